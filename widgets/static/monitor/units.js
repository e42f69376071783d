/** @import { Done, Formats } from "./wire" */

/**
 * Return true for a finite number.
 * @param {unknown} value
 * @returns {value is number}
 */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @param {number} count */
export const formatRankCount = (count) => `${count} ${count === 1 ? "rank" : "ranks"}`;

/**
 * Return `rank 2`, `ranks 0, 2` or `ranks 0-3, 7`, as `rank_list` does.
 * @param {number[]} ranks
 */
export function formatRanks(ranks) {
  /** @type {number[][]} */
  const spans = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const span = spans.at(-1);
    if (span && rank === span[span.length - 1] + 1) span.push(rank);
    else spans.push([rank]);
  }
  const words = spans.flatMap((span) => (span.length > 2 ? [`${span[0]}-${span[span.length - 1]}`] : span.map(String)));
  return `${spans.flat().length === 1 ? "rank" : "ranks"} ${words.join(", ")}`;
}

const [MINUTE, HOUR] = [60, 3600];

/**
 * The functions of notebook_launcher/wording/units.py, with its `FORMATS`; tests/wording/test_units.py compares them.
 *
 * Each returns an empty string for a value that is unknown.
 */
export class Units {
  #formats;

  /** @param {Formats} formats */
  constructor(formats) {
    this.#formats = formats;
  }

  /**
   * Return 490 µs, 35 ms, 4.2 s, 3 min 20 s or 1 h 02 min.
   * @param {number | null | undefined} seconds
   * @returns {string}
   */
  formatSeconds(seconds) {
    if (!isNumber(seconds)) return "";
    if (seconds < 0) return `-${this.formatSeconds(-seconds)}`;
    if (seconds > 0 && seconds < 1e-6) return "<1 µs";
    for (const [factor, unit, limit] of this.#formats.durations) {
      const rounded = roundTo(seconds * factor, this.#formats.unit_digits);
      if (rounded < limit && (seconds || unit === "s")) return `${rounded} ${unit}`;
    }
    const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
    const whole = Math.floor(seconds + 0.5);
    if (whole < HOUR) return `${Math.floor(whole / MINUTE)} min ${two(whole % MINUTE)} s`;
    const minutes = Math.floor(seconds / MINUTE + 0.5);
    return `${this.formatCount(Math.floor(minutes / MINUTE))} h ${two(minutes % MINUTE)} min`;
  }

  /**
   * Return 12 bytes, 1.5 kB or 3.12 GB: in powers of 1000.
   * @param {number | null | undefined} number
   * @returns {string}
   */
  formatBytes(number) {
    if (!isNumber(number)) return "";
    if (number < 0) return `-${this.formatBytes(-number)}`;
    const whole = Math.floor(number + 0.5);
    if (whole < 1000) return `${whole} byte${whole === 1 ? "" : "s"}`;
    const { sizes, unit_digits: digits } = this.#formats;
    for (const [size, unit] of sizes.slice(0, -1)) {
      const rounded = roundTo(number / size, digits);
      if (rounded < 1000) return `${rounded} ${unit}`;
    }
    const [largest, name] = sizes[sizes.length - 1];
    return `${this.formatNumber(number / largest, digits)} ${name}`;
  }

  /**
   * Return a part of 1 as 52.8 %, to one decimal; only nothing is 0 %, and only all of it 100 %.
   * @param {number | null | undefined} share
   */
  formatShare(share) {
    if (!isNumber(share)) return "";
    if (share > 0 && share < 0.0005) return "<0.1 %";
    if (share >= 0.9995 && share < 1) return ">99.9 %";
    return `${Math.floor(share * 1000 + 0.5) / 10} %`;
  }

  /**
   * Return 12.5 it/s, or 1.6 s/it where one iteration takes longer than a second.
   * @param {number | null | undefined} perSecond
   */
  formatRate(perSecond) {
    if (!isNumber(perSecond) || perSecond <= 0) return "";
    if (perSecond >= 1) return `${this.formatQuantity(perSecond)} it/s`;
    return `${this.formatSeconds(1 / perSecond)}/it`;
  }

  /**
   * Return a whole number in full: 1,234,567.
   * @param {number | null | undefined} number
   */
  formatCount(number) {
    return isNumber(number) ? Math.floor(number + 0.5).toLocaleString("en-US") : "";
  }

  /**
   * Return 0.1234, 12.35, 1,235 or 1.235e-5; the whole part is in full below a million.
   * @param {number | null | undefined} value
   * @param {number} digits significant digits
   */
  formatNumber(value, digits = this.#formats.digits) {
    if (value === undefined || value === null) return "";
    if (!isNumber(value)) return this.#formatNonFinite(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    const [smallest, largest] = this.#formats.plain_range;
    if (size < smallest || size >= largest) {
      const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
      return `${Number(mantissa)}e${Number(exponent)}`;
    }
    if (size >= 10 ** (digits - 1)) return Number(value.toFixed(0)).toLocaleString("en-US");
    return `${roundTo(value, digits)}`;
  }

  /** @param {number} value */
  #formatNonFinite(value) {
    const { not_a_number: notANumber, infinity } = this.#formats;
    return Number.isNaN(value) ? notANumber : `${value < 0 ? "-" : ""}${infinity}`;
  }

  /**
   * Return a number with fewer digits, for a quantity whose unit stands beside it.
   * @param {number | null | undefined} value
   */
  formatQuantity(value) {
    return this.formatNumber(value, this.#formats.unit_digits);
  }

  /**
   * Return a metric's value. JSON has null for a value that is not finite.
   * @param {number | null | undefined} value
   */
  formatValue(value) {
    return isNumber(value) ? this.formatNumber(value) : this.#formats.not_finite;
  }

  /**
   * Return 25 of 100 (25 %), or 25 done where the total is unknown.
   * @param {Done} progress
   */
  formatDone({ done, total }) {
    const count = this.formatCount(done ?? 0);
    if (!total) return `${count} done`;
    return `${count} of ${this.formatCount(total)} (${this.formatShare(Math.min(1, (done ?? 0) / total))})`;
  }

  /**
   * Return the number of a step at an axis: 500, 20k or 1.5M.
   * @param {number} step
   */
  formatStep(step) {
    if (Math.abs(step) >= 1e6) return `${this.formatNumber(step / 1e6)}M`;
    return Math.abs(step) >= 1e4 ? `${this.formatNumber(step / 1e3)}k` : this.formatNumber(step);
  }
}

/** @param {number} value @param {number} digits */
const roundTo = (value, digits) => Number(value.toPrecision(digits));
