import { extentOf } from "./series.js";
import { linearTicks, logTicks, tickLabels } from "./ticks.js";

/** @import { Value } from "./wire" */

/**
 * Line of a plot. `raw` is drawn behind a smoothed line, `band` around a mean.
 * @typedef {{
 *   label: string,
 *   ink: string,
 *   dash: number[],
 *   steps: number[],
 *   raw: Value[],
 *   values: Value[],
 *   band?: { low: Value[], high: Value[] },
 * }} PlotLine
 */
/** @typedef {(value: number) => number} ToPixel */
/** @typedef {NonNullable<ReturnType<typeof valueScale>>} ValueScale */
/** @typedef {CanvasRenderingContext2D} Context */
/** @typedef {[low: number, high: number]} Extent */

const LARGEST = 1e300; // beyond it, and below its inverse, a logarithmic axis has no ticks

/** Builds a line of at most four points for each pixel column: first, lowest, highest, last. Gaps separate its runs. */
class PixelLine {
  /** Coordinates x, y, x, y, ... of each run. @type {number[][]} */
  runs = [];
  /** @type {number[] | null} */
  #run = null;
  #column = NaN;
  #x = 0;
  #first = 0;
  #low = 0;
  #high = 0;
  #last = 0;

  /** @param {number} x @param {number} y */
  add(x, y) {
    if (Math.round(x) === this.#column) {
      this.#low = Math.min(this.#low, y);
      this.#high = Math.max(this.#high, y);
      this.#last = y;
      return;
    }
    this.#flush();
    [this.#column, this.#x] = [Math.round(x), x];
    this.#first = this.#low = this.#high = this.#last = y;
  }

  /** End the run. */
  lift() {
    this.#flush();
    [this.#run, this.#column] = [null, NaN];
  }

  #flush() {
    if (Number.isNaN(this.#column)) return;
    if (!this.#run) this.runs.push((this.#run = []));
    this.#run.push(this.#x, this.#first);
    if (this.#high - this.#low > 1) this.#run.push(this.#x, this.#low, this.#x, this.#high, this.#x, this.#last);
  }
}

/**
 * Return the runs of a line in pixels.
 *
 * A run ends at a gap, and where steps go back because the run was resumed. With `dash` it also ends at each gap of the
 * dash along x.
 * @param {number[]} steps
 * @param {Value[]} values
 * @param {ToPixel} toX
 * @param {ToPixel} toY
 * @param {number[]} [dash]
 */
export function pixelLine(steps, values, toX, toY, dash = []) {
  const line = new PixelLine();
  steps.forEach((step, at) => {
    const value = values[at];
    const y = value === null ? NaN : toY(value);
    const x = toX(step);
    const isDrawn = Number.isFinite(y) && !isInGap(dash, x);
    if (!isDrawn || (at > 0 && step < steps[at - 1])) line.lift();
    if (isDrawn) line.add(x, y);
  });
  line.lift();
  return line.runs;
}

/** @param {number[]} dash @param {number} x */
function isInGap(dash, x) {
  let rest = Math.round(x) % dash.reduce((sum, length) => sum + length, 0);
  for (let at = 0; at < dash.length; at += 1) {
    rest -= dash[at];
    if (rest < 0) return at % 2 === 1;
  }
  return false;
}

/**
 * Stroke runs of pixels. A run of one point becomes a dot.
 * @param {Context} context
 * @param {number[][]} runs
 * @param {number} [radius] of the dots
 */
export function strokeRuns(context, runs, radius = 2) {
  context.beginPath();
  for (const run of runs) {
    context.moveTo(run[0], run[1]);
    for (let at = 2; at < run.length; at += 2) context.lineTo(run[at], run[at + 1]);
  }
  context.stroke();
  for (const run of runs) if (run.length === 2) fillDot(context, run[0], run[1], radius);
}

/** @param {Context} context @param {number} x @param {number} y @param {number} radius */
export function fillDot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/**
 * Return the vertical axis of the values inside `domain`, or null if there is no value to draw.
 *
 * `part` maps a value to its part of the axis, 0 to 1; it is NaN for a value that a logarithmic axis does not have.
 * @param {PlotLine[]} lines
 * @param {Extent} domain of the steps
 * @param {boolean} isLog
 * @param {number} leastSpan length of a linear axis at least, as a part of its largest value
 */
export function valueScale(lines, domain, isLog, leastSpan = 0) {
  const toScale = (/** @type {number} */ value) => (!isLog ? value : value > 0 ? Math.log10(value) : NaN);
  const extent = extentOf(
    lines.map((line) =>
      valuesInside(line, domain)
        .map(toScale)
        .filter((at) => !Number.isNaN(at)),
    ),
  );
  if (!extent) return null;
  const missing = isLog ? 0 : leastSpan * Math.max(...extent.map(Math.abs)) - (extent[1] - extent[0]);
  const natural = 0.06 * extent[1] - 0.06 * extent[0] || (isLog ? 0.5 : Math.abs(extent[0]) * 0.1 || 1);
  const pad = Math.max(natural, missing / 2);
  const [low, high] = [Math.max(extent[0] - pad, -Number.MAX_VALUE), Math.min(extent[1] + pad, Number.MAX_VALUE)];
  // Halves, because the distance from -1e308 to 1e308 is more than the largest number.
  const part = (/** @type {number} */ scaled) => (scaled / 2 - low / 2) / (high / 2 - low / 2);
  const ticks = (/** @type {number} */ count) => {
    const found = isLog
      ? logTicks(Math.max(10 ** low, 1 / LARGEST), Math.min(10 ** high, LARGEST), count)
      : linearTicks(low, high, count);
    const texts = tickLabels(found);
    return found.map((at, number) => ({ part: part(toScale(at)), text: texts[number] }));
  };
  return { part: (/** @type {number} */ value) => part(toScale(value)), ticks };
}

/**
 * Return the values of a line, or of its band, at the steps inside `domain`.
 * @param {PlotLine} line
 * @param {Extent} domain
 */
function valuesInside({ steps, raw, band }, domain) {
  /** @type {Value[]} */
  const found = [];
  steps.forEach((step, at) => {
    if (step < domain[0] || step > domain[1]) return;
    if (band) found.push(band.low[at], band.high[at]);
    else found.push(raw[at]);
  });
  return found.filter((value) => value !== null);
}

/**
 * Shade the range from the lowest to the highest rank.
 * @param {Context} context
 * @param {number[]} steps
 * @param {{ low: Value[], high: Value[] }} band
 * @param {ToPixel} toX
 * @param {ToPixel} toY
 */
export function fillBand(context, steps, { low, high }, toX, toY) {
  const isDrawn = steps.map((_, at) => Number.isFinite(toY(low[at] ?? NaN)) && Number.isFinite(toY(high[at] ?? NaN)));
  const edge = (/** @type {Value[]} */ values) =>
    steps.map((step, at) => [toX(step), toY(values[at] ?? NaN)]).filter((_, at) => isDrawn[at]);
  context.globalAlpha = 0.16;
  context.beginPath();
  for (const [x, y] of edge(high)) context.lineTo(x, y);
  for (const [x, y] of edge(low).reverse()) context.lineTo(x, y);
  context.fill();
  context.globalAlpha = 1;
}
