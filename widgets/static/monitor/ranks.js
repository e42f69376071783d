import { h, Section, show, stateLight } from "./elements.js";
import { plainLine } from "./text.js";
import { isNumber } from "./units.js";

/** Columns of numbers: the names of their words in an item RANK; one with a tooltip of its own; one that not all runs have. */
const COLUMNS = [
  { title: "Step", name: "step" },
  {
    ...{ title: "Samples/s, all ranks", name: "samples_per_second", isOptional: true },
    hint: "The rate of all ranks together, as each rank counted it over the last few seconds",
  },
  { title: "Memory", name: "memory", hint: "Resident memory now; for a rank that has ended, its peak" },
  { title: "GPU memory", name: "gpu_memory", isOptional: true },
  { title: "GPU", name: "gpu_utilization", isOptional: true, hint: "Utilisation" },
];

/** Table of the ranks: state, step, throughput, memory, last line of output. */
export class RankTable extends Section {
  constructor() {
    super("Ranks");
  }

  has(data) {
    return data.ranks.size > 0;
  }

  paint(data) {
    const ranks = [...data.ranks.values()].sort((a, b) => a.rank - b.rank);
    const columns = COLUMNS.filter(({ isOptional, name }) => !isOptional || ranks.some((rank) => isNumber(rank[name])));
    const head = (title, kind, hint = "") => h("th", { key: title, scope: "col", "data-kind": kind, title: hint }, title);
    const row = (rank) => {
      const line = rank.returned ? `returned ${rank.returned}` : plainLine(rank.last_line);
      return h(
        "tr",
        { key: rank.rank },
        h("td", { "data-kind": "number" }, String(rank.rank)),
        h("td", { "data-kind": "state" }, ...stateOf(rank, data)),
        columns.map(({ name }) => h("td", { key: name, "data-kind": "number" }, rank.words[name] || "–")),
        h("td", { "data-kind": "line", title: line }, line),
      );
    };
    const heads = [head("Rank", "number"), head("State", "state"), columns.map(({ title, hint }) => head(title, "number", hint)), head("Last line", "line")];
    const table = h("table", { class: "nbl-table" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ranks.map(row)));
    show(this.body, h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, table));
  }
}

function stateOf(rank, data) {
  // "stopped" needs no reason if the user asked for it, but if another rank was the cause.
  const isOnRequest = rank.state === "stopped" && !rank.reason.startsWith("caused by ");
  const light = stateLight(data.stateOf(rank), isOnRequest ? "" : plainLine(rank.reason));
  const isWaitedFor = rank.slowest && !data.isPaused;
  return [light, isWaitedFor && h("span", { class: "nbl-tag", title: "The other ranks wait for this one" }, "slowest")];
}
