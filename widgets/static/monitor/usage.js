import { CurveOptions } from "./curves.js";
import { h, KeyedList, Section } from "./elements.js";
import { Plot } from "./plot.js";

/** @import { FrameLoop } from "./canvas.js" */
/** @import { PlotData, RunData } from "./model.js" */
/** @import { Topic } from "./wire" */

const LEAST_SPAN = 0.05; // of 1 GB, a change by a few kB would fill the whole axis

/** Memory and load of the ranks by time. */
export class Usage extends Section {
  /** @type {Topic[]} */
  topics = ["usage"];

  /** @param {FrameLoop} frames */
  constructor(frames) {
    super("Memory and load");
    const options = Object.assign(new CurveOptions(), { axis: "time", leastSpan: LEAST_SPAN });
    this.grid = h("div", { class: "nbl-grid" });
    this.body.append(this.grid);
    this.plots = new KeyedList(
      this.grid,
      (/** @type {PlotData} */ data) => new Plot(data, frames, { options, tooltipRows: () => 8 }),
      (plot, data) => plot.update(data),
    );
  }

  /** @param {RunData} data */
  has({ usage }) {
    return usage.size > 0;
  }

  /** @param {RunData} data */
  paint({ usage }) {
    this.grid.style.setProperty("--nbl-columns", String(Math.max(2, Math.min(4, usage.size))));
    this.plots.show([...usage]);
  }
}
