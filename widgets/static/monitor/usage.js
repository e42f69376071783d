import { CurveOptions } from "./curves.js";
import { h, Section, show } from "./elements.js";
import { Plots } from "./plot.js";

const LEAST_SPAN = 0.05; // of 1 GB, a change by a few kB would fill the whole axis

/** Memory and load of the ranks by time. */
export class Usage extends Section {
  #plots;

  constructor(frames) {
    super("Memory and load");
    const options = Object.assign(new CurveOptions(), { axis: "time", leastSpan: LEAST_SPAN });
    this.#plots = new Plots(frames, { options, tooltipRows: () => 8 });
  }

  has({ usage }) {
    return usage.size > 0;
  }

  paint({ usage }) {
    const columns = Math.max(2, Math.min(4, usage.size));
    show(this.body, h("div", { class: "nbl-grid", style: `--nbl-columns: ${columns}` }, this.#plots.update([...usage.values()])));
  }
}
