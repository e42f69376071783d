import { h, scrolled, Section, show, stateLight } from "./elements.js";
import { plainLine } from "./units.js";

/** Table of the ranks: state, step, throughput, memory, last line of output. */
export class RankTable extends Section {
  constructor() {
    super("Ranks", ({ ranks }) => ranks.size > 0);
  }

  paint(data) {
    const ranks = [...data.ranks.values()].sort((a, b) => a.rank - b.rank);
    const columns = data.legend.rank_columns.filter(({ is_optional, name }) => !is_optional || ranks.some(({ words }) => words[name]));
    const head = (title, kind, hint = "") => h("th", { key: title, scope: "col", "data-kind": kind, title: hint }, title);
    const row = (rank) => {
      const line = plainLine(rank.last_line);
      const state = stateLight(data.stateOf(rank), plainLine(rank.reason));
      return h(
        "tr",
        { key: rank.rank },
        h("td", { "data-kind": "number" }, String(rank.rank)),
        h("td", { "data-kind": "state" }, state, rank.slowest && h("span", { class: "nbl-tag", title: "The other ranks wait for this one" }, "slowest")),
        columns.map(({ name }) => h("td", { key: name, "data-kind": "number" }, rank.words[name] || "–")),
        h("td", { "data-kind": "line", title: line }, line),
      );
    };
    const heads = [head("Rank", "number"), head("State", "state"), columns.map(({ title, hint }) => head(title, "number", hint)), head("Last line", "line")];
    const table = h("table", { class: "nbl-table" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ranks.map(row)));
    show(this.body, scrolled("Table of ranks", table));
  }
}
