import { h, KeyedList, setHidden, setText, StateLight } from "./elements.js";
import { plainText } from "./text.js";
import { formatRankCount, formatRanks } from "./units.js";

/** @import { RunData } from "./model.js" */
/** @import { ErrorItem, StateLook, Topic } from "./wire" */

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
    return new KeyedList(parent, (/** @type {ErrorItem[]} */ group) => errorCard(group, failed()));
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
    this.culprits.show(alike(culprits));
    this.victims.show(alike(victims));
    const cause = culprits.length ? ` (caused by rank ${culprits[0].rank})` : "";
    setText(this.victimCount, `${formatRankCount(victims.length)} failed as a consequence${cause}`);
    setHidden(this.folded, !victims.length);
  }
}

/**
 * Return the errors in order, those that differ in the rank and its output alone as one group; with the groups' keys.
 * @param {ErrorItem[]} errors
 * @returns {[key: string, group: ErrorItem[]][]}
 */
function alike(errors) {
  const groups = groupBy(errors, ({ summary, traceback }) => `${summary}\n${traceback}`);
  return groups.map((group) => [`${formatRanks(ranksOf(group))} ${group[0].summary}`, group]);
}

/** @param {ErrorItem[]} group */
const ranksOf = (group) => group.map(({ rank }) => rank);

/**
 * @param {ErrorItem[]} errors
 * @param {(error: ErrorItem) => string} keyOf
 */
function groupBy(errors, keyOf) {
  /** @type {Map<string, ErrorItem[]>} */
  const groups = new Map();
  for (const error of errors) groups.set(keyOf(error), [...(groups.get(keyOf(error)) ?? []), error]);
  return [...groups.values()];
}

/** @param {ErrorItem[]} group @param {StateLook} failed */
function errorCard(group, failed) {
  const [{ summary, traceback, victim }] = group;
  const light = new StateLight();
  light.show({ ...failed, word: formatRanks(ranksOf(group)) });
  const head = h("div", { class: "nbl-error-head" }, light.element, h("code", {}, plainText(summary)));
  const card = h("div", { class: "nbl-error" }, head);
  if (traceback) card.append(foldedText("Traceback", plainText(traceback.trimEnd()), { isOpen: !victim }));
  const outputs = groupBy(group, (error) => error.last_lines.join("\n"));
  for (const equal of outputs.filter(([error]) => error.last_lines.length)) {
    const whose = outputs.length > 1 ? ` of ${formatRanks(ranksOf(equal))}` : "";
    card.append(foldedText(`Last lines of output${whose}`, plainText(equal[0].last_lines.join("\n"))));
  }
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
