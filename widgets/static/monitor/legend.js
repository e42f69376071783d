/** @import { LegendItem, StateLook } from "./wire" */

// States of the link to the kernel, which no message reports.
/** @type {StateLook} */
export const UNANSWERED = { word: "waiting for the kernel", tone: "quiet", shape: "ring" };
/** @type {StateLook} */
export const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };
/** @type {StateLook} */
export const LOST = { word: "lost", tone: "warn", shape: "dash" };
/** A detached run whose kernel has ended. @type {StateLook} */
export const CONTINUES = { word: "continues elsewhere", tone: "live", shape: "dash" };

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
