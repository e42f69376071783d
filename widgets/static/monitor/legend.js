import { Units } from "./units.js";

// States that only the page knows: no message says them.

export const UNANSWERED = { word: "waiting for the kernel", tone: "quiet", shape: "ring" };
export const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };
export const LOST = { word: "lost", tone: "warn", shape: "dash" };

/** Words, letters, colours, limits and number formats, as the record LEGEND of a `reset` message has them. */
export class Legend {
  #runStates;
  #rankStates;

  constructor({ phases, run_states: runStates, rank_states: rankStates, limits, formats }) {
    this.phases = phases;
    this.limits = limits;
    this.units = new Units(formats);
    this.#runStates = runStates;
    this.#rankStates = rankStates;
  }

  runState(name) {
    return this.#runStates[name] ?? this.#rankStates.unknown;
  }

  rankState(name) {
    return this.#rankStates[name] ?? this.#rankStates.unknown;
  }
}
