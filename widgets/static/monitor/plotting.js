import { extentOf } from "./series.js";

/** @import { Units } from "./units.js" */
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

/**
 * Return round numbers that divide an interval into about `count` parts.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function linearTicks(low, high, count) {
  const rough = high / Math.max(1, count) - low / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const spacing = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let at = Math.ceil(low / spacing - 1e-9); at * spacing <= high + 1e-9 * spacing && ticks.length < 50; at += 1)
    ticks.push(at * spacing);
  return ticks;
}

/**
 * Return powers of ten between two exponents, as exponents. Where there are fewer than two: 1, 2 and 5 times them.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
function logTicks(low, high, count) {
  const powers = linearTicks(low, high, count).filter((at) => Math.abs(at - Math.round(at)) < 1e-9);
  if (powers.length >= 2) return powers;
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1)
    for (const factor of [1, 2, 5]) ticks.push(power + Math.log10(factor));
  const inside = ticks.filter((at) => at >= low && at <= high);
  return inside.length >= 2 ? inside : linearTicks(low, high, count);
}

/**
 * Return the label of a tick.
 * @param {number} value
 * @param {number} spacing between two ticks
 */
export function formatTick(value, spacing) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(spacing) + 1e-9)));
  return value.toFixed(digits);
}

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
 * @param {Units} units
 */
export function valueScale(lines, domain, isLog, units) {
  const toScale = (/** @type {number} */ value) => (!isLog ? value : value > 0 ? Math.log10(value) : NaN);
  const extent = extentOf(
    lines.map((line) =>
      valuesInside(line, domain)
        .map(toScale)
        .filter((at) => !Number.isNaN(at)),
    ),
  );
  if (!extent) return null;
  const pad = 0.06 * extent[1] - 0.06 * extent[0] || (isLog ? 0.5 : Math.abs(extent[0]) * 0.1 || 1);
  const [low, high] = [Math.max(extent[0] - pad, -Number.MAX_VALUE), Math.min(extent[1] + pad, Number.MAX_VALUE)];
  // Halves, because the distance from -1e308 to 1e308 is more than the largest number.
  const part = (/** @type {number} */ scaled) => (scaled / 2 - low / 2) / (high / 2 - low / 2);
  const ticks = (/** @type {number} */ count) => {
    const found = isLog ? logTicks(low, high, count) : linearTicks(low, high, count);
    const spacing = found.length > 1 ? found[1] - found[0] : 1;
    return found.map((at) => ({
      part: part(at),
      text: isLog ? units.formatNumber(10 ** at) : formatTick(at, spacing),
    }));
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
