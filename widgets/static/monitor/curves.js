import { contextOf, styleOf } from "./canvas.js";
import { chartsOf, epochMetric } from "./charts.js";
import { downloadCsv } from "./downloads.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";
import { Plot } from "./plot.js";

/** @import { FrameLoop } from "./canvas.js" */
/** @import { AxisKind, Chart } from "./charts.js" */
/** @import { Legend } from "./legend.js" */
/** @import { RunData } from "./model.js" */
/** @import { Metric } from "./series.js" */
/** @import { ChangeItem, Limits, PageMessage, Topic } from "./wire" */

/** Options of all plots. */
export class CurveOptions {
  /** Null until the user chooses; then many ranks are averaged. @type {boolean | null} */
  isAveraged = null;
  isLog = false;
  /** Length of the vertical axis at least, as a part of its largest value. */
  leastSpan = 0;
  smoothing = 0;
  /** Ranks that are not drawn. @type {Set<number>} */
  hidden = new Set();
  /** Settings that were changed, which plots mark. @type {ChangeItem[]} */
  changes = [];
  /** Names of metrics in the order in which they were pinned. @type {Set<string>} */
  pinned = new Set();
  /** True if train/loss and val/loss share a chart. */
  isGrouped = true;
  /** @type {AxisKind} */
  axis = "step";
  /** The metric that counts epochs, if the run reports one. @type {Metric | undefined} */
  epochs = undefined;

  /**
   * Return true if this number of ranks is drawn as their mean.
   * @param {number} numRanks
   * @param {Limits} limits
   */
  averages(numRanks, limits) {
    return numRanks > 1 && (this.isAveraged ?? numRanks > limits.separate_ranks);
  }
}

/**
 * Return 0 for "loss", 1 for names that end in it, such as "train/loss" and "val_loss", and 2 for all others.
 * @param {string} name
 */
const lossOrder = (name) => (name.toLowerCase() === "loss" ? 0 : /(^|[^a-z])loss$/i.test(name) ? 1 : 2);

/**
 * Sort charts: pinned ones, losses, then the others in the order in which they appeared.
 * @param {Chart[]} charts
 * @param {Set<string>} pinned
 */
function inOrder(charts, pinned) {
  const places = new Map([...pinned].map((name, at) => [name, at - pinned.size]));
  const placeOf = (/** @type {Chart} */ { name }) => places.get(name) ?? lossOrder(name);
  return [...charts].sort((a, b) => placeOf(a) - placeOf(b));
}

/** @param {Chart} chart */
const chartKey = ({ members }) => JSON.stringify(members.map(({ metric }) => metric.name));

/** Plots of the metrics, their options, and a chip for each rank to hide it. */
export class CurveGrid extends Section {
  /** @type {Topic[]} */
  topics = ["curves", "changes"];
  /** Plots that "Show more" added. */
  #numExtra = 0;
  #frames;
  #options;
  #send;
  /** @type {RunData | undefined} */
  #data;
  average = h("input", { type: "checkbox", onchange: () => this.#choose({ isAveraged: this.average.checked }) });
  averageField = field(this.average, "Average of ranks");
  filter = h("input", {
    type: "search",
    placeholder: "Find a metric",
    "aria-label": "Find a metric",
    oninput: () => this.#showFewer(),
  });

  /**
   * @param {FrameLoop} frames
   * @param {CurveOptions} options
   * @param {(message: PageMessage) => void} send
   */
  constructor(frames, options, send) {
    super("Curves");
    this.#frames = frames;
    this.#options = options;
    this.#send = send;
    this.#addControls();
    this.chips = h("div", { class: "nbl-legend", role: "group", "aria-label": "Ranks that are drawn" });
    this.grid = h("div", { class: "nbl-grid" });
    this.scroll = h("div", { class: "nbl-plots" }, this.grid);
    this.more = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showMore() });
    this.fewer = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showFewer() }, "Show fewer");
    this.shown = h("span", { role: "status" });
    this.foot = h("div", { class: "nbl-foot" }, this.shown, this.more, this.fewer);
    this.body.append(this.chips, this.scroll, this.foot);
    const legend = () => /** @type {RunData} */ (this.#data).legend;
    this.plots = new KeyedList(
      this.grid,
      (/** @type {Chart} */ chart) => new Plot(chart, frames, options, legend(), () => this.#refresh()),
      (plot, chart) => plot.update(chart),
    );
    this.chipList = new KeyedList(
      this.chips,
      (/** @type {number} */ rank) => new RankChip(rank, () => this.#toggle(rank)),
      (chip, rank) => chip.show(!options.hidden.has(rank), this.#frames.theme?.ranks ?? []),
    );
  }

  group = h("input", { type: "checkbox", onchange: () => this.#choose({ isGrouped: this.group.checked }) });
  groupField = field(this.group, "Group train and val");
  axis = h(
    "select",
    { "aria-label": "Horizontal axis", onchange: () => this.#choose({ axis: /** @type {AxisKind} */ (this.axis.value) }) },
    ...["step", "time", "epoch"].map((kind) => h("option", { value: kind }, `by ${kind}`)),
  );

  #addControls() {
    this.group.checked = this.#options.isGrouped;
    this.axis.value = this.#options.axis;
    const log = h("input", { type: "checkbox", onchange: () => this.#choose({ isLog: log.checked }) });
    const oninput = () => {
      setText(output, Number(smoothing.value).toFixed(2));
      this.#choose({ smoothing: Number(smoothing.value) });
    };
    const smoothing = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", oninput });
    const output = h("output", {}, "0.00");
    const smoothingField = h("label", { class: "nbl-field" }, h("span", {}, "Smoothing"), smoothing, output);
    const save = () => this.#data && downloadCsv(this.#data.metrics.values(), `${this.#data.run.id ?? "run"}.csv`);
    const csv = h(
      "button",
      { type: "button", class: "nbl-link", title: "Download the points of all charts", onclick: save },
      "CSV",
    );
    const fields = [this.averageField, this.groupField, field(log, "Log scale"), smoothingField];
    this.controls.append(this.filter, ...fields, this.axis, csv);
  }

  /** @param {Partial<CurveOptions>} change */
  #choose(change) {
    Object.assign(this.#options, change);
    this.#refresh();
    // The picture that the run leaves is drawn as the user saw it last.
    const { axis, isGrouped: grouped, isLog: log, smoothing } = this.#options;
    this.#send({ type: "draw", axis, grouped, log, smoothing });
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

  #refresh() {
    if (this.#data) this.paint(this.#data);
    for (const plot of this.plots.views.values()) plot.surface.invalidate();
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    if (this.#options.changes !== data.changes) {
      this.#options.changes = data.changes;
      for (const plot of this.plots.views.values()) plot.surface.invalidate();
    }
    const metrics = [...data.metrics.values()];
    const ranks = [...new Set(metrics.flatMap((metric) => [...metric.ranks.keys()]))].sort((a, b) => a - b);
    const { limits } = data.legend;
    const isAveraged = this.#options.isAveraged ?? ranks.length > limits.separate_ranks;
    const hasChips = ranks.length > 1 && !isAveraged;
    setHidden(this.element, !metrics.length);
    setHidden(this.filter, metrics.length <= limits.unsearched_metrics);
    setHidden(this.averageField, ranks.length < 2);
    if (this.average.checked !== isAveraged) this.average.checked = isAveraged;
    setHidden(this.chips, !hasChips);
    this.chipList.show(hasChips ? ranks.map((rank) => [rank, rank]) : []);
    this.#options.epochs = epochMetric(metrics);
    setHidden(this.axis.options[2], !this.#options.epochs);
    const charts = chartsOf(metrics, true);
    setHidden(this.groupField, charts.length === metrics.length);
    this.#paintPlots(this.#options.isGrouped ? charts : chartsOf(metrics, false), data.legend);
  }

  /** @param {Chart[]} charts @param {Legend} legend */
  #paintPlots(charts, legend) {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const matches = (/** @type {Chart} */ { members }) =>
      members.some(({ metric }) => metric.name.toLowerCase().includes(wanted));
    const found = inOrder(charts, this.#options.pinned).filter(matches);
    const shown = found.slice(0, legend.limits.plots + this.#numExtra);
    // Four plots stand in two rows of two, so that none stands alone in its row.
    const columns = shown.length === 4 ? 2 : Math.max(1, Math.min(4, shown.length));
    this.grid.style.setProperty("--nbl-columns", String(columns));
    this.plots.show(shown.map((chart) => [chartKey(chart), chart]));
    this.#paintFoot(shown.length, found.length, charts.length, legend);
  }

  /**
   * Show how many metrics are drawn. More plots than at first are scrolled, so that they take no more of the page.
   * @param {number} shown
   * @param {number} found
   * @param {number} known
   * @param {Legend} legend
   */
  #paintFoot(shown, found, known, { limits, units }) {
    const isLong = shown > limits.plots;
    this.scroll.toggleAttribute("data-long", isLong);
    const region = { role: "region", "aria-label": "Plots of the metrics", tabindex: "0" };
    for (const [name, value] of Object.entries(region)) {
      if (isLong) setAttribute(this.scroll, name, value);
      else this.scroll.removeAttribute(name);
    }
    const count = `${units.formatCount(shown)} of ${units.formatCount(found)} metrics shown`;
    const left = found - shown;
    setText(this.shown, shown === known ? "" : found ? count : "No metric matches");
    setText(this.more, `Show ${Math.min(limits.plots, left)} more`);
    setHidden(this.more, !left);
    setHidden(this.fewer, !isLong);
    setHidden(this.foot, !this.shown.textContent && !isLong);
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
