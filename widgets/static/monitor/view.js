import { FrameLoop } from "./canvas.js";
import { CurveGrid, CurveOptions, Usage } from "./curves.js";
import { make, show, Tabs } from "./elements.js";
import { Header, Progress } from "./header.js";
import { DEAD_STATUSES, watchKernel } from "./kernel.js";
import { Logs } from "./logs.js";
import { Measurements } from "./measuring.js";
import { Errors, Notices } from "./messages.js";
import { RunData } from "./model.js";
import { Pictures } from "./pictures.js";
import { RankTable } from "./ranks.js";
import { Settings } from "./settings.js";
import { Timeline } from "./timeline.js";

const PAGE_ID = Math.random().toString(36).slice(2); // differs after a reload

/** Data and options of the last closed view of each model, by the model's key. The next view of the model takes them. */
export const HANDOVERS = new Map();

/** View of a monitor. Two views of one model share nothing. */
export class MonitorView {
  #clock = 0;
  #model;
  #onKnown;
  #key;
  #unwatchKernel;
  #announcement = make("div", { class: "nbl-unseen", role: "status", "aria-live": "polite" });

  /** @param {() => void} onKnown called when there is a run to show */
  constructor(model, parent, onKnown = () => {}) {
    this.#model = model;
    this.#onKnown = onKnown;
    this.#key = model.get("key");
    const { data, options } = HANDOVERS.get(this.#key) ?? {};
    HANDOVERS.delete(this.#key);
    this.data = data ?? new RunData(model.get("title") ?? "");
    this.options = options ?? new CurveOptions();
    const send = (message) => this.#send(message);
    this.root = make("div", { class: "nbl-monitor", role: "group", "aria-label": "Monitor of a run" });
    this.frames = new FrameLoop(this.root, () => this.#paint());
    this.header = new Header(send);
    this.views = [
      new Progress(),
      new Errors(),
      new Notices(),
      new CurveGrid(this.frames, this.options, send),
      new Tabs([new RankTable(), new Settings(send), new Logs(), new Timeline(), new Pictures(), new Usage(this.frames), new Measurements(send)]),
    ];
    const [progress, ...below] = this.views.map(({ element }) => element);
    this.root.append(this.#announcement, make("div", { class: "nbl-head" }, this.header.element, progress), ...below);
    parent.append(this.root);
    model.on("msg:custom", this.#onMessage);
    for (const event of ["comm:close", "comm_live_update"]) model.on(event, this.#onComm);
    this.#unwatchKernel = watchKernel(model, () => this.#setLink("lost"));
    this.frames.request();
    this.#greet();
  }

  #onMessage = (message) => {
    if (message?.type !== "reset" && message?.type !== "update") return;
    this.data.receive(message);
    this.#keepTime();
    this.frames.request();
  };

  /** The comm was closed or opened again. A kernel that is only out of reach answers the hello. */
  #onComm = () => {
    this.#greet();
    this.#setLink(DEAD_STATUSES.has(this.#model.widget_manager?.kernel?.status) ? "lost" : "silent");
  };

  /** @param {"silent" | "lost"} link */
  #setLink(link) {
    if (this.data.link !== "lost") this.data.link = link;
    this.#keepTime();
    this.frames.request();
  }

  /** Ask Python for the whole run. */
  #greet() {
    this.#send({ type: "hello", page: PAGE_ID });
  }

  /** Send a message. Return false if the comm is known to be closed: sending then throws, or rejects later. */
  #send(message) {
    try {
      Promise.resolve(this.#model.send(message)).catch(() => this.#setLink("silent"));
      return true;
    } catch {
      this.#setLink("silent");
      return false;
    }
  }

  /** Run the clock while the run is live, and only then. */
  #keepTime() {
    if (this.data.isLive) this.#clock ||= setInterval(() => this.#tick(), 1000);
    else {
      clearInterval(this.#clock);
      this.#clock = 0;
    }
  }

  #tick() {
    this.header.paint(this.data);
    const silence = (performance.now() - this.data.lastMessageAt) / 1000;
    if (silence > this.data.legend.limits.silent_seconds) this.#setLink("silent");
  }

  #paint() {
    const { isKnown, run, state } = this.data;
    if (isKnown) this.#onKnown();
    // The other views have nothing to show before the first `reset`, and no legend to show it with.
    for (const view of isKnown ? [this.header, ...this.views] : [this.header]) view.paint(this.data);
    show(this.#announcement, run.name ? `${run.name}: ${state.word}` : state.word);
  }

  close() {
    if (this.#key && this.data.isKnown) HANDOVERS.set(this.#key, { data: this.data, options: this.options });
    this.frames.close();
    clearInterval(this.#clock);
    this.#model.off("msg:custom", this.#onMessage);
    for (const event of ["comm:close", "comm_live_update"]) this.#model.off(event, this.#onComm);
    this.#unwatchKernel();
    this.root.remove();
  }
}
