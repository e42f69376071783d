// The live monitor of a run: an anywidget front end in one module, because anywidget loads one.
//
// Python -> page: {type: "reset", ...} is the whole run and answers {type: "hello"}; {type: "update", ...}
// has the same keys, each optional. `run` and the entries of `ranks` replace what was known; entries of
// `curves`, `lanes`, `logs`, `errors` and `notices` are appended. A number that is not finite is null.
// Page -> Python: hello, stop, interrupt, stacks, save.
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
const MANY_RANKS = 8; // beyond, curves are averaged unless asked otherwise
const TOOLTIP_ROWS = 8;

// ------------------------------------------------------------------------------------- words and numbers

const RUN_STATES = {
  starting: { word: "starting", tone: "quiet", shape: "ring" },
  running: { word: "running", tone: "live", shape: "disc" },
  stopping: { word: "stopping", tone: "warn", shape: "square" },
  done: { word: "done", tone: "good", shape: "check" },
  failed: { word: "failed", tone: "bad", shape: "cross" },
  stopped: { word: "stopped", tone: "quiet", shape: "square" },
  lost: { word: "lost: the kernel ended first", tone: "warn", shape: "dash" },
};

const RANK_STATES = {
  starting: RUN_STATES.starting,
  running: { word: "training", tone: "live", shape: "disc" },
  waiting: { word: "waiting in a collective", tone: "warn", shape: "hourglass" },
  saving: { word: "saving", tone: "live", shape: "arrow" },
  asking: { word: "asks for input", tone: "warn", shape: "diamond" },
  returned: RUN_STATES.done,
  failed: RUN_STATES.failed,
  stopped: RUN_STATES.stopped,
};

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

const ACTIONS = [
  { type: "stop", label: "Stop after this step", title: "All ranks end at the same step; what they return is kept" },
  { type: "interrupt", label: "Interrupt", title: "Raise KeyboardInterrupt in every rank now" },
  { type: "stacks", label: "Dump stacks", title: "Show what every rank is executing now" },
  { type: "save", label: "Save now", title: "All ranks save a checkpoint at the same step" },
];

const PHASES = {
  data: { letter: "D", word: "data" },
  forward: { letter: "F", word: "forward" },
  backward: { letter: "B", word: "backward" },
  sync: { letter: "S", word: "synchronise" },
  step: { letter: "O", word: "optimizer step" },
};

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const formatCount = (value) => (isNumber(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 1 }) : "–");

const formatShare = (value) => (isNumber(value) ? `${Math.round(100 * value)} %` : "–");

const formatRankCount = (count) => `${count} ${count === 1 ? "rank" : "ranks"}`;

/** Four significant digits, as short as they go: 0.1234, 1,234, 1.23e-7. */
function formatValue(value) {
  if (!isNumber(value)) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

/** Powers of 1000, as the rest of the package counts. */
function formatBytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** 0:07, 2:31, 1:02:31. */
function formatClock(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function formatSeconds(seconds) {
  if (seconds < 1e-3) return `${(1e6 * seconds).toFixed(0)} µs`;
  return seconds < 1 ? `${(1e3 * seconds).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

const formatRate = (rate) => (rate >= 1 ? `${rate.toFixed(1)} it/s` : `${(1 / rate).toFixed(1)} s/it`);

const formatDone = ({ done, total }) =>
  total ? `${formatCount(done)} of ${formatCount(total)} (${formatShare(done / total)})` : `${formatCount(done ?? 0)} done`;

// Escape sequences (colours, cursor, titles), then every other control character but the tab.
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]/g;
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

/** What a terminal would show of a line: what stands after the last carriage return, without colours. */
function plainLine(raw) {
  const written = raw.replace(/\r+$/, "");
  return written.slice(written.lastIndexOf("\r") + 1).replace(ESCAPES, "").replace(CONTROLS, "").slice(0, MAX_LINE_LENGTH);
}

const plainText = (raw) => String(raw ?? "").split("\n").map(plainLine).join("\n");

// ------------------------------------------------------------------------------- what is known of the run

/** One metric of one rank: at most MAX_POINTS points, thinned so that every peak and every gap stays. */
class Curve {
  steps = [];
  values = [];
  version = 0;
  #smoothed = { weight: 0, version: -1, values: [] };

  extend({ steps, values, replace }) {
    if (replace) [this.steps, this.values] = [[], []];
    for (let at = 0; at < steps.length; at += 1) {
      this.steps.push(steps[at]);
      this.values.push(isNumber(values[at]) ? values[at] : null);
      if (this.steps.length > MAX_POINTS) this.#thin();
    }
    this.version += 1;
  }

  #thin() {
    const kept = [];
    for (let start = 0; start < this.steps.length; start += 4) kept.push(...this.#extremes(start, start + 4));
    this.steps = kept.map((at) => this.steps[at]);
    this.values = kept.map((at) => this.values[at]);
  }

  #extremes(start, end) {
    let [low, high, gap] = [-1, -1, -1];
    for (let at = start; at < Math.min(end, this.values.length); at += 1) {
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
  isConnected = true;

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
    for (const topic of ["run", "ranks", "curves", "lanes", "logs", "errors", "notices"]) this.changed.add(topic);
  }

  take(message) {
    if (message.type === "reset") {
      this.#forget();
      this.isKnown = true;
    }
    if (!this.isConnected) this.changed.add("run");
    this.isConnected = true;
    for (const [topic, take] of Object.entries(RunData.#takers)) {
      const news = message[topic];
      if (!news || news.length === 0) continue;
      this.changed.add(topic);
      take(this, news);
    }
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
      appendBounded(data.notices, notices.map((text) => ({ text: plainText(text) })), MAX_NOTICES);
    },
  };

  get isLive() {
    return this.isKnown && this.isConnected && !this.run.is_over;
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

/** A state as a shape in a colour; the word stands beside it. */
class StateLight {
  constructor() {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", "0 0 12 12");
    svg.setAttribute("aria-hidden", "true");
    svg.append(this.path);
    this.word = h("span", { class: "nbl-state-word" });
    this.element = h("span", { class: "nbl-state" }, svg, this.word);
  }

  show({ word, tone, shape }, reason = "") {
    setAttribute(this.element, "data-tone", tone);
    setAttribute(this.path, "d", SHAPES[shape]);
    setText(this.word, reason ? `${word}: ${reason}` : word);
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
    const heading = h("div", { class: "nbl-heading" }, h("div", { class: "nbl-title", role: "heading", "aria-level": "3" }, title), this.controls);
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

  constructor(beforeSurfaces) {
    this.beforeSurfaces = beforeSurfaces;
  }

  request() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.beforeSurfaces();
      for (const surface of this.#surfaces.values()) if (surface.isVisible && surface.isStale) surface.paint(this.theme);
    });
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
const styleOf = (rank) => ({ color: rank % PALETTE, dash: DASHES[(rank + Math.floor(rank / PALETTE)) % DASHES.length] });

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
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const spacing = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let at = Math.ceil(low / spacing - 1e-9); at * spacing <= high + 1e-9 * spacing && ticks.length < 50; at += 1) ticks.push(at * spacing);
  return ticks;
}

/** Powers of ten between two exponents; where that is fewer than two, 1, 2 and 5 times them. */
function logTicks(low, high, count) {
  const powers = linearTicks(low, high, count).filter((at) => Math.abs(at - Math.round(at)) < 1e-9);
  if (powers.length >= 2) return powers;
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1) for (const factor of [1, 2, 5]) ticks.push(power + Math.log10(factor));
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

const formatStep = (step) => (Math.abs(step) >= 1e6 ? `${formatValue(step / 1e6)}M` : Math.abs(step) >= 1e4 ? `${formatValue(step / 1e3)}k` : formatValue(step));

/** Draw a line through at most four points a pixel column: first, lowest, highest, last. Null lifts the pen. */
function traceLine(context, steps, values, toX, toY) {
  const lone = [];
  let [column, first, low, high, last, count, x0] = [null, 0, 0, 0, 0, 0, 0];
  const flush = () => {
    if (column === null) return;
    if (count === 0) context.moveTo(x0, first);
    else context.lineTo(x0, first);
    if (low !== first) context.lineTo(column, low);
    if (high !== low) context.lineTo(column, high);
    if (last !== high) context.lineTo(column, last);
    count += low === high ? 1 : 2;
    if (count === 1) lone.push([x0, first]);
    else if (count === 2) lone.pop();
  };
  const lift = () => {
    flush();
    if (count > 1) lone.length = Math.min(lone.length, lone.length);
    [column, count] = [null, 0];
  };
  context.beginPath();
  for (let at = 0; at < steps.length; at += 1) {
    const y = values[at] === null ? null : toY(values[at]);
    if (y === null || (at && steps[at] < steps[at - 1])) lift();
    if (y === null) continue;
    const x = toX(steps[at]);
    if (Math.round(x) === column) [low, high, last] = [Math.min(low, y), Math.max(high, y), y];
    else {
      flush();
      [column, x0, first, low, high, last] = [Math.round(x), x, y, y, y, y];
    }
  }
  flush();
  context.stroke();
  return lone;
}
