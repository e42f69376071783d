import { plainLine, plainText } from "./text.js";

/** @import { AnswerItem, ChangeItem, ErrorItem, LegendItem, Limits, PictureItem, RankItem, Reset, RunItem } from "./wire" */
/** @import { FileItem, FindingItem, LineItem, Measure, PlotItem, PlottingItem, SettingItem, Span, StateLook } from "./wire" */
/** @import { Topic, Update, ZoomedItem } from "./wire" */

/** @typedef {{ rank: number, text: string }} LogText a line of a rank's log; an unfinished line still grows */
/** @typedef {Omit<LineItem, "keep">} Line a line of a plot, whole */
/** @typedef {Omit<PlotItem, "lines"> & { lines: Line[], zoomed?: ZoomedItem }} PlotData */

/** @type {Topic[]} */
const TOPICS = [
  ...(/** @type {const} */ (["run", "ranks", "plots", "plotting", "zoomed", "files", "pictures", "lanes", "usage", "logs"])),
  ...(/** @type {const} */ (["errors", "notices", "settings", "changes", "answers", "findings"])),
];

// States of the link to the kernel, which no message reports.
/** @type {StateLook} */
const UNANSWERED = { word: "waiting for the kernel", tone: "quiet", shape: "ring" };
/** @type {StateLook} */
const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };
/** @type {StateLook} */
const LOST = { word: "lost", tone: "warn", shape: "dash" };
/** A detached run whose kernel has ended. @type {StateLook} */
const CONTINUES = { word: "continues elsewhere", tone: "live", shape: "dash" };

/** Words, letters, colours and limits: the tables of notebook_launcher/drawing/legend.py. */
export class Legend {
  #runStates;
  #rankStates;

  /** @param {LegendItem} item */
  constructor({ phases, run_states: runStates, rank_states: rankStates, limits }) {
    this.phases = phases;
    this.limits = limits;
    this.#runStates = runStates;
    this.#rankStates = rankStates;
  }

  /** @param {string} [name] */
  runState(name = "") {
    return this.#runStates[name] ?? this.#rankStates.unknown;
  }

  /** @param {string} [name] */
  rankState(name = "") {
    return this.#rankStates[name] ?? this.#rankStates.unknown;
  }
}

/** Output of a rank: finished lines, and one that has no end yet. */
class RankLog {
  /** @type {LogText[]} */
  lines = [];
  /** @type {LogText | null} */
  #open = null;
  #raw = "";
  #rank;
  #limits;

  /** @param {number} rank @param {Limits} limits */
  constructor(rank, limits) {
    this.#rank = rank;
    this.#limits = limits;
  }

  /**
   * Append text. Return the lines that it begins.
   * @param {string} text
   */
  extend(text) {
    const { lines: maxLines, line_characters: maxCharacters } = this.#limits;
    const pieces = text.split("\n");
    /** @type {LogText[]} */
    const added = [];
    pieces.forEach((piece, at) => {
      this.#raw = (this.#raw + piece).slice(-2 * maxCharacters);
      const ends = at < pieces.length - 1;
      if (!this.#open && (ends || this.#raw)) {
        this.#open = { rank: this.#rank, text: "" };
        added.push(this.#open);
      }
      if (this.#open) this.#open.text = plainLine(this.#raw).slice(0, maxCharacters);
      if (ends) [this.#open, this.#raw] = [null, ""];
    });
    appendBounded(this.lines, added, maxLines);
    return added;
  }
}

/**
 * Append items to a list and remove the oldest ones beyond a limit.
 * @template Item
 * @param {Item[]} list
 * @param {Item[]} items
 * @param {number} limit
 */
function appendBounded(list, items, limit) {
  for (const item of items) list.push(item);
  if (list.length > limit) list.splice(0, list.length - limit);
}

/**
 * Return the value of a key, created if it is missing.
 * @template Key, Value
 * @param {Map<Key, Value>} map
 * @param {Key} key
 * @param {() => Value} make
 * @returns {Value}
 */
function getOrCreate(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return /** @type {Value} */ (map.get(key));
}

/**
 * Return a plot with the points that a message adds.
 * @param {PlotItem} item
 * @param {PlotData | undefined} known
 * @returns {PlotData}
 */
function wholePlot(item, known) {
  const lines = item.lines.map((line, at) => {
    const before = known?.lines[at];
    const join = (/** @type {any[] | undefined} */ old, /** @type {any[]} */ more) => [...(old ?? []).slice(0, line.keep), ...more];
    const { x, y, smooth, low, high } = line;
    const whole = { ...line, x: join(before?.x, x), y: join(before?.y, y) };
    if (smooth) whole.smooth = join(before?.smooth, smooth);
    if (low && high) [whole.low, whole.high] = [join(before?.low, low), join(before?.high, high)];
    return whole;
  });
  return { ...item, lines, zoomed: known?.zoomed };
}

/** State of a run as the messages reported it, and the topics that changed since the last frame. */
export class RunData {
  /** @type {Set<Topic>} */
  changed = new Set();
  /** True from the first `reset` on. Before, there is no legend. */
  isKnown = false;
  legend = /** @type {Legend} */ (/** @type {unknown} */ (null));
  /**
   * State of the link to the kernel. A silent kernel may answer again, a lost one has restarted or ended.
   * @type {"up" | "silent" | "lost"}
   */
  link = "up";
  /** @type {RunItem} */
  run;
  /** @type {Map<number, RankItem>} */
  ranks = new Map();
  /** @type {Map<string, PlotData>} */
  plots = new Map();
  /** @type {PlottingItem} */
  plotting = { axis: "step", grouped: true, average: false, smoothing: 0, order: [], can_group: false, has_epochs: false, num_ranks: 0, marks: [], turn: 0 };
  /** Files that no view has offered yet. @type {FileItem[]} */
  files = [];
  /** Memory and load of the ranks. @type {Map<string, PlotData>} */
  usage = new Map();
  /** Pictures by name and rank, the oldest first. @type {Map<string, PictureItem[]>} */
  pictures = new Map();
  /** Spans by rank, the oldest first. @type {Map<number, Span[]>} */
  lanes = new Map();
  /** @type {Map<number, RankLog>} */
  logs = new Map();
  /** Lines of all ranks in the order of their arrival. @type {LogText[]} */
  lines = [];
  /** @type {ErrorItem[]} */
  errors = [];
  /** @type {{ text: string }[]} */
  notices = [];
  /** Settings that can be changed, as they are now. @type {SettingItem[]} */
  settings = [];
  /** @type {ChangeItem[]} */
  changes = [];
  /** The last answer for each setting. @type {Map<string, AnswerItem>} */
  answers = new Map();
  /** The last finding of each kind. @type {Map<Measure, FindingItem>} */
  findings = new Map();
  lastMessageAt = performance.now();
  /** Time at which `run.seconds` held. */
  #runReceivedAt = performance.now();

  /** @param {string} name */
  constructor(name) {
    this.run = { name };
    this.markAllChanged();
  }

  /** @param {Reset | Update} message */
  receive(message) {
    this.lastMessageAt = performance.now();
    // A kernel that ended may have sent an update before. Only the answer to a hello shows that a kernel is alive.
    if (message.type === "reset" || this.link !== "lost") this.setLink("up");
    if (message.type === "reset") this.#reset(new Legend(message.legend));
    // The model's messages go to all of its views. This one may be an update for a view that was there before.
    if (this.isKnown) this.#add(message);
  }

  /** @param {Legend} legend */
  #reset(legend) {
    [this.isKnown, this.legend, this.run] = [true, legend, {}];
    const { ranks, plots, usage, pictures, lanes, logs, answers, findings } = this;
    for (const map of [ranks, plots, usage, pictures, lanes, logs, answers, findings]) map.clear();
    [this.lines, this.errors, this.notices, this.settings, this.changes] = [[], [], [], [], []];
    this.markAllChanged();
  }

  /** @param {Reset | Update} message */
  #add(message) {
    const { run, ranks = [], plots = [], plotting, zoomed = [], files = [], lanes = [], logs = [], errors = [], notices = [] } = message;
    const { pictures = [], settings = [], changes = [], answers = [], findings = [], usage = [] } = message;
    const { limits } = this.legend;
    const single = { run: run ? [run] : [], plotting: plotting ? [plotting] : [] };
    const known = { ...single, ranks, plots, zoomed, files, pictures, lanes, usage, logs };
    const topics = { ...known, errors, notices, settings, changes, answers, findings };
    for (const topic of TOPICS) if (topics[topic].length) this.changed.add(topic);
    if (run) {
      const before = this.run.num_processes ?? 0;
      this.#forgetRanks(before, run.num_processes ?? before);
      [this.run, this.#runReceivedAt] = [run, performance.now()];
    }
    for (const rank of ranks) this.ranks.set(rank.rank, rank);
    for (const plot of plots) this.plots.set(plot.key, wholePlot(plot, this.plots.get(plot.key)));
    for (const plot of usage) this.usage.set(plot.key, wholePlot(plot, this.usage.get(plot.key)));
    if (plotting) this.#setPlotting(plotting);
    for (const item of zoomed) {
      const plot = this.plots.get(item.key);
      if (plot) this.plots.set(item.key, { ...plot, zoomed: item });
    }
    this.files.push(...files);
    for (const picture of pictures) {
      const key = JSON.stringify([picture.name, picture.rank]);
      appendBounded(
        getOrCreate(this.pictures, key, () => []),
        [picture],
        limits.pictures,
      );
    }
    for (const { rank, spans } of lanes) {
      appendBounded(
        getOrCreate(this.lanes, rank, () => []),
        spans,
        limits.spans,
      );
    }
    for (const { rank, text } of logs) {
      const log = getOrCreate(this.logs, rank, () => new RankLog(rank, limits));
      appendBounded(this.lines, log.extend(text), limits.lines);
    }
    appendBounded(this.errors, errors, limits.lines);
    if (settings.length) this.settings = settings;
    this.changes = [...this.changes, ...changes];
    for (const answer of answers) this.answers.set(answer.name, answer);
    for (const finding of findings) this.findings.set(finding.kind, finding);
    // An object each, so that two notices of the same text are told apart.
    const texts = notices.map((text) => ({ text: plainText(text) }));
    appendBounded(this.notices, texts, limits.notices);
  }

  /** @param {PlottingItem} plotting */
  #setPlotting(plotting) {
    this.plotting = plotting;
    const order = new Set(plotting.order);
    for (const key of this.plots.keys()) if (!order.has(key)) this.plots.delete(key);
  }

  /**
   * Forget ranks that do not come back: a run that loses machines continues with fewer. Their logs stay.
   * @param {number} before
   * @param {number} after
   */
  #forgetRanks(before, after) {
    for (let rank = after; rank < before; rank++) {
      this.ranks.delete(rank);
      this.lanes.delete(rank);
      this.changed.add("ranks").add("lanes");
    }
  }

  /** @param {"up" | "silent" | "lost"} link */
  setLink(link) {
    if (this.link === link) return;
    this.link = link;
    this.changed.add("run").add("ranks");
  }

  /** Mark all topics as changed, for a view that has drawn nothing yet. */
  markAllChanged() {
    for (const topic of TOPICS) this.changed.add(topic);
  }

  get isLive() {
    return this.isKnown && this.link === "up" && !this.run.is_over;
  }

  /** Appearance of the run's state. Without a link to the kernel, the state of a live run is that of the link. */
  get state() {
    if (!this.run.is_over && this.link === "lost") return this.run.back ? CONTINUES : LOST;
    if (!this.run.is_over && this.link !== "up") return NOT_RESPONDING;
    return this.isKnown ? this.legend.runState(this.run.state) : UNANSWERED;
  }

  /**
   * Return the appearance of a rank's state. Without a link, the state of a live rank is that of the link.
   * @param {RankItem} rank
   * @returns {StateLook}
   */
  stateOf(rank) {
    const state = this.legend.rankState(rank.state);
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
    // A text that all ranks wrote is in the shortest log.
    const [shortest, ...others] = logs.sort((a, b) => a.length - b.length);
    let common = new Set(shortest.map((line) => line.text));
    for (const lines of others) {
      common = new Set(lines.map((line) => line.text).filter((text) => common.has(text)));
    }
    return common;
  }
}
