import { styleOf } from "./canvas.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";

/** @import { Line, RunData } from "./model.js" */
/** @import { Topic } from "./wire" */
/** @typedef {number | "all"} TabKey a rank, or all of them */

/** Output of the ranks: a tab for each rank and one for all of them, a search, and a filter for what differs. */
export class Logs extends Section {
  /** @type {Topic[]} */
  topics = ["logs", "ranks"];
  /** @type {TabKey} */
  #selected = "all";
  /** Searched text in lower case. */
  #words = "";
  /** @type {RunData | undefined} */
  #data;

  /** @param {string} uid that no other view on the page has */
  constructor(uid) {
    super("Logs");
    this.panelId = `${uid}-log`;
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
    this.tabs = h("div", {
      class: "nbl-tabs",
      role: "tablist",
      "aria-label": "Rank whose log is shown",
      onkeydown: (event) => this.#onKey(event),
    });
    this.count = h("div", { class: "nbl-count", role: "status" });
    this.panel = h("div", { class: "nbl-log", role: "tabpanel", id: this.panelId, tabindex: "0" });
    this.body.append(this.tabs, this.panel, this.count);
    this.tabList = new KeyedList(
      this.tabs,
      (/** @type {TabKey} */ key) => this.#makeTab(key),
      ({ element }, key) => this.#updateTab(element, key),
    );
    this.lineList = new KeyedList(
      this.panel,
      (/** @type {Line} */ line) => new LogLine(line),
      (row, line) => row.show(line, this.#words, this.#selected === "all"),
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
  #paintTabs(data) {
    const ranks = data.rankNumbers;
    setHidden(this.element, !data.logs.size);
    setHidden(this.tabs, ranks.length < 2);
    setHidden(this.differencesField, ranks.length < 2);
    if (this.#selected !== "all" && !ranks.includes(this.#selected)) this.#selected = "all";
    /** @type {TabKey[]} */
    const keys = ["all", ...ranks];
    this.tabList.show(keys.map((key) => [key, key]));
    setAttribute(this.panel, "aria-labelledby", `${this.panelId}-${this.#selected}`);
  }

  /** @param {RunData} data */
  #paintLines(data) {
    const kept = this.#selected === "all" ? data.lines : (data.logs.get(this.#selected)?.lines ?? []);
    const common = this.differences.checked && !this.differencesField.hidden ? data.commonTexts() : new Set();
    this.#words = this.search.value.toLowerCase();
    const found = kept.filter(({ text }) => !common.has(text) && text.toLowerCase().includes(this.#words));
    const shown = found.slice(-data.legend.limits.shown_lines);
    const wasAtEnd = this.panel.scrollHeight - this.panel.scrollTop - this.panel.clientHeight < 24;
    this.lineList.show(shown.map((line) => [line, line]));
    if (wasAtEnd) this.panel.scrollTop = this.panel.scrollHeight;
    const format = (/** @type {number} */ number) => data.legend.units.formatCount(number);
    setText(this.count, this.#countText(kept.length, found.length, shown.length, format));
  }

  /** @param {number} kept @param {number} found @param {number} shown @param {(number: number) => string} format */
  #countText(kept, found, shown, format) {
    if (!kept) return "Nothing written yet";
    if (!found && this.#words) return `No line contains “${this.search.value}” (${format(kept)} searched)`;
    if (!found) return "Every rank wrote the same lines";
    const all = `${format(kept)} ${kept === 1 ? "line" : "lines"}`;
    const lines = found === kept ? all : `${format(found)} of ${format(kept)} lines`;
    return shown < found ? `Last ${format(shown)} of ${lines}` : lines;
  }

  /** @param {TabKey} key */
  #makeTab(key) {
    const element = h("button", {
      type: "button",
      class: "nbl-tab",
      role: "tab",
      id: `${this.panelId}-${key}`,
      "aria-controls": this.panelId,
      onclick: () => this.#select(key),
    });
    return { element };
  }

  /** @param {HTMLElement} tab @param {TabKey} key */
  #updateTab(tab, key) {
    const isSelected = key === this.#selected;
    const hasFailed = key !== "all" && this.#data?.ranks.get(key)?.state === "failed";
    setText(tab, key === "all" ? "all" : `rank ${key}${hasFailed ? " (failed)" : ""}`);
    setAttribute(tab, "aria-selected", String(isSelected));
    setAttribute(tab, "tabindex", isSelected ? "0" : "-1");
  }

  /** @param {TabKey} key */
  #select(key) {
    if (!this.#data) return;
    this.#selected = key;
    this.#paintTabs(this.#data);
    this.#paintLines(this.#data);
    this.panel.scrollTop = this.panel.scrollHeight;
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const keys = [...this.tabList.views.keys()];
    const at = keys.indexOf(this.#selected);
    /** @type {Record<string, number>} */
    const targets = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: keys.length - 1 };
    const target = targets[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.#select(keys[(target + keys.length) % keys.length]);
    const tab = this.tabList.views.get(this.#selected)?.element;
    tab?.focus();
    tab?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** Line of the log, with the number of its rank. */
class LogLine {
  /** @type {string | undefined} */
  #drawn;

  /** @param {Line} line */
  constructor({ rank }) {
    this.rank = h("span", { class: "nbl-line-rank" }, String(rank));
    this.rank.style.color = `var(--nbl-rank-${styleOf(rank).color})`;
    this.text = h("span", { class: "nbl-line-text" });
    this.element = h("div", { class: "nbl-line" }, this.rank, this.text);
  }

  /**
   * @param {Line} line
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
