import { plainLine, plainText } from "./units.js";

// States of the link to the kernel, which no message reports.
const UNANSWERED = { word: "waiting for the kernel", tone: "quiet", shape: "ring" };
const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };
const LOST = { word: "lost", tone: "warn", shape: "dash" };
const CONTINUES = { word: "continues elsewhere", tone: "live", shape: "dash" }; // a detached run whose kernel has ended

let lastNumber = 0;
/** Return a number by which lines and notices of the same text are told apart. */
const newNumber = () => ++lastNumber;

/** Output of a rank: finished lines, and one that has no end yet. */
class RankLog {
  lines = [];
  #open = null;
  #raw = "";
  #rank;
  #limits;

  constructor(rank, limits) {
    this.#rank = rank;
    this.#limits = limits;
  }

  /** Append text. Return the lines that it begins. */
  extend(text) {
    const { lines: maxLines, line_characters: maxCharacters } = this.#limits;
    const pieces = text.split("\n");
    const added = [];
    pieces.forEach((piece, at) => {
      this.#raw = (this.#raw + piece).slice(-2 * maxCharacters);
      const ends = at < pieces.length - 1;
      if (!this.#open && (ends || this.#raw)) {
        this.#open = { rank: this.#rank, text: "", number: newNumber() };
        added.push(this.#open);
      }
      if (this.#open) this.#open.text = plainLine(this.#raw).slice(0, maxCharacters);
      if (ends) [this.#open, this.#raw] = [null, ""];
    });
    appendBounded(this.lines, added, maxLines);
    return added;
  }
}

/** Append items to a list and remove the oldest ones beyond a limit. */
function appendBounded(list, items, limit) {
  for (const item of items) list.push(item);
  if (list.length > limit) list.splice(0, list.length - limit);
}

/** Return the value of a key, created if it is missing. */
function getOrCreate(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

/** Return a plot with the points that a message adds: of each list the page has the first `keep` ones. */
function wholePlot(item, known) {
  const lines = item.lines.map((line, at) => {
    const whole = { ...line };
    for (const name of ["x", "y", "smooth", "low", "high"])
      if (line[name]) whole[name] = [...(known?.lines[at]?.[name] ?? []).slice(0, line.keep), ...line[name]];
    return whole;
  });
  return { ...item, lines, zoomed: known?.zoomed };
}

/** State of a run as the messages reported it; `wire.d.ts` describes what the items are. */
export class RunData {
  /** False until the first `reset`: before, there is no legend. */
  isKnown = false;
  /** State of the link to the kernel: "up", "silent" (it may answer again) or "lost" (it has restarted or ended). */
  link = "up";
  /** @type {import("./wire").LegendItem} */
  legend;
  /** @type {import("./wire").RunItem} */
  run;
  ranks = new Map();
  plots = new Map();
  /** @type {import("./wire").PlottingItem} */
  plotting = { axis: "step", grouped: true, average: false, smoothing: 0, order: [], can_group: false, has_epochs: false, num_ranks: 0, marks: [], turn: 0 };
  /** Files that no view has offered yet. */
  files = [];
  /** Memory and load of the ranks. */
  usage = new Map();
  /** Pictures by name and rank, the oldest first. */
  pictures = new Map();
  /** Spans by rank, the oldest first. */
  lanes = new Map();
  logs = new Map();
  /** Lines of all ranks in the order of their arrival. */
  lines = [];
  /** @type {import("./wire").ErrorsItem} */
  errors = { culprits: [], victims: [], victims_title: "" };
  notices = [];
  /** Settings that can be changed, as they are now. */
  settings = [];
  changes = [];
  /** The last answer for each setting. */
  answers = new Map();
  /** The last finding of each kind. */
  findings = new Map();
  lastMessageAt = performance.now();
  /** Time at which `run.seconds` held. */
  #runReceivedAt = performance.now();

  constructor(name) {
    this.run = { name };
  }

  receive(message) {
    this.lastMessageAt = performance.now();
    // A kernel that ended may have sent an update before. Only the answer to a hello shows that a kernel is alive.
    if (message.type === "reset" || this.link !== "lost") this.link = "up";
    if (message.type === "reset") this.#reset(message.legend);
    // The model's messages go to all of its views. This one may be an update for a view that was there before.
    if (this.isKnown) this.#add(message);
  }

  #reset(legend) {
    Object.assign(this, new RunData(""), { isKnown: true, legend });
  }

  /** @param {import("./wire").News} message */
  #add(message) {
    const { limits } = this.legend;
    if (message.run) this.#setRun(message.run);
    for (const rank of message.ranks ?? []) this.ranks.set(rank.rank, rank);
    for (const plot of message.plots ?? []) this.plots.set(plot.key, wholePlot(plot, this.plots.get(plot.key)));
    for (const plot of message.usage ?? []) this.usage.set(plot.key, wholePlot(plot, this.usage.get(plot.key)));
    if (message.plotting) {
      this.plotting = message.plotting;
      const order = new Set(this.plotting.order);
      for (const key of this.plots.keys()) if (!order.has(key)) this.plots.delete(key);
    }
    for (const zoomed of message.zoomed ?? []) {
      const plot = this.plots.get(zoomed.key);
      if (plot) this.plots.set(zoomed.key, { ...plot, zoomed });
    }
    this.files.push(...(message.files ?? []));
    for (const picture of message.pictures ?? []) {
      const key = JSON.stringify([picture.name, picture.rank]);
      appendBounded(getOrCreate(this.pictures, key, () => []), [picture], limits.pictures);
    }
    for (const { rank, spans } of message.lanes ?? [])
      appendBounded(getOrCreate(this.lanes, rank, () => []), spans, limits.spans);
    for (const { rank, text } of message.logs ?? []) {
      const log = getOrCreate(this.logs, rank, () => new RankLog(rank, limits));
      appendBounded(this.lines, log.extend(text), limits.lines);
    }
    if (message.errors) this.errors = message.errors;
    const notices = (message.notices ?? []).map((text) => ({ text: plainText(text), number: newNumber() }));
    appendBounded(this.notices, notices, limits.notices);
    if (message.settings?.length) this.settings = message.settings;
    this.changes.push(...(message.changes ?? []));
    for (const answer of message.answers ?? []) this.answers.set(answer.name, answer);
    for (const finding of message.findings ?? []) this.findings.set(finding.kind, finding);
  }

  #setRun(run) {
    // A run that loses machines continues with fewer ranks. Those that do not come back leave their logs alone.
    const [before = 0, after = before] = [this.run.num_processes, run.num_processes];
    for (let rank = after; rank < before; rank++) {
      this.ranks.delete(rank);
      this.lanes.delete(rank);
    }
    [this.run, this.#runReceivedAt] = [run, performance.now()];
  }

  get isLive() {
    return this.isKnown && this.link === "up" && !this.run.is_over;
  }

  /** Appearance of the run's state. Without a link to the kernel, the state of a live run is that of the link. */
  get state() {
    if (!this.run.is_over && this.link === "lost") return this.run.outlives ? CONTINUES : LOST;
    if (!this.run.is_over && this.link !== "up") return NOT_RESPONDING;
    return this.isKnown ? (this.legend.run_states[this.run.state] ?? this.legend.rank_states.unknown) : UNANSWERED;
  }

  /** Return the appearance of a rank's state. Without a link, the state of a live rank is that of the link. */
  stateOf(rank) {
    const state = this.legend.rank_states[rank.state] ?? this.legend.rank_states.unknown;
    if (this.isPaused && rank.state === "waiting") return this.state;
    const isCut = !this.run.is_over && this.link !== "up" && !state.is_over;
    return isCut ? this.state : state;
  }

  /** True while all ranks are held: none waits for another, and a pace of before says nothing. */
  get isPaused() {
    return this.run.state === "paused";
  }

  /** Seconds since the launch: the last reported number, continued by the page's clock while the run is live. */
  get seconds() {
    const since = this.isLive ? (performance.now() - this.#runReceivedAt) / 1000 : 0;
    return (this.run.seconds ?? 0) + since;
  }

  get rankNumbers() {
    return [...new Set([...this.ranks.keys(), ...this.logs.keys()])].sort((a, b) => a - b);
  }

  /** Return the texts of lines that every rank wrote. */
  commonTexts() {
    const logs = this.rankNumbers.map((rank) => this.logs.get(rank)?.lines ?? []);
    if (logs.length < 2) return new Set();
    const sets = logs.map((lines) => new Set(lines.map(({ text }) => text)));
    return sets.reduce((common, texts) => new Set([...common].filter((text) => texts.has(text))));
  }
}
