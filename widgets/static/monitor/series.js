import { isNumber } from "./units.js";

/** @import { CurveItem, Value } from "./wire" */

/** Metric of one rank: at most `limit` points. Thinning keeps every peak and every gap. */
export class Curve {
  /** @type {number[]} */
  steps = [];
  /** Seconds from the launch to each report. @type {number[]} */
  times = [];
  /** Null is a gap: a value that is not finite. @type {Value[]} */
  values = [];
  version = 0;
  hasGaps = false;
  #limit;
  #smoothed = { weight: 0, version: -1, values: /** @type {Value[]} */ ([]) };

  /** @param {number} limit */
  constructor(limit) {
    this.#limit = limit;
  }

  /** @param {Pick<CurveItem, "steps" | "values" | "times" | "replace">} points */
  extend({ steps, values, times = steps, replace }) {
    if (replace) [this.steps, this.times, this.values, this.hasGaps] = [[], [], [], false];
    for (let at = 0; at < steps.length; at += 1) {
      const value = isNumber(values[at]) ? values[at] : null;
      this.steps.push(steps[at]);
      this.times.push(times[at]);
      this.values.push(value);
      this.hasGaps ||= value === null;
      if (this.steps.length > this.#limit) this.#thin();
    }
    this.version += 1;
  }

  /**
   * Keep the extremes of each stretch. Stretches span equally many steps, so that old points are not thinned more than
   * new ones.
   */
  #thin() {
    const [first, last] = /** @type {[number, number]} */ (extentOf([this.steps]));
    const width = (last - first) / (this.#limit / 4) || 1;
    this.#keepExtremes((at) => Math.floor((this.steps[at] - first) / width));
    // Where steps go back and forth, each point is a stretch of its own, and nothing was dropped.
    if (this.steps.length > 0.75 * this.#limit) this.#keepExtremes((at) => Math.floor(at / 4));
  }

  /** @param {(at: number) => number} stretchOf number of the stretch that a point belongs to */
  #keepExtremes(stretchOf) {
    const kept = [];
    for (let start = 0, end = 0; start < this.steps.length; start = end) {
      while (end < this.steps.length && stretchOf(end) === stretchOf(start)) end += 1;
      kept.push(...extremesOf(this.values, start, end));
    }
    this.steps = kept.map((at) => this.steps[at]);
    this.times = kept.map((at) => this.times[at]);
    this.values = kept.map((at) => this.values[at]);
  }

  /**
   * Return the values as an exponential moving average.
   * @param {number} weight
   */
  smoothed(weight) {
    const cache = this.#smoothed;
    if (weight === 0) return this.values;
    if (cache.weight !== weight || cache.version !== this.version) {
      this.#smoothed = { weight, version: this.version, values: movingAverage(this.values, weight) };
    }
    return this.#smoothed.values;
  }

  get last() {
    return this.values[this.values.length - 1];
  }
}

/**
 * Return the positions of the lowest value, the highest value and the first gap from `start` to before `end`, in order.
 * @param {Value[]} values
 * @param {number} start
 * @param {number} end
 */
function extremesOf(values, start, end) {
  let [low, high, gap] = [-1, -1, -1];
  for (let at = start; at < end; at += 1) {
    const value = values[at];
    if (value === null) gap = gap < 0 ? at : gap;
    else {
      if (low < 0 || value < /** @type {number} */ (values[low])) low = at;
      if (high < 0 || value > /** @type {number} */ (values[high])) high = at;
    }
  }
  return [...new Set([low, high, gap])].filter((at) => at >= 0).sort((a, b) => a - b);
}

/**
 * Return the exponential moving average, corrected for the bias of its start. Gaps stay gaps.
 * @param {Value[]} values
 * @param {number} weight of the past, 0 to less than 1
 * @returns {Value[]}
 */
function movingAverage(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** One metric of all ranks. */
export class Metric {
  /** Curves by rank, in the order of the ranks. @type {Map<number, Curve>} */
  ranks = new Map();
  version = 0;
  #limit;
  #average = { version: -1, curve: new Curve(0), low: /** @type {Value[]} */ ([]), high: /** @type {Value[]} */ ([]) };

  /** @param {string} name @param {number} limit points of a curve */
  constructor(name, limit) {
    this.name = name;
    this.#limit = limit;
  }

  /** @param {CurveItem} item */
  extend(item) {
    let curve = this.ranks.get(item.rank);
    if (!curve) {
      curve = new Curve(this.#limit);
      this.ranks = new Map([...this.ranks, /** @type {const} */ ([item.rank, curve])].sort(([a], [b]) => a - b));
    }
    curve.extend(item);
    this.version += 1;
  }

  /** Return the mean over ranks as a curve, and the lowest and highest value at each of its steps. */
  average() {
    if (this.#average.version !== this.version) {
      const { steps, times, mean, low, high } = averageOf([...this.ranks.values()]);
      const curve = new Curve(this.#limit);
      curve.extend({ steps, times, values: mean });
      this.#average = { version: this.version, curve, low, high };
    }
    return this.#average;
  }
}

/**
 * Return the mean, the lowest and the highest value of several curves at the steps of the longest one.
 *
 * As in the static picture, the mean is a gap where a value is not finite.
 * @param {{ steps: number[], times?: number[], values: Value[] }[]} curves
 */
function averageOf(curves) {
  const readers = curves.map(interpolator);
  const longest = curves.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  const order = longest.steps.map((_, at) => at).sort((a, b) => longest.steps[a] - longest.steps[b]);
  const steps = order.map((at) => longest.steps[at]);
  const times = order.map((at) => (longest.times ?? longest.steps)[at]);
  /** @type {[Value[], Value[], Value[]]} */
  const [mean, low, high] = [[], [], []];
  for (const step of steps) {
    const values = readers.map((read) => read(step)).filter((value) => value !== undefined);
    const finite = values.filter((value) => value !== null);
    const isWhole = finite.length === values.length;
    mean.push(isWhole ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null);
    low.push(finite.length ? Math.min(...finite) : null);
    high.push(finite.length ? Math.max(...finite) : null);
  }
  return { steps, times, mean, low, high };
}

/**
 * Return a function that reads a curve at growing steps, interpolated between its points.
 *
 * The function returns null at and beside a gap, and undefined before the first and after the last point.
 * @param {{ steps: number[], values: Value[] }} curve
 */
function interpolator({ steps, values }) {
  const order = steps.map((_, at) => at).sort((a, b) => steps[a] - steps[b]);
  let next = 0;
  return (/** @type {number} */ step) => {
    while (next < order.length && steps[order[next]] < step) next += 1;
    if (next === order.length) return undefined;
    const [right, left] = [order[next], order[next - 1]];
    if (steps[right] === step) return values[right];
    if (left === undefined) return undefined;
    const [before, after] = [values[left], values[right]];
    if (before === null || after === null) return null;
    return before + ((step - steps[left]) / (steps[right] - steps[left])) * (after - before);
  };
}

/**
 * Return the lowest and the highest of several lists of numbers without their gaps; null if there is no number.
 * @param {Value[][]} lists
 * @returns {[number, number] | null}
 */
export function extentOf(lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}
