export const MAX_LINE_LENGTH = 10_000;

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const formatRankCount = (count) => `${count} ${count === 1 ? "rank" : "ranks"}`;

// The next six say what notebook_launcher/units.py says; tests/foundations/test_units.py runs both on one table.

const [MINUTE, HOUR] = [60, 3600];

/** 490 µs, 35 ms, 4.2 s, 3 min 20 s or 1 h 02 min; empty if unknown. */
export function formatSeconds(seconds) {
  if (!isNumber(seconds)) return "";
  if (seconds < 0) return `-${formatSeconds(-seconds)}`;
  if (seconds > 0 && seconds < 1e-6) return "<1 µs";
  for (const [factor, unit, limit] of [
    [1e6, "µs", 1000],
    [1e3, "ms", 1000],
    [1, "s", MINUTE],
  ]) {
    const rounded = roundTo(seconds * factor, 3);
    if (rounded < limit && (seconds || unit === "s")) return `${rounded} ${unit}`;
  }
  const two = (value) => String(value).padStart(2, "0");
  const whole = Math.floor(seconds + 0.5);
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)} min ${two(whole % MINUTE)} s`;
  const minutes = Math.floor(seconds / MINUTE + 0.5);
  return `${formatCount(Math.floor(minutes / MINUTE))} h ${two(minutes % MINUTE)} min`;
}

/** 12 bytes, 1.5 kB or 3.12 GB: in powers of 1000; empty if unknown. */
export function formatBytes(number) {
  if (!isNumber(number)) return "";
  if (number < 0) return `-${formatBytes(-number)}`;
  const whole = Math.floor(number + 0.5);
  if (whole < 1000) return `${whole} byte${whole === 1 ? "" : "s"}`;
  for (const [size, unit] of [
    [1e3, "kB"],
    [1e6, "MB"],
    [1e9, "GB"],
  ]) {
    const rounded = roundTo(number / size, 3);
    if (rounded < 1000) return `${rounded} ${unit}`;
  }
  return `${formatNumber(number / 1e12, 3)} TB`;
}

/** A part of 1 as 52.8 %, to one decimal; only nothing is 0 %, and only all of it 100 %. */
export function formatShare(share) {
  if (!isNumber(share)) return "";
  if (share > 0 && share < 0.0005) return "<0.1 %";
  if (share >= 0.9995 && share < 1) return ">99.9 %";
  return `${Math.floor(share * 1000 + 0.5) / 10} %`;
}

/** 12.5 it/s, or 1.6 s/it where one iteration takes longer than a second; empty if unknown. */
export function formatRate(perSecond) {
  if (!isNumber(perSecond) || perSecond <= 0) return "";
  return perSecond >= 1 ? `${formatNumber(perSecond, 3)} it/s` : `${formatSeconds(1 / perSecond)}/it`;
}

/** A whole number in full: 1,234,567; empty if unknown. */
export const formatCount = (number) => (isNumber(number) ? Math.floor(number + 0.5).toLocaleString("en-US") : "");

/** 0.1234, 12.35, 1,235 or 1.235e-5, with so many digits; the whole part is in full below a million. */
export function formatNumber(value, digits = 4) {
  if (!isNumber(value)) return value === undefined || value === null ? "" : formatNonFinite(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  if (size >= 10 ** (digits - 1)) return Number(value.toFixed(0)).toLocaleString("en-US");
  return `${roundTo(value, digits)}`;
}

const formatNonFinite = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞");

const roundTo = (value, digits) => Number(value.toPrecision(digits));

/** A metric's value; JSON has no number that is not finite, so Python sends null for it. */
export const formatValue = (value) => (isNumber(value) ? formatNumber(value) : "not finite");

export const formatDone = ({ done, total }) =>
  total
    ? `${formatCount(done ?? 0)} of ${formatCount(total)} (${formatShare(Math.min(1, (done ?? 0) / total))})`
    : `${formatCount(done ?? 0)} done`;

// Escape sequences (colours, cursor, titles), then every other control character but the tab.
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]/g;
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

/** What a terminal would show of a line: what stands after the last carriage return, without colours. */
export function plainLine(raw) {
  const written = raw.replace(/\r+$/, "");
  return written
    .slice(written.lastIndexOf("\r") + 1)
    .replace(ESCAPES, "")
    .replace(CONTROLS, "")
    .slice(0, MAX_LINE_LENGTH);
}

export const plainText = (raw) =>
  String(raw ?? "")
    .split("\n")
    .map(plainLine)
    .join("\n");
