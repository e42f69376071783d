/**
 * Ticks of axes and their labels: the functions of notebook_launcher/drawing/scales.py.
 * tests/drawing/test_curve_vectors.py compares the two.
 */

const MAX_TICKS = 21;

/**
 * Return about `count` equidistant round numbers within [low, high].
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function linearTicks(low, high, count) {
  const parts = Math.max(count, 1);
  const raw = high / parts - low / parts; // high - low may be more than the largest number.
  const power = raw > 0 ? Number(`1e${Math.floor(Math.log10(raw))}`) : 0;
  if (power === 0) return [low];
  const [, factor] = FACTORS.find(([limit]) => raw < limit * power) ?? [0, 10];
  const spacing = power * factor;
  const [first, last] = [Math.ceil(low / spacing - 1e-9), Math.floor(high / spacing + 1e-9)];
  const length = Math.max(0, Math.min(last - first + 1, MAX_TICKS));
  return Array.from({ length }, (_, at) => tidy((first + at) * spacing));
}

const FACTORS = [
  [1.5, 1],
  [3.5, 2],
  [7.5, 5],
];

/** Return a number with 15 digits, so that 3 * 0.1 is 0.3, and 0 for -0. @param {number} value */
const tidy = (value) => Number(value.toPrecision(15)) + 0;

/**
 * Return about `count` powers of ten within [low, high], which are positive; within one decade, other round numbers.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function logTicks(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const powers = Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => first + at);
  const spacing = powers.length > count ? Math.ceil(powers.length / count) : 1;
  if (powers.length > 2 || spacing > 1) return powers.filter((power) => power % spacing === 0).map((at) => powerOf(1, at));
  const decades = [first - 1, ...powers, last + 1];
  const inside = [...new Set(decades)]
    .flatMap((power) => [1, 2, 5].map((factor) => powerOf(factor, power)))
    .filter((value) => low <= value && value <= high);
  return inside.length > 2 ? inside : linearTicks(low, high, count);
}

/** Return factor * 10 ** power, as near as a number can be. @param {number} factor @param {number} power */
const powerOf = (factor, power) => Number(`${factor}e${power}`);

/**
 * Return a text for each tick, all in one notation: `0.25`, `20k`, `1e-5`.
 * @param {number[]} ticks
 * @returns {string[]}
 */
export function tickLabels(ticks) {
  const sizes = ticks.map(Math.abs);
  const largest = Math.max(0, ...sizes);
  if (ticks.length > 1 && ticks.every((tick) => tick > 0) && largest / Math.min(...ticks) >= 100)
    return ticks.map(powerLabel);
  const spacing = Math.min(...ticks.slice(1).map((tick, at) => Math.abs(tick - ticks[at])), Infinity);
  const close = 1e-4 * ((Number.isFinite(spacing) ? spacing : largest) || 1);
  if (largest >= 1e15 || largest < 1e-3) {
    const digits = fewestDigits((count) =>
      ticks.every((tick) => Math.abs(Number(tick.toExponential(count)) - tick) < close),
    );
    return ticks.map((tick) => exponentLabel(tick.toExponential(digits)));
  }
  const [unit, letter] = UNITS.find(([size]) => largest >= 10 * size) ?? [1, ""];
  const decimals = fewestDigits((count) =>
    ticks.every((tick) => Math.abs(Number((tick / unit).toFixed(count)) - tick / unit) < close / unit),
  );
  return ticks.map((tick) => (tick === 0 ? "0" : `${(tick / unit).toFixed(decimals)}${letter}`));
}

/** @type {[number, string][]} */
const UNITS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** @param {(count: number) => boolean} suffices */
const fewestDigits = (suffices) => [0, 1, 2, 3, 4, 5, 6, 7, 8].find(suffices) ?? 9;

/** @param {number} tick */
const powerLabel = (tick) =>
  tick >= 1e-3 && tick < 1e4 ? String(Number(tick.toPrecision(6))) : exponentLabel(tick.toExponential(0));

/** Return `1e5` for JavaScript's `1e+5`, and 0 for `0.0e+0`. @param {string} text */
function exponentLabel(text) {
  return Number(text) === 0 ? "0" : text.replace("e+", "e");
}
