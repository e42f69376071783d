import { button, fold, h, make, progressBar, show, stateLight } from "./elements.js";
import { formatSeconds, isNumber, plainText } from "./units.js";

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
    const buttons = Object.entries(data.legend?.actions ?? {}).filter(([type]) => type !== (data.isPaused ? "pause" : "resume"));
    const actions = { class: "nbl-actions", role: "group", "aria-label": "Control the run" };
    const hints = { silent: "Kernel not responding. Last update shown.", lost: run.lost_hint };
    const requested = link === "up" && this.#asked.run === run && `Requested: ${this.#asked.label}.`;
    const hint = requested || (!run.is_over && hints[link]) || run.action_hint;
    show(
      this.element,
      h("div", { class: "nbl-top" }, identity, !run.is_over && h("div", actions, buttons.map((action) => this.#button(action, data)))),
      facts.length > 0 && h("div", { class: "nbl-summary", title: facts.join("\n") }, facts.join(" · ")),
      // Without a live region: the seconds in it grow, and the change of the state is read aloud already.
      run.waiting && h("div", { class: "nbl-waiting" }, plainText(run.waiting)),
      h("div", { class: "nbl-hint", role: "status", hidden: !hint }, hint),
    );
  }

  #button([type, [label, words]], data) {
    const { run, link } = data;
    const disabled = link !== "up" || !run.actions?.[type];
    const title = (type === "pause" && disabled && run.change_hint) || words;
    const onclick = () => {
      if (!this.#send({ type })) return;
      this.#asked = { run, label };
      this.paint(data);
    };
    return button(label, onclick, { class: "nbl-button", "data-action": type, disabled, title });
  }
}

/** Progress of the slowest rank, and of each rank on demand. */
export class Progress {
  element = make("div", { class: "nbl-progress", hidden: true });

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
    this.element.hidden = !progress && !ranks.length;
    show(
      this.element,
      progress && h("div", { class: "nbl-progress-text" }, h("span", {}, progress.text), h("span", { class: "nbl-pace" }, isMoving && progress.pace)),
      progress && progressBar(progress, progress.text, data.state, "Progress of the slowest rank"),
      ranks.length > 1 && fold("Each rank", {}, h("div", { class: "nbl-each" }, ranks.map(row))),
    );
  }
}
