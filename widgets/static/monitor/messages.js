import { h, KeyedList, setHidden, setText, StateLight } from "./elements.js";
import { plainText } from "./text.js";
import { formatRankCount } from "./units.js";

/** @import { RunData } from "./model.js" */
/** @import { ErrorRecord, StateLook, Topic } from "./wire" */

/** Failures: culprits with their tracebacks; below them, folded, the ranks that failed as a consequence. */
export class Errors {
  /** @type {Topic[]} */
  topics = ["errors", "run"];
  /** @type {RunData | undefined} */
  #data;

  constructor() {
    this.banner = h("div", { class: "nbl-error-line" });
    const [culprits, victims] = [h("div", {}), h("div", {})];
    this.victimCount = h("summary", {});
    this.folded = h("details", { class: "nbl-details" }, this.victimCount, victims);
    this.element = h("section", { class: "nbl-errors", "aria-label": "Errors" }, this.banner, culprits, this.folded);
    this.element.hidden = true;
    this.culprits = this.#cards(culprits);
    this.victims = this.#cards(victims);
  }

  /** @param {HTMLElement} parent */
  #cards(parent) {
    const failed = () => /** @type {RunData} */ (this.#data).legend.rankState("failed");
    return new KeyedList(parent, (/** @type {ErrorRecord} */ error) => errorCard(error, failed()));
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    const { errors, run } = data;
    const culprits = errors.filter((error) => !error.victim);
    const victims = errors.filter((error) => error.victim);
    const banner = run.state === "stopped" ? "" : (run.error ?? ""); // A stop on request is not a failure.
    setHidden(this.element, !errors.length && !banner);
    setText(this.banner, banner);
    setHidden(this.banner, !banner || culprits.length > 0);
    this.culprits.show(culprits.map((error) => [keyOf(error), error]));
    this.victims.show(victims.map((error) => [keyOf(error), error]));
    const cause = culprits.length ? ` (caused by rank ${culprits[0].rank})` : "";
    setText(this.victimCount, `${formatRankCount(victims.length)} failed as a consequence${cause}`);
    setHidden(this.folded, !victims.length);
  }
}

/** @param {ErrorRecord} error */
const keyOf = ({ rank, summary }) => `${rank} ${summary}`;

/** @param {ErrorRecord} error @param {StateLook} failed */
function errorCard({ rank, summary, traceback, victim, last_lines: lastLines }, failed) {
  const light = new StateLight();
  light.show({ ...failed, word: `rank ${rank}` });
  const head = h("div", { class: "nbl-error-head" }, light.element, h("code", {}, plainText(summary)));
  const card = h("div", { class: "nbl-error" }, head);
  if (traceback) card.append(foldedText("Traceback", plainText(traceback.trimEnd()), { isOpen: !victim }));
  if (lastLines.length) card.append(foldedText("Last lines of output", plainText(lastLines.join("\n"))));
  return { element: card };
}

/**
 * Create a text that is folded under a title.
 * @param {string} title
 * @param {string} text
 * @param {{ isOpen?: boolean, class?: string }} [options]
 */
function foldedText(title, text, options = {}) {
  const attributes = { class: options.class ?? "nbl-details" };
  const details = h("details", attributes, h("summary", {}, title), h("pre", { tabindex: "0" }, text));
  details.open = options.isOpen ?? false;
  return details;
}

/** Notices for the user, the newest first. Several lines, such as stacks, are folded under the first one. */
export class Notices {
  /** @type {Topic[]} */
  topics = ["notices"];

  constructor() {
    this.element = h("section", { class: "nbl-notices", "aria-label": "Notices", "aria-live": "polite" });
    this.element.hidden = true;
    this.list = new KeyedList(this.element, noticeCard);
  }

  /** @param {RunData} data */
  paint({ notices }) {
    setHidden(this.element, !notices.length);
    this.list.show([...notices].reverse().map((notice) => [notice, notice]));
  }
}

/** @param {{ text: string }} notice */
function noticeCard({ text }) {
  const [first, ...rest] = text.trimEnd().split("\n");
  if (!rest.length) return { element: h("div", { class: "nbl-notice" }, first) };
  return { element: foldedText(first, rest.join("\n"), { isOpen: true, class: "nbl-notice nbl-details" }) };
}
