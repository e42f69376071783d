import { ENDED_RANKS, NOT_RESPONDING, RANK_STATES, RUN_STATES, UNKNOWN_STATE } from "./legend.js";
import { Metric } from "./series.js";
import { MAX_LINE_LENGTH, plainLine, plainText } from "./units.js";

const MAX_LINES = 5000; // of a rank's log
const MAX_SPANS = 1024; // of a rank's timeline
const MAX_NOTICES = 20;

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
export class RunData {
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
