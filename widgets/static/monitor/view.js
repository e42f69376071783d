import { FrameLoop, readTheme, watchTheme } from "./canvas.js";
import { CurveGrid, CurveOptions } from "./curves.js";
import { h, setText } from "./elements.js";
import { Header, Progress } from "./header.js";
import { Logs } from "./logs.js";
import { Measurements } from "./measuring.js";
import { Errors, Notices } from "./messages.js";
import { RunData } from "./model.js";
import { Pictures } from "./pictures.js";
import { RankTable } from "./ranks.js";
import { Settings } from "./settings.js";
import { Tabs } from "./tabs.js";
import { Timeline } from "./timeline.js";
import { Usage } from "./usage.js";

/** @import { KernelListener, Model, PageMessage, Reset, Topic, Update } from "./wire" */

/**
 * Part of the page. It is painted in the first frame after one of its topics changed.
 * @typedef {{ topics: Topic[], element: HTMLElement, paint(data: RunData, changed: Set<Topic>): void }} View
 */

const PAGE_ID = Math.random().toString(36).slice(2); // differs after a reload
const DEAD_STATUSES = new Set(["restarting", "autorestarting", "dead", "terminating"]);

/**
 * Data and options of the last closed view of each model, by the model's key. The next view of the model takes them.
 * @type {Map<string, { data: RunData, options: CurveOptions }>}
 */
export const HANDOVERS = new Map();

/** View of a monitor. Two views of one model share nothing. */
export class MonitorView {
  #unwatchTheme = () => {};
  #clock = 0;
  #model;
  #kernel;
  #onKnown;
  #key;

  /** @param {Model} model @param {HTMLElement} parent @param {() => void} onKnown called when there is a run to show */
  constructor(model, parent, onKnown = () => {}) {
    this.#model = model;
    this.#kernel = model.widget_manager?.kernel;
    this.#onKnown = onKnown;
    this.#key = model.get("key");
    const { data, options } = HANDOVERS.get(this.#key) ?? {};
    HANDOVERS.delete(this.#key);
    this.data = data ?? new RunData(model.get("title") ?? "");
    this.data.markAllChanged();
    this.options = options ?? new CurveOptions();
    this.frames = new FrameLoop(
      () => readTheme(this.root),
      () => this.#paintViews(),
    );
    const announcement = h("div", { class: "nbl-unseen", role: "status", "aria-live": "polite" });
    this.header = new Header(
      (message) => this.#send(message),
      (text) => setText(announcement, text),
    );
    const send = (/** @type {PageMessage} */ message) => this.#send(message);
    const progress = new Progress();
    const parts = new Tabs([
      new RankTable(),
      new Settings(send),
      new Logs(),
      new Timeline(this.frames),
      new Pictures(),
      new Usage(this.frames),
      new Measurements(send),
    ]);
    /** @type {View[]} */
    const below = [new Errors(), new Notices(), new CurveGrid(this.frames, this.options, send), parts];
    /** @type {View[]} */
    this.views = [this.header, progress, ...below];
    const head = h("div", { class: "nbl-head" }, this.header.element, progress.element);
    const attributes = {
      class: "nbl-monitor",
      role: "group",
      "aria-label": "Monitor of a run",
    };
    this.root = h("div", attributes, announcement, head, ...below.map(({ element }) => element));
    parent.append(this.root);
    this.#listen();
    this.frames.request();
    this.#greet();
  }

  #listen() {
    this.#model.on("msg:custom", this.#onMessage);
    this.#model.on("comm:close", this.#onComm);
    this.#model.on("comm_live_update", this.#onComm);
    this.#kernel?.statusChanged?.connect(this.#onKernel);
    this.#unwatchTheme = watchTheme(() => this.#onTheme());
  }

  /** @param {Reset | Update | null | undefined} message */
  #onMessage = (message) => {
    if (message?.type !== "reset" && message?.type !== "update") return;
    this.data.receive(message);
    this.#keepTime();
    this.frames.request();
  };

  /** The comm was closed or opened again. A kernel that is only out of reach answers the hello. */
  #onComm = () => {
    this.#greet();
    this.#setLink(DEAD_STATUSES.has(this.#kernel?.status ?? "") ? "lost" : "silent");
  };

  /** @type {KernelListener} */
  #onKernel = (_, status) => {
    if (DEAD_STATUSES.has(status)) this.#setLink("lost");
  };

  #onTheme() {
    this.data.changed.add("plotting");
    this.frames.invalidateAll();
  }

  /** @param {"silent" | "lost"} link */
  #setLink(link) {
    if (link === "silent" && this.data.link === "lost") return;
    this.data.setLink(link);
    this.#keepTime();
    this.frames.request();
  }

  /** Ask Python for the whole run. */
  #greet() {
    this.#send({ type: "hello", page: PAGE_ID });
  }

  /**
   * Send a message. Return false if the comm is known to be closed: sending then throws, or rejects later.
   * @param {PageMessage} message
   */
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
    if (this.data.isLive && !this.#clock) this.#clock = setInterval(() => this.#tick(), 1000);
    if (this.data.isLive || !this.#clock) return;
    clearInterval(this.#clock);
    this.#clock = 0;
  }

  #tick() {
    this.header.tick(this.data);
    const silence = (performance.now() - this.data.lastMessageAt) / 1000;
    if (silence > this.data.legend.limits.silent_seconds) this.#setLink("silent");
  }

  #paintViews() {
    const { changed, isKnown } = this.data;
    this.data.changed = new Set();
    if (isKnown) this.#onKnown();
    // The other views have nothing to show before the first `reset`, and no legend to show it with.
    for (const view of isKnown ? this.views : [this.header])
      if (view.topics.some((topic) => changed.has(topic))) view.paint(this.data, changed);
  }

  close() {
    if (this.#key && this.data.isKnown) HANDOVERS.set(this.#key, { data: this.data, options: this.options });
    this.#unwatchTheme();
    this.frames.close();
    clearInterval(this.#clock);
    this.#model.off("msg:custom", this.#onMessage);
    this.#model.off("comm:close", this.#onComm);
    this.#model.off("comm_live_update", this.#onComm);
    this.#kernel?.statusChanged?.disconnect(this.#onKernel);
    this.root.remove();
  }
}
