import { h, KeyedList, setHidden, setText, StateLight } from "./elements.js";
import { formatRankCount, plainText } from "./units.js";

/** What failed, the culprits first with their tracebacks; ranks that fell with them are folded away. */
export class Errors {
  topics = ["errors", "run"];

  constructor() {
    this.banner = h("div", { class: "nbl-error-line" });
    this.culprits = h("div", {});
    this.victims = h("div", {});
    this.victimCount = h("summary", {});
    this.folded = h("details", { class: "nbl-details" }, this.victimCount, this.victims);
    this.element = h(
      "section",
      { class: "nbl-errors", "aria-label": "Errors" },
      this.banner,
      this.culprits,
      this.folded,
    );
    this.element.hidden = true;
    this.cards = [this.culprits, this.victims].map((parent) => new KeyedList(parent, errorCard));
  }

  paint({ errors, run, legend }) {
    const culprits = errors.filter((error) => !error.victim);
    const victims = errors.filter((error) => error.victim);
    const error = run.state === "stopped" ? "" : (run.error ?? ""); // A stop on request is no failure.
    setHidden(this.element, !errors.length && !error);
    setText(this.banner, error);
    setHidden(this.banner, !error || culprits.length > 0);
    [culprits, victims].forEach((some, at) =>
      this.cards[at].show(some.map((error) => [`${error.rank} ${error.summary}`, { ...error, state: legend.rankState("failed") }])),
    );
    const cause = culprits.length ? ` (caused by rank ${culprits[0].rank})` : "";
    setText(this.victimCount, `${formatRankCount(victims.length)} failed as a consequence${cause}`);
    setHidden(this.folded, !victims.length);
  }
}

function errorCard({ rank, summary, traceback, victim, last_lines: lastLines, state }) {
  const light = new StateLight();
  light.show({ ...state, word: `rank ${rank}` });
  const card = h(
    "div",
    { class: "nbl-error" },
    h("div", { class: "nbl-error-head" }, light.element, h("code", {}, plainText(summary))),
  );
  const fold = (title, text, open) => {
    const details = h(
      "details",
      { class: "nbl-details" },
      h("summary", {}, title),
      h("pre", { tabindex: "0" }, plainText(text)),
    );
    details.open = open;
    card.append(details);
  };
  if (traceback) fold("Traceback", traceback.trimEnd(), !victim);
  if (lastLines?.length) fold("Last lines of its output", lastLines.join("\n"), false);
  return { element: card };
}

/** What Python has to say, the newest first; a long notice, such as stacks, is folded under its first line. */
export class Notices {
  topics = ["notices"];

  constructor() {
    this.element = h("section", { class: "nbl-notices", "aria-label": "Notices", "aria-live": "polite" });
    this.element.hidden = true;
    this.list = new KeyedList(this.element, noticeCard);
  }

  paint({ notices }) {
    setHidden(this.element, !notices.length);
    this.list.show([...notices].reverse().map((notice) => [notice, notice]));
  }
}

function noticeCard({ text }) {
  const [first, ...rest] = text.trimEnd().split("\n");
  if (!rest.length) return { element: h("div", { class: "nbl-notice" }, first) };
  const details = h(
    "details",
    { class: "nbl-notice nbl-details" },
    h("summary", {}, first),
    h("pre", { tabindex: "0" }, rest.join("\n")),
  );
  details.open = true;
  return { element: details };
}
