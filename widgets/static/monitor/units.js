export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const formatRankCount = (count) => `${count} ${count === 1 ? "rank" : "ranks"}`;

const [MINUTE, HOUR] = [60, 3600];

/** The functions of notebook_launcher/units.py, with its `FORMATS`; tests/foundations/test_units.py compares them. */
export class Units {
  #formats;

  constructor(formats) {
    this.#formats = formats;
  }

  /** 490 µs, 35 ms, 4.2 s, 3 min 20 s or 1 h 02 min; empty if unknown. */
  formatSeconds(seconds) {
    if (!isNumber(seconds)) return "";
    if (seconds < 0) return `-${this.formatSeconds(-seconds)}`;
    if (seconds > 0 && seconds < 1e-6) return "<1 µs";
    for (const [factor, unit, limit] of this.#formats.durations) {
      const rounded = roundTo(seconds * factor, this.#formats.unit_digits);
      if (rounded < limit && (seconds || unit === "s")) return `${rounded} ${unit}`;
    }
    const two = (value) => String(value).padStart(2, "0");
    const whole = Math.floor(seconds + 0.5);
    if (whole < HOUR) return `${Math.floor(whole / MINUTE)} min ${two(whole % MINUTE)} s`;
    const minutes = Math.floor(seconds / MINUTE + 0.5);
    return `${this.formatCount(Math.floor(minutes / MINUTE))} h ${two(minutes % MINUTE)} min`;
  }

  /** 12 bytes, 1.5 kB or 3.12 GB: in powers of 1000; empty if unknown. */
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

  /** A part of 1 as 52.8 %, to one decimal; only nothing is 0 %, and only all of it 100 %. */
  formatShare(share) {
    if (!isNumber(share)) return "";
    if (share > 0 && share < 0.0005) return "<0.1 %";
    if (share >= 0.9995 && share < 1) return ">99.9 %";
    return `${Math.floor(share * 1000 + 0.5) / 10} %`;
  }

  /** 12.5 it/s, or 1.6 s/it where one iteration takes longer than a second; empty if unknown. */
  formatRate(perSecond) {
    if (!isNumber(perSecond) || perSecond <= 0) return "";
    if (perSecond >= 1) return `${this.formatNumber(perSecond, this.#formats.unit_digits)} it/s`;
    return `${this.formatSeconds(1 / perSecond)}/it`;
  }

  /** A whole number in full: 1,234,567; empty if unknown. */
  formatCount(number) {
    return isNumber(number) ? Math.floor(number + 0.5).toLocaleString("en-US") : "";
  }

  /** 0.1234, 12.35, 1,235 or 1.235e-5, with so many digits; the whole part is in full below a million. */
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

  #formatNonFinite(value) {
    const { not_a_number: notANumber, infinity } = this.#formats;
    return Number.isNaN(value) ? notANumber : `${value < 0 ? "-" : ""}${infinity}`;
  }

  /** A metric's value; JSON has no number that is not finite, so Python sends null for it. */
  formatValue(value) {
    return isNumber(value) ? this.formatNumber(value) : this.#formats.not_finite;
  }

  /** A number of samples per second, or another quantity whose unit stands elsewhere. */
  formatQuantity(value) {
    return this.formatNumber(value, this.#formats.unit_digits);
  }

  formatDone({ done, total }) {
    const count = this.formatCount(done ?? 0);
    if (!total) return `${count} done`;
    return `${count} of ${this.formatCount(total)} (${this.formatShare(Math.min(1, (done ?? 0) / total))})`;
  }

  formatStep(step) {
    if (Math.abs(step) >= 1e6) return `${this.formatNumber(step / 1e6)}M`;
    return Math.abs(step) >= 1e4 ? `${this.formatNumber(step / 1e3)}k` : this.formatNumber(step);
  }
}

const roundTo = (value, digits) => Number(value.toPrecision(digits));

// Escape sequences (colours, cursor, titles), then every other control character but the tab.
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]/g;
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

/** What a terminal would show of a line: what stands after the last carriage return, without colours. */
export function plainLine(raw) {
  const written = raw.replace(/\r+$/, "");
  return written
    .slice(written.lastIndexOf("\r") + 1)
    .replace(ESCAPES, "")
    .replace(CONTROLS, "");
}

export const plainText = (raw) =>
  String(raw ?? "")
    .split("\n")
    .map(plainLine)
    .join("\n");
