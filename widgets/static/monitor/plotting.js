import { extentOf } from "./series.js";

/** Round numbers that divide [low, high] into about `count` parts. */
export function linearTicks(low, high, count) {
  const rough = high / Math.max(1, count) - low / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const spacing = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let at = Math.ceil(low / spacing - 1e-9); at * spacing <= high + 1e-9 * spacing && ticks.length < 50; at += 1)
    ticks.push(at * spacing);
  return ticks;
}

/** Powers of ten between two exponents; where that is fewer than two, 1, 2 and 5 times them. */
function logTicks(low, high, count) {
  const powers = linearTicks(low, high, count).filter((at) => Math.abs(at - Math.round(at)) < 1e-9);
  if (powers.length >= 2) return powers;
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1)
    for (const factor of [1, 2, 5]) ticks.push(power + Math.log10(factor));
  const inside = ticks.filter((at) => at >= low && at <= high);
  return inside.length >= 2 ? inside : linearTicks(low, high, count);
}

export function formatTick(value, spacing) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(spacing) + 1e-9)));
  return value.toFixed(digits);
}

/** A line of pixels: at most four points a column (first, lowest, highest, last), in runs between gaps. */
class PixelLine {
  runs = [];
  #run = null;
  #column = NaN;
  #x = 0;
  #first = 0;
  #low = 0;
  #high = 0;
  #last = 0;

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

/** A gap, and a step that lies before its forerunner (a restart), lift the pen; so do the gaps of a dash along x. */
export function pixelLine(steps, values, toX, toY, dash = []) {
  const line = new PixelLine();
  steps.forEach((step, at) => {
    const y = values[at] === null ? NaN : toY(values[at]);
    const x = toX(step);
    const isDrawn = Number.isFinite(y) && !isInGap(dash, x);
    if (!isDrawn || (at > 0 && step < steps[at - 1])) line.lift();
    if (isDrawn) line.add(x, y);
  });
  line.lift();
  return line.runs;
}

function isInGap(dash, x) {
  let rest = Math.round(x) % dash.reduce((sum, length) => sum + length, 0);
  for (let at = 0; at < dash.length; at += 1) {
    rest -= dash[at];
    if (rest < 0) return at % 2 === 1;
  }
  return false;
}

/** Stroke runs of pixels; a run of one point becomes a dot. */
export function strokeRuns(context, runs, radius = 2) {
  context.beginPath();
  for (const run of runs) {
    context.moveTo(run[0], run[1]);
    for (let at = 2; at < run.length; at += 2) context.lineTo(run[at], run[at + 1]);
  }
  context.stroke();
  for (const run of runs) if (run.length === 2) fillDot(context, run[0], run[1], radius);
}

export function fillDot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** Map values to 0..1 over what lies in `domain`; null where there is nothing to show. */
export function valueScale(lines, domain, isLog, units) {
  const toScale = isLog ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
  const inside = lines.map(({ steps, raw, band }) => {
    const found = [];
    steps.forEach((step, at) => {
      if (step < domain[0] || step > domain[1] || raw[at] === null) return;
      for (const value of band ? [band.low[at], band.high[at]] : [raw[at]])
        if (!Number.isNaN(toScale(value))) found.push(toScale(value));
    });
    return found;
  });
  const extent = extentOf(inside);
  if (!extent) return null;
  const pad = 0.06 * extent[1] - 0.06 * extent[0] || (isLog ? 0.5 : Math.abs(extent[0]) * 0.1 || 1);
  const [low, high] = [Math.max(extent[0] - pad, -Number.MAX_VALUE), Math.min(extent[1] + pad, Number.MAX_VALUE)];
  // By halves: from -1e308 to 1e308 is further than a number can say.
  const part = (scaled) => (scaled / 2 - low / 2) / (high / 2 - low / 2);
  const ticks = (count) => {
    const found = isLog ? logTicks(low, high, count) : linearTicks(low, high, count);
    const spacing = found.length > 1 ? found[1] - found[0] : 1;
    return found.map((at) => ({ part: part(at), text: isLog ? units.formatNumber(10 ** at) : formatTick(at, spacing) }));
  };
  return { part: (value) => part(toScale(value)), ticks };
}

/** Shade what lies between the lowest and the highest rank. */
export function fillBand(context, steps, { low, high }, toX, toY) {
  context.globalAlpha = 0.16;
  const there = steps
    .map((_, at) => at)
    .filter((at) => low[at] !== null && Number.isFinite(toY(low[at])) && Number.isFinite(toY(high[at])));
  context.beginPath();
  for (const at of there) context.lineTo(toX(steps[at]), toY(high[at]));
  for (const at of there.reverse()) context.lineTo(toX(steps[at]), toY(low[at]));
  context.fill();
  context.globalAlpha = 1;
}
