import { fold, h, make, progressBar, show, stateLight } from "./elements.js";
import { plainText } from "./text.js";
import { formatSeconds, isNumber } from "./units.js";

/** Requests: the words of their buttons, and their tooltips. */
const ACTIONS = {
  stop: ["Stop after this step", "Each rank finishes its step, then the run ends"],
  interrupt: ["Interrupt", "Stop every rank now, wherever it is"],
  stacks: ["Dump stacks", "Show what every rank is executing now"],
  save: ["Save now", "All ranks save a checkpoint after the same update"],
  pause: ["Pause", "Hold all ranks after the same update"],
  resume: ["Resume", "Continue training on all ranks"],
};

/** State, name and age of the run, the buttons that act on it, and hints about them. */
export class Header {
  element = make("header", { class: "nbl-header" });
  #send;
  /** The last request, and the item RUN at that time. */
  #asked = { run: null, label: "" };

  constructor(send) {
    this.#send = send;
  }

  paint(data) {
    const { run, link, state } = data;
    const facts = [run.arguments, run.summary, run.effective_batch && `effective batch ${run.effective_batch}`].filter(Boolean);
    const seconds = data.isLive ? Math.floor(data.seconds) : data.seconds;
    const left = data.isLive && !data.isPaused && run.left;
    const identity = h(
      "div",
      { class: "nbl-identity" },
      stateLight(state),
      h("span", { class: "nbl-name", title: run.id }, run.name),
      h("span", { class: "nbl-clock", role: "timer", "aria-live": "off", title: "Time since the launch" }, data.isKnown && formatSeconds(seconds)),
      left && h("span", { class: "nbl-clock", title: "Time until the end of the run, at its pace so far" }, left),
    );
    const buttons = Object.keys(ACTIONS).filter((type) => type !== (data.isPaused ? "pause" : "resume"));
    const actions = { class: "nbl-actions", role: "group", "aria-label": "Control the run" };
    const hint = link === "up" && this.#asked.run === run ? `Requested: ${this.#asked.label}.` : hintOf(data);
    show(
      this.element,
      h("div", { class: "nbl-top" }, identity, !run.is_over && h("div", actions, buttons.map((type) => this.#button(type, data)))),
      facts.length > 0 && h("div", { class: "nbl-summary", title: facts.join("\n") }, facts.join(" · ")),
      // Without a live region: the seconds in it grow, and the change of the state is read aloud already.
      run.waiting && h("div", { class: "nbl-waiting" }, plainText(run.waiting)),
      h("div", { class: "nbl-hint", role: "status", hidden: !hint }, hint),
    );
  }

  #button(type, data) {
    const { run, link } = data;
    const [label, words] = ACTIONS[type];
    const disabled = link !== "up" || !run.actions?.[type];
    const title = (type === "pause" && disabled && run.change_hint) || words;
    const onclick = () => {
      if (!this.#send({ type })) return;
      this.#asked = { run, label };
      this.paint(data);
    };
    return h("button", { type: "button", class: "nbl-button", "data-action": type, disabled, title, onclick }, label);
  }
}

function hintOf({ run, link }) {
  if (run.is_over) return run.state === "lost" ? "The kernel ended before the run did." : "";
  if (link === "up") return run.action_hint ?? "";
  if (link === "silent") return "Kernel not responding. Last update shown.";
  if (run.back) return `The kernel restarted or ended; the run continues: ${run.back} shows it again.`;
  const folder = run.id ? ` open_run("${run.id}") shows what its folder holds.` : "";
  return `The kernel restarted or ended. The run has ended too. Last update shown.${folder}`;
}

/** Progress of the slowest rank, and of each rank on demand. */
export class Progress {
  element = make("div", { class: "nbl-progress", hidden: true });
  #isOpen = false;

  paint(data) {
    const ranks = [...data.ranks.values()].filter((rank) => isNumber(rank.done));
    const { progress } = data.run;
    const isMoving = data.isLive && !data.isPaused;
    const row = (rank) =>
      h(
        "div",
        { class: "nbl-each-row", key: rank.rank },
        h("span", {}, `rank ${rank.rank}`),
        progressBar(rank, rank.words.done, data.stateOf(rank), `Progress of rank ${rank.rank}`),
        h("span", { class: "nbl-each-text" }, rank.words.done),
      );
    const ontoggle = ({ target }) => {
      if (this.#isOpen === target.open) return;
      this.#isOpen = target.open;
      this.paint(data);
    };
    this.element.hidden = !progress && !ranks.length;
    show(
      this.element,
      progress && h("div", { class: "nbl-progress-text" }, h("span", {}, progress.text), h("span", { class: "nbl-pace" }, isMoving && progress.pace)),
      progress && progressBar(progress, progress.text, data.state, "Progress of the slowest rank"),
      ranks.length > 1 && fold("Each rank", { ontoggle }, h("div", { class: "nbl-each" }, this.#isOpen && ranks.map(row))),
    );
  }
}
