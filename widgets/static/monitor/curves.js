import { contextOf, styleOf } from "./canvas.js";
import { offerFile } from "./downloads.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";
import { Plot } from "./plot.js";
import { formatCount } from "./units.js";

/** @import { FrameLoop } from "./canvas.js" */
/** @import { PlotData, RunData } from "./model.js" */
/** @import { Extent } from "./plot.js" */
/** @import { AxisKind, Limits, PageMessage, PlottingItem, Topic } from "./wire" */

/** Options of all plots. */
export class CurveOptions {
  isLog = false;
  hidesOutliers = false;
  /** True if plots share the cursor and the zoom. */
  isLinked = false;
  /** Length of the vertical axis at least, as a part of its largest value. */
  leastSpan = 0;
  /** Ranks that are not drawn. @type {Set<number>} */
  hidden = new Set();
  /** Names of plots in the order in which they were pinned. @type {Set<string>} */
  pinned = new Set();
  /** @type {AxisKind} */
  axis = "step";
  /** Settings that were changed, which plots mark. @type {PlottingItem["marks"]} */
  marks = [];
}

/** @typedef {{ axis: string, grouped: boolean, average: boolean | null, smoothing: number }} Drawing */

/** Plots of the metrics, their options, and a chip for each rank to hide it. */
export class CurveGrid extends Section {
  /** @type {Topic[]} */
  topics = ["plots", "plotting", "zoomed", "files"];
  /** Plots that "Show more" added. */
  #numExtra = 0;
  /** Number of the last request to draw otherwise. */
  #turn = 0;
  /** True while the kernel has not answered the last request; `#isBehind` if there is more to ask for. */
  #isAsked = false;
  #isBehind = false;
  /** What was asked for. @type {Drawing} */
  #wanted = { axis: "step", grouped: true, average: null, smoothing: 0 };
  /** @type {FrameLoop} */
  #frames;
  /** @type {CurveOptions} */
  #options;
  /** @type {(message: PageMessage) => void} */
  #send;
  #page = Math.random().toString(36).slice(2);
  /** @type {RunData | undefined} */
  #data;
  average = h("input", { type: "checkbox", onchange: () => this.#choose({ average: this.average.checked }) });
  averageField = field(this.average, "Average of ranks");
  group = h("input", { type: "checkbox", onchange: () => this.#choose({ grouped: this.group.checked }) });
  groupField = field(this.group, "Group train and val");
  smoothing = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", oninput: () => this.#smooth() });
  weight = h("output", {}, "0.00");
  filter = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => this.#showFewer() });
  axis = h(
    "select",
    { "aria-label": "Horizontal axis", onchange: () => this.#choose({ axis: this.axis.value }) },
    ...["step", "time", "epoch"].map((kind) => h("option", { value: kind }, `by ${kind}`)),
  );

  /**
   * @param {FrameLoop} frames
   * @param {CurveOptions} options
   * @param {(message: PageMessage) => void} send
   */
  constructor(frames, options, send) {
    super("Curves");
    [this.#frames, this.#options, this.#send] = [frames, options, send];
    const box = (/** @type {string} */ label, /** @type {"isLog" | "hidesOutliers" | "isLinked"} */ name, title = "") => {
      const input = h("input", { type: "checkbox", onchange: () => this.#toggleOption(name, input.checked) });
      input.checked = options[name];
      const made = field(input, label);
      made.title = title;
      return made;
    };
    const csv = h(
      "button",
      { type: "button", class: "nbl-link", title: "Download all reported values", onclick: () => send({ type: "csv", page: this.#page }) },
      "CSV",
    );
    this.controls.append(
      this.filter,
      this.averageField,
      this.groupField,
      box("Log scale", "isLog"),
      box("No outliers", "hidesOutliers", "Fit the axis to 95 % of the values in sight"),
      box("Link plots", "isLinked", "All plots share the cursor and the zoom"),
      h("label", { class: "nbl-field" }, h("span", {}, "Smoothing"), this.smoothing, this.weight),
      this.axis,
      csv,
    );
    this.chips = h("div", { class: "nbl-legend", role: "group", "aria-label": "Ranks that are drawn" });
    this.grid = h("div", { class: "nbl-grid" });
    this.scroll = h("div", { class: "nbl-plots" }, this.grid);
    this.more = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showMore() });
    this.fewer = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showFewer() }, "Show fewer");
    this.shown = h("span", { role: "status" });
    this.foot = h("div", { class: "nbl-foot" }, this.shown, this.more, this.fewer);
    this.body.append(this.chips, this.scroll, this.foot);
    const shared = {
      options,
      onPin: () => this.#refresh(),
      onZoom: (/** @type {Plot} */ plot, /** @type {Extent | null} */ extent) => this.#zoom(plot, extent),
      onCursor: (/** @type {Plot} */ plot, /** @type {number | null} */ place) => this.#follow(plot, place),
      tooltipRows: () => this.#data?.legend.limits.tooltip_rows ?? 8,
    };
    /** @type {KeyedList<string, PlotData | string, Plot | Heading>} */
    this.plots = new KeyedList(
      this.grid,
      (item) => (typeof item === "string" ? new Heading(item) : new Plot(item, frames, shared)),
      (view, item) => view instanceof Plot && typeof item !== "string" && view.update(item),
    );
    this.chipList = new KeyedList(
      this.chips,
      (/** @type {number} */ rank) => new RankChip(rank, () => this.#toggle(rank)),
      (chip, rank) => chip.show(!options.hidden.has(rank), this.#frames.theme?.ranks ?? []),
    );
  }

  /** Ask the kernel to draw otherwise. @param {Partial<Drawing>} change */
  #choose(change) {
    Object.assign(this.#wanted, change);
    if (this.#isAsked) this.#isBehind = true;
    else this.#ask();
  }

  #ask() {
    [this.#isAsked, this.#isBehind] = [true, false];
    this.#turn += 1;
    this.#send({ type: "draw", ...this.#wanted, log: this.#options.isLog, turn: this.#turn });
  }

  #smooth() {
    setText(this.weight, Number(this.smoothing.value).toFixed(2));
    this.#choose({ smoothing: Number(this.smoothing.value) });
  }

  /** @param {"isLog" | "hidesOutliers" | "isLinked"} name @param {boolean} isOn */
  #toggleOption(name, isOn) {
    this.#options[name] = isOn;
    this.#refresh();
    if (name === "isLog") this.#choose({}); // The picture that the run leaves is drawn as the user saw it last.
  }

  #showMore() {
    this.#numExtra += this.#data?.legend.limits.plots ?? 0;
    this.#refresh();
  }

  #showFewer() {
    this.#numExtra = 0;
    this.#refresh();
  }

  /** @param {number} rank */
  #toggle(rank) {
    if (!this.#options.hidden.delete(rank)) this.#options.hidden.add(rank);
    this.#refresh();
  }

  get #plots() {
    return [...this.plots.views].filter((entry) => entry[1] instanceof Plot).map(([key, view]) => ({ key, plot: /** @type {Plot} */ (view) }));
  }

  /** Zoom all linked plots, and ask for the part in sight as fine as it was reported. @param {Plot} zoomed @param {Extent | null} extent */
  #zoom(zoomed, extent) {
    for (const { key, plot } of this.#plots) {
      if (plot !== zoomed && !this.#options.isLinked) continue;
      if (plot !== zoomed) plot.zoomTo(extent, true);
      if (extent) this.#send({ type: "zoom", key, low: extent[0], high: extent[1] });
    }
  }

  /** @param {Plot} pointed @param {number | null} place */
  #follow(pointed, place) {
    if (this.#options.isLinked) for (const { plot } of this.#plots) if (plot !== pointed) plot.follow(place);
  }

  #refresh() {
    if (this.#data) this.paint(this.#data);
    for (const { plot } of this.#plots) plot.invalidate();
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    for (const { page, name, text } of data.files.splice(0))
      if (page === this.#page) offerFile(new Blob([text], { type: "text/csv" }), name);
    const { plotting } = data;
    if (this.#options.axis !== plotting.axis) for (const { plot } of this.#plots) plot.zoomTo(null, true);
    [this.#options.axis, this.#options.marks] = [plotting.axis, plotting.marks];
    if (this.#isAsked && plotting.turn === this.#turn) this.#isAsked = false;
    if (this.#isBehind && !this.#isAsked) this.#ask();
    if (!this.#isAsked) this.#paintControls(plotting);
    setHidden(this.element, !data.plots.size);
    setHidden(this.averageField, plotting.num_ranks < 2);
    setHidden(this.groupField, !plotting.can_group);
    setHidden(this.axis.options[2], !plotting.has_epochs);
    const all = plotting.order.flatMap((key) => data.plots.get(key) ?? []);
    const ranks = [...new Set(all.flatMap(({ lines }) => lines.flatMap(({ rank }) => rank ?? [])))].sort((a, b) => a - b);
    const hasChips = ranks.length > 1;
    setHidden(this.chips, !hasChips);
    this.chipList.show(hasChips ? ranks.map((rank) => [rank, rank]) : []);
    setHidden(this.filter, new Set(all.flatMap(({ names }) => names)).size <= data.legend.limits.unsearched_metrics);
    this.#paintPlots(all, data.legend.limits);
  }

  /** Show what the kernel draws by. @param {PlottingItem} plotting */
  #paintControls({ axis, grouped, average, smoothing }) {
    [this.axis.value, this.group.checked, this.average.checked] = [axis, grouped, average];
    Object.assign(this.#wanted, { axis, grouped, smoothing });
    if (Number(this.smoothing.value) === smoothing) return;
    this.smoothing.value = String(smoothing);
    setText(this.weight, smoothing.toFixed(2));
  }

  /** @param {PlotData[]} all @param {Limits} limits */
  #paintPlots(all, limits) {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const found = all.filter(({ names }) => names.some((name) => name.toLowerCase().includes(wanted)));
    const pinned = [...this.#options.pinned].flatMap((title) => found.find((plot) => plot.title === title) ?? []);
    const others = found.filter((plot) => !pinned.includes(plot));
    const sections = [...new Set(others.map(({ section }) => section))];
    const hasSections = sections.length > 1 && found.length > limits.unsearched_metrics;
    const inOrder = hasSections ? sections.flatMap((name) => others.filter(({ section }) => section === name)) : others;
    const shown = [...pinned, ...inOrder].slice(0, limits.plots + this.#numExtra);
    // Four plots stand in two rows of two, so that none stands alone in its row.
    const columns = shown.length === 4 ? 2 : Math.max(1, Math.min(4, shown.length));
    this.grid.style.setProperty("--nbl-columns", String(columns));
    /** @type {[string, PlotData | string][]} */
    const entries = [];
    let last = "";
    for (const plot of shown) {
      const { key, section } = plot;
      if (hasSections && !pinned.includes(plot) && section !== last) entries.push([`section ${(last = section)}`, section]);
      entries.push([key, plot]);
    }
    this.plots.show(entries);
    this.#paintFoot(shown.length, found.length, all.length, limits);
  }

  /**
   * Show how many metrics are drawn. More plots than at first are scrolled, so that they take no more of the page.
   * @param {number} shown
   * @param {number} found
   * @param {number} known
   * @param {Limits} limits
   */
  #paintFoot(shown, found, known, limits) {
    const isLong = shown > limits.plots;
    this.scroll.toggleAttribute("data-long", isLong);
    const region = { role: "region", "aria-label": "Plots of the metrics", tabindex: "0" };
    for (const [name, value] of Object.entries(region)) {
      if (isLong) setAttribute(this.scroll, name, value);
      else this.scroll.removeAttribute(name);
    }
    const count = `${formatCount(shown)} of ${formatCount(found)} metrics shown`;
    const left = found - shown;
    setText(this.shown, shown === known ? "" : found ? count : "No metric matches");
    setText(this.more, `Show ${Math.min(limits.plots, left)} more`);
    setHidden(this.more, !left);
    setHidden(this.fewer, !isLong);
    setHidden(this.foot, !this.shown.textContent && !isLong);
  }
}

/** First part of the names of the plots below. */
class Heading {
  /** @param {string} name */
  constructor(name) {
    this.element = h("div", { class: "nbl-prefix", role: "heading", "aria-level": "4" }, name);
  }
}

/** Button that hides and shows a rank, with a sample of its line. */
class RankChip {
  #style;
  #drawnInk = "";

  /** @param {number} rank @param {() => void} onclick */
  constructor(rank, onclick) {
    this.#style = styleOf(rank);
    this.sample = h("canvas", { width: "44", height: "12", "aria-hidden": "true" });
    const attributes = { type: "button", class: "nbl-chip", title: "Show or hide this rank", onclick };
    this.element = h("button", attributes, this.sample, `rank ${rank}`);
  }

  /** @param {boolean} isShown @param {string[]} inks */
  show(isShown, inks) {
    setAttribute(this.element, "aria-pressed", String(isShown));
    const ink = inks[this.#style.color];
    if (ink === this.#drawnInk) return;
    this.#drawnInk = ink;
    const context = contextOf(this.sample);
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 22, 6);
    Object.assign(context, { strokeStyle: ink, lineWidth: 2 });
    context.setLineDash(this.#style.dash);
    context.beginPath();
    context.moveTo(0, 3);
    context.lineTo(22, 3);
    context.stroke();
  }
}
