import { lineSample } from "./canvas.js";
import { button, field, h, make, Section, show } from "./elements.js";
import { offerFile, Plots } from "./plot.js";
import { formatCount } from "./units.js";

const LEAST_SPAN = 0.05; // of 1 GB, a change by a few kB would fill the whole axis of memory

/** Options of all plots. */
export class CurveOptions {
  isLog = false;
  hidesOutliers = false;
  /** True if plots share the cursor and the zoom. */
  isLinked = false;
  /** Length of the vertical axis at least, as a part of its largest value. */
  leastSpan = 0;
  /** Ranks that are not drawn. */
  hidden = new Set();
  /** Titles of plots in the order in which they were pinned. */
  pinned = new Set();
  axis = "step";
  /** Settings that were changed, which plots mark. */
  marks = [];
}

/** Plots of the metrics, their options, and a chip for each rank to hide it. */
export class CurveGrid extends Section {
  /** Plots that "Show more" added. */
  #numExtra = 0;
  /** Number of the last request to draw otherwise. */
  #turn = 0;
  /** True while the kernel has not answered the last request; `#isBehind` if there is more to ask for. */
  #isAsked = false;
  #isBehind = false;
  /** What was asked for. */
  #wanted = { axis: "step", grouped: true, average: null, smoothing: 0 };
  #page = Math.random().toString(36).slice(2);
  #plotting;
  #plots;
  #options;
  #send;

  constructor(frames, options, send) {
    super("Curves");
    [this.#options, this.#send] = [options, send];
    this.filter = make("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => this.#showMore(0) });
    this.axis = make("select", { "aria-label": "Horizontal axis", onchange: () => this.#choose({ axis: this.axis.value }) });
    this.#plots = new Plots(frames, {
      options,
      onPin: () => this.refresh(),
      onZoom: (plot, extent) => this.#zoom(plot, extent),
      onCursor: (plot, place) => options.isLinked && this.#plots.each((other) => other !== plot && other.follow(place)),
      tooltipRows: () => this.data.legend.limits.tooltip_rows,
    });
  }

  /** Ask the kernel to draw otherwise. */
  #choose(change) {
    Object.assign(this.#wanted, change);
    if (this.#isAsked) this.#isBehind = true;
    else this.#ask();
    this.refresh();
  }

  #ask() {
    [this.#isAsked, this.#isBehind] = [true, false];
    this.#turn += 1;
    this.#send({ type: "draw", ...this.#wanted, log: this.#options.isLog, turn: this.#turn });
  }

  /** Zoom all linked plots, and ask for the part in sight as fine as it was reported. */
  #zoom(zoomed, extent) {
    this.#plots.each((plot, key) => {
      if (plot !== zoomed && !this.#options.isLinked) return;
      if (plot !== zoomed) plot.zoomTo(extent, true);
      if (extent) this.#send({ type: "zoom", key, low: extent[0], high: extent[1] });
    });
  }

  #showMore(count) {
    this.#numExtra = count && this.#numExtra + count;
    this.refresh();
  }

  paint(data) {
    super.paint(data);
    for (const { page, name, text } of data.files.splice(0))
      if (page === this.#page) offerFile(new Blob([text], { type: "text/csv" }), name);
    const { plotting } = data;
    if (this.#isAsked && plotting.turn === this.#turn) this.#isAsked = false;
    if (this.#isBehind && !this.#isAsked) this.#ask();
    const { axis, grouped, smoothing, marks } = plotting;
    if (!this.#isAsked) Object.assign(this.#wanted, { axis, grouped, smoothing });
    if (this.#options.axis !== axis) this.#plots.each((plot) => plot.zoomTo(null, true));
    Object.assign(this.#options, { axis, marks });
    if (this.#plotting !== plotting) this.#plots.each((plot) => plot.invalidate());
    this.#plotting = plotting;
    const all = plotting.order.flatMap((key) => data.plots.get(key) ?? []);
    const isSearched = new Set(all.flatMap(({ names }) => names)).size > data.legend.limits.unsearched_metrics;
    const wanted = isSearched ? this.filter.value.trim().toLowerCase() : "";
    const found = all.filter(({ names }) => names.some((name) => name.toLowerCase().includes(wanted)));
    this.element.hidden = !data.plots.size;
    show(this.controls, isSearched && this.filter, ...this.#controls(plotting));
    show(this.body, this.#chips(all), ...this.#plotsAndFoot(found, all.length, data.legend.limits));
  }

  #controls(plotting) {
    const box = (label, checked, onClick, attributes = {}) =>
      field(h("input", { type: "checkbox", checked, onchange: ({ target }) => onClick(target.checked) }), label, attributes);
    const option = (name) => (isOn) => {
      this.#options[name] = isOn;
      this.#plots.each((plot) => plot.invalidate());
      if (name === "isLog") this.#choose({}); // The picture that the run leaves is drawn as the user saw it last.
    };
    const { isLog, hidesOutliers, isLinked } = this.#options;
    const { axis, grouped, smoothing } = this.#wanted;
    const average = this.#isAsked ? (this.#wanted.average ?? plotting.average) : plotting.average;
    const range = { type: "range", min: 0, max: 0.99, step: 0.01, oninput: ({ target }) => this.#choose({ smoothing: Number(target.value) }) };
    const kinds = ["step", "time", ...(plotting.has_epochs ? ["epoch"] : [])];
    show(this.axis, kinds.map((value) => h("option", { value }, `by ${value}`)));
    this.axis.value = axis;
    return [
      plotting.num_ranks > 1 && box("Average of ranks", average, (isOn) => this.#choose({ average: isOn })),
      plotting.can_group && box("Group train and val", grouped, (isOn) => this.#choose({ grouped: isOn })),
      box("Log scale", isLog, option("isLog")),
      box("No outliers", hidesOutliers, option("hidesOutliers"), { title: "Fit the axis to 95 % of the values in sight" }),
      box("Link plots", isLinked, option("isLinked"), { title: "All plots share the cursor and the zoom" }),
      h("label", { class: "nbl-field" }, h("span", {}, "Smoothing"), h("input", { ...range, value: smoothing }), h("output", {}, smoothing.toFixed(2))),
      this.axis,
      button("CSV", () => this.#send({ type: "csv", page: this.#page }), { class: "nbl-link", title: "Download all reported values" }),
    ];
  }

  #chips(all) {
    const { hidden } = this.#options;
    const ranks = [...new Set(all.flatMap(({ lines }) => lines.flatMap(({ rank }) => rank ?? [])))].sort((a, b) => a - b);
    const chip = (rank) => {
      const onclick = () => {
        if (!hidden.delete(rank)) hidden.add(rank);
        this.#plots.each((plot) => plot.invalidate());
        this.refresh();
      };
      const attributes = { class: "nbl-chip", title: "Show or hide this rank", "aria-pressed": String(!hidden.has(rank)) };
      return button([lineSample(rank), `rank ${rank}`], onclick, { key: rank, ...attributes });
    };
    return ranks.length > 1 && h("div", { class: "nbl-legend", role: "group", "aria-label": "Ranks that are drawn" }, ranks.map(chip));
  }

  /** The plots that are shown: the pinned ones, then sections by the first part of their names, if there are many. */
  #plotsAndFoot(found, known, limits) {
    const pinned = [...this.#options.pinned].flatMap((title) => found.find((plot) => plot.title === title) ?? []);
    const others = found.filter((plot) => !pinned.includes(plot));
    const sections = [...new Set(others.map(({ section }) => section))];
    const hasSections = sections.length > 1 && found.length > limits.unsearched_metrics;
    const inOrder = hasSections ? sections.flatMap((name) => others.filter(({ section }) => section === name)) : others;
    const shown = [...pinned, ...inOrder].slice(0, limits.plots + this.#numExtra);
    // Four plots stand in two rows of two, so that none stands alone in its row.
    const columns = shown.length === 4 ? 2 : Math.max(1, Math.min(4, shown.length));
    const elements = this.#plots.update(shown);
    let last = "";
    const entries = shown.flatMap((plot, at) => {
      const begins = hasSections && !pinned.includes(plot) && plot.section !== last;
      if (begins) last = plot.section;
      const heading = { key: `section ${last}`, class: "nbl-prefix", role: "heading", "aria-level": "4" };
      return begins ? [h("div", heading, last), elements[at]] : [elements[at]];
    });
    // More plots than at first are scrolled, so that they take no more of the page.
    const isLong = shown.length > limits.plots;
    const region = isLong ? { "data-long": true, role: "region", "aria-label": "Plots of the metrics", tabindex: "0" } : {};
    const left = found.length - shown.length;
    const count = found.length ? `${formatCount(shown.length)} of ${formatCount(found.length)} metrics shown` : "No metric matches";
    const more = (text, count) => button(text, () => this.#showMore(count), { class: "nbl-button" });
    return [
      h("div", { class: "nbl-plots", ...region }, h("div", { class: "nbl-grid", style: `--nbl-columns: ${columns}` }, entries)),
      (shown.length < known || isLong) &&
        h(
          "div",
          { class: "nbl-foot" },
          h("span", { role: "status" }, shown.length < known && count),
          left > 0 && more(`Show ${Math.min(limits.plots, left)} more`, limits.plots),
          isLong && more("Show fewer", 0),
        ),
    ];
  }

  close() {
    this.#plots.update([]);
  }
}

/** Memory and load of the ranks by time. */
export class Usage extends Section {
  #plots;

  constructor(frames) {
    super("Memory and load", ({ usage }) => usage.size > 0);
    const options = Object.assign(new CurveOptions(), { axis: "time", leastSpan: LEAST_SPAN });
    this.#plots = new Plots(frames, { options, tooltipRows: () => 8 });
  }

  paint({ usage }) {
    const columns = Math.max(2, Math.min(4, usage.size));
    show(this.body, h("div", { class: "nbl-grid", style: `--nbl-columns: ${columns}` }, this.#plots.update([...usage.values()])));
  }
}
