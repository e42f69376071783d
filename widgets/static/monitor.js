// The live monitor of a run: an anywidget front end in one module, because anywidget loads one.
//
// Python -> page: {type: "reset", ...} is the whole run and answers {type: "hello"}; {type: "update", ...}
// has the same keys, each optional. `run` and the entries of `ranks` replace what was known; entries of
// `curves`, `lanes`, `logs`, `errors` and `notices` are appended. A number that is not finite is null.
// Page -> Python: hello, with a name for the page, stop, interrupt, stacks, save.
//
// A message changes `RunData` and asks for a frame; the frame brings the views up to date, at most once per
// screen refresh and not at all while the page is hidden. Text of the user's goes into text nodes only.

// ---------------------------------------------------------------------------------------------- limits

const MAX_POINTS = 2000; // of a curve: more than a plot has pixels
const MAX_LINES = 5000; // of a rank's log
const MAX_LINE_LENGTH = 10_000;
const SHOWN_LINES = 500;
const MAX_SPANS = 1024; // of a rank's timeline
const MAX_LANES = 64;
const MAX_NOTICES = 20;
const PLOTS_AT_ONCE = 12; // more of them on demand
const MANY_RANKS = 4; // beyond, curves are averaged unless asked otherwise
const SEARCHED_METRICS = 6; // beyond, there is a field to find one
const TOOLTIP_ROWS = 8;
const SILENCE = 10; // seconds without a message: a live run sends one a second

const PAGE = Math.random().toString(36).slice(2); // another one after a reload

// ------------------------------------------------------------------------------------- words and numbers

const RUN_STATES = {
  starting: { word: "starting", tone: "quiet", shape: "ring" },
  running: { word: "running", tone: "live", shape: "disc" },
  waiting: { word: "waiting", tone: "warn", shape: "hourglass" },
  stopping: { word: "stopping", tone: "warn", shape: "square" },
  done: { word: "done", tone: "good", shape: "check" },
  failed: { word: "failed", tone: "bad", shape: "cross" },
  stopped: { word: "stopped", tone: "quiet", shape: "square" },
  lost: { word: "lost", tone: "warn", shape: "dash" },
};

const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };

const RANK_STATES = {
  starting: RUN_STATES.starting,
  running: { word: "training", tone: "live", shape: "disc" },
  waiting: { word: "waiting in a collective", tone: "warn", shape: "hourglass" },
  saving: { word: "saving", tone: "live", shape: "arrow" },
  asking: { word: "waiting for input", tone: "warn", shape: "diamond" },
  returned: RUN_STATES.done,
  failed: RUN_STATES.failed,
  stopped: RUN_STATES.stopped,
};

const ENDED_RANKS = new Set(["returned", "failed", "stopped"]);

const UNKNOWN_STATE = { word: "unknown", tone: "quiet", shape: "dash" };

// Each state has a shape of its own, so that its colour says nothing alone. Paths in a box of 12.
const SHAPES = {
  ring: "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9zm0 2a2.5 2.5 0 1 1 0 5a2.5 2.5 0 1 1 0-5z",
  disc: "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9z",
  square: "M2 2h8v8H2z",
  check: "M1.2 6.4l1.6-1.6 2 2 4.4-4.6 1.6 1.6-6 6.2z",
  cross: "M2.8 1.4L6 4.6l3.2-3.2 1.4 1.4L7.4 6l3.2 3.2-1.4 1.4L6 7.4l-3.2 3.2-1.4-1.4L4.6 6 1.4 2.8z",
  hourglass: "M2 1h8v1.4L7 6l3 3.6V11H2V9.6L5 6 2 2.4z",
  arrow: "M4.8 1h2.4v4.6h2.4L6 9.4 2.4 5.6h2.4zM2 10h8v1.2H2z",
  diamond: "M6 .8L11.2 6 6 11.2.8 6z",
  dash: "M1.5 5h9v2h-9z",
};

const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";

const ACTIONS = [
  { type: "stop", label: "Stop after this step", title: "Each rank finishes its step, then the run ends" },
  { type: "interrupt", label: "Interrupt", title: "Stop every rank now, wherever it is" },
  { type: "stacks", label: "Dump stacks", title: "Show what every rank is executing now" },
  { type: "save", label: "Save now", title: "All ranks save a checkpoint at the same step" },
];

// Words, letters, colours (in monitor.css) and order are those of notebook_launcher/drawing/timeline.py.
const PHASES = {
  data: { letter: "D", word: "data" },
  forward: { letter: "F", word: "forward" },
  backward: { letter: "B", word: "backward" },
  sync: { letter: "S", word: "sync" },
  step: { letter: "O", word: "optimizer" },
};

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const formatRankCount = (count) => `${count} ${count === 1 ? "rank" : "ranks"}`;

// The next six say what notebook_launcher/units.py says; tests/foundations/test_units.py runs both on one table.

const [MINUTE, HOUR] = [60, 3600];

/** 490 µs, 35 ms, 4.2 s, 3 min 20 s or 1 h 02 min; empty if unknown. */
function formatSeconds(seconds) {
  if (!isNumber(seconds)) return "";
  if (seconds < 0) return `-${formatSeconds(-seconds)}`;
  if (seconds > 0 && seconds < 1e-6) return "<1 µs";
  for (const [factor, unit, limit] of [
    [1e6, "µs", 1000],
    [1e3, "ms", 1000],
    [1, "s", MINUTE],
  ]) {
    const rounded = roundTo(seconds * factor, 3);
    if (rounded < limit && (seconds || unit === "s")) return `${rounded} ${unit}`;
  }
  const two = (value) => String(value).padStart(2, "0");
  const whole = Math.floor(seconds + 0.5);
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)} min ${two(whole % MINUTE)} s`;
  const minutes = Math.floor(seconds / MINUTE + 0.5);
  return `${formatCount(Math.floor(minutes / MINUTE))} h ${two(minutes % MINUTE)} min`;
}

/** 12 bytes, 1.5 kB or 3.12 GB: in powers of 1000; empty if unknown. */
function formatBytes(number) {
  if (!isNumber(number)) return "";
  if (number < 0) return `-${formatBytes(-number)}`;
  const whole = Math.floor(number + 0.5);
  if (whole < 1000) return `${whole} byte${whole === 1 ? "" : "s"}`;
  for (const [size, unit] of [
    [1e3, "kB"],
    [1e6, "MB"],
    [1e9, "GB"],
  ]) {
    const rounded = roundTo(number / size, 3);
    if (rounded < 1000) return `${rounded} ${unit}`;
  }
  return `${formatNumber(number / 1e12, 3)} TB`;
}

/** A part of 1 as 52.8 %, to one decimal; only nothing is 0 %, and only all of it 100 %. */
function formatShare(share) {
  if (!isNumber(share)) return "";
  if (share > 0 && share < 0.0005) return "<0.1 %";
  if (share >= 0.9995 && share < 1) return ">99.9 %";
  return `${Math.floor(share * 1000 + 0.5) / 10} %`;
}

/** 12.5 it/s, or 1.6 s/it where one iteration takes longer than a second; empty if unknown. */
function formatRate(perSecond) {
  if (!isNumber(perSecond) || perSecond <= 0) return "";
  return perSecond >= 1 ? `${formatNumber(perSecond, 3)} it/s` : `${formatSeconds(1 / perSecond)}/it`;
}

/** A whole number in full: 1,234,567; empty if unknown. */
const formatCount = (number) => (isNumber(number) ? Math.floor(number + 0.5).toLocaleString("en-US") : "");

/** 0.1234, 12.35, 1,235 or 1.235e-5, with so many digits; the whole part is in full below a million. */
function formatNumber(value, digits = 4) {
  if (!isNumber(value)) return value === undefined || value === null ? "" : formatNonFinite(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  if (size >= 10 ** (digits - 1)) return Number(value.toFixed(0)).toLocaleString("en-US");
  return `${roundTo(value, digits)}`;
}

const formatNonFinite = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞");

const roundTo = (value, digits) => Number(value.toPrecision(digits));

/** A metric's value; JSON has no number that is not finite, so Python sends null for it. */
const formatValue = (value) => (isNumber(value) ? formatNumber(value) : "not finite");

const formatDone = ({ done, total }) =>
  total
    ? `${formatCount(done ?? 0)} of ${formatCount(total)} (${formatShare(Math.min(1, (done ?? 0) / total))})`
    : `${formatCount(done ?? 0)} done`;

// Escape sequences (colours, cursor, titles), then every other control character but the tab.
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]/g;
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

/** What a terminal would show of a line: what stands after the last carriage return, without colours. */
function plainLine(raw) {
  const written = raw.replace(/\r+$/, "");
  return written
    .slice(written.lastIndexOf("\r") + 1)
    .replace(ESCAPES, "")
    .replace(CONTROLS, "")
    .slice(0, MAX_LINE_LENGTH);
}

const plainText = (raw) =>
  String(raw ?? "")
    .split("\n")
    .map(plainLine)
    .join("\n");

// ------------------------------------------------------------------------------- what is known of the run

/** One metric of one rank: at most MAX_POINTS points, thinned so that every peak and every gap stays. */
class Curve {
  steps = [];
  values = [];
  version = 0;
  hasGaps = false;
  #smoothed = { weight: 0, version: -1, values: [] };

  extend({ steps, values, replace }) {
    if (replace) [this.steps, this.values, this.hasGaps] = [[], [], false];
    for (let at = 0; at < steps.length; at += 1) {
      const value = isNumber(values[at]) ? values[at] : null;
      this.steps.push(steps[at]);
      this.values.push(value);
      this.hasGaps ||= value === null;
      if (this.steps.length > MAX_POINTS) this.#thin();
    }
    this.version += 1;
  }

  /** Keep each stretch's extremes; stretches are equally wide, so that old points fare no worse than new ones. */
  #thin() {
    const [first, last] = extentOf([this.steps]);
    const width = (last - first) / (MAX_POINTS / 4) || 1;
    this.#keepExtremes((at) => Math.floor((this.steps[at] - first) / width));
    // Steps that go to and fro make a stretch of each point.
    if (this.steps.length > 0.75 * MAX_POINTS) this.#keepExtremes((at) => Math.floor(at / 4));
  }

  #keepExtremes(stretchOf) {
    const kept = [];
    for (let start = 0, end = 0; start < this.steps.length; start = end) {
      while (end < this.steps.length && stretchOf(end) === stretchOf(start)) end += 1;
      kept.push(...this.#extremes(start, end));
    }
    this.steps = kept.map((at) => this.steps[at]);
    this.values = kept.map((at) => this.values[at]);
  }

  #extremes(start, end) {
    let [low, high, gap] = [-1, -1, -1];
    for (let at = start; at < end; at += 1) {
      const value = this.values[at];
      if (value === null) gap = gap < 0 ? at : gap;
      else {
        if (low < 0 || value < this.values[low]) low = at;
        if (high < 0 || value > this.values[high]) high = at;
      }
    }
    return [...new Set([low, high, gap])].filter((at) => at >= 0).sort((a, b) => a - b);
  }

  /** Exponential moving average without the bias of its start; gaps stay. */
  smoothed(weight) {
    const cache = this.#smoothed;
    if (weight === 0) return this.values;
    if (cache.weight !== weight || cache.version !== this.version) {
      this.#smoothed = { weight, version: this.version, values: movingAverage(this.values, weight) };
    }
    return this.#smoothed.values;
  }

  get last() {
    return this.values[this.values.length - 1];
  }
}

function movingAverage(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** All ranks' curves of one metric. */
class Metric {
  ranks = new Map();
  version = 0;
  #average = { version: -1, curve: null, low: [], high: [] };

  constructor(name) {
    this.name = name;
  }

  extend(message) {
    if (!this.ranks.has(message.rank)) {
      this.ranks.set(message.rank, new Curve());
      this.ranks = new Map([...this.ranks].sort(([a], [b]) => a - b));
    }
    this.ranks.get(message.rank).extend(message);
    this.version += 1;
  }

  /** The mean over ranks as a curve, and the lowest and highest of them, at the steps of the longest curve. */
  average() {
    if (this.#average.version !== this.version) {
      const { steps, mean, low, high } = averageOf([...this.ranks.values()]);
      const curve = new Curve();
      curve.extend({ steps, values: mean });
      this.#average = { version: this.version, curve, low, high };
    }
    return this.#average;
  }
}

function averageOf(curves) {
  const readers = curves.map(interpolator);
  const longest = curves.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  const steps = [...longest.steps].sort((a, b) => a - b);
  const [mean, low, high] = [[], [], []];
  for (const step of steps) {
    let [sum, count, lowest, highest] = [0, 0, Infinity, -Infinity];
    for (const read of readers) {
      const value = read(step);
      if (value === null) continue;
      sum += value;
      count += 1;
      lowest = Math.min(lowest, value);
      highest = Math.max(highest, value);
    }
    mean.push(count ? sum / count : null);
    low.push(count ? lowest : null);
    high.push(count ? highest : null);
  }
  return { steps, mean, low, high };
}

/** Return a function of growing steps: the value there, between two points on their line, null where there is none. */
function interpolator({ steps, values }) {
  const order = steps.map((_, at) => at).sort((a, b) => steps[a] - steps[b]);
  let next = 0;
  return (step) => {
    while (next < order.length && steps[order[next]] < step) next += 1;
    if (next === order.length) return null;
    const [right, left] = [order[next], order[next - 1]];
    if (steps[right] === step) return values[right];
    if (left === undefined || values[left] === null || values[right] === null) return null;
    const part = (step - steps[left]) / (steps[right] - steps[left]);
    return values[left] + part * (values[right] - values[left]);
  };
}

/** What a rank wrote: whole lines, and the one that has no end yet. */
class RankLog {
  lines = [];
  #open = null;
  #raw = "";

  /** Take in text; `order` numbers lines by arrival over all ranks. Return the lines that are new. */
  extend(rank, text, order) {
    const pieces = text.split("\n");
    const added = [];
    pieces.forEach((piece, at) => {
      this.#raw = (this.#raw + piece).slice(-2 * MAX_LINE_LENGTH);
      const ends = at < pieces.length - 1;
      if (!this.#open && (ends || this.#raw)) {
        this.#open = { rank, order: order.next++, text: "" };
        added.push(this.#open);
      }
      if (this.#open) this.#open.text = plainLine(this.#raw);
      if (ends) [this.#open, this.#raw] = [null, ""];
    });
    appendBounded(this.lines, added, MAX_LINES);
    return added;
  }
}

function appendBounded(list, items, limit) {
  for (const item of items) list.push(item);
  if (list.length > limit) list.splice(0, list.length - limit);
}

/** Everything that messages have told, and which topics have changed since the last frame. */
class RunData {
  changed = new Set();
  isKnown = false;
  link = "up"; // "silent": the kernel may answer again; "lost": it has restarted or ended

  constructor(title) {
    this.#forget();
    this.run = { name: title };
  }

  #forget() {
    this.run = {};
    this.receivedAt = performance.now();
    this.ranks = new Map();
    this.metrics = new Map();
    this.lanes = new Map();
    this.logs = new Map();
    this.lines = [];
    this.order = { next: 0 };
    this.errors = [];
    this.notices = [];
    this.markAll();
  }

  take(message) {
    if (message.type === "reset") {
      this.#forget();
      this.isKnown = true;
    }
    this.heardAt = performance.now();
    // An update may have been on its way when the kernel went; only the answer to a hello comes from one that lives.
    if (message.type === "reset" || this.link !== "lost") this.setLink("up");
    for (const [topic, take] of Object.entries(RunData.#takers)) {
      const news = message[topic];
      if (!news || news.length === 0) continue;
      this.changed.add(topic);
      take(this, news);
    }
  }

  setLink(link) {
    if (this.link === link) return;
    this.link = link;
    for (const topic of ["run", "ranks"]) this.changed.add(topic);
  }

  /** Let everything be drawn again, by a view that has drawn nothing of it yet. */
  markAll() {
    for (const topic of ["run", "ranks", "curves", "lanes", "logs", "errors", "notices"]) this.changed.add(topic);
  }

  static #takers = {
    run: (data, run) => {
      data.run = run;
      data.receivedAt = performance.now();
    },
    ranks: (data, ranks) => {
      for (const rank of ranks) data.ranks.set(rank.rank, rank);
    },
    curves: (data, curves) => {
      for (const curve of curves) {
        if (!data.metrics.has(curve.name)) data.metrics.set(curve.name, new Metric(curve.name));
        data.metrics.get(curve.name).extend(curve);
      }
    },
    lanes: (data, lanes) => {
      for (const { rank, spans } of lanes) {
        if (!data.lanes.has(rank)) data.lanes.set(rank, []);
        appendBounded(data.lanes.get(rank), spans, MAX_SPANS);
      }
    },
    logs: (data, logs) => {
      for (const { rank, text } of logs) {
        if (!data.logs.has(rank)) data.logs.set(rank, new RankLog());
        appendBounded(data.lines, data.logs.get(rank).extend(rank, text, data.order), MAX_LINES);
      }
    },
    errors: (data, errors) => {
      appendBounded(data.errors, errors, MAX_LINES);
    },
    notices: (data, notices) => {
      appendBounded(
        data.notices,
        notices.map((text) => ({ text: plainText(text) })),
        MAX_NOTICES,
      );
    },
  };

  get isLive() {
    return this.isKnown && this.link === "up" && !this.run.is_over;
  }

  /** The state that is known to hold now: without a link to the kernel, that of a live run is not. */
  get state() {
    if (!this.run.is_over && this.link !== "up") return this.link === "lost" ? RUN_STATES.lost : NOT_RESPONDING;
    if (this.isKnown || this.run.state) return RUN_STATES[this.run.state] ?? UNKNOWN_STATE;
    return { ...RUN_STATES.starting, word: "waiting for the kernel" };
  }

  /** The same of a rank. */
  stateOf(rank) {
    const isCut = !this.run.is_over && this.link !== "up" && !ENDED_RANKS.has(rank.state);
    return isCut ? this.state : (RANK_STATES[rank.state] ?? UNKNOWN_STATE);
  }

  /** Seconds since the launch: the run's own count, carried on by the page's clock. */
  get seconds() {
    const since = this.isLive ? (performance.now() - this.receivedAt) / 1000 : 0;
    return (this.run.seconds ?? 0) + since;
  }

  get rankNumbers() {
    return [...new Set([...this.ranks.keys(), ...this.logs.keys()])].sort((a, b) => a - b);
  }

  /** The texts that every rank has written. A text that all have is one of those of the shortest log. */
  commonTexts() {
    const logs = this.rankNumbers.map((rank) => this.logs.get(rank)?.lines ?? []);
    if (logs.length < 2) return new Set();
    const [shortest, ...others] = logs.sort((a, b) => a.length - b.length);
    let common = new Set(shortest.map((line) => line.text));
    for (const lines of others) {
      const both = new Set();
      for (const { text } of lines) if (common.has(text)) both.add(text);
      common = both;
    }
    return common;
  }
}

// --------------------------------------------------------------------------------------------- elements

/** Make an element. Attributes that are undefined are left out; children may be strings, which become text nodes. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** A shape beside words that say the same, so that a screen reader leaves it out. */
function icon(shape = "") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", shape);
  svg.append(path);
  return svg;
}

/** A state as a shape in a colour; the word stands beside it. */
class StateLight {
  constructor() {
    const svg = icon();
    this.path = svg.firstChild;
    this.word = h("span", { class: "nbl-state-word" });
    this.element = h("span", { class: "nbl-state" }, svg, this.word);
  }

  show({ word, tone, shape }, reason = "") {
    setAttribute(this.element, "data-tone", tone);
    setAttribute(this.path, "d", SHAPES[shape]);
    setText(this.word, reason && reason !== word ? `${word}: ${reason}` : word);
    setAttribute(this.element, "title", this.word.textContent);
  }
}

/** The children of an element, each standing for a key; those whose key stays are kept and updated. */
class KeyedList {
  views = new Map();

  constructor(parent, make, update = () => {}) {
    Object.assign(this, { parent, make, update });
  }

  /** Show these [key, item] pairs in this order. */
  show(entries) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (wanted.has(key)) continue;
      view.remove?.();
      view.element.remove();
      this.views.delete(key);
    }
    let next = this.parent.firstElementChild;
    for (const [key, item] of entries) {
      let view = this.views.get(key);
      if (!view) this.views.set(key, (view = this.make(item, key)));
      if (view.element === next) next = next.nextElementSibling;
      else this.parent.insertBefore(view.element, next);
      this.update(view, item, key);
    }
  }
}

const field = (control, label) => h("label", { class: "nbl-field" }, control, h("span", {}, label));

/** A section with a heading, controls at its right, and a body; hidden until it has something to show. */
class Section {
  constructor(title, ...controls) {
    this.controls = h("div", { class: "nbl-controls" }, ...controls);
    this.body = h("div", { class: "nbl-body" });
    const heading = h(
      "div",
      { class: "nbl-heading" },
      h("div", { class: "nbl-title", role: "heading", "aria-level": "3" }, title),
      this.controls,
    );
    this.element = h("section", { class: "nbl-section", "aria-label": title }, heading, this.body);
    this.element.hidden = true;
  }
}

const progressBar = (label) =>
  h("div", { class: "nbl-bar", role: "progressbar", "aria-label": label }, h("div", { class: "nbl-bar-fill" }));

function showProgress(bar, { done, total }, text) {
  const share = total ? Math.min(1, done / total) : null;
  bar.toggleAttribute("data-endless", share === null);
  const width = `${share === null ? 100 : (100 * share).toFixed(2)}%`;
  if (bar.firstChild.style.width !== width) bar.firstChild.style.width = width;
  setAttribute(bar, "aria-valuetext", text);
  if (share === null) return bar.removeAttribute("aria-valuenow");
  setAttribute(bar, "aria-valuemin", "0");
  setAttribute(bar, "aria-valuemax", String(total));
  return setAttribute(bar, "aria-valuenow", String(Math.min(done, total)));
}

// --------------------------------------------------------------------------------- canvases and their frame

/** What draws: one animation frame at a time for all views, and only canvases that can be seen. */
class Stage {
  #surfaces = new Map();
  #frame = 0;
  #seen = new IntersectionObserver((entries) => this.#onSeen(entries), { rootMargin: "50px" });
  #sized = new ResizeObserver((entries) => this.#onSized(entries));

  constructor(readTheme, beforeSurfaces) {
    this.readTheme = readTheme;
    this.beforeSurfaces = beforeSurfaces;
  }

  request() {
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    try {
      // Each time: a view is made before it is put on the page, where no style is known yet.
      this.theme = this.readTheme();
      this.beforeSurfaces();
      for (const surface of this.#surfaces.values()) {
        if (surface.isVisible && surface.isStale) surface.paint(this.theme);
      }
    } finally {
      this.#frame = 0; // last: what became stale meanwhile has just been painted
    }
  }

  watch(surface) {
    this.#surfaces.set(surface.canvas, surface);
    this.#seen.observe(surface.canvas);
    this.#sized.observe(surface.canvas);
  }

  unwatch(surface) {
    this.#surfaces.delete(surface.canvas);
    this.#seen.unobserve(surface.canvas);
    this.#sized.unobserve(surface.canvas);
  }

  invalidateAll() {
    for (const surface of this.#surfaces.values()) surface.isStale = true;
    this.request();
  }

  #onSeen(entries) {
    for (const { target, isIntersecting } of entries) this.#surfaces.get(target)?.setVisible(isIntersecting);
    this.request();
  }

  #onSized(entries) {
    for (const { target, contentRect } of entries) this.#surfaces.get(target)?.setSize(contentRect);
    this.request();
  }

  close() {
    cancelAnimationFrame(this.#frame);
    this.#seen.disconnect();
    this.#sized.disconnect();
    for (const surface of this.#surfaces.values()) surface.setVisible(false);
    this.#surfaces.clear();
    this.request = () => {};
  }
}

/** A canvas with its size in CSS pixels; `draw(context, width, height, theme)` fills it. */
class Surface {
  isVisible = false;
  isStale = true;
  width = 0;
  height = 0;

  constructor(stage, draw, attributes) {
    this.stage = stage;
    this.draw = draw;
    this.canvas = h("canvas", attributes);
    stage.watch(this);
  }

  invalidate() {
    this.isStale = true;
    this.stage.request();
  }

  setSize({ width, height }) {
    this.isStale ||= width !== this.width || height !== this.height;
    Object.assign(this, { width, height });
  }

  /** A canvas out of sight gives its pixels back: 200 plots would hold 100 MB. */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible) [this.canvas.width, this.canvas.height, this.isStale] = [0, 0, true];
  }

  paint(theme) {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (!width || !height) return;
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${theme.font}`;
    this.draw(context, this.width, this.height, theme);
    this.isStale = false;
  }
}

const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 4], [9, 2, 2, 2, 2, 2], [1, 3]];
const PALETTE = 8;

/** Colour and dash of a rank: neighbours differ in both, and 64 ranks have 64 pairs. */
const styleOf = (rank) => ({
  color: rank % PALETTE,
  dash: DASHES[(rank + Math.floor(rank / PALETTE)) % DASHES.length],
});

/** The colours in force, read from the style sheet; whether they are dark is told by the ground itself. */
function readTheme(root) {
  const style = getComputedStyle(root);
  const [red, green, blue] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  setAttribute(root, "data-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 110 ? "dark" : "light");
  const color = (name) => style.getPropertyValue(name).trim();
  return {
    ink: style.color,
    ground: style.backgroundColor,
    font: style.fontFamily,
    ranks: Array.from({ length: PALETTE }, (_, at) => color(`--nbl-rank-${at}`)),
    phases: Object.fromEntries(Object.keys(PHASES).map((phase) => [phase, color(`--nbl-phase-${phase}`)])),
    phaseInk: color("--nbl-phase-ink"),
    bad: color("--nbl-bad"),
  };
}

/** Round numbers that divide [low, high] into about `count` parts. */
function linearTicks(low, high, count) {
  const rough = high / Math.max(1, count) - low / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const spacing = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let at = Math.ceil(low / spacing - 1e-9); at * spacing <= high + 1e-9 * spacing && ticks.length < 50; at += 1)
    ticks.push(at * spacing);
  return ticks;
}

/** Powers of ten between two exponents; where that is fewer than two, 1, 2 and 5 times them. */
function logTicks(low, high, count) {
  const powers = linearTicks(low, high, count).filter((at) => Math.abs(at - Math.round(at)) < 1e-9);
  if (powers.length >= 2) return powers;
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1)
    for (const factor of [1, 2, 5]) ticks.push(power + Math.log10(factor));
  const inside = ticks.filter((at) => at >= low && at <= high);
  return inside.length >= 2 ? inside : linearTicks(low, high, count);
}

function formatTick(value, spacing) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(spacing) + 1e-9)));
  return value.toFixed(digits);
}

const formatStep = (step) =>
  Math.abs(step) >= 1e6
    ? `${formatNumber(step / 1e6)}M`
    : Math.abs(step) >= 1e4
      ? `${formatNumber(step / 1e3)}k`
      : formatNumber(step);

/** A line of pixels: at most four points a column (first, lowest, highest, last), in runs between gaps. */
class PixelLine {
  runs = [];
  #run = null;
  #column = NaN;
  #x = 0;
  #first = 0;
  #low = 0;
  #high = 0;
  #last = 0;

  add(x, y) {
    if (Math.round(x) === this.#column) {
      this.#low = Math.min(this.#low, y);
      this.#high = Math.max(this.#high, y);
      this.#last = y;
      return;
    }
    this.#flush();
    [this.#column, this.#x] = [Math.round(x), x];
    this.#first = this.#low = this.#high = this.#last = y;
  }

  lift() {
    this.#flush();
    [this.#run, this.#column] = [null, NaN];
  }

  #flush() {
    if (Number.isNaN(this.#column)) return;
    if (!this.#run) this.runs.push((this.#run = []));
    this.#run.push(this.#x, this.#first);
    if (this.#high - this.#low > 1) this.#run.push(this.#x, this.#low, this.#x, this.#high, this.#x, this.#last);
  }
}

/** A gap, and a step that lies before its forerunner (a restart), lift the pen; so do the gaps of a dash along x. */
function pixelLine(steps, values, toX, toY, dash = []) {
  const line = new PixelLine();
  steps.forEach((step, at) => {
    const y = values[at] === null ? NaN : toY(values[at]);
    const x = toX(step);
    const isDrawn = Number.isFinite(y) && !isInGap(dash, x);
    if (!isDrawn || (at > 0 && step < steps[at - 1])) line.lift();
    if (isDrawn) line.add(x, y);
  });
  line.lift();
  return line.runs;
}

function isInGap(dash, x) {
  let rest = Math.round(x) % dash.reduce((sum, length) => sum + length, 0);
  for (let at = 0; at < dash.length; at += 1) {
    rest -= dash[at];
    if (rest < 0) return at % 2 === 1;
  }
  return false;
}

/** Stroke runs of pixels; a run of one point becomes a dot. */
function strokeRuns(context, runs, radius = 2) {
  context.beginPath();
  for (const run of runs) {
    context.moveTo(run[0], run[1]);
    for (let at = 2; at < run.length; at += 2) context.lineTo(run[at], run[at + 1]);
  }
  context.stroke();
  for (const run of runs) if (run.length === 2) fillDot(context, run[0], run[1], radius);
}

function fillDot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** A small table that follows the pointer inside `parent`. */
class Tooltip {
  constructor(parent) {
    this.title = h("div", { class: "nbl-tip-title" });
    this.rows = h("div", {});
    this.element = h("div", { class: "nbl-tip", "aria-live": "off" }, this.title, this.rows);
    this.element.hidden = true;
    parent.append(this.element);
  }

  show(x, y, title, rows) {
    setText(this.title, title);
    this.rows.replaceChildren(
      ...rows.map(({ color, label, value }) => {
        const swatch = h("i", {});
        swatch.style.background = color ?? "transparent";
        return h("div", { class: "nbl-tip-row" }, swatch, h("span", {}, label), h("b", {}, value));
      }),
    );
    this.element.hidden = false;
    const room = this.element.parentElement.clientWidth;
    const isLeft = x + 14 + this.element.offsetWidth <= room;
    this.element.style.left = `${Math.max(0, isLeft ? x + 14 : x - 14 - this.element.offsetWidth)}px`;
    this.element.style.top = `${y}px`;
  }

  hide() {
    setHidden(this.element, true);
  }
}

// ----------------------------------------------------------------------------- header, progress, messages

class Header {
  topics = ["run"];

  constructor(send, announce) {
    this.send = send;
    this.announce = announce;
    this.light = new StateLight();
    this.name = h("span", { class: "nbl-name" });
    this.clock = h("span", { class: "nbl-clock", role: "timer", "aria-live": "off", title: "Time since the launch" });
    this.summary = h("div", { class: "nbl-summary" });
    this.waiting = h("div", { class: "nbl-waiting" }); // Its seconds grow: the state's word is what is read out.
    this.hint = h("div", { class: "nbl-hint", role: "status" });
    this.buttons = ACTIONS.map(({ type, label, title }) =>
      h(
        "button",
        { type: "button", class: "nbl-button", "data-action": type, title, onclick: () => this.#press(type) },
        label,
      ),
    );
    const identity = h("div", { class: "nbl-identity" }, this.light.element, this.name, this.clock);
    this.actions = h("div", { class: "nbl-actions", role: "group", "aria-label": "Control the run" }, ...this.buttons);
    this.element = h(
      "header",
      { class: "nbl-header" },
      h("div", { class: "nbl-top" }, identity, this.actions),
      this.summary,
      this.waiting,
      this.hint,
    );
  }

  #press(type) {
    this.asked = ACTIONS.find((action) => action.type === type).label;
    if (this.send({ type })) setText(this.hint, `Requested: ${this.asked}.`);
    setHidden(this.hint, !this.hint.textContent);
  }

  paint(data) {
    const { run, state } = data;
    this.light.show(state);
    setText(this.name, run.name ?? "");
    setAttribute(this.name, "title", run.id ?? "");
    const summary = [run.arguments, run.summary, run.effective_batch && `effective batch ${run.effective_batch}`]
      .filter(Boolean)
      .join(" · ");
    setText(this.summary, summary);
    setHidden(this.summary, !summary);
    setText(this.waiting, plainText(run.waiting ?? ""));
    setHidden(this.waiting, !run.waiting);
    const hint = this.#hint(data);
    setText(this.hint, hint);
    setHidden(this.hint, !hint);
    for (const button of this.buttons)
      button.disabled = data.link !== "up" || Boolean(run.is_over) || !run.actions?.[button.dataset.action];
    setHidden(this.actions, Boolean(run.is_over));
    this.announce(run.name ? `${run.name}: ${state.word}` : state.word);
    this.tick(data);
  }

  #hint({ run, link }) {
    if (run.is_over) return run.state === "lost" ? "The kernel ended before the run did." : "";
    if (link === "up") return run.action_hint ?? "";
    if (link === "silent") return "Kernel not responding. Last update shown.";
    const again = run.id ? ` open_run("${run.id}") shows what its folder holds.` : "";
    return `The kernel restarted or ended, and the run with it. Last update shown.${again}`;
  }

  tick(data) {
    setText(this.clock, data.isKnown ? formatSeconds(data.isLive ? Math.floor(data.seconds) : data.seconds) : "");
  }
}

class Progress {
  topics = ["run", "ranks"];

  constructor() {
    this.what = h("span", {});
    this.pace = h("span", { class: "nbl-pace" });
    this.bar = progressBar("Progress of the slowest rank");
    this.bar.title = "Progress of the slowest rank";
    this.each = h("div", { class: "nbl-each" });
    this.details = h("details", { class: "nbl-details" }, h("summary", {}, "Each rank"), this.each);
    this.element = h(
      "div",
      { class: "nbl-progress" },
      h("div", { class: "nbl-progress-text" }, this.what, this.pace),
      this.bar,
      this.details,
    );
    this.list = new KeyedList(this.each, this.#makeRow, this.#updateRow);
    this.details.addEventListener("toggle", () => this.#paintRows());
  }

  paint(data) {
    const { run, ranks } = data;
    this.data = data;
    this.ranks = [...ranks.values()].filter((rank) => isNumber(rank.done));
    const progress = run.progress ?? null;
    setHidden(this.element, !progress && !this.ranks.length);
    setHidden(this.what.parentElement, !progress);
    setHidden(this.bar, !progress);
    setHidden(this.details, this.ranks.length < 2);
    if (progress) this.#paintMerged(run, progress);
    this.#paintRows();
  }

  #paintMerged(run, progress) {
    const text = [progress.description, formatDone(progress)].filter(Boolean).join(" · ");
    const pace = [
      formatRate(progress.rate),
      isNumber(progress.seconds_left) ? `${formatSeconds(Math.ceil(progress.seconds_left))} left` : "",
    ];
    setText(this.what, text);
    setText(this.pace, this.data.isLive ? pace.filter(Boolean).join(" · ") : "");
    setAttribute(this.bar, "data-tone", this.data.state.tone);
    showProgress(this.bar, progress, text);
  }

  #paintRows() {
    this.list.show(this.details.open ? this.ranks.map((rank) => [rank.rank, rank]) : []);
  }

  #makeRow = (rank) => {
    const bar = progressBar(`Progress of rank ${rank.rank}`);
    const text = h("span", { class: "nbl-each-text" });
    return { bar, text, element: h("div", { class: "nbl-each-row" }, h("span", {}, `rank ${rank.rank}`), bar, text) };
  };

  #updateRow = ({ bar, text }, rank) => {
    setText(text, formatDone(rank));
    setAttribute(bar, "data-tone", this.data.stateOf(rank).tone);
    showProgress(bar, rank, formatDone(rank));
  };
}

/** What failed, the culprits first with their tracebacks; ranks that fell with them are folded away. */
class Errors {
  topics = ["errors", "run"];

  constructor() {
    this.banner = h("div", { class: "nbl-error-line" });
    this.culprits = h("div", {});
    this.victims = h("div", {});
    this.victimCount = h("summary", {});
    this.folded = h("details", { class: "nbl-details" }, this.victimCount, this.victims);
    this.element = h(
      "section",
      { class: "nbl-errors", "aria-label": "Errors" },
      this.banner,
      this.culprits,
      this.folded,
    );
    this.cards = [this.culprits, this.victims].map((parent) => new KeyedList(parent, errorCard));
  }

  paint({ errors, run }) {
    const culprits = errors.filter((error) => !error.victim);
    const victims = errors.filter((error) => error.victim);
    const error = run.state === "stopped" ? "" : (run.error ?? ""); // A stop on request is no failure.
    setHidden(this.element, !errors.length && !error);
    setText(this.banner, error);
    setHidden(this.banner, !error || culprits.length > 0);
    [culprits, victims].forEach((some, at) =>
      this.cards[at].show(some.map((error) => [`${error.rank} ${error.summary}`, error])),
    );
    const cause = culprits.length ? ` (caused by rank ${culprits[0].rank})` : "";
    setText(this.victimCount, `${formatRankCount(victims.length)} failed as a consequence${cause}`);
    setHidden(this.folded, !victims.length);
  }
}

function errorCard({ rank, summary, traceback, victim, last_lines: lastLines }) {
  const light = new StateLight();
  light.show({ ...RUN_STATES.failed, word: `rank ${rank}` });
  const card = h(
    "div",
    { class: "nbl-error" },
    h("div", { class: "nbl-error-head" }, light.element, h("code", {}, plainText(summary))),
  );
  const fold = (title, text, open) => {
    const details = h(
      "details",
      { class: "nbl-details" },
      h("summary", {}, title),
      h("pre", { tabindex: "0" }, plainText(text)),
    );
    details.open = open;
    card.append(details);
  };
  if (traceback) fold("Traceback", traceback.trimEnd(), !victim);
  if (lastLines?.length) fold("Last lines of its output", lastLines.join("\n"), false);
  return { element: card };
}

/** What Python has to say, the newest first; a long notice, such as stacks, is folded under its first line. */
class Notices {
  topics = ["notices"];

  constructor() {
    this.element = h("section", { class: "nbl-notices", "aria-label": "Notices", "aria-live": "polite" });
    this.list = new KeyedList(this.element, noticeCard);
  }

  paint({ notices }) {
    setHidden(this.element, !notices.length);
    this.list.show([...notices].reverse().map((notice) => [notice, notice]));
  }
}

function noticeCard({ text }) {
  const [first, ...rest] = text.trimEnd().split("\n");
  if (!rest.length) return { element: h("div", { class: "nbl-notice" }, first) };
  const details = h(
    "details",
    { class: "nbl-notice nbl-details" },
    h("summary", {}, first),
    h("pre", { tabindex: "0" }, rest.join("\n")),
  );
  details.open = true;
  return { element: details };
}

// ------------------------------------------------------------------------------------------------ ranks

const any = (field) => (ranks) => ranks.some((rank) => isNumber(rank[field]));

/** Columns of the table; one with `when` is there only if that holds for the ranks. */
const COLUMNS = [
  { title: "Rank", kind: "number", text: (rank) => String(rank.rank) },
  { title: "State", kind: "state" },
  { title: "Step", kind: "number", text: (rank) => formatCount(rank.step) },
  {
    title: "Samples/s",
    kind: "number",
    text: (rank) => formatNumber(rank.samples_per_second, 3),
    hint: "All ranks together, over the last few seconds",
  },
  {
    title: "Memory",
    kind: "number",
    text: (rank) => formatBytes(rank.memory ?? rank.peak_memory),
    hint: "Resident memory now; for a rank that has ended, its peak",
  },
  { title: "GPU memory", kind: "number", text: (rank) => formatBytes(rank.gpu_memory), when: any("gpu_memory") },
  {
    title: "GPU",
    kind: "number",
    text: (rank) => formatShare(rank.gpu_utilization),
    when: any("gpu_utilization"),
    hint: "Utilisation",
  },
  {
    title: "Last line",
    kind: "line",
    text: (rank) => (rank.returned ? `returned ${rank.returned}` : plainLine(rank.last_line ?? "")),
  },
];

class RankTable extends Section {
  topics = ["ranks"];

  constructor() {
    super("Ranks");
    this.head = h("tr", {});
    this.rows = h("tbody", {});
    const table = h("table", { class: "nbl-table" }, h("thead", {}, this.head), this.rows);
    this.body.append(
      h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, table),
    );
    this.list = new KeyedList(
      this.rows,
      () => this.#makeRow(),
      (row, rank) => this.#updateRow(row, rank),
    );
  }

  paint(data) {
    this.data = data;
    const ranks = [...data.ranks.values()].sort((a, b) => a.rank - b.rank);
    setHidden(this.element, !ranks.length);
    const columns = COLUMNS.filter(({ when }) => !when || when(ranks));
    if (columns.length !== this.columns?.length) this.#setColumns(columns);
    this.list.show(ranks.map((rank) => [rank.rank, rank]));
  }

  #setColumns(columns) {
    this.columns = columns;
    this.list.show([]);
    this.head.replaceChildren(
      ...columns.map(({ title, kind, hint }) => h("th", { scope: "col", "data-kind": kind, title: hint }, title)),
    );
  }

  #makeRow() {
    const light = new StateLight();
    const slowest = h("span", { class: "nbl-tag", title: "The other ranks wait for this one" }, "slowest");
    const cells = this.columns.map(({ kind }) =>
      kind === "state" ? h("td", { "data-kind": kind }, light.element, slowest) : h("td", { "data-kind": kind }),
    );
    return { light, slowest, cells, element: h("tr", {}, ...cells) };
  }

  #updateRow({ light, slowest, cells }, rank) {
    const reason = rank.reason ?? "";
    // A rank that was stopped on request has no reason worth a word; one that ended because of another rank has.
    const isOfNoInterest = rank.state === "stopped" && !reason.startsWith("caused by ");
    light.show(this.data.stateOf(rank), isOfNoInterest ? "" : plainLine(reason));
    setHidden(slowest, !rank.slowest);
    this.columns.forEach(({ text, kind }, at) => {
      if (!text) return;
      const value = text(rank);
      setText(cells[at], value || (kind === "number" ? "–" : ""));
      if (kind === "line") setAttribute(cells[at], "title", value);
    });
  }
}

// ----------------------------------------------------------------------------------------------- curves

/** How all plots are drawn. */
class CurveOptions {
  isAveraged = null; // null: until someone chooses, averaged if there are many ranks
  isLog = false;
  smoothing = 0;
  hidden = new Set();
  pinned = new Set(); // names of metrics, in the order in which they were pinned

  averages(metric) {
    return metric.ranks.size > 1 && (this.isAveraged ?? metric.ranks.size > MANY_RANKS);
  }
}

/** 0 for "loss", 1 for names that end in it, such as "train/loss" and "val_loss", 2 for all others. */
const lossOrder = (name) => (name.toLowerCase() === "loss" ? 0 : /(^|[^a-z])loss$/i.test(name) ? 1 : 2);

/** Metrics in the order in which they are drawn: those that are pinned, the losses, the others as they appeared. */
function inOrder(metrics, pinned) {
  const places = new Map([...pinned].map((name, at) => [name, at - pinned.size]));
  const placeOf = ({ name }) => places.get(name) ?? lossOrder(name);
  return [...metrics].sort((a, b) => placeOf(a) - placeOf(b));
}

class CurveGrid extends Section {
  topics = ["curves"];
  limit = PLOTS_AT_ONCE;

  constructor(stage, options) {
    super("Curves");
    this.stage = stage;
    this.options = options;
    this.average = h("input", { type: "checkbox", onchange: () => this.#choose({ isAveraged: this.average.checked }) });
    this.log = h("input", { type: "checkbox", onchange: () => this.#choose({ isLog: this.log.checked }) });
    this.smoothing = h("input", {
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      value: "0",
      oninput: () => this.#choose({ smoothing: Number(this.smoothing.value) }),
    });
    this.smoothingValue = h("output", {}, "0.00");
    this.filter = h("input", {
      type: "search",
      placeholder: "Find a metric",
      "aria-label": "Find a metric",
      oninput: () => this.#onFilter(),
    });
    this.averageField = field(this.average, "Average of ranks");
    const smoothingField = h(
      "label",
      { class: "nbl-field" },
      h("span", {}, "Smoothing"),
      this.smoothing,
      this.smoothingValue,
    );
    this.controls.append(this.filter, this.averageField, field(this.log, "Log scale"), smoothingField);
    this.legend = h("div", { class: "nbl-legend", role: "group", "aria-label": "Ranks that are drawn" });
    this.grid = h("div", { class: "nbl-grid" });
    this.scroll = h("div", { class: "nbl-plots" }, this.grid);
    this.more = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showMore() });
    this.fewer = h("button", { type: "button", class: "nbl-button", onclick: () => this.#showFewer() }, "Show fewer");
    this.shown = h("span", { role: "status" });
    this.foot = h("div", { class: "nbl-foot" }, this.shown, this.more, this.fewer);
    this.body.append(this.legend, this.scroll, this.foot);
    this.plots = new KeyedList(
      this.grid,
      (metric) => new Plot(metric, stage, this.options, () => this.#refresh()),
      (plot, metric) => plot.update(metric),
    );
    this.chips = new KeyedList(
      this.legend,
      (rank) => this.#makeChip(rank),
      (chip, rank) => chip.update(rank),
    );
  }

  #choose(change) {
    Object.assign(this.options, change);
    setText(this.smoothingValue, this.options.smoothing.toFixed(2));
    this.#refresh();
  }

  #onFilter() {
    this.limit = PLOTS_AT_ONCE;
    this.#refresh();
  }

  #showMore() {
    this.limit += PLOTS_AT_ONCE;
    this.#refresh();
  }

  #showFewer() {
    this.limit = PLOTS_AT_ONCE;
    this.#refresh();
  }

  #refresh() {
    this.paint(this.data);
    for (const plot of this.plots.views.values()) plot.surface.invalidate();
  }

  paint(data) {
    this.data = data;
    const metrics = [...data.metrics.values()];
    const ranks = [...new Set(metrics.flatMap((metric) => [...metric.ranks.keys()]))].sort((a, b) => a - b);
    const isAveraged = this.options.isAveraged ?? ranks.length > MANY_RANKS;
    setHidden(this.element, !metrics.length);
    setHidden(this.filter, metrics.length <= SEARCHED_METRICS);
    setHidden(this.averageField, ranks.length < 2);
    if (this.average.checked !== isAveraged) this.average.checked = isAveraged;
    setHidden(this.legend, ranks.length < 2 || isAveraged);
    this.chips.show(this.legend.hidden ? [] : ranks.map((rank) => [rank, rank]));
    this.#paintPlots(metrics);
  }

  #paintPlots(metrics) {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const found = inOrder(metrics, this.options.pinned).filter(({ name }) => name.toLowerCase().includes(wanted));
    const shown = found.slice(0, this.limit);
    // Rows without an orphan: four plots stand two by two.
    this.grid.style.setProperty("--nbl-columns", shown.length === 4 ? 2 : Math.max(1, Math.min(4, shown.length)));
    this.plots.show(shown.map((metric) => [metric.name, metric]));
    this.#paintFoot(shown.length, found.length, metrics.length);
  }

  /** However many metrics are drawn, they take no more of the page than the first ones: the rest is scrolled to. */
  #paintFoot(shown, found, known) {
    const isLong = shown > PLOTS_AT_ONCE;
    this.scroll.toggleAttribute("data-long", isLong);
    for (const [name, value] of [
      ["role", "region"],
      ["aria-label", "Plots of the metrics"],
      ["tabindex", "0"],
    ])
      if (isLong) setAttribute(this.scroll, name, value);
      else this.scroll.removeAttribute(name);
    const left = found - shown;
    const words = found ? `${formatCount(shown)} of ${formatCount(found)} metrics shown` : "No metric has such a name";
    setText(this.shown, shown === known ? "" : words);
    setText(this.more, `Show ${Math.min(PLOTS_AT_ONCE, left)} more`);
    setHidden(this.more, !left);
    setHidden(this.fewer, !isLong);
    setHidden(this.foot, !this.shown.textContent && !isLong);
  }

  #makeChip(rank) {
    const swatch = h("canvas", { width: "44", height: "12", "aria-hidden": "true" });
    const element = h(
      "button",
      { type: "button", class: "nbl-chip", title: "Show or hide this rank", onclick: () => this.#toggle(rank) },
      swatch,
      `rank ${rank}`,
    );
    const update = () => {
      setAttribute(element, "aria-pressed", String(!this.options.hidden.has(rank)));
      this.#paintSwatch(swatch, rank);
    };
    return { element, update };
  }

  #paintSwatch(swatch, rank) {
    const { color, dash } = styleOf(rank);
    const ink = this.stage.theme.ranks[color];
    if (swatch.dataset.ink === ink) return;
    swatch.dataset.ink = ink;
    const context = swatch.getContext("2d");
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 22, 6);
    Object.assign(context, { strokeStyle: ink, lineWidth: 2 });
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(0, 3);
    context.lineTo(22, 3);
    context.stroke();
  }

  #toggle(rank) {
    if (!this.options.hidden.delete(rank)) this.options.hidden.add(rank);
    this.#refresh();
  }
}

const PLOT_EDGE = { top: 6, right: 3, bottom: 20, left: 1 };

/** One metric: its name, its last value, and a canvas that can be zoomed (drag, keys) and read (hover, keys). */
class Plot {
  zoom = null; // [first step, last step]
  cursor = null; // the x in pixels that is read
  drag = null; // the x in pixels where a drag began
  seen = -1;

  constructor(metric, stage, options, onPin) {
    this.options = options;
    this.onPin = onPin;
    this.surface = new Surface(stage, (...all) => this.#draw(...all), {
      class: "nbl-canvas nbl-plot-canvas",
      tabindex: "0",
      role: "img",
    });
    this.latest = h("span", { class: "nbl-latest" });
    this.reset = h(
      "button",
      { type: "button", class: "nbl-link", title: "Or double-click the plot", onclick: () => this.#setZoom(null) },
      "Reset zoom",
    );
    this.pin = h("button", {
      type: "button",
      class: "nbl-pin",
      "aria-label": `Pin ${metric.name}`,
      title: "Keep this metric first",
      onclick: () => this.#togglePin(),
    });
    this.pin.append(icon(PIN));
    const caption = h(
      "figcaption",
      {},
      this.pin,
      h("span", { class: "nbl-plot-name", title: metric.name }, metric.name),
      this.reset,
      this.latest,
    );
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.tooltip = new Tooltip(frame);
    this.element = h("figure", { class: "nbl-plot" }, caption, frame);
    this.reset.hidden = true;
    this.#listen(this.surface.canvas);
  }

  remove() {
    this.surface.stage.unwatch(this.surface);
  }

  #togglePin() {
    const { pinned } = this.options;
    if (!pinned.delete(this.metric.name)) pinned.add(this.metric.name);
    this.onPin();
    this.pin.focus(); // It has moved, and an element that moves loses the focus.
  }

  update(metric) {
    setAttribute(this.pin, "aria-pressed", String(this.options.pinned.has(metric.name)));
    if (this.metric === metric && this.seen === metric.version) return;
    [this.metric, this.seen] = [metric, metric.version];
    setText(this.latest, this.#latestText());
    setAttribute(
      this.surface.canvas,
      "aria-label",
      `${metric.name}, last value ${this.latest.textContent}. Arrow keys read values, plus and minus zoom, Escape shows all.`,
    );
    this.surface.invalidate();
  }

  #latestText() {
    const curves = [...this.metric.ranks];
    const broken = curves.filter(([, curve]) => curve.last === null).map(([rank]) => rank);
    if (broken.length)
      return curves.length === 1
        ? "not finite"
        : `not finite on rank ${broken.slice(0, 3).join(", ")}${broken.length > 3 ? "…" : ""}`;
    const mean = curves.reduce((sum, [, curve]) => sum + curve.last, 0) / curves.length;
    const gaps = curves.some(([, curve]) => curve.hasGaps) ? "some not finite, " : "";
    return `${gaps}${curves.length === 1 ? "" : "mean "}${formatValue(mean)}`;
  }

  // -- the pointer and the keys

  #listen(canvas) {
    const at = (event) => event.offsetX;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.drag = at(event);
    });
    canvas.addEventListener("pointermove", (event) => this.#read(at(event)));
    canvas.addEventListener("pointerup", (event) => this.#endDrag(at(event)));
    canvas.addEventListener("pointercancel", () => this.#endDrag(null));
    canvas.addEventListener("pointerleave", () => this.#read(null));
    canvas.addEventListener("blur", () => this.#read(null));
    canvas.addEventListener("dblclick", () => this.#setZoom(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    const box = this.box;
    if (!box) return;
    const middle = (box.left + box.right) / 2;
    const step = (box.right - box.left) / 40;
    const keys = {
      ArrowLeft: () => this.#read(Math.max(box.left, (this.cursor ?? middle) - step), "polite"),
      ArrowRight: () => this.#read(Math.min(box.right, (this.cursor ?? middle) + step), "polite"),
      "+": () => this.#scaleZoom(this.cursor ?? middle, 0.5),
      "=": () => this.#scaleZoom(this.cursor ?? middle, 0.5),
      "-": () => this.#scaleZoom(this.cursor ?? middle, 2),
      Escape: () => this.#setZoom(null),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  #endDrag(x) {
    const from = this.drag;
    this.drag = null;
    if (from !== null && x !== null && this.box && Math.abs(x - from) > 4)
      this.#setZoom([this.#stepAt(Math.min(from, x)), this.#stepAt(Math.max(from, x))]);
    else this.surface.invalidate();
  }

  #scaleZoom(x, factor) {
    const center = this.#stepAt(x);
    const half = (factor * (this.domain[1] - this.domain[0])) / 2;
    const [first, last] = this.extent;
    const zoom = [Math.max(first, center - half), Math.min(last, center + half)];
    if (zoom[1] - zoom[0] >= last - first) this.#setZoom(null);
    else if (zoom[1] > zoom[0]) this.#setZoom(zoom);
  }

  #setZoom(zoom) {
    this.zoom = zoom;
    setHidden(this.reset, !zoom);
    this.surface.invalidate();
  }

  /** Show what stands at x; what keys ask for is spoken as well. */
  #read(x, loudness = "off") {
    this.cursor = x;
    setAttribute(this.tooltip.element, "aria-live", loudness);
    this.surface.invalidate();
  }

  #stepAt(x) {
    const { left, right } = this.box;
    const part = Math.min(1, Math.max(0, (x - left) / (right - left)));
    return this.domain[0] + part * (this.domain[1] - this.domain[0]);
  }

  // -- the picture

  /** What is drawn: lines with a label, a style, steps, values and, behind a smoothed line, the raw values. */
  #lines(theme) {
    const { smoothing, hidden } = this.options;
    if (this.options.averages(this.metric)) {
      const { curve, low, high } = this.metric.average();
      const line = {
        label: "mean",
        ink: theme.ranks[0],
        dash: [],
        steps: curve.steps,
        raw: curve.values,
        values: curve.smoothed(smoothing),
      };
      return [{ ...line, band: { low, high } }];
    }
    return [...this.metric.ranks]
      .filter(([rank]) => !hidden.has(rank))
      .map(([rank, curve]) => {
        const { color, dash } = styleOf(rank);
        return {
          label: `rank ${rank}`,
          ink: theme.ranks[color],
          dash,
          steps: curve.steps,
          raw: curve.values,
          values: curve.smoothed(smoothing),
        };
      });
  }

  #draw(context, width, height, theme) {
    const lines = this.#lines(theme);
    this.extent = extentOf(lines.map((line) => line.steps));
    this.domain = this.zoom ?? this.extent;
    const scale = this.extent && valueScale(lines, this.domain, this.options.isLog);
    this.box = null;
    if (!scale) return this.#drawWords(context, width, height, theme);
    const ticks = scale.ticks(6);
    const label = Math.max(...ticks.map(({ text }) => context.measureText(text).width));
    this.box = {
      left: PLOT_EDGE.left + label + 6,
      right: width - PLOT_EDGE.right,
      top: PLOT_EDGE.top,
      bottom: height - PLOT_EDGE.bottom,
    };
    const { left, right, top, bottom } = this.box;
    const span = this.domain[1] - this.domain[0];
    const toX = (step) => (span ? left + ((step - this.domain[0]) / span) * (right - left) : (left + right) / 2);
    const toY = (value) => bottom - scale.part(value) * (bottom - top);
    this.#drawAxes(context, theme, ticks, toX);
    context.save();
    context.beginPath();
    context.rect(left - 1, top - 3, right - left + 3, bottom - top + 8);
    context.clip();
    for (const line of lines) this.#drawLine(context, line, toX, toY);
    this.#drawDrag(context, theme);
    context.restore();
    return this.#drawCursor(context, theme, lines, toX, toY);
  }

  #drawWords(context, width, height, theme) {
    const words =
      this.options.isLog && this.extent
        ? "Nothing above zero to show on a log scale"
        : this.metric.ranks.size && !this.extent
          ? "All ranks are hidden"
          : "No finite value";
    Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.6, textAlign: "center", textBaseline: "middle" });
    context.fillText(words, width / 2, height / 2);
    context.globalAlpha = 1;
    this.tooltip.hide();
  }

  #drawAxes(context, theme, ticks, toX) {
    const { left, right, top, bottom } = this.box;
    Object.assign(context, {
      fillStyle: theme.ink,
      strokeStyle: theme.ink,
      lineWidth: 1,
      textAlign: "right",
      textBaseline: "middle",
    });
    for (const { part, text } of ticks) {
      const y = Math.round(bottom - part * (bottom - top)) + 0.5;
      context.globalAlpha = 0.07;
      context.strokeRect(left, y, right - left, 0);
      context.globalAlpha = 0.62;
      context.fillText(text, left - 6, y);
    }
    context.globalAlpha = 0.35;
    context.strokeRect(left, bottom + 0.5, right - left, 0);
    context.globalAlpha = 0.62;
    context.textBaseline = "top";
    const steps =
      this.domain[0] === this.domain[1] ? [this.domain[0]] : linearTicks(...this.domain, (right - left) / 70);
    for (const step of steps) {
      if (!Number.isInteger(step) && this.domain[1] - this.domain[0] >= 2) continue;
      const text = formatStep(step);
      const half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(Math.max(toX(step), half), right + PLOT_EDGE.right - half - 1), bottom + 6);
    }
    context.globalAlpha = 1;
  }

  #drawLine(context, { ink, dash, steps, values, raw, band }, toX, toY) {
    Object.assign(context, { strokeStyle: ink, fillStyle: ink, lineJoin: "round", lineWidth: 1 });
    if (band) fillBand(context, steps, band, toX, toY);
    context.setLineDash([]);
    if (values !== raw) {
      context.globalAlpha = 0.25;
      strokeRuns(context, pixelLine(steps, raw, toX, toY));
      context.globalAlpha = 1;
    }
    // A line that goes up and down in each column has no visible dashes of its own: its columns are left out instead,
    // which is a third of the work as well.
    const [first, last] = this.domain;
    const count = steps.reduce((sum, step) => sum + (step >= first && step <= last), 0);
    const isDense = count > this.box.right - this.box.left;
    context.lineWidth = 1.6;
    context.setLineDash(isDense ? [] : dash);
    strokeRuns(context, pixelLine(steps, values, toX, toY, isDense ? dash : []), isDense ? 0.8 : 2);
    context.setLineDash([]);
    // Where a value is not finite, a tick hangs from the axis.
    steps.forEach((step, at) => {
      if (raw[at] === null) context.fillRect(Math.round(toX(step)) - 1, this.box.bottom + 1, 2, 4);
    });
  }

  #drawDrag(context, theme) {
    if (this.drag === null || this.cursor === null) return;
    Object.assign(context, { fillStyle: theme.ink, globalAlpha: 0.12 });
    context.fillRect(
      Math.min(this.drag, this.cursor),
      this.box.top,
      Math.abs(this.cursor - this.drag),
      this.box.bottom - this.box.top,
    );
    context.globalAlpha = 1;
  }

  #drawCursor(context, theme, lines, toX, toY) {
    if (this.cursor === null) return this.tooltip.hide();
    const step = nearestStep(lines, this.#stepAt(this.cursor), this.domain);
    if (step === null) return this.tooltip.hide();
    const x = toX(step);
    Object.assign(context, { strokeStyle: theme.ink, globalAlpha: 0.4, lineWidth: 1 });
    context.strokeRect(Math.round(x) + 0.5, this.box.top, 0, this.box.bottom - this.box.top);
    context.globalAlpha = 1;
    const rows = [];
    for (const { label, ink, steps, values, band } of lines) {
      const at = steps.lastIndexOf(step);
      if (at < 0) continue;
      rows.push({ color: ink, label, value: formatValue(values[at]) });
      if (band)
        rows.push(
          { label: "lowest", value: formatValue(band.low[at]) },
          { label: "highest", value: formatValue(band.high[at]) },
        );
      context.fillStyle = ink;
      if (values[at] !== null && Number.isFinite(toY(values[at]))) fillDot(context, x, toY(values[at]), 3);
    }
    const more = rows.length - TOOLTIP_ROWS;
    if (more > 0) rows.splice(TOOLTIP_ROWS, more, { label: `and ${more} more`, value: "" });
    return this.tooltip.show(x, 0, `step ${formatCount(step)}`, rows);
  }
}

/** The lowest and the highest of lists of numbers, without those that are null; null if there is none. */
function extentOf(lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/** Map values to 0..1 over what lies in `domain`; null where there is nothing to show. */
function valueScale(lines, domain, isLog) {
  const toScale = isLog ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
  const inside = lines.map(({ steps, raw, band }) => {
    const found = [];
    steps.forEach((step, at) => {
      if (step < domain[0] || step > domain[1] || raw[at] === null) return;
      for (const value of band ? [band.low[at], band.high[at]] : [raw[at]])
        if (!Number.isNaN(toScale(value))) found.push(toScale(value));
    });
    return found;
  });
  const extent = extentOf(inside);
  if (!extent) return null;
  const pad = 0.06 * extent[1] - 0.06 * extent[0] || (isLog ? 0.5 : Math.abs(extent[0]) * 0.1 || 1);
  const [low, high] = [Math.max(extent[0] - pad, -Number.MAX_VALUE), Math.min(extent[1] + pad, Number.MAX_VALUE)];
  // By halves: from -1e308 to 1e308 is further than a number can say.
  const part = (scaled) => (scaled / 2 - low / 2) / (high / 2 - low / 2);
  const ticks = (count) => {
    const found = isLog ? logTicks(low, high, count) : linearTicks(low, high, count);
    const spacing = found.length > 1 ? found[1] - found[0] : 1;
    return found.map((at) => ({ part: part(at), text: isLog ? formatNumber(10 ** at) : formatTick(at, spacing) }));
  };
  return { part: (value) => part(toScale(value)), ticks };
}

/** The step nearest to `wanted` that any of the lines has inside `domain`. */
function nearestStep(lines, wanted, domain) {
  let nearest = null;
  for (const { steps } of lines) {
    for (const step of steps) {
      if (step < domain[0] || step > domain[1]) continue;
      if (nearest === null || Math.abs(step - wanted) < Math.abs(nearest - wanted)) nearest = step;
    }
  }
  return nearest;
}

/** Shade what lies between the lowest and the highest rank. */
function fillBand(context, steps, { low, high }, toX, toY) {
  context.globalAlpha = 0.16;
  const there = steps
    .map((_, at) => at)
    .filter((at) => low[at] !== null && Number.isFinite(toY(low[at])) && Number.isFinite(toY(high[at])));
  context.beginPath();
  for (const at of there) context.lineTo(toX(steps[at]), toY(high[at]));
  for (const at of there.reverse()) context.lineTo(toX(steps[at]), toY(low[at]));
  context.fill();
  context.globalAlpha = 1;
}

// --------------------------------------------------------------------------------------------- timeline

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
class Timeline extends Section {
  topics = ["lanes", "run"];

  constructor(stage) {
    super("Timeline");
    const options = WINDOW_CHOICES.map(([value, label]) => h("option", { value }, label));
    this.windows = h(
      "select",
      { "aria-label": "How much of the timeline", onchange: () => this.surface.invalidate() },
      ...options,
    );
    this.controls.append(this.windows);
    this.text = h("p", { class: "nbl-sync" });
    const entries = [...Object.entries(PHASES), ["", { letter: "", word: "other" }]];
    const chips = entries.map(([phase, { letter, word }]) =>
      h("span", { class: "nbl-phase" }, h("i", { "data-phase": phase }, letter), word),
    );
    this.legend = h("div", { class: "nbl-legend" }, ...chips);
    this.surface = new Surface(stage, (...all) => this.#draw(...all), { class: "nbl-canvas", role: "img" });
    const frame = h("div", { class: "nbl-frame" }, this.surface.canvas);
    this.body.append(
      this.text,
      this.legend,
      h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": "Lanes of the ranks" }, frame),
    );
    this.tooltip = new Tooltip(frame);
    this.surface.canvas.addEventListener("pointermove", (event) => this.#read(event.offsetX, event.offsetY));
    this.surface.canvas.addEventListener("pointerleave", () => this.tooltip.hide());
  }

  paint({ lanes, run }, changed) {
    setText(this.text, run.sync?.text ?? "");
    setHidden(this.text, !this.text.textContent);
    if (changed.has("lanes")) this.#paintLanes(lanes);
  }

  #paintLanes(lanes) {
    this.lanes = [...lanes]
      .filter(([, spans]) => spans.length)
      .sort(([a], [b]) => a - b)
      .slice(0, MAX_LANES);
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
      context.fillStyle = theme.phases[phase] ?? theme.ink;
      // A hair of ground between neighbours, where there is room for it.
      context.fillRect(x, top, width > 3 ? width - 0.75 : width, height);
      if (phase === "sync" && width > 3) hatch(context, x, top, width - 0.75, height, theme.ground);
      if (width >= LETTER_ROOM && PHASES[phase])
        this.#drawLetter(context, theme, PHASES[phase].letter, x + width / 2, top + height / 2);
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
    return this.tooltip.show(x, y + 12, `rank ${lane[0]}, ${PHASES[phase]?.word ?? phase}`, [
      { label: "took", value: formatSeconds(seconds) },
      { label: "at", value: formatSeconds(at) },
    ]);
  }
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

// ------------------------------------------------------------------------------------------------- logs

const ALL = "all";

/** What the ranks wrote: a tab for each and one for all, searched, or only where ranks differ. */
class Logs extends Section {
  topics = ["logs", "ranks"];
  selected = ALL;

  constructor(uid) {
    super("Logs");
    this.panelId = `${uid}-log`;
    this.search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the log",
      oninput: () => this.#paintLines(),
    });
    this.differences = h("input", { type: "checkbox", onchange: () => this.#paintLines() });
    this.differencesField = field(this.differences, "Only differences");
    this.differencesField.title = "Hide lines that every rank wrote";
    this.controls.append(this.search, this.differencesField);
    this.tabs = h("div", {
      class: "nbl-tabs",
      role: "tablist",
      "aria-label": "Rank whose log is shown",
      onkeydown: (event) => this.#onKey(event),
    });
    this.count = h("div", { class: "nbl-count", role: "status" });
    this.panel = h("div", { class: "nbl-log", role: "tabpanel", id: this.panelId, tabindex: "0" });
    this.body.append(this.tabs, this.panel, this.count);
    this.tabList = new KeyedList(
      this.tabs,
      (key) => this.#makeTab(key),
      (tab, key) => this.#updateTab(tab, key),
    );
    this.lineList = new KeyedList(
      this.panel,
      (line) => new LogLine(line),
      (row, line) => row.update(line, this.words, this.selected === ALL),
    );
  }

  paint(data, changed) {
    this.data = data;
    this.#paintTabs(data);
    if (changed.has("logs")) this.#paintLines();
  }

  #paintTabs(data) {
    const ranks = data.rankNumbers;
    setHidden(this.element, !data.logs.size);
    setHidden(this.tabs, ranks.length < 2);
    setHidden(this.differencesField, ranks.length < 2);
    if (!ranks.includes(this.selected)) this.selected = ALL;
    this.tabList.show([ALL, ...ranks].map((key) => [key, key]));
    setAttribute(this.panel, "aria-labelledby", `${this.panelId}-${this.selected}`);
  }

  #paintLines() {
    const { data } = this;
    const kept = this.selected === ALL ? data.lines : (data.logs.get(this.selected)?.lines ?? []);
    const common = this.differences.checked && !this.differencesField.hidden ? data.commonTexts() : new Set();
    this.words = this.search.value.toLowerCase();
    const found = kept.filter(
      (line) => !common.has(line.text) && (!this.words || line.text.toLowerCase().includes(this.words)),
    );
    const shown = found.slice(-SHOWN_LINES);
    const wasAtEnd = this.panel.scrollHeight - this.panel.scrollTop - this.panel.clientHeight < 24;
    this.lineList.show(shown.map((line) => [line, line]));
    if (wasAtEnd) this.panel.scrollTop = this.panel.scrollHeight;
    setText(this.count, this.#countText(kept.length, found.length, shown.length));
  }

  #countText(kept, found, shown) {
    if (!kept) return "Nothing written yet";
    if (!found)
      return this.words
        ? `No line contains “${this.search.value}” (${formatCount(kept)} searched)`
        : "Every rank wrote the same lines";
    const lines =
      found === kept
        ? `${formatCount(kept)} ${kept === 1 ? "line" : "lines"}`
        : `${formatCount(found)} of ${formatCount(kept)} lines`;
    return shown < found ? `Last ${formatCount(shown)} of ${lines}` : lines;
  }

  #makeTab(key) {
    const element = h("button", {
      type: "button",
      class: "nbl-tab",
      role: "tab",
      id: `${this.panelId}-${key}`,
      "aria-controls": this.panelId,
      onclick: () => this.#select(key),
    });
    return { element };
  }

  #updateTab({ element }, key) {
    const isSelected = key === this.selected;
    const failed = this.data.ranks.get(key)?.state === "failed";
    setText(element, key === ALL ? "all" : `rank ${key}${failed ? " (failed)" : ""}`);
    setAttribute(element, "aria-selected", String(isSelected));
    setAttribute(element, "tabindex", isSelected ? "0" : "-1");
  }

  #select(key) {
    this.selected = key;
    this.#paintTabs(this.data);
    this.#paintLines();
    this.panel.scrollTop = this.panel.scrollHeight;
  }

  #onKey(event) {
    const keys = [...this.tabList.views.keys()];
    const at = keys.indexOf(this.selected);
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: keys.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.#select(keys[(target + keys.length) % keys.length]);
    const tab = this.tabList.views.get(this.selected).element;
    tab.focus();
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

class LogLine {
  #drawn = null;

  constructor(line) {
    this.rank = h("span", { class: "nbl-line-rank" }, String(line.rank));
    this.rank.style.color = `var(--nbl-rank-${styleOf(line.rank).color})`;
    this.text = h("span", { class: "nbl-line-text" });
    this.element = h("div", { class: "nbl-line" }, this.rank, this.text);
  }

  update({ text }, words, isMerged) {
    setHidden(this.rank, !isMerged);
    const drawn = `${words}\n${text}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.text.replaceChildren(...(words ? markWords(text, words) : [text || "\u00a0"]));
  }
}

/** Split a text around what was searched for, without regard to case. */
function markWords(text, words) {
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return [text]; // a few capitals grow: then positions would be wrong
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}

// ---------------------------------------------------------------------------------------------- the widget

const GONE = new Set(["restarting", "autorestarting", "dead", "terminating"]);

/** What the last view of a model knew and how it was set, by the model's key, for the view that takes its place. */
const HANDED_ON = new Map();

/** One view of a monitor; two views of one model know nothing of each other. */
class MonitorView {
  #life = new AbortController();
  #clock = 0;

  constructor(model, el, onKnown = () => {}) {
    this.model = model;
    this.kernel = model.widget_manager?.kernel; // JupyterLab's; other front ends do not tell of theirs
    this.onKnown = onKnown;
    this.key = model.get("key");
    const { data, options } = HANDED_ON.get(this.key) ?? {};
    HANDED_ON.delete(this.key);
    this.data = data ?? new RunData(model.get("title") ?? "");
    this.data.markAll();
    this.options = options ?? new CurveOptions();
    this.stage = new Stage(
      () => readTheme(this.root),
      () => this.#paintViews(),
    );
    this.live = h("div", { class: "nbl-unseen", role: "status", "aria-live": "polite" });
    const uid = `nbl-${Math.random().toString(36).slice(2)}`;
    const announce = (text) => setText(this.live, text);
    this.header = new Header((message) => this.#send(message), announce);
    this.views = [
      this.header,
      new Progress(),
      new Errors(),
      new Notices(),
      new RankTable(),
      new CurveGrid(this.stage, this.options),
      new Timeline(this.stage),
      new Logs(uid),
    ];
    // JupyterLab's shortcuts (two zeros restart the kernel) must not hear keys that are pressed in here.
    const attributes = {
      class: "nbl-monitor",
      role: "group",
      "aria-label": "Monitor of a run",
      "data-lm-suppress-shortcuts": "true",
    };
    this.root = h("div", attributes, this.live, ...this.views.map((view) => view.element));
    el.append(this.root);
    this.#listen();
    this.stage.request();
    this.#send({ type: "hello", page: PAGE });
  }

  #listen() {
    this.model.on("msg:custom", this.#onMessage);
    this.model.on("comm:close", this.#onComm);
    this.model.on("comm_live_update", this.#onComm);
    this.kernel?.statusChanged?.connect(this.#onKernel);
    const { signal } = this.#life;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.#onTheme, { signal });
    this.themes = new MutationObserver(this.#onTheme);
    for (const target of [document.documentElement, document.body]) this.themes.observe(target, { attributes: true });
  }

  #onMessage = (message) => {
    if (message?.type !== "reset" && message?.type !== "update") return;
    this.data.take(message);
    this.#keepTime();
    this.stage.request();
  };

  /** The kernel's comm is gone or has come back: a kernel that is only out of reach answers the hello. */
  #onComm = () => {
    this.#send({ type: "hello", page: PAGE });
    this.#setLink(GONE.has(this.kernel?.status) ? "lost" : "silent");
  };

  #onKernel = (_, status) => {
    if (GONE.has(status)) this.#setLink("lost");
  };

  #setLink(link) {
    if (link === "silent" && this.data.link === "lost") return;
    this.data.setLink(link);
    this.#keepTime();
    this.stage.request();
  }

  #onTheme = () => {
    this.data.changed.add("curves");
    this.stage.invalidateAll();
  };

  /** Send, and tell whether that went well; a closed comm throws or rejects. */
  #send(message) {
    try {
      Promise.resolve(this.model.send(message)).catch(() => this.#setLink("silent"));
      return true;
    } catch {
      this.#setLink("silent");
      return false;
    }
  }

  /** Let the clock tick while there is something to count, and at no other time. */
  #keepTime() {
    if (this.data.isLive && !this.#clock) this.#clock = setInterval(() => this.#tick(), 1000);
    if (this.data.isLive || !this.#clock) return;
    clearInterval(this.#clock);
    this.#clock = 0;
  }

  #tick() {
    this.header.tick(this.data);
    if (performance.now() - this.data.heardAt > 1000 * SILENCE) this.#setLink("silent");
  }

  #paintViews() {
    if (this.data.isKnown) this.onKnown();
    const changed = this.data.changed;
    this.data.changed = new Set();
    for (const view of this.views) if (view.topics.some((topic) => changed.has(topic))) view.paint(this.data, changed);
  }

  close() {
    if (this.key && this.data.isKnown) HANDED_ON.set(this.key, { data: this.data, options: this.options });
    this.#life.abort();
    this.themes.disconnect();
    this.stage.close();
    clearInterval(this.#clock);
    this.model.off("msg:custom", this.#onMessage);
    this.model.off("comm:close", this.#onComm);
    this.model.off("comm_live_update", this.#onComm);
    this.kernel?.statusChanged?.disconnect(this.#onKernel);
    this.root.remove();
  }
}

// The picture that a run leaves in the notebook is covered with the monitor for as long as the model lives. What is
// saved is the picture alone, so a notebook without its kernel shows no widget that is missing.
class Covering {
  #views = new Map(); // by the element that is covered

  constructor(model) {
    this.model = model;
    this.key = model.get("key");
    this.observer = new MutationObserver((records) => this.#onChange(records));
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.#find(document.body);
  }

  #onChange(records) {
    for (const [element, view] of this.#views) {
      if (element.isConnected) continue;
      view.close();
      this.#views.delete(element);
    }
    for (const { addedNodes } of records)
      for (const node of addedNodes) if (node instanceof Element) this.#find(node.parentElement ?? node);
  }

  #find(root) {
    for (const element of root.querySelectorAll(`[data-nbl-explore="${CSS.escape(this.key)}"]`))
      if (!this.#views.has(element)) this.#cover(element);
    if (this.#views.size) this.#setCovered(true);
  }

  #cover(element) {
    const host = h("div", { "data-nbl-host": "" });
    host.hidden = true;
    element.append(host);
    const onKnown = () => {
      if (!host.hidden) return;
      host.hidden = false;
      this.#setCovered(true);
    };
    this.#views.set(element, new MonitorView(this.model, host, onKnown));
  }

  /** Hide the pictures, or show them again. */
  #setCovered(isCovered) {
    const isShown = [...this.#views.keys()].some((element) => !element.lastElementChild.hidden);
    const pictures = [...this.#views.keys()].flatMap((element) => [...element.children].slice(0, -1));
    const others = document.querySelectorAll(`[data-nbl-cover="${CSS.escape(this.key)}"]`);
    for (const picture of [...pictures, ...others]) picture.style.display = isCovered && isShown ? "none" : "";
  }

  close() {
    this.observer.disconnect();
    this.#setCovered(false);
    for (const view of this.#views.values()) view.close();
    for (const element of this.#views.keys()) element.lastElementChild.remove();
    this.#views.clear();
    HANDED_ON.delete(this.key);
  }
}

function initialize({ model }) {
  if (!model.get("key")) return undefined;
  const covering = new Covering(model);
  return () => covering.close();
}

function render({ model, el }) {
  const view = new MonitorView(model, el);
  return () => view.close();
}

export default { initialize, render };
