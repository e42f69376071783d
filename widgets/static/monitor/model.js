import { Legend, LOST, NOT_RESPONDING, UNANSWERED } from "./legend.js";
import { Metric } from "./series.js";
import { plainLine, plainText } from "./units.js";

/** What a rank wrote: whole lines, and the one that has no end yet. */
class RankLog {
  lines = [];
  #open = null;
  #raw = "";
  #limits;

  constructor(limits) {
    this.#limits = limits;
  }

  /** Take in text. Return the lines that are new. */
  extend(rank, text) {
    const { lines: maxLines, line_characters: maxCharacters } = this.#limits;
    const pieces = text.split("\n");
    const added = [];
    pieces.forEach((piece, at) => {
      this.#raw = (this.#raw + piece).slice(-2 * maxCharacters);
      const ends = at < pieces.length - 1;
      if (!this.#open && (ends || this.#raw)) {
        this.#open = { rank, text: "" };
        added.push(this.#open);
      }
      if (this.#open) this.#open.text = plainLine(this.#raw).slice(0, maxCharacters);
      if (ends) [this.#open, this.#raw] = [null, ""];
    });
    appendBounded(this.lines, added, maxLines);
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
  legend = null; // until the first `reset`
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
    this.errors = [];
    this.notices = [];
    this.markAll();
  }

  receive(message) {
    if (message.type === "reset") {
      this.#forget();
      this.legend = new Legend(message.legend);
    }
    this.lastMessageAt = performance.now();
    // An update may have been on its way when the kernel went; only the answer to a hello comes from one that lives.
    if (message.type === "reset" || this.link !== "lost") this.setLink("up");
    if (!this.isKnown) return; // An update for another view, on its way while this one waits for its `reset`.
    for (const [topic, receive] of Object.entries(RunData.#receivers)) {
      const news = message[topic];
      if (!news || news.length === 0) continue;
      this.changed.add(topic);
      receive(this, news);
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

  static #receivers = {
    run: (data, run) => {
      data.run = run;
      data.receivedAt = performance.now();
    },
    ranks: (data, ranks) => {
      for (const rank of ranks) data.ranks.set(rank.rank, rank);
    },
    curves: (data, curves) => {
      for (const curve of curves) {
        if (!data.metrics.has(curve.name)) data.metrics.set(curve.name, new Metric(curve.name, data.legend.limits.points));
        data.metrics.get(curve.name).extend(curve);
      }
    },
    lanes: (data, lanes) => {
      for (const { rank, spans } of lanes) {
        if (!data.lanes.has(rank)) data.lanes.set(rank, []);
        appendBounded(data.lanes.get(rank), spans, data.legend.limits.spans);
      }
    },
    logs: (data, logs) => {
      for (const { rank, text } of logs) {
        if (!data.logs.has(rank)) data.logs.set(rank, new RankLog(data.legend.limits));
        appendBounded(data.lines, data.logs.get(rank).extend(rank, text), data.legend.limits.lines);
      }
    },
    errors: (data, errors) => {
      appendBounded(data.errors, errors, data.legend.limits.lines);
    },
    notices: (data, notices) => {
      appendBounded(
        data.notices,
        notices.map((text) => ({ text: plainText(text) })),
        data.legend.limits.notices,
      );
    },
  };

  get isKnown() {
    return this.legend !== null;
  }

  get isLive() {
    return this.isKnown && this.link === "up" && !this.run.is_over;
  }

  /** The state that is known to hold now: without a link to the kernel, that of a live run is not. */
  get state() {
    if (!this.run.is_over && this.link !== "up") return this.link === "lost" ? LOST : NOT_RESPONDING;
    return this.isKnown ? this.legend.runState(this.run.state) : UNANSWERED;
  }

  /** The same of a rank. */
  stateOf(rank) {
    const state = this.legend.rankState(rank.state);
    const isCut = !this.run.is_over && this.link !== "up" && !state.is_over;
    return isCut ? this.state : state;
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
