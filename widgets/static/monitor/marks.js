/** @import { Axes } from "./axes.js" */
/** @import { TooltipRow } from "./canvas.js" */
/** @import { ChangeItem } from "./wire" */

const REACH = 6; // pixels from a mark within which a pointer shows what was changed

/**
 * Return the position of a change in pixels; null where it is out of sight.
 * @param {Axes} axes
 * @param {ChangeItem} change
 */
function positionOf({ domain, toX }, { step }) {
  return step === null || step < domain[0] || step > domain[1] ? null : toX(step);
}

/**
 * Draw a dashed line with a flag where settings were changed.
 * @param {Axes} axes
 * @param {ChangeItem[]} changes
 */
export function drawMarks(axes, changes) {
  const { context, theme, box } = axes;
  Object.assign(context, { strokeStyle: theme.ink, fillStyle: theme.ink, globalAlpha: 0.55, lineWidth: 1 });
  context.setLineDash([2, 3]);
  for (const x of new Set(changes.map((change) => positionOf(axes, change)))) {
    if (x === null) continue;
    const at = Math.round(x) + 0.5;
    context.strokeRect(at, box.top, 0, box.bottom - box.top);
    context.beginPath();
    context.moveTo(at, box.top);
    context.lineTo(at + 7, box.top + 3.5);
    context.lineTo(at, box.top + 7);
    context.fill();
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
}

/**
 * Return the rows of a tooltip about the changes near a position.
 * @param {Axes} axes
 * @param {ChangeItem[]} changes
 * @param {number} x
 * @returns {TooltipRow[]}
 */
export function markRows(axes, changes, x) {
  const near = changes.filter((change) => Math.abs((positionOf(axes, change) ?? Infinity) - x) <= REACH);
  return near.slice(-4).map(({ name, before, after }) => ({ label: name, value: `${before} → ${after}` }));
}
