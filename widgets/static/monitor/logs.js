import { styleOf } from "./canvas.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText, TabBar } from "./elements.js";
import { formatCount } from "./units.js";

/** @import { LogText, RunData } from "./model.js" */
/** @import { Topic } from "./wire" */
/** @typedef {number | "all"} TabKey a rank, or all of them */

const MOST_TABS = 12;

/** Output of the ranks: a tab for each rank and one for all of them, a search, and a filter for what differs. */
export class Logs extends Section {
  /** @type {Topic[]} */
  topics = ["logs", "ranks"];
  /** Searched text in lower case. */
  #words = "";
  /** @type {RunData | undefined} */
  #data;

  constructor() {
    super("Logs");
    this.search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the log",
      oninput: () => this.#refresh(),
    });
    this.differences = h("input", { type: "checkbox", onchange: () => this.#refresh() });
    this.differencesField = field(this.differences, "Only differences");
    this.differencesField.title = "Hide lines that every rank wrote";
    this.controls.append(this.search, this.differencesField);
    this.tabs = new TabBar("Rank whose log is shown", /** @type {TabKey} */ ("all"), () => this.#select());
    this.choice = h("select", { "aria-label": "Rank whose log is shown", onchange: () => this.tabs.select(this.#chosen()) });
    this.controls.prepend(this.choice);
    this.count = h("div", { class: "nbl-count", role: "status" });
    this.panel = h("div", { class: "nbl-log", role: "tabpanel", tabindex: "0" });
    this.body.append(this.tabs.element, this.panel, this.count);
    this.lineList = new KeyedList(
      this.panel,
      (/** @type {LogText} */ line) => new LogLine(line),
      (row, line) => row.show(line, this.#words, this.tabs.selected === "all"),
    );
  }

  /** @param {RunData} data @param {Set<Topic>} changed */
  paint(data, changed) {
    this.#data = data;
    this.#paintTabs(data);
    if (changed.has("logs")) this.#paintLines(data);
  }

  #refresh() {
    if (this.#data) this.#paintLines(this.#data);
  }

  /** @param {RunData} data */
  has(data) {
    return data.logs.size > 0;
  }

  /** @returns {TabKey} */
  #chosen() {
    return this.choice.value === "all" ? "all" : Number(this.choice.value);
  }

  /** Show a tab for each rank, or a list where they would not fit beside each other. @param {RunData} data */
  #paintTabs(data) {
    const ranks = data.rankNumbers;
    setHidden(this.differencesField, ranks.length < 2);
    const nameOf = (/** @type {number} */ rank) => `rank ${rank}${data.ranks.get(rank)?.state === "failed" ? " (failed)" : ""}`;
    /** @type {[TabKey, string][]} */
    const tabs = [["all", "all"], ...ranks.map((rank) => /** @type {[TabKey, string]} */ ([rank, nameOf(rank)]))];
    this.tabs.show(tabs);
    setHidden(this.tabs.element, ranks.length < 2 || ranks.length > MOST_TABS);
    setHidden(this.choice, ranks.length <= MOST_TABS);
    if (this.choice.options.length !== tabs.length || this.choice.textContent !== tabs.map(([, text]) => text).join(""))
      this.choice.replaceChildren(...tabs.map(([key, text]) => h("option", { value: String(key) }, text)));
    this.choice.value = String(this.tabs.selected);
    this.panel.id = `${this.tabs.idOf(this.tabs.selected)}-panel`;
    setAttribute(this.panel, "aria-labelledby", this.tabs.idOf(this.tabs.selected));
  }

  /** @param {RunData} data */
  #paintLines(data) {
    const { selected } = this.tabs;
    const kept = selected === "all" ? data.lines : (data.logs.get(selected)?.lines ?? []);
    const common = this.differences.checked && !this.differencesField.hidden ? data.commonTexts() : new Set();
    this.#words = this.search.value.toLowerCase();
    const found = kept.filter(({ text }) => !common.has(text) && text.toLowerCase().includes(this.#words));
    const shown = found.slice(-data.legend.limits.shown_lines);
    const wasAtEnd = this.panel.scrollHeight - this.panel.scrollTop - this.panel.clientHeight < 24;
    this.lineList.show(shown.map((line) => [line, line]));
    if (wasAtEnd) this.panel.scrollTop = this.panel.scrollHeight;
    setText(this.count, this.#countText(kept.length, found.length, shown.length));
  }

  /** @param {number} kept @param {number} found @param {number} shown */
  #countText(kept, found, shown) {
    if (!kept) return "Nothing written yet";
    if (!found && this.#words) return `No line contains “${this.search.value}” (${formatCount(kept)} searched)`;
    if (!found) return "Every rank wrote the same lines";
    const all = `${formatCount(kept)} ${kept === 1 ? "line" : "lines"}`;
    const lines = found === kept ? all : `${formatCount(found)} of ${formatCount(kept)} lines`;
    return shown < found ? `Last ${formatCount(shown)} of ${lines}` : lines;
  }

  #select() {
    if (!this.#data) return;
    this.#paintTabs(this.#data);
    this.#paintLines(this.#data);
    this.panel.scrollTop = this.panel.scrollHeight;
  }
}

/** Line of the log, with the number of its rank. */
class LogLine {
  /** @type {string | undefined} */
  #drawn;

  /** @param {LogText} line */
  constructor({ rank }) {
    this.rank = h("span", { class: "nbl-line-rank" }, String(rank));
    this.rank.style.color = `var(--nbl-rank-${styleOf(rank).color})`;
    this.text = h("span", { class: "nbl-line-text" });
    this.element = h("div", { class: "nbl-line" }, this.rank, this.text);
  }

  /**
   * @param {LogText} line
   * @param {string} words to mark, in lower case
   * @param {boolean} isMerged with the lines of other ranks
   */
  show({ text }, words, isMerged) {
    setHidden(this.rank, !isMerged);
    const drawn = `${words}\n${text}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.text.replaceChildren(...(words ? markWords(text, words) : [text || "\u00a0"]));
  }
}

/**
 * Return a text with each occurrence of `words` marked, in upper or lower case.
 * @param {string} text
 * @param {string} words in lower case
 */
function markWords(text, words) {
  const lower = text.toLowerCase();
  // A few capitals become two characters in lower case; positions would not match then.
  if (lower.length !== text.length) return [text];
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}
