import { chartsOf } from "./charts.js";
import { CurveOptions } from "./curves.js";
import { h, KeyedList, Section, setHidden } from "./elements.js";
import { Plot } from "./plot.js";

/** @import { FrameLoop } from "./canvas.js" */
/** @import { Chart } from "./charts.js" */
/** @import { RunData } from "./model.js" */
/** @import { Topic } from "./wire" */

const LEAST_SPAN = 0.05; // of 1 GB, a change by a few kB would fill the whole axis

/** Memory and load of the ranks by time. Hidden until there are points enough for a line. */
export class Usage extends Section {
  /** @type {Topic[]} */
  topics = ["usage"];
  #options = new CurveOptions();
  /** @type {RunData | undefined} */
  #data;

  /** @param {FrameLoop} frames */
  constructor(frames) {
    super("Memory and load");
    this.#options.axis = "time";
    this.#options.leastSpan = LEAST_SPAN;
    const grid = h("div", { class: "nbl-grid" });
    this.grid = grid;
    this.body.append(grid);
    const legend = () => /** @type {RunData} */ (this.#data).legend;
    this.plots = new KeyedList(
      grid,
      (/** @type {Chart} */ chart) => new Plot(chart, frames, this.#options, legend(), null),
      (plot, chart) => plot.update(chart),
    );
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    const charts = chartsOf([...data.usage.values()], false);
    const isLong = charts.some(({ members }) => [...members[0].metric.ranks.values()].some(({ steps }) => steps.length > 2));
    setHidden(this.element, !isLong);
    this.grid.style.setProperty("--nbl-columns", String(Math.max(2, Math.min(4, charts.length))));
    this.plots.show(isLong ? charts.map((chart) => [chart.name, chart]) : []);
  }
}
