import {
  drawAxes,
  drawCursorLine,
  drawPlotLine,
  drawSelection,
  drawWords,
  makeAxes,
  nearestStep,
  stepAt,
} from "./axes.js";
import { styleOf, Surface, Tooltip } from "./canvas.js";
import { h, icon, setAttribute, setHidden, setText } from "./elements.js";
import { drawMarks, markRows } from "./marks.js";
import { fillDot, valueScale } from "./plotting.js";
import { extentOf } from "./series.js";

/** @import { Axes } from "./axes.js" */
/** @import { FrameLoop, Theme, TooltipRow } from "./canvas.js" */
/** @import { CurveOptions } from "./curves.js" */
/** @import { Legend } from "./legend.js" */
/** @import { Extent, PlotLine } from "./plotting.js" */
/** @import { Metric } from "./series.js" */

const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";
const SHORTEST_DRAG = 4; // pixels; a shorter one is a click

/** One metric: name, last value, and a canvas to zoom (drag, keys) and to read values from (hover, keys). */
export class Plot {
  /** Steps that the plot is zoomed to. @type {Extent | null} */
  #zoom = null;
  /** Position of the cursor in pixels. @type {number | null} */
  #cursor = null;
  /** Position in pixels where a drag began. @type {number | null} */
  #dragStart = null;
  /** Steps of all lines. @type {Extent} */
  #extent = [0, 0];
  /** Axes of the last frame; null if there was nothing to draw. @type {Axes | null} */
  #axes = null;
  #drawnVersion = -1;
  #metric;
  #options;
  #legend;
  #onPin;

  /**
   * @param {Metric} metric
   * @param {FrameLoop} frames
   * @param {CurveOptions} options
   * @param {Legend} legend
   * @param {() => void} onPin called when the metric was pinned or unpinned
   */
  constructor(metric, frames, options, legend, onPin) {
    this.#metric = metric;
    this.#options = options;
    this.#legend = legend;
    this.#onPin = onPin;
    const attributes = { class: "nbl-canvas nbl-plot-canvas", tabindex: "0", role: "img" };
    this.surface = new Surface(frames, (...all) => this.#draw(...all), attributes);
    this.latest = h("span", { class: "nbl-latest" });
    const reset = () => this.#setZoom(null);
    this.reset = h(
      "button",
      { type: "button", class: "nbl-link", title: "Or double-click the plot", onclick: reset },
      "Reset zoom",
    );
    this.reset.hidden = true;
    this.pin = h("button", {
      type: "button",
      class: "nbl-pin",
      "aria-label": `Pin ${metric.name}`,
      title: "Keep this metric first",
      onclick: () => this.#togglePin(),
    });
    this.pin.append(icon(PIN).svg);
    const name = h("span", { class: "nbl-plot-name", title: metric.name }, metric.name);
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.tooltip = new Tooltip(frame);
    const caption = h("figcaption", {}, this.pin, name, this.reset, this.latest);
    this.element = h("figure", { class: "nbl-plot" }, caption, frame);
    this.#listen(this.surface.canvas);
  }

  remove() {
    this.surface.remove();
  }

  #togglePin() {
    const { pinned } = this.#options;
    if (!pinned.delete(this.#metric.name)) pinned.add(this.#metric.name);
    this.#onPin();
    this.pin.focus(); // The plot moves to another place, and an element that moves loses the focus.
  }

  /** @param {Metric} metric */
  update(metric) {
    setAttribute(this.pin, "aria-pressed", String(this.#options.pinned.has(metric.name)));
    if (this.#metric === metric && this.#drawnVersion === metric.version) return;
    [this.#metric, this.#drawnVersion] = [metric, metric.version];
    setText(this.latest, this.#latestText());
    const keys = "Arrow keys read values, plus and minus zoom, Escape shows all.";
    setAttribute(this.surface.canvas, "aria-label", `${metric.name}, last value ${this.latest.textContent}. ${keys}`);
    this.surface.invalidate();
  }

  #latestText() {
    const { units } = this.#legend;
    const notFinite = units.formatValue(null);
    const curves = [...this.#metric.ranks];
    const broken = curves.filter(([, curve]) => curve.last === null).map(([rank]) => rank);
    if (broken.length && curves.length === 1) return notFinite;
    if (broken.length) return `${notFinite} on rank ${broken.slice(0, 3).join(", ")}${broken.length > 3 ? "…" : ""}`;
    const mean = curves.reduce((sum, [, curve]) => sum + (curve.last ?? NaN), 0) / curves.length;
    const gaps = curves.some(([, curve]) => curve.hasGaps) ? `some ${notFinite}, ` : "";
    return `${gaps}${curves.length === 1 ? "" : "mean "}${units.formatValue(mean)}`;
  }

  // Pointer and keys.

  /** @param {HTMLCanvasElement} canvas */
  #listen(canvas) {
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.#dragStart = event.offsetX;
    });
    canvas.addEventListener("pointermove", (event) => this.#moveCursor(event.offsetX));
    canvas.addEventListener("pointerup", (event) => this.#endDrag(event.offsetX));
    canvas.addEventListener("pointercancel", () => this.#endDrag(null));
    canvas.addEventListener("pointerleave", () => this.#moveCursor(null));
    canvas.addEventListener("blur", () => this.#moveCursor(null));
    canvas.addEventListener("dblclick", () => this.#setZoom(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const axes = this.#axes;
    if (!axes || event.ctrlKey || event.metaKey || event.altKey) return;
    const { left, right } = axes.box;
    const at = this.#cursor ?? (left + right) / 2;
    const stride = (right - left) / 40;
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => this.#moveCursor(Math.max(left, at - stride), "polite"),
      ArrowRight: () => this.#moveCursor(Math.min(right, at + stride), "polite"),
      "+": () => this.#scaleZoom(axes, at, 0.5),
      "=": () => this.#scaleZoom(axes, at, 0.5),
      "-": () => this.#scaleZoom(axes, at, 2),
      Escape: () => this.#setZoom(null),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  /** @param {number | null} x null if the drag was cancelled */
  #endDrag(x) {
    const start = this.#dragStart;
    this.#dragStart = null;
    if (start !== null && x !== null && this.#axes && Math.abs(x - start) > SHORTEST_DRAG)
      this.#setZoom([stepAt(this.#axes, Math.min(start, x)), stepAt(this.#axes, Math.max(start, x))]);
    else this.surface.invalidate();
  }

  /** @param {Axes} axes @param {number} x that stays where it is @param {number} factor of the steps in sight */
  #scaleZoom(axes, x, factor) {
    const center = stepAt(axes, x);
    const half = (factor * (axes.domain[1] - axes.domain[0])) / 2;
    const [first, last] = this.#extent;
    /** @type {Extent} */
    const zoom = [Math.max(first, center - half), Math.min(last, center + half)];
    if (zoom[1] - zoom[0] >= last - first) this.#setZoom(null);
    else if (zoom[1] > zoom[0]) this.#setZoom(zoom);
  }

  /** @param {Extent | null} zoom */
  #setZoom(zoom) {
    this.#zoom = zoom;
    setHidden(this.reset, !zoom);
    this.surface.invalidate();
  }

  /**
   * Show the values at a position. Values that were reached by keys are read aloud as well.
   * @param {number | null} x
   * @param {"off" | "polite"} [loudness]
   */
  #moveCursor(x, loudness = "off") {
    this.#cursor = x;
    setAttribute(this.tooltip.element, "aria-live", loudness);
    this.surface.invalidate();
  }

  // Drawing.

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height @param {Theme} theme */
  #draw(context, width, height, theme) {
    const lines = this.#lines(theme);
    const extent = extentOf(lines.map((line) => line.steps));
    if (extent) this.#extent = extent;
    const domain = this.#zoom ?? extent;
    const scale = domain && valueScale(lines, domain, this.#options.isLog, this.#legend.units);
    this.#axes = scale && makeAxes(context, width, height, theme, domain, scale);
    if (!this.#axes) {
      this.tooltip.hide();
      drawWords(context, width, height, theme, this.#whyEmpty(extent));
      return;
    }
    const axes = this.#axes;
    const { left, right, top, bottom } = axes.box;
    drawAxes(axes, this.#legend.units);
    context.save();
    context.beginPath();
    context.rect(left - 1, top - 3, right - left + 3, bottom - top + 8);
    context.clip();
    drawMarks(axes, this.#options.changes);
    for (const line of lines) drawPlotLine(axes, line);
    if (this.#dragStart !== null && this.#cursor !== null) drawSelection(axes, this.#dragStart, this.#cursor);
    context.restore();
    this.#drawCursor(axes, lines);
  }

  /**
   * Return the lines to draw: the mean, or one for each rank that is not hidden.
   * @param {Theme} theme
   * @returns {PlotLine[]}
   */
  #lines(theme) {
    const { smoothing, hidden } = this.#options;
    if (this.#options.averages(this.#metric.ranks.size, this.#legend.limits)) {
      const { curve, low, high } = this.#metric.average();
      const values = curve.smoothed(smoothing);
      const look = { label: "mean", ink: theme.ranks[0], dash: [] };
      return [{ ...look, steps: curve.steps, raw: curve.values, values, band: { low, high } }];
    }
    return [...this.#metric.ranks]
      .filter(([rank]) => !hidden.has(rank))
      .map(([rank, curve]) => {
        const { color, dash } = styleOf(rank);
        const look = { label: `rank ${rank}`, ink: theme.ranks[color], dash };
        return { ...look, steps: curve.steps, raw: curve.values, values: curve.smoothed(smoothing) };
      });
  }

  /** @param {Extent | null} extent */
  #whyEmpty(extent) {
    if (this.#options.isLog && extent) return "No value above zero, which a log scale needs";
    return this.#metric.ranks.size && !extent ? "All ranks are hidden" : "No finite value";
  }

  /** @param {Axes} axes @param {PlotLine[]} lines */
  #drawCursor(axes, lines) {
    if (this.#cursor === null) return this.tooltip.hide();
    const step = nearestStep(lines, stepAt(axes, this.#cursor), axes.domain);
    if (step === null) return this.tooltip.hide();
    const x = axes.toX(step);
    drawCursorLine(axes, x);
    const { limits, units } = this.#legend;
    /** @type {TooltipRow[]} */
    const rows = markRows(axes, this.#options.changes, this.#cursor);
    for (const { label, ink, steps, values, band } of lines) {
      const at = steps.lastIndexOf(step);
      if (at < 0) continue;
      const value = values[at];
      rows.push({ color: ink, label, value: units.formatValue(value) });
      if (band) rows.push({ label: "lowest", value: units.formatValue(band.low[at]) });
      if (band) rows.push({ label: "highest", value: units.formatValue(band.high[at]) });
      axes.context.fillStyle = ink;
      if (value !== null && Number.isFinite(axes.toY(value))) fillDot(axes.context, x, axes.toY(value), 3);
    }
    const more = rows.length - limits.tooltip_rows;
    if (more > 0) rows.splice(limits.tooltip_rows, more, { label: `and ${more} more`, value: "" });
    return this.tooltip.show(x, 0, `step ${units.formatCount(step)}`, rows);
  }
}
