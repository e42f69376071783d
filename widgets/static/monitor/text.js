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
