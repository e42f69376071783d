import { styleOf } from "./canvas.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";

const ALL = "all";

/** What the ranks wrote: a tab for each and one for all, searched, or only where ranks differ. */
export class Logs extends Section {
  topics = ["logs", "ranks"];
  selected = ALL;

  constructor(uid) {
    super("Logs");
    this.panelId = `${uid}-log`;
    this.search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the log",
      oninput: () => this.#paintLines(),
    });
    this.differences = h("input", { type: "checkbox", onchange: () => this.#paintLines() });
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
      (key) => this.#makeTab(key),
      (tab, key) => this.#updateTab(tab, key),
    );
    this.lineList = new KeyedList(
      this.panel,
      (line) => new LogLine(line),
      (row, line) => row.update(line, this.words, this.selected === ALL),
    );
  }

  paint(data, changed) {
    this.data = data;
    this.#paintTabs(data);
    if (changed.has("logs")) this.#paintLines();
  }

  #paintTabs(data) {
    const ranks = data.rankNumbers;
    setHidden(this.element, !data.logs.size);
    setHidden(this.tabs, ranks.length < 2);
    setHidden(this.differencesField, ranks.length < 2);
    if (!ranks.includes(this.selected)) this.selected = ALL;
    this.tabList.show([ALL, ...ranks].map((key) => [key, key]));
    setAttribute(this.panel, "aria-labelledby", `${this.panelId}-${this.selected}`);
  }

  #paintLines() {
    const { data } = this;
    const kept = this.selected === ALL ? data.lines : (data.logs.get(this.selected)?.lines ?? []);
    const common = this.differences.checked && !this.differencesField.hidden ? data.commonTexts() : new Set();
    this.words = this.search.value.toLowerCase();
    const found = kept.filter(
      (line) => !common.has(line.text) && (!this.words || line.text.toLowerCase().includes(this.words)),
    );
    const shown = found.slice(-data.legend.limits.shown_lines);
    const wasAtEnd = this.panel.scrollHeight - this.panel.scrollTop - this.panel.clientHeight < 24;
    this.lineList.show(shown.map((line) => [line, line]));
    if (wasAtEnd) this.panel.scrollTop = this.panel.scrollHeight;
    setText(this.count, this.#countText(kept.length, found.length, shown.length));
  }

  #countText(kept, found, shown) {
    const { units } = this.data.legend;
    if (!kept) return "Nothing written yet";
    if (!found)
      return this.words
        ? `No line contains “${this.search.value}” (${units.formatCount(kept)} searched)`
        : "Every rank wrote the same lines";
    const lines =
      found === kept
        ? `${units.formatCount(kept)} ${kept === 1 ? "line" : "lines"}`
        : `${units.formatCount(found)} of ${units.formatCount(kept)} lines`;
    return shown < found ? `Last ${units.formatCount(shown)} of ${lines}` : lines;
  }

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

  #updateTab({ element }, key) {
    const isSelected = key === this.selected;
    const failed = this.data.ranks.get(key)?.state === "failed";
    setText(element, key === ALL ? "all" : `rank ${key}${failed ? " (failed)" : ""}`);
    setAttribute(element, "aria-selected", String(isSelected));
    setAttribute(element, "tabindex", isSelected ? "0" : "-1");
  }

  #select(key) {
    this.selected = key;
    this.#paintTabs(this.data);
    this.#paintLines();
    this.panel.scrollTop = this.panel.scrollHeight;
  }

  #onKey(event) {
    const keys = [...this.tabList.views.keys()];
    const at = keys.indexOf(this.selected);
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: keys.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.#select(keys[(target + keys.length) % keys.length]);
    const tab = this.tabList.views.get(this.selected).element;
    tab.focus();
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

class LogLine {
  #drawn = null;

  constructor(line) {
    this.rank = h("span", { class: "nbl-line-rank" }, String(line.rank));
    this.rank.style.color = `var(--nbl-rank-${styleOf(line.rank).color})`;
    this.text = h("span", { class: "nbl-line-text" });
    this.element = h("div", { class: "nbl-line" }, this.rank, this.text);
  }

  update({ text }, words, isMerged) {
    setHidden(this.rank, !isMerged);
    const drawn = `${words}\n${text}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.text.replaceChildren(...(words ? markWords(text, words) : [text || "\u00a0"]));
  }
}

/** Split a text around what was searched for, without regard to case. */
function markWords(text, words) {
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return [text]; // a few capitals grow: then positions would be wrong
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}
