import { h, KeyedList, progressBar, setAttribute, setHidden, setText, showProgress, StateLight } from "./elements.js";
import { isNumber, plainText } from "./units.js";

const ACTIONS = [
  { type: "stop", label: "Stop after this step", title: "Each rank finishes its step, then the run ends" },
  { type: "interrupt", label: "Interrupt", title: "Stop every rank now, wherever it is" },
  { type: "stacks", label: "Dump stacks", title: "Show what every rank is executing now" },
  { type: "save", label: "Save now", title: "All ranks save a checkpoint at the same step" },
];

export class Header {
  topics = ["run"];

  constructor(send, announce) {
    this.send = send;
    this.announce = announce;
    this.light = new StateLight();
    this.name = h("span", { class: "nbl-name" });
    this.clock = h("span", { class: "nbl-clock", role: "timer", "aria-live": "off", title: "Time since the launch" });
    this.summary = h("div", { class: "nbl-summary" });
    this.waiting = h("div", { class: "nbl-waiting" }); // Its seconds grow: the state's word is what is read out.
    this.hint = h("div", { class: "nbl-hint", role: "status" });
    this.buttons = ACTIONS.map(({ type, label, title }) =>
      h(
        "button",
        { type: "button", class: "nbl-button", "data-action": type, title, onclick: () => this.#press(type) },
        label,
      ),
    );
    const identity = h("div", { class: "nbl-identity" }, this.light.element, this.name, this.clock);
    this.actions = h("div", { class: "nbl-actions", role: "group", "aria-label": "Control the run" }, ...this.buttons);
    this.element = h(
      "header",
      { class: "nbl-header" },
      h("div", { class: "nbl-top" }, identity, this.actions),
      this.summary,
      this.waiting,
      this.hint,
    );
  }

  #press(type) {
    this.asked = ACTIONS.find((action) => action.type === type).label;
    if (this.send({ type })) setText(this.hint, `Requested: ${this.asked}.`);
    setHidden(this.hint, !this.hint.textContent);
  }

  paint(data) {
    const { run, state } = data;
    this.light.show(state);
    setText(this.name, run.name ?? "");
    setAttribute(this.name, "title", run.id ?? "");
    const summary = [run.arguments, run.summary, run.effective_batch && `effective batch ${run.effective_batch}`]
      .filter(Boolean)
      .join(" · ");
    setText(this.summary, summary);
    setHidden(this.summary, !summary);
    setText(this.waiting, plainText(run.waiting ?? ""));
    setHidden(this.waiting, !run.waiting);
    const hint = this.#hint(data);
    setText(this.hint, hint);
    setHidden(this.hint, !hint);
    for (const button of this.buttons)
      button.disabled = data.link !== "up" || Boolean(run.is_over) || !run.actions?.[button.dataset.action];
    setHidden(this.actions, Boolean(run.is_over));
    this.announce(run.name ? `${run.name}: ${state.word}` : state.word);
    this.tick(data);
  }

  #hint({ run, link }) {
    if (run.is_over) return run.state === "lost" ? "The kernel ended before the run did." : "";
    if (link === "up") return run.action_hint ?? "";
    if (link === "silent") return "Kernel not responding. Last update shown.";
    const again = run.id ? ` open_run("${run.id}") shows what its folder holds.` : "";
    return `The kernel restarted or ended, and the run with it. Last update shown.${again}`;
  }

  tick(data) {
    const seconds = data.isLive ? Math.floor(data.seconds) : data.seconds;
    setText(this.clock, data.legend?.units.formatSeconds(seconds) ?? "");
  }
}

export class Progress {
  topics = ["run", "ranks"];

  constructor() {
    this.what = h("span", {});
    this.pace = h("span", { class: "nbl-pace" });
    this.bar = progressBar("Progress of the slowest rank");
    this.bar.title = "Progress of the slowest rank";
    this.each = h("div", { class: "nbl-each" });
    this.details = h("details", { class: "nbl-details" }, h("summary", {}, "Each rank"), this.each);
    this.element = h(
      "div",
      { class: "nbl-progress" },
      h("div", { class: "nbl-progress-text" }, this.what, this.pace),
      this.bar,
      this.details,
    );
    this.element.hidden = true;
    this.list = new KeyedList(this.each, this.#makeRow, this.#updateRow);
    this.details.addEventListener("toggle", () => this.#paintRows());
  }

  paint(data) {
    const { run, ranks } = data;
    this.data = data;
    this.ranks = [...ranks.values()].filter((rank) => isNumber(rank.done));
    const progress = run.progress ?? null;
    setHidden(this.element, !progress && !this.ranks.length);
    setHidden(this.what.parentElement, !progress);
    setHidden(this.bar, !progress);
    setHidden(this.details, this.ranks.length < 2);
    if (progress) this.#paintMerged(progress);
    this.#paintRows();
  }

  #paintMerged(progress) {
    const { units } = this.data.legend;
    const text = [progress.description, units.formatDone(progress)].filter(Boolean).join(" · ");
    const pace = [
      units.formatRate(progress.rate),
      isNumber(progress.seconds_left) ? `${units.formatSeconds(Math.ceil(progress.seconds_left))} left` : "",
    ];
    setText(this.what, text);
    setText(this.pace, this.data.isLive ? pace.filter(Boolean).join(" · ") : "");
    setAttribute(this.bar, "data-tone", this.data.state.tone);
    showProgress(this.bar, progress, text);
  }

  #paintRows() {
    this.list.show(this.details.open ? this.ranks.map((rank) => [rank.rank, rank]) : []);
  }

  #makeRow = (rank) => {
    const bar = progressBar(`Progress of rank ${rank.rank}`);
    const text = h("span", { class: "nbl-each-text" });
    return { bar, text, element: h("div", { class: "nbl-each-row" }, h("span", {}, `rank ${rank.rank}`), bar, text) };
  };

  #updateRow = ({ bar, text }, rank) => {
    const done = this.data.legend.units.formatDone(rank);
    setText(text, done);
    setAttribute(bar, "data-tone", this.data.stateOf(rank).tone);
    showProgress(bar, rank, done);
  };
}
