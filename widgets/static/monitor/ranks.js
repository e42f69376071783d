import { h, KeyedList, Section, setAttribute, setHidden, setText, StateLight } from "./elements.js";
import { isNumber, plainLine } from "./units.js";

const any = (field) => (ranks) => ranks.some((rank) => isNumber(rank[field]));

/** Columns of the table; one with `when` is there only if that holds for the ranks. */
const COLUMNS = [
  { title: "Rank", kind: "number", text: (rank) => String(rank.rank) },
  { title: "State", kind: "state" },
  { title: "Step", kind: "number", text: (rank, units) => units.formatCount(rank.step) },
  {
    title: "Samples/s",
    kind: "number",
    text: (rank, units) => units.formatQuantity(rank.samples_per_second),
    hint: "All ranks together, over the last few seconds",
  },
  {
    title: "Memory",
    kind: "number",
    text: (rank, units) => units.formatBytes(rank.memory ?? rank.peak_memory),
    hint: "Resident memory now; for a rank that has ended, its peak",
  },
  {
    title: "GPU memory",
    kind: "number",
    text: (rank, units) => units.formatBytes(rank.gpu_memory),
    when: any("gpu_memory"),
  },
  {
    title: "GPU",
    kind: "number",
    text: (rank, units) => units.formatShare(rank.gpu_utilization),
    when: any("gpu_utilization"),
    hint: "Utilisation",
  },
  {
    title: "Last line",
    kind: "line",
    text: (rank) => (rank.returned ? `returned ${rank.returned}` : plainLine(rank.last_line ?? "")),
  },
];

export class RankTable extends Section {
  topics = ["ranks"];

  constructor() {
    super("Ranks");
    this.head = h("tr", {});
    this.rows = h("tbody", {});
    const table = h("table", { class: "nbl-table" }, h("thead", {}, this.head), this.rows);
    this.body.append(
      h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, table),
    );
    this.list = new KeyedList(
      this.rows,
      () => this.#makeRow(),
      (row, rank) => this.#updateRow(row, rank),
    );
  }

  paint(data) {
    this.data = data;
    const ranks = [...data.ranks.values()].sort((a, b) => a.rank - b.rank);
    setHidden(this.element, !ranks.length);
    const columns = COLUMNS.filter(({ when }) => !when || when(ranks));
    if (columns.length !== this.columns?.length) this.#setColumns(columns);
    this.list.show(ranks.map((rank) => [rank.rank, rank]));
  }

  #setColumns(columns) {
    this.columns = columns;
    this.list.show([]);
    this.head.replaceChildren(
      ...columns.map(({ title, kind, hint }) => h("th", { scope: "col", "data-kind": kind, title: hint }, title)),
    );
  }

  #makeRow() {
    const light = new StateLight();
    const slowest = h("span", { class: "nbl-tag", title: "The other ranks wait for this one" }, "slowest");
    const cells = this.columns.map(({ kind }) =>
      kind === "state" ? h("td", { "data-kind": kind }, light.element, slowest) : h("td", { "data-kind": kind }),
    );
    return { light, slowest, cells, element: h("tr", {}, ...cells) };
  }

  #updateRow({ light, slowest, cells }, rank) {
    const reason = rank.reason ?? "";
    // A rank that was stopped on request has no reason worth a word; one that ended because of another rank has.
    const isOfNoInterest = rank.state === "stopped" && !reason.startsWith("caused by ");
    light.show(this.data.stateOf(rank), isOfNoInterest ? "" : plainLine(reason));
    setHidden(slowest, !rank.slowest);
    this.columns.forEach(({ text, kind }, at) => {
      if (!text) return;
      const value = text(rank, this.data.legend.units);
      setText(cells[at], value || (kind === "number" ? "–" : ""));
      if (kind === "line") setAttribute(cells[at], "title", value);
    });
  }
}
