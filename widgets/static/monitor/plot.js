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
import { placedChanges, placesOf } from "./charts.js";
import { downloadPng } from "./downloads.js";
import { h, icon, KeyedList, setAttribute, setHidden, setText } from "./elements.js";
import { drawMarks, markRows } from "./marks.js";
import { PartLabel } from "./parts.js";
import { fillDot, valueScale } from "./plotting.js";
import { extentOf } from "./series.js";

/** @import { Axes } from "./axes.js" */
/** @import { FrameLoop, Theme, TooltipRow } from "./canvas.js" */
/** @import { AxisKind } from "./charts.js" */
/** @import { CurveOptions } from "./curves.js" */
/** @import { Legend } from "./legend.js" */
/** @import { PartLook } from "./parts.js" */
/** @import { Extent, PlotLine } from "./plotting.js" */
/** @import { Chart } from "./charts.js" */
/** @import { Curve } from "./series.js" */

const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";
const SHORTEST_DRAG = 4; // pixels; a shorter one is a click

/** A chart: name, last values, and a canvas to zoom (drag, keys) and to read values from (hover, keys). */
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
  /** Axis of the last frame. @type {AxisKind} */
  #kind = "step";
  #isDrawn = false;
  #chart;
  #options;
  #legend;
  #onPin;

  /**
   * @param {Chart} chart
   * @param {FrameLoop} frames
   * @param {CurveOptions} options
   * @param {Legend} legend
   * @param {(() => void) | null} onPin called when the metric was pinned or unpinned; null: it cannot be
   */
  constructor(chart, frames, options, legend, onPin) {
    this.#chart = chart;
    this.#options = options;
    this.#legend = legend;
    this.#onPin = onPin;
    const attributes = { class: "nbl-canvas nbl-plot-canvas", tabindex: "0", role: "img" };
    this.surface = new Surface(frames, (...all) => this.#draw(...all), attributes);
    this.latest = h("span", { class: "nbl-latest" });
    this.parts = h("div", { class: "nbl-parts" });
    this.partList = new KeyedList(
      this.parts,
      () => new PartLabel(),
      (label, /** @type {PartLook} */ look) => label.show(look),
    );
    const reset = () => this.#setZoom(null);
    this.reset = h(
      "button",
      { type: "button", class: "nbl-link", title: "Or double-click the plot", onclick: reset },
      "Reset zoom",
    );
    this.reset.hidden = true;
    this.png = h(
      "button",
      {
        type: "button",
        class: "nbl-link nbl-quiet-link",
        title: "Download this chart as a picture",
        "aria-label": `Download ${chart.name} as PNG`,
        onclick: () => frames.theme && downloadPng(this.surface.canvas, chart.name, frames.theme),
      },
      "PNG",
    );
    this.pin = h("button", {
      type: "button",
      class: "nbl-pin",
      "aria-label": `Pin ${chart.name}`,
      title: "Keep this metric first",
      onclick: () => this.#togglePin(),
    });
    this.pin.append(icon(PIN).svg);
    this.pin.hidden = !onPin;
    const name = h("span", { class: "nbl-plot-name", title: chart.members.map(({ metric }) => metric.name).join(", ") }, chart.name);
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.tooltip = new Tooltip(frame);
    const caption = h("figcaption", {}, this.pin, name, this.reset, this.latest, this.png);
    this.element = h("figure", { class: "nbl-plot" }, caption, this.parts, frame);
    this.#listen(this.surface.canvas);
  }

  remove() {
    this.surface.remove();
  }

  #togglePin() {
    const { pinned } = this.#options;
    if (!pinned.delete(this.#chart.name)) pinned.add(this.#chart.name);
    this.#onPin?.();
    this.pin.focus(); // The plot moves to another place, and an element that moves loses the focus.
  }

  /** @param {Chart} chart */
  update(chart) {
    setAttribute(this.pin, "aria-pressed", String(this.#options.pinned.has(chart.name)));
    if (this.#isDrawn && this.#chart.equals(chart)) return;
    [this.#chart, this.#isDrawn] = [chart, true];
    setText(this.latest, this.#latestText());
    const keys = "Arrow keys read values, plus and minus zoom, Escape shows all.";
    const last = chart.members.length > 1 ? "several curves" : `last value ${this.latest.textContent}`;
    setAttribute(this.surface.canvas, "aria-label", `${chart.name}, ${last}. ${keys}`);
    this.surface.invalidate();
  }

  #latestText() {
    const { members } = this.#chart;
    return members.length === 1 ? this.#latestOf([...members[0].metric.ranks]) : "";
  }

  /** Name the parts of a group beside samples of their lines. @param {Theme} theme */
  #paintParts(theme) {
    const { members } = this.#chart;
    const labels = members.map(({ part, metric }, at) => {
      const isAveraged = this.#options.averages(metric.ranks.size, this.#legend.limits);
      const isPlain = isAveraged || metric.ranks.size === 1;
      const { color } = styleOf(at);
      const look = { ink: isPlain ? theme.ranks[color] : theme.ink, line: isAveraged || at === 0 ? "solid" : "dashed" };
      return { ...look, text: `${part} ${this.#latestOf([...metric.ranks])}` };
    });
    this.partList.show(members.length > 1 ? labels.map((label, at) => [at, label]) : []);
  }

  /** @param {[rank: number, curve: Curve][]} curves */
  #latestOf(curves) {
    const { units } = this.#legend;
    const notFinite = units.formatValue(null);
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
    if (this.#kind !== this.#options.axis) {
      this.#kind = this.#options.axis;
      this.#setZoom(null);
    }
    this.#paintParts(theme);
    const lines = this.#lines(theme);
    const extent = extentOf(lines.map((line) => line.steps));
    if (extent) this.#extent = extent;
    const domain = this.#zoom ?? extent;
    const scale = domain && valueScale(lines, domain, this.#options.isLog, this.#options.leastSpan);
    this.#axes = scale && makeAxes(context, width, height, theme, domain, scale);
    if (!this.#axes) {
      this.tooltip.hide();
      drawWords(context, width, height, theme, this.#whyEmpty(extent));
      return;
    }
    const axes = this.#axes;
    const { left, right, top, bottom } = axes.box;
    drawAxes(axes, (place) => this.#placeText(place), this.#kind !== "time");
    context.save();
    context.beginPath();
    context.rect(left - 1, top - 3, right - left + 3, bottom - top + 8);
    context.clip();
    drawMarks(axes, this.#changes());
    for (const line of lines) drawPlotLine(axes, line);
    if (this.#dragStart !== null && this.#cursor !== null) drawSelection(axes, this.#dragStart, this.#cursor);
    context.restore();
    this.#drawCursor(axes, lines);
  }

  /**
   * Return the lines to draw: for each metric its mean, or a line for each rank that is not hidden.
   * @param {Theme} theme
   * @returns {PlotLine[]}
   */
  #lines(theme) {
    const { members } = this.#chart;
    return members.flatMap((_, at) => this.#linesOf(at, theme, members.length > 1));
  }

  /**
   * Return the lines of a metric. Of several metrics, the colour or else the dash tells them apart.
   * @param {number} at
   * @param {Theme} theme
   * @param {boolean} isGroup
   * @returns {PlotLine[]}
   */
  #linesOf(at, theme, isGroup) {
    const { smoothing, hidden } = this.#options;
    const { part, metric } = this.#chart.members[at];
    const line = (/** @type {Curve} */ curve) => ({
      steps: placesOf(curve, this.#kind, this.#options.epochs),
      raw: curve.values,
      values: curve.smoothed(smoothing),
    });
    if (this.#options.averages(metric.ranks.size, this.#legend.limits)) {
      const { curve, low, high } = metric.average();
      const look = { label: isGroup ? part : "mean", ink: theme.ranks[at % theme.ranks.length], dash: [] };
      return [{ ...look, ...line(curve), band: { low, high } }];
    }
    const isAlone = metric.ranks.size === 1;
    return [...metric.ranks]
      .filter(([rank]) => !hidden.has(rank))
      .map(([rank, curve]) => {
        const { color, dash } = styleOf(isGroup && isAlone ? at : rank);
        const label = !isGroup ? `rank ${rank}` : isAlone ? part : `${part}, rank ${rank}`;
        const look = { label, ink: theme.ranks[color], dash: isGroup && !isAlone ? styleOf(at).dash : dash };
        return { ...look, ...line(curve) };
      });
  }

  /** Changes of settings, at their places on the axis. */
  #changes() {
    return placedChanges(this.#options.changes, this.#kind, this.#options.epochs);
  }

  /** @param {Extent | null} extent */
  #whyEmpty(extent) {
    if (this.#options.isLog && extent) return "No value above zero, which a log scale needs";
    return this.#chart.members.some(({ metric }) => metric.ranks.size) && !extent ? "All ranks are hidden" : "No finite value";
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
    const rows = markRows(axes, this.#changes(), this.#cursor);
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
    const title = this.#kind === "step" ? `step ${units.formatCount(step)}` : this.#placeText(step);
    return this.tooltip.show(x, 0, this.#kind === "epoch" ? `epoch ${title}` : title, rows);
  }

  /** @param {number} place */
  #placeText(place) {
    const { units } = this.#legend;
    return this.#kind === "time" ? units.formatSeconds(place) : units.formatStep(place);
  }
}
