import { readTheme, FrameLoop } from "./canvas.js";
import { CurveGrid, CurveOptions } from "./curves.js";
import { h, setText } from "./elements.js";
import { Header, Progress } from "./header.js";
import { Logs } from "./logs.js";
import { Errors, Notices } from "./messages.js";
import { RunData } from "./model.js";
import { RankTable } from "./ranks.js";
import { Timeline } from "./timeline.js";


const PAGE_ID = Math.random().toString(36).slice(2); // another one after a reload

const DEAD_STATUSES = new Set(["restarting", "autorestarting", "dead", "terminating"]);

/** What the last view of a model knew and how it was set, by the model's key, for the view that takes its place. */
export const HANDOVERS = new Map();

/** One view of a monitor; two views of one model know nothing of each other. */
export class MonitorView {
  #life = new AbortController();
  #clock = 0;

  constructor(model, el, onKnown = () => {}) {
    this.model = model;
    this.kernel = model.widget_manager?.kernel; // JupyterLab's; other front ends do not tell of theirs
    this.onKnown = onKnown;
    this.key = model.get("key");
    const { data, options } = HANDOVERS.get(this.key) ?? {};
    HANDOVERS.delete(this.key);
    this.data = data ?? new RunData(model.get("title") ?? "");
    this.data.markAll();
    this.options = options ?? new CurveOptions();
    this.frames = new FrameLoop(
      () => readTheme(this.root),
      () => this.#paintViews(),
    );
    this.live = h("div", { class: "nbl-unseen", role: "status", "aria-live": "polite" });
    const uid = `nbl-${Math.random().toString(36).slice(2)}`;
    const announce = (text) => setText(this.live, text);
    this.header = new Header((message) => this.#send(message), announce);
    this.views = [
      this.header,
      new Progress(),
      new Errors(),
      new Notices(),
      new RankTable(),
      new CurveGrid(this.frames, this.options),
      new Timeline(this.frames),
      new Logs(uid),
    ];
    // JupyterLab's shortcuts (two zeros restart the kernel) must not hear keys that are pressed in here.
    const attributes = {
      class: "nbl-monitor",
      role: "group",
      "aria-label": "Monitor of a run",
      "data-lm-suppress-shortcuts": "true",
    };
    this.root = h("div", attributes, this.live, ...this.views.map((view) => view.element));
    el.append(this.root);
    this.#listen();
    this.frames.request();
    this.#send({ type: "hello", page: PAGE_ID });
  }

  #listen() {
    this.model.on("msg:custom", this.#onMessage);
    this.model.on("comm:close", this.#onComm);
    this.model.on("comm_live_update", this.#onComm);
    this.kernel?.statusChanged?.connect(this.#onKernel);
    const { signal } = this.#life;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.#onTheme, { signal });
    this.themes = new MutationObserver(this.#onTheme);
    for (const target of [document.documentElement, document.body]) this.themes.observe(target, { attributes: true });
  }

  #onMessage = (message) => {
    if (message?.type !== "reset" && message?.type !== "update") return;
    this.data.receive(message);
    this.#keepTime();
    this.frames.request();
  };

  /** The kernel's comm is gone or has come back: a kernel that is only out of reach answers the hello. */
  #onComm = () => {
    this.#send({ type: "hello", page: PAGE_ID });
    this.#setLink(DEAD_STATUSES.has(this.kernel?.status) ? "lost" : "silent");
  };

  #onKernel = (_, status) => {
    if (DEAD_STATUSES.has(status)) this.#setLink("lost");
  };

  #setLink(link) {
    if (link === "silent" && this.data.link === "lost") return;
    this.data.setLink(link);
    this.#keepTime();
    this.frames.request();
  }

  #onTheme = () => {
    this.data.changed.add("curves");
    this.frames.invalidateAll();
  };

  /** Send, and tell whether that went well; a closed comm throws or rejects. */
  #send(message) {
    try {
      Promise.resolve(this.model.send(message)).catch(() => this.#setLink("silent"));
      return true;
    } catch {
      this.#setLink("silent");
      return false;
    }
  }

  /** Let the clock tick while there is something to count, and at no other time. */
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
    if (this.data.isKnown) this.onKnown();
    const changed = this.data.changed;
    this.data.changed = new Set();
    const views = this.data.isKnown ? this.views : [this.header];
    for (const view of views) if (view.topics.some((topic) => changed.has(topic))) view.paint(this.data, changed);
  }

  close() {
    if (this.key && this.data.isKnown) HANDOVERS.set(this.key, { data: this.data, options: this.options });
    this.#life.abort();
    this.themes.disconnect();
    this.frames.close();
    clearInterval(this.#clock);
    this.model.off("msg:custom", this.#onMessage);
    this.model.off("comm:close", this.#onComm);
    this.model.off("comm_live_update", this.#onComm);
    this.kernel?.statusChanged?.disconnect(this.#onKernel);
    this.root.remove();
  }
}
