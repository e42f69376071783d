import { contextOf } from "./canvas.js";

/** @import { Theme } from "./canvas.js" */
/** @import { Metric } from "./series.js" */

const HEAD = 24; // pixels above a plot in its picture, for its name

/**
 * Offer a file to the user, as the browser does with downloads.
 * @param {Blob} blob
 * @param {string} name
 */
function offer(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  URL.revokeObjectURL(link.href);
}

/**
 * Return the points that the page has, a line for each: metric, rank, step, seconds, value.
 * @param {Iterable<Metric>} metrics
 */
export function csvOf(metrics) {
  const lines = ["metric,rank,step,seconds,value"];
  for (const { name, ranks } of metrics) {
    const inert = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name; // A spreadsheet would carry it out.
    const quoted = /[",\n\r]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
    for (const [rank, { steps, times, values }] of ranks) {
      steps.forEach((step, at) => lines.push(`${quoted},${rank},${step},${times[at]},${values[at] ?? "nan"}`));
    }
  }
  return `${lines.join("\n")}\n`;
}

/** @param {Iterable<Metric>} metrics @param {string} name of the file */
export function downloadCsv(metrics, name) {
  offer(new Blob([csvOf(metrics)], { type: "text/csv" }), name);
}

/**
 * Offer a plot as a picture, with its name above it and on the background of the page.
 * @param {HTMLCanvasElement} canvas
 * @param {string} title
 * @param {Theme} theme
 */
export function downloadPng(canvas, title, theme) {
  const picture = document.createElement("canvas");
  const ratio = canvas.clientWidth ? canvas.width / canvas.clientWidth : 1;
  [picture.width, picture.height] = [canvas.width, canvas.height + HEAD * ratio];
  const context = contextOf(picture);
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--nbl-ground") || "#ffffff";
  context.fillRect(0, 0, picture.width, picture.height);
  Object.assign(context, { fillStyle: theme.ink, font: `600 ${12 * ratio}px ${theme.font}`, textBaseline: "middle" });
  context.fillText(title, 6 * ratio, (HEAD / 2) * ratio);
  context.drawImage(canvas, 0, HEAD * ratio);
  picture.toBlob((blob) => blob && offer(blob, `${title}.png`), "image/png");
}
