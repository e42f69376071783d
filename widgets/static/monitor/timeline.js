import { Surface, Tooltip } from "./canvas.js";
import { h, KeyedList, Section, setAttribute, showText } from "./elements.js";
import { formatRankCount, formatSeconds, formatTick } from "./units.js";

/** @import { FrameLoop, Theme } from "./canvas.js" */
/** @import { Legend } from "./model.js" */
/** @import { RunData } from "./model.js" */
/** @import { PhaseLook, Span, Topic } from "./wire" */
/** @typedef {CanvasRenderingContext2D} Context */

const WINDOW_CHOICES = [
  ["4", "last 4 steps"],
  ["16", "last 16 steps"],
  ["Infinity", "all kept steps"],
];
const AXIS_HEIGHT = 20;
const LETTER_ROOM = 11;
const MAX_LAG = 2; // seconds between the reports of two ranks; a rank that reports later than that is stuck

/** @param {Span} span */
const endOf = ([, start, seconds]) => start + seconds;

/** Timeline of the phases: a lane for each rank. Colours, letters and a hatch tell the phases apart. */
export class Timeline extends Section {
  /** @type {Topic[]} */
  topics = ["lanes", "run"];
  /** Ranks and their spans. @type {[rank: number, spans: Span[]][]} */
  #lanes = [];
  #laneHeight = 24;
  /** Seconds in sight. */
  #domain = { start: 0, end: 1 };
  /** Pixels at the left that the names of the ranks take. */
  #left = 0;
  /** @type {Legend | undefined} */
  #legend;

  /** @param {FrameLoop} frames */
  constructor(frames) {
    super("Timeline");
    const options = WINDOW_CHOICES.map(([value, label]) => h("option", { value }, label));
    const onchange = () => this.surface.invalidate();
    this.windows = h("select", { "aria-label": "Steps that the timeline shows", onchange }, ...options);
    this.controls.append(this.windows);
    this.text = h("p", { class: "nbl-sync" });
    const chips = h("div", { class: "nbl-legend" });
    this.chips = new KeyedList(chips, phaseChip);
    this.surface = new Surface(frames, (...all) => this.#draw(...all), { class: "nbl-canvas", role: "img" });
    const frame = h("div", { class: "nbl-frame" }, this.surface.target);
    const region = { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Lanes of the ranks" };
    this.body.append(this.text, chips, h("div", region, frame));
    this.tooltip = new Tooltip(frame);
    this.surface.target.addEventListener("pointermove", (event) => this.#showSpan(event.offsetX, event.offsetY));
    this.surface.target.addEventListener("pointerleave", () => this.tooltip.hide());
  }

  /** @param {RunData} data */
  has({ lanes }) {
    return [...lanes.values()].some((spans) => spans.length);
  }

  /** @param {RunData} data @param {Set<Topic>} changed */
  paint({ lanes, legend, run }, changed) {
    this.#legend = legend;
    this.chips.show([...Object.entries(legend.phases), ["", { letter: "", word: "other", colour: "" }]]);
    showText(this.text, run.sync?.text ?? "");
    if (changed.has("lanes")) this.#paintLanes(lanes, legend.limits.lanes);
  }

  /** @param {Map<number, Span[]>} lanes @param {number} limit */
  #paintLanes(lanes, limit) {
    this.#lanes = [...lanes]
      .filter(([, spans]) => spans.length)
      .sort(([a], [b]) => a - b)
      .slice(0, limit);
    const numLanes = this.#lanes.length;
    this.#laneHeight = numLanes > 16 ? 16 : 24;
    this.surface.target.style.height = `${AXIS_HEIGHT + numLanes * this.#laneHeight + 2}px`;
    const label = `Timeline of ${formatRankCount(numLanes)}. ${this.text.textContent}`;
    setAttribute(this.surface.target, "aria-label", label);
    this.surface.invalidate();
  }

  /**
   * Return the seconds to show. They end where the spans of all ranks are known, and begin where the rank that took
   * longest for the chosen number of steps began them.
   */
  #secondsInSight() {
    const count = Number(this.windows.value);
    const ends = this.#lanes.map(([, spans]) => endOf(spans[spans.length - 1]));
    const [earliest, latest] = [Math.min(...ends), Math.max(...ends)];
    const end = latest - earliest > MAX_LAG ? latest : earliest;
    const starts = this.#lanes.map(([, spans]) => {
      const steps = spans.filter((span) => span[0] === "step" && endOf(span) <= end);
      return steps.length > count ? endOf(steps[steps.length - 1 - count]) : spans[0][1];
    });
    const start = Math.min(...starts);
    return { start, end: Math.max(end, start + 1e-6) };
  }

  /** @param {number} seconds */
  #toX(seconds) {
    const { start, end } = this.#domain;
    return this.#left + ((seconds - start) / (end - start)) * (this.surface.width - this.#left);
  }

  /** @param {Context} context @param {number} width @param {number} height @param {Theme} theme */
  #draw(context, width, height, theme) {
    this.#domain = this.#secondsInSight();
    this.#left = 8 + Math.max(...this.#lanes.map(([rank]) => context.measureText(`rank ${rank}`).width));
    this.#drawAxis(context, width, height, theme);
    this.#lanes.forEach(([rank, spans], at) => {
      const top = AXIS_HEIGHT + at * this.#laneHeight + 2;
      Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.7, textAlign: "right", textBaseline: "middle" });
      context.fillText(`rank ${rank}`, this.#left - 8, top + this.#laneHeight / 2 - 2);
      context.globalAlpha = 0.06;
      context.fillRect(this.#left, top, width - this.#left, this.#laneHeight - 4);
      context.globalAlpha = 1;
      for (const span of spans) this.#drawSpan(context, theme, span, top);
    });
  }

  /** @param {Context} context @param {number} width @param {number} height @param {Theme} theme */
  #drawAxis(context, width, height, theme) {
    Object.assign(context, { fillStyle: theme.ink, strokeStyle: theme.ink, lineWidth: 1 });
    Object.assign(context, { textAlign: "center", textBaseline: "top" });
    const { start, end } = this.#domain;
    const least = (90 * (end - start)) / Math.max(1, width - this.#left);
    const power = 10 ** Math.floor(Math.log10(least));
    const spacing = power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
    for (let number = Math.ceil(start / spacing); number * spacing <= end; number += 1) {
      const x = Math.round(this.#toX(number * spacing)) + 0.5;
      const text = `${formatTick(number * spacing)} s`;
      const half = context.measureText(text).width / 2;
      context.globalAlpha = 0.07;
      context.strokeRect(x, AXIS_HEIGHT - 2, 0, height - AXIS_HEIGHT + 2);
      context.globalAlpha = 0.62;
      context.fillText(text, Math.min(x, width - half), 2);
    }
    context.globalAlpha = 1;
  }

  /** @param {Context} context @param {Theme} theme @param {Span} span @param {number} top */
  #drawSpan(context, theme, [phase, start, seconds], top) {
    const look = this.#legend?.phases[phase];
    const height = this.#laneHeight - 4;
    const x = Math.max(this.#left, this.#toX(start));
    const width = Math.min(this.surface.width, this.#toX(start + seconds)) - x;
    if (width <= 0) return;
    context.fillStyle = look?.colour ?? theme.ink;
    // A hairline of background separates neighbours that are wide enough for it.
    context.fillRect(x, top, width > 3 ? width - 0.75 : width, height);
    if (phase === "sync" && width > 3) hatch(context, x, top, width - 0.75, height, theme.ground);
    if (!look || width < LETTER_ROOM) return;
    Object.assign(context, { fillStyle: theme.phaseInk, textAlign: "center", textBaseline: "middle" });
    context.fillText(look.letter, x + width / 2, top + height / 2 + 0.5);
  }

  /**
   * Show the span at a position, if there is one.
   * @param {number} x
   * @param {number} y
   */
  #showSpan(x, y) {
    const lane = this.#lanes[Math.floor((y - AXIS_HEIGHT) / this.#laneHeight)];
    const span = lane?.[1].find((span) => this.#toX(span[1]) <= x && x <= this.#toX(endOf(span)));
    if (!span || !this.#legend || x < this.#left) return this.tooltip.hide();
    const { phases } = this.#legend;
    const [phase, start, seconds] = span;
    return this.tooltip.show(x, y + 12, `rank ${lane[0]}, ${phases[phase]?.word ?? phase}`, [
      { label: "took", value: formatSeconds(seconds) },
      { label: "at", value: formatSeconds(start) },
    ]);
  }
}

/** @param {PhaseLook} look @param {string} phase */
function phaseChip({ letter, word, colour }, phase) {
  const swatch = h("i", { "data-phase": phase }, letter);
  swatch.style.backgroundColor = colour;
  return { element: h("span", { class: "nbl-phase" }, swatch, word) };
}

/**
 * Draw slanted lines in the colour of the background, which mark waiting without a colour.
 * @param {Context} context
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {string} ink
 */
function hatch(context, x, y, width, height, ink) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  Object.assign(context, { strokeStyle: ink, lineWidth: 1, globalAlpha: 0.45 });
  context.beginPath();
  for (let at = x - height - (x % 6); at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
