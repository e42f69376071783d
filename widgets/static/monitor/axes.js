import { fillBand, linearTicks, pixelLine, strokeRuns } from "./plotting.js";

/** @import { Theme } from "./canvas.js" */
/** @import { Extent, PlotLine, ToPixel } from "./plotting.js" */
/** @import { Units } from "./units.js" */

/**
 * Frame of a plot: pixels of its inner box, the steps in sight, and the way from values to pixels.
 * @typedef {{
 *   context: CanvasRenderingContext2D,
 *   theme: Theme,
 *   ticks: { part: number, text: string }[],
 *   domain: Extent,
 *   box: { left: number, right: number, top: number, bottom: number, width: number },
 *   toX: ToPixel,
 *   toY: ToPixel,
 * }} Axes
 */

const PIXELS_PER_TICK = 70;

/** @param {Axes} axes @param {Units} units */
export function drawAxes({ context, theme, ticks, domain, box, toX }, units) {
  const { left, right, top, bottom } = box;
  Object.assign(context, { fillStyle: theme.ink, strokeStyle: theme.ink, lineWidth: 1 });
  Object.assign(context, { textAlign: "right", textBaseline: "middle" });
  for (const { part, text } of ticks) {
    const y = Math.round(bottom - part * (bottom - top)) + 0.5;
    context.globalAlpha = 0.07;
    context.strokeRect(left, y, right - left, 0);
    context.globalAlpha = 0.62;
    context.fillText(text, left - 6, y);
  }
  context.globalAlpha = 0.35;
  context.strokeRect(left, bottom + 0.5, right - left, 0);
  Object.assign(context, { globalAlpha: 0.62, textAlign: "center", textBaseline: "top" });
  const span = domain[1] - domain[0];
  for (const step of span ? linearTicks(...domain, (right - left) / PIXELS_PER_TICK) : [domain[0]]) {
    if (!Number.isInteger(step) && span >= 2) continue;
    const text = units.formatStep(step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(toX(step), half), box.width - half - 1), bottom + 6);
  }
  context.globalAlpha = 1;
}

/** @param {Axes} axes @param {PlotLine} line */
export function drawPlotLine({ context, domain, box, toX, toY }, { ink, dash, steps, values, raw, band }) {
  Object.assign(context, { strokeStyle: ink, fillStyle: ink, lineJoin: "round", lineWidth: 1 });
  if (band) fillBand(context, steps, band, toX, toY);
  context.setLineDash([]);
  if (values !== raw) {
    context.globalAlpha = 0.25;
    strokeRuns(context, pixelLine(steps, raw, toX, toY));
    context.globalAlpha = 1;
  }
  // The dashes of a line that goes up and down in each pixel column cannot be seen. Whole columns are left out instead,
  // which also saves a third of the work.
  const count = steps.reduce((sum, step) => sum + Number(step >= domain[0] && step <= domain[1]), 0);
  const isDense = count > box.right - box.left;
  context.lineWidth = 1.6;
  context.setLineDash(isDense ? [] : dash);
  strokeRuns(context, pixelLine(steps, values, toX, toY, isDense ? dash : []), isDense ? 0.8 : 2);
  context.setLineDash([]);
  // A tick below the axis marks each value that is not finite.
  steps.forEach((step, at) => {
    if (raw[at] === null) context.fillRect(Math.round(toX(step)) - 1, box.bottom + 1, 2, 4);
  });
}

/**
 * Shade the part of the plot that a drag has selected.
 * @param {Axes} axes
 * @param {number} start
 * @param {number} end
 */
export function drawSelection({ context, theme, box }, start, end) {
  Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.12 });
  context.fillRect(Math.min(start, end), box.top, Math.abs(end - start), box.bottom - box.top);
  context.globalAlpha = 1;
}

/** @param {Axes} axes @param {number} x */
export function drawCursorLine({ context, theme, box }, x) {
  Object.assign(context, { strokeStyle: theme.ink, globalAlpha: 0.4, lineWidth: 1 });
  context.strokeRect(Math.round(x) + 0.5, box.top, 0, box.bottom - box.top);
  context.globalAlpha = 1;
}

/**
 * Draw a sentence in the middle of a plot without axes.
 * @param {CanvasRenderingContext2D} context
 * @param {number} width
 * @param {number} height
 * @param {Theme} theme
 * @param {string} words
 */
export function drawWords(context, width, height, theme, words) {
  Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.6, textAlign: "center", textBaseline: "middle" });
  context.fillText(words, width / 2, height / 2);
  context.globalAlpha = 1;
}
