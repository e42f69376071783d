import { Surface, Tooltip } from "./canvas.js";
import { h, KeyedList, Section, setAttribute, setHidden, setText } from "./elements.js";
import { formatTick, linearTicks } from "./plotting.js";
import { formatRankCount } from "./units.js";

const WINDOW_CHOICES = [
  ["4", "last 4 steps"],
  ["16", "last 16 steps"],
  ["Infinity", "all kept steps"],
];
const AXIS_HEIGHT = 20;
const LETTER_ROOM = 11;
const MAX_LAG = 2; // seconds that one rank's report may come after another's; one that is silent for longer is stuck

const endOf = ([, start, seconds]) => start + seconds;

/** What each rank did when: a lane for each, in colours, letters and hatches. */
export class Timeline extends Section {
  topics = ["lanes", "run"];

  constructor(frames) {
    super("Timeline");
    const options = WINDOW_CHOICES.map(([value, label]) => h("option", { value }, label));
    this.windows = h(
      "select",
      { "aria-label": "How much of the timeline", onchange: () => this.surface.invalidate() },
      ...options,
    );
    this.controls.append(this.windows);
    this.text = h("p", { class: "nbl-sync" });
    this.chips = h("div", { class: "nbl-legend" });
    this.chipList = new KeyedList(this.chips, phaseChip);
    this.surface = new Surface(frames, (...all) => this.#draw(...all), { class: "nbl-canvas", role: "img" });
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.body.append(
      this.text,
      this.chips,
      h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Lanes of the ranks" }, frame),
    );
    this.tooltip = new Tooltip(frame);
    this.surface.canvas.addEventListener("pointermove", (event) => this.#read(event.offsetX, event.offsetY));
    this.surface.canvas.addEventListener("pointerleave", () => this.tooltip.hide());
  }

  paint({ lanes, legend, run }, changed) {
    this.legend = legend;
    this.chipList.show([...Object.entries(legend.phases), ["", { letter: "", word: "other", colour: "" }]]);
    setText(this.text, run.sync?.text ?? "");
    setHidden(this.text, !this.text.textContent);
    if (changed.has("lanes")) this.#paintLanes(lanes);
  }

  #paintLanes(lanes) {
    this.lanes = [...lanes]
      .filter(([, spans]) => spans.length)
      .sort(([a], [b]) => a - b)
      .slice(0, this.legend.limits.lanes);
    setHidden(this.element, !this.lanes.length);
    this.laneHeight = this.lanes.length > 16 ? 16 : 24;
    this.surface.canvas.style.height = `${AXIS_HEIGHT + this.lanes.length * this.laneHeight + 2}px`;
    setAttribute(
      this.surface.canvas,
      "aria-label",
      `Timeline of ${formatRankCount(this.lanes.length)}. ${this.text.textContent}`,
    );
    this.surface.invalidate();
  }

  /** The last steps of the rank that has taken longest for them, up to where all lanes are known. */
  #domain() {
    const count = Number(this.windows.value);
    const ends = this.lanes.map(([, spans]) => endOf(spans[spans.length - 1]));
    const [earliest, latest] = [Math.min(...ends), Math.max(...ends)];
    const end = latest - earliest > MAX_LAG ? latest : earliest;
    const starts = this.lanes.map(([, spans]) => {
      const steps = spans.filter((span) => span[0] === "step" && endOf(span) <= end);
      return steps.length > count ? endOf(steps[steps.length - 1 - count]) : spans[0][1];
    });
    const start = Math.min(...starts);
    return [start, Math.max(end, start + 1e-6)];
  }

  #draw(context, width, height, theme) {
    const [start, end] = (this.domain = this.#domain());
    const left = 8 + Math.max(...this.lanes.map(([rank]) => context.measureText(`rank ${rank}`).width));
    this.toX = (seconds) => left + ((seconds - start) / (end - start)) * (width - left);
    this.#drawAxis(context, theme, left, width, height);
    this.lanes.forEach(([rank, spans], at) => {
      const top = AXIS_HEIGHT + at * this.laneHeight + 2;
      Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.7, textAlign: "right", textBaseline: "middle" });
      context.fillText(`rank ${rank}`, left - 8, top + this.laneHeight / 2 - 2);
      context.globalAlpha = 0.06;
      context.fillRect(left, top, width - left, this.laneHeight - 4);
      context.globalAlpha = 1;
      this.#drawSpans(context, theme, spans, left, top);
    });
  }

  #drawAxis(context, theme, left, right, height) {
    const [start, end] = this.domain;
    Object.assign(context, {
      fillStyle: theme.ink,
      strokeStyle: theme.ink,
      lineWidth: 1,
      textAlign: "center",
      textBaseline: "top",
    });
    const ticks = linearTicks(start, end, (right - left) / 90);
    const spacing = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
    for (const tick of ticks) {
      const x = Math.round(this.toX(tick)) + 0.5;
      const text = `${formatTick(tick, spacing)} s`;
      const half = context.measureText(text).width / 2;
      context.globalAlpha = 0.07;
      context.strokeRect(x, AXIS_HEIGHT - 2, 0, height - AXIS_HEIGHT + 2);
      context.globalAlpha = 0.62;
      context.fillText(text, Math.min(x, right - half), 2);
    }
    context.globalAlpha = 1;
  }

  #drawSpans(context, theme, spans, left, top) {
    const height = this.laneHeight - 4;
    for (const [phase, at, seconds] of spans) {
      const x = Math.max(left, this.toX(at));
      const width = Math.min(this.surface.width, this.toX(at + seconds)) - x;
      if (width <= 0) continue;
      context.fillStyle = this.legend.phases[phase]?.colour ?? theme.ink;
      // A hair of ground between neighbours, where there is room for it.
      context.fillRect(x, top, width > 3 ? width - 0.75 : width, height);
      if (phase === "sync" && width > 3) hatch(context, x, top, width - 0.75, height, theme.ground);
      if (width >= LETTER_ROOM && this.legend.phases[phase])
        this.#drawLetter(context, theme, this.legend.phases[phase].letter, x + width / 2, top + height / 2);
    }
  }

  #drawLetter(context, theme, letter, x, y) {
    Object.assign(context, { fillStyle: theme.phaseInk, textAlign: "center", textBaseline: "middle" });
    context.fillText(letter, x, y + 0.5);
  }

  #read(x, y) {
    const lane = this.lanes[Math.floor((y - AXIS_HEIGHT) / this.laneHeight)];
    const span = this.toX && lane?.[1].find(([, at, seconds]) => this.toX(at) <= x && x <= this.toX(at + seconds));
    if (!span || x < this.toX(this.domain[0])) return this.tooltip.hide();
    const [phase, at, seconds] = span;
    const { phases, units } = this.legend;
    return this.tooltip.show(x, y + 12, `rank ${lane[0]}, ${phases[phase]?.word ?? phase}`, [
      { label: "took", value: units.formatSeconds(seconds) },
      { label: "at", value: units.formatSeconds(at) },
    ]);
  }
}

function phaseChip({ letter, word, colour }, phase) {
  const swatch = h("i", { "data-phase": phase }, letter);
  swatch.style.backgroundColor = colour;
  return { element: h("span", { class: "nbl-phase" }, swatch, word) };
}

/** Slanted lines in the colour of the ground, so that waiting can be told without colours. */
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
