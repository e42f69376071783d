
// Numbers below the pointer and on axes (all other numbers come as words from the kernel), and plain text.

/** Return true for a finite number. */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Return 1,234,567. */
export const formatCount = (count) => Math.round(count).toLocaleString("en-US");

/** Return 0.1234, 12.35, 1,235 or 1.235e-5. */
export function formatValue(value) {
  if (!isNumber(value)) return "not finite";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return exponent(Number(value.toPrecision(4)));
  return size >= 1000 ? formatCount(value) : String(Number(value.toPrecision(4)));
}

/** Return 0.25, 20k or 1e-5. */
export function formatTick(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e15)) return exponent(Number(value.toPrecision(6)));
  const power = size < 1e4 ? 0 : Math.floor(Math.log10(size) / 3);
  return `${Number((value / 1e3 ** power).toPrecision(6))}${["", "k", "M", "G", "T"][power]}`;
}

const exponent = (value) => value.toExponential().replace("e+", "e");

/** Return 490 µs, 35 ms, 4.2 s, 3 min 20 s or 1 h 02 min. */
export function formatSeconds(seconds) {
  if (seconds && seconds < 1) {
    const milliseconds = Number((1e3 * seconds).toPrecision(3));
    return milliseconds < 1 ? `${Number((1e6 * seconds).toPrecision(3))} µs` : `${milliseconds} ms`;
  }
  if (seconds < 59.95) return `${Number(seconds.toPrecision(3))} s`;
  const two = (count) => String(count).padStart(2, "0");
  const [whole, minutes] = [Math.round(seconds), Math.round(seconds / 60)];
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${formatCount(Math.floor(minutes / 60))} h ${two(minutes % 60)} min`;
}

/** Return step 1,200, 4.2 s or epoch 1.5. */
export function formatPlace(axis, place) {
  if (axis === "time") return formatSeconds(place);
  return axis === "step" ? `step ${formatCount(place)}` : `epoch ${formatValue(place)}`;
}

// Escape sequences (colours, cursor, titles), then every other control character but the tab.
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]/g;
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

/** Return a line as a terminal shows it: the part after the last carriage return, without colours. */
export function plainLine(raw) {
  const written = raw.replace(/\r+$/, "");
  return written
    .slice(written.lastIndexOf("\r") + 1)
    .replace(ESCAPES, "")
    .replace(CONTROLS, "");
}

/** Return several lines as a terminal shows them. */
export const plainText = (raw) =>
  String(raw ?? "")
    .split("\n")
    .map(plainLine)
    .join("\n");
