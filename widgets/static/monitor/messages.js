import { fold, h, make, show, stateLight } from "./elements.js";
import { plainText } from "./units.js";

/** Failures: culprits with their tracebacks; below them, folded, the ranks that failed as a consequence. */
export class Errors {
  element = make("section", { class: "nbl-errors", "aria-label": "Errors", hidden: true });

  paint({ errors: { culprits, victims, victims_title: title }, run, legend }) {
    const banner = run.state === "stopped" ? "" : run.error; // A stop on request is not a failure.
    const cards = (errors, open) => h("div", {}, errors.map((error) => errorCard(error, open, legend.rank_states.failed)));
    this.element.hidden = !culprits.length && !victims.length && !banner;
    show(
      this.element,
      banner && !culprits.length && h("div", { class: "nbl-error-line" }, banner),
      cards(culprits, true),
      victims.length > 0 && fold(title, {}, cards(victims, false)),
    );
  }
}

/** A box for errors that differ in the rank and its output alone. */
function errorCard({ who, summary, traceback, outputs }, open, look) {
  const text = (words) => h("pre", { tabindex: "0" }, plainText(words));
  return h(
    "div",
    { class: "nbl-error", key: `${summary}\n${traceback}` },
    h("div", { class: "nbl-error-head" }, stateLight({ ...look, word: who }), h("code", {}, plainText(summary))),
    traceback && fold("Traceback", { open }, text(traceback.trimEnd())),
    outputs.map(([title, lines]) => fold(title, {}, text(lines))),
  );
}

/** Notices for the user, the newest first. Several lines, such as stacks, are folded under the first one. */
export class Notices {
  element = make("section", { class: "nbl-notices", "aria-label": "Notices", "aria-live": "polite", hidden: true });

  paint({ notices }) {
    this.element.hidden = !notices.length;
    show(this.element, [...notices].reverse().map(noticeCard));
  }
}

function noticeCard({ text, number }) {
  const [first, ...rest] = text.trimEnd().split("\n");
  if (!rest.length) return h("div", { class: "nbl-notice", key: number }, first);
  return fold(first, { class: "nbl-notice nbl-details", key: number, open: true }, h("pre", { tabindex: "0" }, rest.join("\n")));
}
