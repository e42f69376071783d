import { h, KeyedList, ProgressBar, setAttribute, setHidden, setText, showText, StateLight } from "./elements.js";
import { plainText } from "./text.js";
import { formatSeconds, isNumber } from "./units.js";

/** @import { RunData } from "./model.js" */
/** @import { Action, PageMessage, ProgressItem, RankItem, Topic } from "./wire" */

/** @type {{ type: Action, label: string, title: string }[]} */
const ACTIONS = [
  { type: "stop", label: "Stop after this step", title: "Each rank finishes its step, then the run ends" },
  { type: "interrupt", label: "Interrupt", title: "Stop every rank now, wherever it is" },
  { type: "stacks", label: "Dump stacks", title: "Show what every rank is executing now" },
  { type: "save", label: "Save now", title: "All ranks save a checkpoint after the same update" },
  { type: "pause", label: "Pause", title: "Hold all ranks after the same update" },
];
const RESUME = { type: /** @type {Action} */ ("resume"), label: "Resume", title: "Continue training on all ranks" };

/** State, name and age of the run, the buttons that act on it, and hints about them. */
export class Header {
  /** @type {Topic[]} */
  topics = ["run"];
  #isPaused = false;
  #send;
  #announce;

  /**
   * @param {(message: PageMessage) => boolean} send returns false if the kernel cannot be reached
   * @param {(text: string) => void} announce reads a text aloud in a screen reader
   */
  constructor(send, announce) {
    this.#send = send;
    this.#announce = announce;
    this.light = new StateLight();
    this.name = h("span", { class: "nbl-name" });
    this.clock = h("span", { class: "nbl-clock", role: "timer", "aria-live": "off", title: "Time since the launch" });
    this.left = h("span", { class: "nbl-clock", title: "Time until the end of the run, at its pace so far" });
    this.summary = h("div", { class: "nbl-summary" });
    // Without a live region: the seconds in it grow, and the change of the state is read aloud already.
    this.waiting = h("div", { class: "nbl-waiting" });
    this.hint = h("div", { class: "nbl-hint", role: "status" });
    this.buttons = ACTIONS.map((action) => {
      const onclick = () => this.#onClick(this.#now(action));
      return { action, button: h("button", { type: "button", class: "nbl-button", onclick }) };
    });
    const identity = h("div", { class: "nbl-identity" }, this.light.element, this.name, this.clock, this.left);
    const buttons = this.buttons.map(({ button }) => button);
    this.actions = h("div", { class: "nbl-actions", role: "group", "aria-label": "Control the run" }, ...buttons);
    this.element = h(
      "header",
      { class: "nbl-header" },
      h("div", { class: "nbl-top" }, identity, this.actions),
      this.summary,
      this.waiting,
      this.hint,
    );
  }

  /** While the ranks are held, Pause is Resume. @param {typeof ACTIONS[number]} action */
  #now(action) {
    return action.type === "pause" && this.#isPaused ? RESUME : action;
  }

  /** @param {{ type: Action, label: string }} action */
  #onClick({ type, label }) {
    if (this.#send({ type })) showText(this.hint, `Requested: ${label}.`);
  }

  /** @param {RunData} data */
  paint(data) {
    const { run, state } = data;
    this.light.show(state);
    setText(this.name, run.name ?? "");
    setAttribute(this.name, "title", run.id ?? "");
    const batch = run.effective_batch && `effective batch ${run.effective_batch}`;
    setAttribute(this.summary, "title", [run.arguments, run.summary, batch].filter(Boolean).join("\n"));
    showText(this.summary, [run.arguments, run.summary, batch].filter(Boolean).join(" · "));
    showText(this.left, data.isLive && !data.isPaused ? (run.left ?? "") : "");
    showText(this.waiting, plainText(run.waiting ?? ""));
    showText(this.hint, this.#hint(data));
    this.#isPaused = data.isPaused;
    for (const { action, button } of this.buttons) {
      const { type, label, title } = this.#now(action);
      button.disabled = data.link !== "up" || Boolean(run.is_over) || !run.actions?.[type];
      setAttribute(button, "data-action", type);
      setAttribute(button, "title", (action.type === "pause" && button.disabled && run.change_hint) || title);
      setText(button, label);
    }
    setHidden(this.actions, Boolean(run.is_over));
    this.#announce(run.name ? `${run.name}: ${state.word}` : state.word);
    this.tick(data);
  }

  /** @param {RunData} data */
  #hint({ run, link }) {
    if (run.is_over) return run.state === "lost" ? "The kernel ended before the run did." : "";
    if (link === "up") return run.action_hint ?? "";
    if (link === "silent") return "Kernel not responding. Last update shown.";
    if (run.back) return `The kernel restarted or ended; the run continues: ${run.back} shows it again.`;
    const folder = run.id ? ` open_run("${run.id}") shows what its folder holds.` : "";
    return `The kernel restarted or ended. The run has ended too. Last update shown.${folder}`;
  }

  /**
   * Bring the clock up to date.
   * @param {RunData} data
   */
  tick(data) {
    const seconds = data.isLive ? Math.floor(data.seconds) : data.seconds;
    setText(this.clock, data.isKnown ? formatSeconds(seconds) : "");
  }
}

/** Progress of the slowest rank, and of each rank on demand. */
export class Progress {
  /** @type {Topic[]} */
  topics = ["run", "ranks"];
  /** @type {RankItem[]} */
  #ranks = [];
  /** @type {RunData | undefined} */
  #data;

  constructor() {
    this.done = h("span", {});
    this.pace = h("span", { class: "nbl-pace" });
    this.text = h("div", { class: "nbl-progress-text" }, this.done, this.pace);
    this.bar = new ProgressBar("Progress of the slowest rank");
    this.bar.element.title = "Progress of the slowest rank";
    const rows = h("div", { class: "nbl-each" });
    const ontoggle = () => this.#paintRows();
    this.details = h("details", { class: "nbl-details", ontoggle }, h("summary", {}, "Each rank"), rows);
    this.element = h("div", { class: "nbl-progress" }, this.text, this.bar.element, this.details);
    this.element.hidden = true;
    this.rows = new KeyedList(
      rows,
      (/** @type {RankItem} */ { rank }) => new ProgressRow(rank),
      (row, rank) => row.show(rank, /** @type {RunData} */ (this.#data)),
    );
  }

  /** @param {RunData} data */
  paint(data) {
    this.#data = data;
    this.#ranks = [...data.ranks.values()].filter((rank) => isNumber(rank.done));
    const progress = data.run.progress ?? null;
    setHidden(this.element, !progress && !this.#ranks.length);
    setHidden(this.text, !progress);
    setHidden(this.bar.element, !progress);
    setHidden(this.details, this.#ranks.length < 2);
    if (progress) this.#paintSlowest(progress, data);
    this.#paintRows();
  }

  /** @param {ProgressItem} progress @param {RunData} data */
  #paintSlowest(progress, data) {
    setText(this.done, progress.text);
    setText(this.pace, data.isLive && !data.isPaused ? progress.pace : "");
    this.bar.show(progress, progress.text, data.state);
  }

  #paintRows() {
    this.rows.show(this.details.open ? this.#ranks.map((rank) => [rank.rank, rank]) : []);
  }
}

/** Progress of one rank. */
class ProgressRow {
  /** @param {number} rank */
  constructor(rank) {
    this.bar = new ProgressBar(`Progress of rank ${rank}`);
    this.text = h("span", { class: "nbl-each-text" });
    const label = h("span", {}, `rank ${rank}`);
    this.element = h("div", { class: "nbl-each-row" }, label, this.bar.element, this.text);
  }

  /** @param {RankItem} rank @param {RunData} data */
  show(rank, data) {
    setText(this.text, rank.words.done);
    this.bar.show(rank, rank.words.done, data.stateOf(rank));
  }
}
