import { fold, h, make, show, stateLight } from "./elements.js";
import { plainText } from "./text.js";
import { formatRankCount, formatRanks } from "./units.js";

/** Failures: culprits with their tracebacks; below them, folded, the ranks that failed as a consequence. */
export class Errors {
  element = make("section", { class: "nbl-errors", "aria-label": "Errors", hidden: true });

  paint({ errors, run, legend }) {
    const culprits = errors.filter((error) => !error.victim);
    const victims = errors.filter((error) => error.victim);
    const banner = run.state === "stopped" ? "" : run.error; // A stop on request is not a failure.
    const cards = (all) => groupsOf(all, ({ summary, traceback }) => `${summary}\n${traceback}`).map((group) => errorCard(group, legend.rank_states.failed));
    const cause = culprits.length ? ` (caused by rank ${culprits[0].rank})` : "";
    this.element.hidden = !errors.length && !banner;
    show(
      this.element,
      banner && !culprits.length && h("div", { class: "nbl-error-line" }, banner),
      h("div", {}, cards(culprits)),
      victims.length > 0 && fold(`${formatRankCount(victims.length)} failed as a consequence${cause}`, {}, h("div", {}, cards(victims))),
    );
  }
}

/** Return the errors in order, in groups of an equal key. */
function groupsOf(errors, keyOf) {
  const groups = new Map();
  for (const error of errors) groups.set(keyOf(error), [...(groups.get(keyOf(error)) ?? []), error]);
  return [...groups.values()];
}

const wordsOf = (group) => formatRanks(group.map(({ rank }) => rank));

/** A box for errors that differ in the rank and its output alone. */
function errorCard(group, look) {
  const [{ summary, traceback, victim }] = group;
  const text = (words) => h("pre", { tabindex: "0" }, plainText(words));
  const outputs = groupsOf(group, (error) => error.last_lines.join("\n"));
  const output = (equal) => {
    const whose = outputs.length > 1 ? ` of ${wordsOf(equal)}` : "";
    return equal[0].last_lines.length > 0 && fold(`Last lines of output${whose}`, {}, text(equal[0].last_lines.join("\n")));
  };
  return h(
    "div",
    { class: "nbl-error", key: `${summary}\n${traceback}` },
    h("div", { class: "nbl-error-head" }, stateLight({ ...look, word: wordsOf(group) }), h("code", {}, plainText(summary))),
    traceback && fold("Traceback", { open: !victim }, text(traceback.trimEnd())),
    outputs.map(output),
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
