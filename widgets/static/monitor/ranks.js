import { h, KeyedList, Section, setAttribute, setHidden, setText, StateLight } from "./elements.js";
import { plainLine } from "./text.js";
import { isNumber } from "./units.js";

/** @import { RunData } from "./model.js" */
/** @import { RankItem, Topic } from "./wire" */

/**
 * Column of the table. Without `text` it holds the state; with `needs` it is shown if a rank has a number there.
 * @typedef {{
 *   title: string,
 *   kind: "number" | "state" | "line",
 *   hint?: string,
 *   needs?: "samples_per_second" | "gpu_memory" | "gpu_utilization",
 *   text?: (rank: RankItem) => string,
 * }} Column
 */

/** @type {Column[]} */
const COLUMNS = [
  { title: "Rank", kind: "number", text: (rank) => String(rank.rank) },
  { title: "State", kind: "state" },
  { title: "Step", kind: "number", text: (rank) => rank.words.step },
  {
    title: "Samples/s, all ranks",
    kind: "number",
    text: (rank) => rank.words.samples_per_second,
    needs: "samples_per_second",
    hint: "The rate of all ranks together, as each rank counted it over the last few seconds",
  },
  {
    title: "Memory",
    kind: "number",
    text: (rank) => rank.words.memory,
    hint: "Resident memory now; for a rank that has ended, its peak",
  },
  {
    title: "GPU memory",
    kind: "number",
    text: (rank) => rank.words.gpu_memory,
    needs: "gpu_memory",
  },
  {
    title: "GPU",
    kind: "number",
    text: (rank) => rank.words.gpu_utilization,
    needs: "gpu_utilization",
    hint: "Utilisation",
  },
  {
    title: "Last line",
    kind: "line",
    text: (rank) => (rank.returned ? `returned ${rank.returned}` : plainLine(rank.last_line)),
  },
];

/** Table of the ranks: state, step, throughput, memory, last line of output. */
export class RankTable extends Section {
  /** @type {Topic[]} */
  topics = ["ranks", "run"];
  /** @type {Column[]} */
  #columns = [];
  /** @type {RunData | undefined} */
  #data;

  constructor() {
    super("Ranks");
    this.head = h("tr", {});
    const rows = h("tbody", {});
    const table = h("table", { class: "nbl-table" }, h("thead", {}, this.head), rows);
    this.body.append(
      h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, table),
    );
    this.rows = new KeyedList(
      rows,
      (/** @type {RankItem} */ _) => new Row(this.#columns),
      (row, rank) => row.show(rank, /** @type {RunData} */ (this.#data)),
    );
  }

  /** @param {RunData} data */
  has(data) {
    return data.ranks.size > 0;
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    const ranks = [...data.ranks.values()].sort((a, b) => a.rank - b.rank);
    const columns = COLUMNS.filter(({ needs }) => !needs || ranks.some((rank) => isNumber(rank[needs])));
    if (columns.map(({ title }) => title).join() !== this.#columns.map(({ title }) => title).join()) this.#setColumns(columns);
    this.rows.show(ranks.map((rank) => [rank.rank, rank]));
  }

  /** @param {Column[]} columns */
  #setColumns(columns) {
    this.#columns = columns;
    this.rows.show([]);
    this.head.replaceChildren(
      ...columns.map(({ title, kind, hint }) => h("th", { scope: "col", "data-kind": kind, title: hint }, title)),
    );
  }
}

/** Row of one rank. */
class Row {
  #columns;

  /** @param {Column[]} columns */
  constructor(columns) {
    this.#columns = columns;
    this.light = new StateLight();
    this.slowest = h("span", { class: "nbl-tag", title: "The other ranks wait for this one" }, "slowest");
    this.cells = columns.map(({ kind }) => h("td", { "data-kind": kind }));
    const state = columns.findIndex(({ kind }) => kind === "state");
    this.cells[state].append(this.light.element, this.slowest);
    this.element = h("tr", {}, ...this.cells);
  }

  /** @param {RankItem} rank @param {RunData} data */
  show(rank, data) {
    // "stopped" needs no reason if the user asked for it, but if another rank was the cause.
    const isOnRequest = rank.state === "stopped" && !rank.reason.startsWith("caused by ");
    this.light.show(data.stateOf(rank), isOnRequest ? "" : plainLine(rank.reason));
    setHidden(this.slowest, !rank.slowest || data.isPaused);
    this.#columns.forEach(({ text, kind }, at) => {
      if (!text) return;
      const value = text(rank);
      setText(this.cells[at], value || (kind === "number" ? "–" : ""));
      if (kind === "line") setAttribute(this.cells[at], "title", value);
    });
  }
}
