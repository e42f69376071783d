import { styleOf } from "./canvas.js";
import { field, h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";
import { Plot } from "./plot.js";

/** How all plots are drawn. */
export class CurveOptions {
  isAveraged = null; // null: until someone chooses, averaged if there are many ranks
  isLog = false;
  smoothing = 0;
  hidden = new Set();
  pinned = new Set(); // names of metrics, in the order in which they were pinned

  averages(numRanks, limits) {
    return numRanks > 1 && (this.isAveraged ?? numRanks > limits.separate_ranks);
  }
}

/** 0 for "loss", 1 for names that end in it, such as "train/loss" and "val_loss", 2 for all others. */
const lossOrder = (name) => (name.toLowerCase() === "loss" ? 0 : /(^|[^a-z])loss$/i.test(name) ? 1 : 2);

/** Metrics in the order in which they are drawn: those that are pinned, the losses, the others as they appeared. */
function inOrder(metrics, pinned) {
  const places = new Map([...pinned].map((name, at) => [name, at - pinned.size]));
  const placeOf = ({ name }) => places.get(name) ?? lossOrder(name);
  return [...metrics].sort((a, b) => placeOf(a) - placeOf(b));
}

export class CurveGrid extends Section {
  topics = ["curves"];
  #numExtra = 0;

  constructor(frames, options) {
    super("Curves");
    this.frames = frames;
    this.options = options;
    this.average = h("input", { type: "checkbox", onchange: () => this.#choose({ isAveraged: this.average.checked }) });
    this.log = h("input", { type: "checkbox", onchange: () => this.#choose({ isLog: this.log.checked }) });
    this.smoothing = h("input", {
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      value: "0",
      oninput: () => this.#choose({ smoothing: Number(this.smoothing.value) }),
    });
    this.smoothingValue = h("output", {}, "0.00");
    this.filter = h("input", {
      type: "search",
      placeholder: "Find a metric",
      "aria-label": "Find a metric",
      oninput: () => this.#showFewer(),
    });
    this.averageField = field(this.average, "Average of ranks");
    const smoothingField = h(
      "label",
      { class: "nbl-field" },
      h("span", {}, "Smoothing"),
      this.smoothing,
      this.smoothingValue,
    );
    this.controls.append(this.filter, this.averageField, field(this.log, "Log scale"), smoothingField);
    this.legend = h("div", { class: "nbl-legend", role: "group", "aria-label": "Ranks that are drawn" });
    this.grid = h("div", { class: "nbl-grid" });
    this.scroll = h("div", { class: "nbl-plots" }, this.grid);
    this.more = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showMore() });
    this.fewer = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showFewer() }, "Show fewer");
    this.shown = h("span", { role: "status" });
    this.foot = h("div", { class: "nbl-foot" }, this.shown, this.more, this.fewer);
    this.body.append(this.legend, this.scroll, this.foot);
    this.plots = new KeyedList(
      this.grid,
      (metric) => new Plot(metric, frames, this.options, this.data.legend, () => this.#refresh()),
      (plot, metric) => plot.update(metric),
    );
    this.chips = new KeyedList(
      this.legend,
      (rank) => this.#makeChip(rank),
      (chip, rank) => chip.update(rank),
    );
  }

  #choose(change) {
    Object.assign(this.options, change);
    setText(this.smoothingValue, this.options.smoothing.toFixed(2));
    this.#refresh();
  }

  #showMore() {
    this.#numExtra += this.data.legend.limits.plots;
    this.#refresh();
  }

  #showFewer() {
    this.#numExtra = 0;
    this.#refresh();
  }

  #refresh() {
    this.paint(this.data);
    for (const plot of this.plots.views.values()) plot.surface.invalidate();
  }

  paint(data) {
    this.data = data;
    const metrics = [...data.metrics.values()];
    const ranks = [...new Set(metrics.flatMap((metric) => [...metric.ranks.keys()]))].sort((a, b) => a - b);
    const { limits } = data.legend;
    const isAveraged = this.options.isAveraged ?? ranks.length > limits.separate_ranks;
    setHidden(this.element, !metrics.length);
    setHidden(this.filter, metrics.length <= limits.unsearched_metrics);
    setHidden(this.averageField, ranks.length < 2);
    if (this.average.checked !== isAveraged) this.average.checked = isAveraged;
    setHidden(this.legend, ranks.length < 2 || isAveraged);
    this.chips.show(this.legend.hidden ? [] : ranks.map((rank) => [rank, rank]));
    this.#paintPlots(metrics);
  }

  #paintPlots(metrics) {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const found = inOrder(metrics, this.options.pinned).filter(({ name }) => name.toLowerCase().includes(wanted));
    const shown = found.slice(0, this.data.legend.limits.plots + this.#numExtra);
    // Rows without an orphan: four plots stand two by two.
    this.grid.style.setProperty("--nbl-columns", shown.length === 4 ? 2 : Math.max(1, Math.min(4, shown.length)));
    this.plots.show(shown.map((metric) => [metric.name, metric]));
    this.#paintFoot(shown.length, found.length, metrics.length);
  }

  /** However many metrics are drawn, they take no more of the page than the first ones: the rest is scrolled to. */
  #paintFoot(shown, found, known) {
    const { limits, units } = this.data.legend;
    const isLong = shown > limits.plots;
    this.scroll.toggleAttribute("data-long", isLong);
    for (const [name, value] of [
      ["role", "region"],
      ["aria-label", "Plots of the metrics"],
      ["tabindex", "0"],
    ])
      if (isLong) setAttribute(this.scroll, name, value);
      else this.scroll.removeAttribute(name);
    const left = found - shown;
    const words = found ? `${units.formatCount(shown)} of ${units.formatCount(found)} metrics shown` : "No metric has such a name";
    setText(this.shown, shown === known ? "" : words);
    setText(this.more, `Show ${Math.min(limits.plots, left)} more`);
    setHidden(this.more, !left);
    setHidden(this.fewer, !isLong);
    setHidden(this.foot, !this.shown.textContent && !isLong);
  }

  #makeChip(rank) {
    const swatch = h("canvas", { width: "44", height: "12", "aria-hidden": "true" });
    const element = h(
      "button",
      { type: "button", class: "nbl-chip", title: "Show or hide this rank", onclick: () => this.#toggle(rank) },
      swatch,
      `rank ${rank}`,
    );
    const update = () => {
      setAttribute(element, "aria-pressed", String(!this.options.hidden.has(rank)));
      this.#paintSwatch(swatch, rank);
    };
    return { element, update };
  }

  #paintSwatch(swatch, rank) {
    const { color, dash } = styleOf(rank);
    const ink = this.frames.theme.ranks[color];
    if (swatch.dataset.ink === ink) return;
    swatch.dataset.ink = ink;
    const context = swatch.getContext("2d");
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 22, 6);
    Object.assign(context, { strokeStyle: ink, lineWidth: 2 });
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(0, 3);
    context.lineTo(22, 3);
    context.stroke();
  }

  #toggle(rank) {
    if (!this.options.hidden.delete(rank)) this.options.hidden.add(rank);
    this.#refresh();
  }
}
