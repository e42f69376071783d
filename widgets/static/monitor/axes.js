import { fillBand, pixelLine, strokeRuns } from "./plotting.js";
import { linearTicks } from "./ticks.js";

/** @import { Theme } from "./canvas.js" */
/** @import { Extent, PlotLine, ToPixel, ValueScale } from "./plotting.js" */

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

const PLOT_EDGE = { top: 6, right: 3, bottom: 20, left: 1 };
const NUM_TICKS = 5; // of the values, about
const PIXELS_PER_TICK = 70; // of the steps, about

/**
 * Return the axes of a plot. The labels of the values take the room at its left that they need.
 * @param {CanvasRenderingContext2D} context
 * @param {number} width
 * @param {number} height
 * @param {Theme} theme
 * @param {Extent} domain
 * @param {ValueScale} scale
 * @returns {Axes}
 */
export function makeAxes(context, width, height, theme, domain, scale) {
  const ticks = scale.ticks(NUM_TICKS);
  const label = Math.max(...ticks.map(({ text }) => context.measureText(text).width));
  const [left, right] = [PLOT_EDGE.left + label + 6, width - PLOT_EDGE.right];
  const [top, bottom] = [PLOT_EDGE.top, height - PLOT_EDGE.bottom];
  const span = domain[1] - domain[0];
  return {
    context,
    theme,
    ticks,
    domain,
    box: { left, right, top, bottom, width },
    toX: (step) => (span ? left + ((step - domain[0]) / span) * (right - left) : (left + right) / 2),
    toY: (value) => bottom - scale.part(value) * (bottom - top),
  };
}

/**
 * Return the step at a position, as a fraction between two steps too.
 * @param {Axes} axes
 * @param {number} x
 */
export function stepAt({ box: { left, right }, domain }, x) {
  const part = Math.min(1, Math.max(0, (x - left) / (right - left)));
  return domain[0] + part * (domain[1] - domain[0]);
}

/**
 * Return the nearest step inside `domain` that any line has a point at.
 * @param {PlotLine[]} lines
 * @param {number} wanted
 * @param {Extent} domain
 */
export function nearestStep(lines, wanted, domain) {
  /** @type {number | null} */
  let nearest = null;
  for (const { steps } of lines) {
    for (const step of steps) {
      if (step < domain[0] || step > domain[1]) continue;
      if (nearest === null || Math.abs(step - wanted) < Math.abs(nearest - wanted)) nearest = step;
    }
  }
  return nearest;
}

/** @param {Axes} axes @param {(place: number) => string} label @param {boolean} isWhole true if places are integers */
export function drawAxes({ context, theme, ticks, domain, box, toX }, label, isWhole) {
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
    if (isWhole && !Number.isInteger(step) && span >= 2) continue;
    const text = label(step);
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
