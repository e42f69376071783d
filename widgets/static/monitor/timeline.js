import { h, make, scrolled, Section, show } from "./elements.js";
import { formatSeconds, formatTick } from "./units.js";

const WINDOW_CHOICES = { 4: "last 4 steps", 16: "last 16 steps", Infinity: "all kept steps" };
const MAX_LAG = 2; // seconds between the reports of two ranks; a rank that reports later than that is stuck
const LETTER_ROOM = 1.4; // percent of the width
const LEAST = 0.04; // percent of the width; a span that is shorter is not seen

const endOf = ([, start, seconds]) => start + seconds;

/** Timeline of the phases: a lane for each rank. Colours, letters and a hatch tell the phases apart. */
export class Timeline extends Section {
  constructor() {
    super("Timeline", ({ lanes }) => [...lanes.values()].some((spans) => spans.length));
    const options = Object.entries(WINDOW_CHOICES).map(([value, label]) => h("option", { value }, label));
    this.windows = make("select", { "aria-label": "Steps that the timeline shows", onchange: () => this.refresh() }, ...options);
    show(this.controls, this.windows);
  }

  paint(data) {
    super.paint(data);
    const { phases, limits } = data.legend;
    const lanes = [...data.lanes]
      .filter(([, spans]) => spans.length)
      .sort(([a], [b]) => a - b)
      .slice(0, limits.lanes);
    const { start, end } = secondsInSight(lanes, Number(this.windows.value));
    const percent = (seconds) => (100 * seconds) / (end - start);
    const span = (rank, [phase, begin, seconds]) => {
      const [left, right] = [Math.max(0, percent(begin - start)), Math.min(100, percent(begin + seconds - start))];
      if (right - left < LEAST) return false;
      const { letter, word, colour } = phases[phase] ?? { letter: "", word: phase, colour: "" };
      const title = `rank ${rank}, ${word}: took ${formatSeconds(seconds)} at ${formatSeconds(begin)}`;
      const style = `left: ${left.toFixed(3)}%; width: ${(right - left).toFixed(3)}%; background-color: ${colour}`;
      return h("i", { key: `${begin}${phase}`, "data-phase": phase, style, title }, right - left > LETTER_ROOM && letter);
    };
    const lane = ([rank, spans]) => [
      h("span", {}, `rank ${rank}`),
      h("div", { class: "nbl-lane" }, spans.map((one) => span(rank, one))),
    ];
    const tick = (seconds) => h("span", { key: seconds, style: `left: ${percent(seconds - start)}%` }, `${formatTick(seconds)} s`);
    const label = `Timeline of ${lanes.length} ${lanes.length === 1 ? "rank" : "ranks"}. ${data.run.sync ?? ""}`;
    const picture = { class: "nbl-lanes", role: "img", "aria-label": label, "data-many": lanes.length > 16 };
    const chip = ([phase, { letter, word, colour }]) =>
      h("span", { class: "nbl-phase" }, h("i", { "data-phase": phase, style: `background-color: ${colour}` }, letter), word);
    show(
      this.body,
      h("p", { class: "nbl-sync" }, data.run.sync),
      h("div", { class: "nbl-legend" }, [...Object.entries(phases), ["", { letter: "", word: "other", colour: "" }]].map(chip)),
      scrolled("Lanes of the ranks", h("div", picture, h("div", { class: "nbl-axis" }, ticksBetween(start, end).map(tick)), lanes.map(lane))),
    );
  }
}

/**
 * Return the seconds to show. They end where the spans of all ranks are known, and begin where the rank that took
 * longest for the chosen number of steps began them.
 */
function secondsInSight(lanes, count) {
  const ends = lanes.map(([, spans]) => endOf(spans[spans.length - 1]));
  const [earliest, latest] = [Math.min(...ends), Math.max(...ends)];
  const end = latest - earliest > MAX_LAG ? latest : earliest;
  const starts = lanes.map(([, spans]) => {
    const steps = spans.filter((span) => span[0] === "step" && endOf(span) <= end);
    return steps.length > count ? endOf(steps[steps.length - 1 - count]) : spans[0][1];
  });
  const start = Math.min(...starts);
  return { start, end: Math.max(end, start + 1e-6) };
}

/** Return at most eight round numbers, none so near to the right end that its words would be cut off. */
function ticksBetween(start, end) {
  const least = (end - start) / 8;
  const power = 10 ** Math.floor(Math.log10(least));
  const spacing = power * [1, 2, 5, 10].find((factor) => factor * power >= least);
  const first = Math.ceil(start / spacing);
  return Array.from({ length: 9 }, (_, at) => (first + at) * spacing).filter((tick) => tick < end - 0.04 * (end - start));
}
