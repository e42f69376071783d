import { styleOf, Surface, Tooltip } from "./canvas.js";
import { h, icon, setAttribute, setHidden, setText } from "./elements.js";
import { fillBand, fillDot, linearTicks, pixelLine, strokeRuns, valueScale } from "./plotting.js";
import { extentOf } from "./series.js";

const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";
const PLOT_EDGE = { top: 6, right: 3, bottom: 20, left: 1 };

/** One metric: its name, its last value, and a canvas that can be zoomed (drag, keys) and read (hover, keys). */
export class Plot {
  zoom = null; // [first step, last step]
  cursor = null; // the x in pixels that is read
  drag = null; // the x in pixels where a drag began
  seen = -1;

  constructor(metric, frames, options, legend, onPin) {
    this.legend = legend;
    this.options = options;
    this.onPin = onPin;
    this.surface = new Surface(frames, (...all) => this.#draw(...all), {
      class: "nbl-canvas nbl-plot-canvas",
      tabindex: "0",
      role: "img",
    });
    this.latest = h("span", { class: "nbl-latest" });
    this.reset = h(
      "button",
      { type: "button", class: "nbl-link", title: "Or double-click the plot", onclick: () => this.#setZoom(null) },
      "Reset zoom",
    );
    this.pin = h("button", {
      type: "button",
      class: "nbl-pin",
      "aria-label": `Pin ${metric.name}`,
      title: "Keep this metric first",
      onclick: () => this.#togglePin(),
    });
    this.pin.append(icon(PIN));
    const caption = h(
      "figcaption",
      {},
      this.pin,
      h("span", { class: "nbl-plot-name", title: metric.name }, metric.name),
      this.reset,
      this.latest,
    );
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.tooltip = new Tooltip(frame);
    this.element = h("figure", { class: "nbl-plot" }, caption, frame);
    this.reset.hidden = true;
    this.#listen(this.surface.canvas);
  }

  remove() {
    this.surface.frames.unwatch(this.surface);
  }

  #togglePin() {
    const { pinned } = this.options;
    if (!pinned.delete(this.metric.name)) pinned.add(this.metric.name);
    this.onPin();
    this.pin.focus(); // It has moved, and an element that moves loses the focus.
  }

  update(metric) {
    setAttribute(this.pin, "aria-pressed", String(this.options.pinned.has(metric.name)));
    if (this.metric === metric && this.seen === metric.version) return;
    [this.metric, this.seen] = [metric, metric.version];
    setText(this.latest, this.#latestText());
    setAttribute(
      this.surface.canvas,
      "aria-label",
      `${metric.name}, last value ${this.latest.textContent}. Arrow keys read values, plus and minus zoom, Escape shows all.`,
    );
    this.surface.invalidate();
  }

  #latestText() {
    const curves = [...this.metric.ranks];
    const broken = curves.filter(([, curve]) => curve.last === null).map(([rank]) => rank);
    if (broken.length)
      return curves.length === 1
        ? this.legend.units.formatValue(null)
        : `${this.legend.units.formatValue(null)} on rank ${broken.slice(0, 3).join(", ")}${broken.length > 3 ? "…" : ""}`;
    const mean = curves.reduce((sum, [, curve]) => sum + curve.last, 0) / curves.length;
    const gaps = curves.some(([, curve]) => curve.hasGaps) ? `some ${this.legend.units.formatValue(null)}, ` : "";
    return `${gaps}${curves.length === 1 ? "" : "mean "}${this.legend.units.formatValue(mean)}`;
  }

  // -- the pointer and the keys

  #listen(canvas) {
    const at = (event) => event.offsetX;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.drag = at(event);
    });
    canvas.addEventListener("pointermove", (event) => this.#read(at(event)));
    canvas.addEventListener("pointerup", (event) => this.#endDrag(at(event)));
    canvas.addEventListener("pointercancel", () => this.#endDrag(null));
    canvas.addEventListener("pointerleave", () => this.#read(null));
    canvas.addEventListener("blur", () => this.#read(null));
    canvas.addEventListener("dblclick", () => this.#setZoom(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    const box = this.box;
    if (!box) return;
    const middle = (box.left + box.right) / 2;
    const step = (box.right - box.left) / 40;
    const keys = {
      ArrowLeft: () => this.#read(Math.max(box.left, (this.cursor ?? middle) - step), "polite"),
      ArrowRight: () => this.#read(Math.min(box.right, (this.cursor ?? middle) + step), "polite"),
      "+": () => this.#scaleZoom(this.cursor ?? middle, 0.5),
      "=": () => this.#scaleZoom(this.cursor ?? middle, 0.5),
      "-": () => this.#scaleZoom(this.cursor ?? middle, 2),
      Escape: () => this.#setZoom(null),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  #endDrag(x) {
    const from = this.drag;
    this.drag = null;
    if (from !== null && x !== null && this.box && Math.abs(x - from) > 4)
      this.#setZoom([this.#stepAt(Math.min(from, x)), this.#stepAt(Math.max(from, x))]);
    else this.surface.invalidate();
  }

  #scaleZoom(x, factor) {
    const center = this.#stepAt(x);
    const half = (factor * (this.domain[1] - this.domain[0])) / 2;
    const [first, last] = this.extent;
    const zoom = [Math.max(first, center - half), Math.min(last, center + half)];
    if (zoom[1] - zoom[0] >= last - first) this.#setZoom(null);
    else if (zoom[1] > zoom[0]) this.#setZoom(zoom);
  }

  #setZoom(zoom) {
    this.zoom = zoom;
    setHidden(this.reset, !zoom);
    this.surface.invalidate();
  }

  /** Show what stands at x; what keys ask for is spoken as well. */
  #read(x, loudness = "off") {
    this.cursor = x;
    setAttribute(this.tooltip.element, "aria-live", loudness);
    this.surface.invalidate();
  }

  #stepAt(x) {
    const { left, right } = this.box;
    const part = Math.min(1, Math.max(0, (x - left) / (right - left)));
    return this.domain[0] + part * (this.domain[1] - this.domain[0]);
  }

  // -- the picture

  /** What is drawn: lines with a label, a style, steps, values and, behind a smoothed line, the raw values. */
  #lines(theme) {
    const { smoothing, hidden } = this.options;
    if (this.options.averages(this.metric.ranks.size, this.legend.limits)) {
      const { curve, low, high } = this.metric.average();
      const line = {
        label: "mean",
        ink: theme.ranks[0],
        dash: [],
        steps: curve.steps,
        raw: curve.values,
        values: curve.smoothed(smoothing),
      };
      return [{ ...line, band: { low, high } }];
    }
    return [...this.metric.ranks]
      .filter(([rank]) => !hidden.has(rank))
      .map(([rank, curve]) => {
        const { color, dash } = styleOf(rank);
        return {
          label: `rank ${rank}`,
          ink: theme.ranks[color],
          dash,
          steps: curve.steps,
          raw: curve.values,
          values: curve.smoothed(smoothing),
        };
      });
  }

  #draw(context, width, height, theme) {
    const lines = this.#lines(theme);
    this.extent = extentOf(lines.map((line) => line.steps));
    this.domain = this.zoom ?? this.extent;
    const scale = this.extent && valueScale(lines, this.domain, this.options.isLog, this.legend.units);
    this.box = null;
    if (!scale) return this.#drawWords(context, width, height, theme);
    const ticks = scale.ticks(6);
    const label = Math.max(...ticks.map(({ text }) => context.measureText(text).width));
    this.box = {
      left: PLOT_EDGE.left + label + 6,
      right: width - PLOT_EDGE.right,
      top: PLOT_EDGE.top,
      bottom: height - PLOT_EDGE.bottom,
    };
    const { left, right, top, bottom } = this.box;
    const span = this.domain[1] - this.domain[0];
    const toX = (step) => (span ? left + ((step - this.domain[0]) / span) * (right - left) : (left + right) / 2);
    const toY = (value) => bottom - scale.part(value) * (bottom - top);
    this.#drawAxes(context, theme, ticks, toX);
    context.save();
    context.beginPath();
    context.rect(left - 1, top - 3, right - left + 3, bottom - top + 8);
    context.clip();
    for (const line of lines) this.#drawLine(context, line, toX, toY);
    this.#drawDrag(context, theme);
    context.restore();
    return this.#drawCursor(context, theme, lines, toX, toY);
  }

  #drawWords(context, width, height, theme) {
    const words =
      this.options.isLog && this.extent
        ? "Nothing above zero to show on a log scale"
        : this.metric.ranks.size && !this.extent
          ? "All ranks are hidden"
          : "No finite value";
    Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.6, textAlign: "center", textBaseline: "middle" });
    context.fillText(words, width / 2, height / 2);
    context.globalAlpha = 1;
    this.tooltip.hide();
  }

  #drawAxes(context, theme, ticks, toX) {
    const { left, right, top, bottom } = this.box;
    Object.assign(context, {
      fillStyle: theme.ink,
      strokeStyle: theme.ink,
      lineWidth: 1,
      textAlign: "right",
      textBaseline: "middle",
    });
    for (const { part, text } of ticks) {
      const y = Math.round(bottom - part * (bottom - top)) + 0.5;
      context.globalAlpha = 0.07;
      context.strokeRect(left, y, right - left, 0);
      context.globalAlpha = 0.62;
      context.fillText(text, left - 6, y);
    }
    context.globalAlpha = 0.35;
    context.strokeRect(left, bottom + 0.5, right - left, 0);
    context.globalAlpha = 0.62;
    context.textBaseline = "top";
    const steps =
      this.domain[0] === this.domain[1] ? [this.domain[0]] : linearTicks(...this.domain, (right - left) / 70);
    for (const step of steps) {
      if (!Number.isInteger(step) && this.domain[1] - this.domain[0] >= 2) continue;
      const text = this.legend.units.formatStep(step);
      const half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(Math.max(toX(step), half), right + PLOT_EDGE.right - half - 1), bottom + 6);
    }
    context.globalAlpha = 1;
  }

  #drawLine(context, { ink, dash, steps, values, raw, band }, toX, toY) {
    Object.assign(context, { strokeStyle: ink, fillStyle: ink, lineJoin: "round", lineWidth: 1 });
    if (band) fillBand(context, steps, band, toX, toY);
    context.setLineDash([]);
    if (values !== raw) {
      context.globalAlpha = 0.25;
      strokeRuns(context, pixelLine(steps, raw, toX, toY));
      context.globalAlpha = 1;
    }
    // A line that goes up and down in each column has no visible dashes of its own: its columns are left out instead,
    // which is a third of the work as well.
    const [first, last] = this.domain;
    const count = steps.reduce((sum, step) => sum + (step >= first && step <= last), 0);
    const isDense = count > this.box.right - this.box.left;
    context.lineWidth = 1.6;
    context.setLineDash(isDense ? [] : dash);
    strokeRuns(context, pixelLine(steps, values, toX, toY, isDense ? dash : []), isDense ? 0.8 : 2);
    context.setLineDash([]);
    // Where a value is not finite, a tick hangs from the axis.
    steps.forEach((step, at) => {
      if (raw[at] === null) context.fillRect(Math.round(toX(step)) - 1, this.box.bottom + 1, 2, 4);
    });
  }

  #drawDrag(context, theme) {
    if (this.drag === null || this.cursor === null) return;
    Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.12 });
    context.fillRect(
      Math.min(this.drag, this.cursor),
      this.box.top,
      Math.abs(this.cursor - this.drag),
      this.box.bottom - this.box.top,
    );
    context.globalAlpha = 1;
  }

  #drawCursor(context, theme, lines, toX, toY) {
    if (this.cursor === null) return this.tooltip.hide();
    const step = nearestStep(lines, this.#stepAt(this.cursor), this.domain);
    if (step === null) return this.tooltip.hide();
    const x = toX(step);
    Object.assign(context, { strokeStyle: theme.ink, globalAlpha: 0.4, lineWidth: 1 });
    context.strokeRect(Math.round(x) + 0.5, this.box.top, 0, this.box.bottom - this.box.top);
    context.globalAlpha = 1;
    const { limits, units } = this.legend;
    const rows = [];
    for (const { label, ink, steps, values, band } of lines) {
      const at = steps.lastIndexOf(step);
      if (at < 0) continue;
      rows.push({ color: ink, label, value: units.formatValue(values[at]) });
      if (band)
        rows.push(
          { label: "lowest", value: units.formatValue(band.low[at]) },
          { label: "highest", value: units.formatValue(band.high[at]) },
        );
      context.fillStyle = ink;
      if (values[at] !== null && Number.isFinite(toY(values[at]))) fillDot(context, x, toY(values[at]), 3);
    }
    const more = rows.length - limits.tooltip_rows;
    if (more > 0) rows.splice(limits.tooltip_rows, more, { label: `and ${more} more`, value: "" });
    return this.tooltip.show(x, 0, `step ${units.formatCount(step)}`, rows);
  }
}

/** The step nearest to `wanted` that any of the lines has inside `domain`. */
function nearestStep(lines, wanted, domain) {
  let nearest = null;
  for (const { steps } of lines) {
    for (const step of steps) {
      if (step < domain[0] || step > domain[1]) continue;
      if (nearest === null || Math.abs(step - wanted) < Math.abs(nearest - wanted)) nearest = step;
    }
  }
  return nearest;
}
