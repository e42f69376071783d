import { styleOf } from "./canvas.js";
import { field, h, make, Section, show, TabBar } from "./elements.js";
import { formatCount } from "./units.js";

const MOST_TABS = 12;

/** Output of the ranks: a tab for each rank and one for all of them, a search, and a filter for what differs. */
export class Logs extends Section {
  constructor() {
    super("Logs", ({ logs }) => logs.size > 0);
    const repaint = () => this.refresh();
    const label = "Rank whose log is shown";
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the log", oninput: repaint });
    this.differences = make("input", { type: "checkbox", onchange: repaint });
    this.choice = make("select", { "aria-label": label, onchange: ({ target }) => this.tabs.select(target.value) });
    this.tabs = new TabBar(label, "all", () => {
      this.refresh();
      this.panel.scrollTop = this.panel.scrollHeight;
    });
    this.panel = make("div", { class: "nbl-log", role: "tabpanel", tabindex: "0" });
    this.count = make("div", { class: "nbl-count", role: "status" });
  }

  paint(data) {
    super.paint(data);
    const ranks = data.rankNumbers;
    const hasOne = ranks.length < 2;
    const nameOf = (rank) => `rank ${rank}${data.ranks.get(rank)?.state === "failed" ? " (failed)" : ""}`;
    const tabs = [["all", "all"], ...ranks.map((rank) => [String(rank), nameOf(rank)])];
    const differences = field(this.differences, "Only differences", { title: "Hide lines that every rank wrote", hidden: hasOne });
    // A list, where tabs would not fit beside each other.
    const isLong = ranks.length > MOST_TABS;
    show(this.choice, tabs.map(([value, text]) => h("option", { key: value, value }, text)));
    this.tabs.show(tabs);
    this.choice.value = this.tabs.selected;
    show(this.controls, isLong && this.choice, this.search, differences);
    show(this.body, !hasOne && !isLong && this.tabs.element, this.panel, this.count);
    const tab = this.tabs.idOf(this.tabs.selected);
    this.panel.id = `${tab}-panel`;
    this.panel.setAttribute("aria-labelledby", tab);
    this.#paintLines(data, hasOne);
  }

  #paintLines(data, hasOne) {
    const { selected } = this.tabs;
    const isMerged = selected === "all";
    const kept = isMerged ? data.lines : (data.logs.get(Number(selected))?.lines ?? []);
    const common = this.differences.checked && !hasOne ? data.commonTexts() : new Set();
    const words = this.search.value.toLowerCase();
    const found = kept.filter(({ text }) => !common.has(text) && text.toLowerCase().includes(words));
    const shown = found.slice(-data.legend.limits.shown_lines);
    const wasAtEnd = this.panel.scrollHeight - this.panel.scrollTop - this.panel.clientHeight < 24;
    const line = ({ rank, text, number }) =>
      h(
        "div",
        { class: "nbl-line", key: number },
        isMerged && h("span", { class: "nbl-line-rank", style: `color: var(--nbl-rank-${styleOf(rank).color})` }, String(rank)),
        h("span", { class: "nbl-line-text" }, ...(words ? markWords(text, words) : [text || "\u00a0"])),
      );
    show(this.panel, shown.map(line));
    if (wasAtEnd) this.panel.scrollTop = this.panel.scrollHeight;
    show(this.count, this.#countText(kept.length, found.length, shown.length));
  }

  #countText(kept, found, shown) {
    if (!kept) return "Nothing written yet";
    if (!found && this.search.value) return `No line contains “${this.search.value}” (${formatCount(kept)} searched)`;
    if (!found) return "Every rank wrote the same lines";
    const all = `${formatCount(kept)} ${kept === 1 ? "line" : "lines"}`;
    const lines = found === kept ? all : `${formatCount(found)} of ${formatCount(kept)} lines`;
    return shown < found ? `Last ${formatCount(shown)} of ${lines}` : lines;
  }
}

/** Return a text with each occurrence of some words in lower case marked, in whatever case it is written. */
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
