import { isNumber } from "./units.js";

/** One metric of one rank: at most `limit` points, thinned so that every peak and every gap stays. */
class Curve {
  steps = [];
  values = [];
  version = 0;
  hasGaps = false;
  #limit;
  #smoothed = { weight: 0, version: -1, values: [] };

  constructor(limit) {
    this.#limit = limit;
  }

  extend({ steps, values, replace }) {
    if (replace) [this.steps, this.values, this.hasGaps] = [[], [], false];
    for (let at = 0; at < steps.length; at += 1) {
      const value = isNumber(values[at]) ? values[at] : null;
      this.steps.push(steps[at]);
      this.values.push(value);
      this.hasGaps ||= value === null;
      if (this.steps.length > this.#limit) this.#thin();
    }
    this.version += 1;
  }

  /** Keep each stretch's extremes; stretches are equally wide, so that old points fare no worse than new ones. */
  #thin() {
    const [first, last] = extentOf([this.steps]);
    const width = (last - first) / (this.#limit / 4) || 1;
    this.#keepExtremes((at) => Math.floor((this.steps[at] - first) / width));
    // Steps that go to and fro make a stretch of each point.
    if (this.steps.length > 0.75 * this.#limit) this.#keepExtremes((at) => Math.floor(at / 4));
  }

  #keepExtremes(stretchOf) {
    const kept = [];
    for (let start = 0, end = 0; start < this.steps.length; start = end) {
      while (end < this.steps.length && stretchOf(end) === stretchOf(start)) end += 1;
      kept.push(...extremesOf(this.values, start, end));
    }
    this.steps = kept.map((at) => this.steps[at]);
    this.values = kept.map((at) => this.values[at]);
  }

  /** Exponential moving average without the bias of its start; gaps stay. */
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

/** The places of the lowest value, the highest and the first gap between `start` and `end`, in their order. */
function extremesOf(values, start, end) {
  let [low, high, gap] = [-1, -1, -1];
  for (let at = start; at < end; at += 1) {
    const value = values[at];
    if (value === null) gap = gap < 0 ? at : gap;
    else {
      if (low < 0 || value < values[low]) low = at;
      if (high < 0 || value > values[high]) high = at;
    }
  }
  return [...new Set([low, high, gap])].filter((at) => at >= 0).sort((a, b) => a - b);
}

function movingAverage(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** All ranks' curves of one metric. */
export class Metric {
  ranks = new Map();
  version = 0;
  #limit;
  #average = { version: -1, curve: null, low: [], high: [] };

  constructor(name, limit) {
    this.name = name;
    this.#limit = limit;
  }

  extend(message) {
    if (!this.ranks.has(message.rank)) {
      this.ranks.set(message.rank, new Curve(this.#limit));
      this.ranks = new Map([...this.ranks].sort(([a], [b]) => a - b));
    }
    this.ranks.get(message.rank).extend(message);
    this.version += 1;
  }

  /** The mean over ranks as a curve, and the lowest and highest of them, at the steps of the longest curve. */
  average() {
    if (this.#average.version !== this.version) {
      const { steps, mean, low, high } = averageOf([...this.ranks.values()]);
      const curve = new Curve(this.#limit);
      curve.extend({ steps, values: mean });
      this.#average = { version: this.version, curve, low, high };
    }
    return this.#average;
  }
}

function averageOf(curves) {
  const readers = curves.map(interpolator);
  const longest = curves.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  const steps = [...longest.steps].sort((a, b) => a - b);
  const [mean, low, high] = [[], [], []];
  for (const step of steps) {
    const values = readers.map((read) => read(step)).filter((value) => value !== undefined);
    const finite = values.filter((value) => value !== null);
    const isWhole = finite.length === values.length;
    mean.push(isWhole ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null);
    low.push(finite.length ? Math.min(...finite) : null);
    high.push(finite.length ? Math.max(...finite) : null);
  }
  return { steps, mean, low, high };
}

/**
 * Return a function of growing steps: the value there, between two points the value on their line. It is null at and
 * beside a value that is not finite, and undefined before the first and after the last point.
 */
function interpolator({ steps, values }) {
  const order = steps.map((_, at) => at).sort((a, b) => steps[a] - steps[b]);
  let next = 0;
  return (step) => {
    while (next < order.length && steps[order[next]] < step) next += 1;
    if (next === order.length) return undefined;
    const [right, left] = [order[next], order[next - 1]];
    if (steps[right] === step) return values[right];
    if (left === undefined) return undefined;
    if (values[left] === null || values[right] === null) return null;
    const part = (step - steps[left]) / (steps[right] - steps[left]);
    return values[left] + part * (values[right] - values[left]);
  };
}

/** The lowest and the highest of lists of numbers, without those that are null; null if there is none. */
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
