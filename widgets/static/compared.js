// Runs side by side: their tables, and the plots of the monitor.

import { FrameLoop, readTheme, watchTheme } from "./monitor/canvas.js";
import { CurveGrid, CurveOptions } from "./monitor/curves.js";
import { h } from "./monitor/elements.js";
import { Notices } from "./monitor/messages.js";
import { RunData } from "./monitor/model.js";

/** @import { Model, Reset, Update } from "./monitor/wire" */

/** @param {{ model: Model, el: HTMLElement }} context */
function render({ model, el }) {
  const data = new RunData("");
  const paint = () => {
    data.changed = new Set();
    for (const view of data.isKnown ? [grid, notices] : []) view.paint(data);
  };
  const frames = new FrameLoop(() => readTheme(root), paint);
  const grid = new CurveGrid(frames, new CurveOptions(), (message) => model.send(message));
  const notices = new Notices();
  const tables = h("div", {});
  // HTML of this package's own, in which every text is escaped.
  tables.innerHTML = model.get("tables");
  const root = h("div", { class: "nbl-monitor", role: "group", "aria-label": "Runs side by side" }, notices.element, grid.element, tables);
  el.append(root);
  const onMessage = (/** @type {Reset | Update} */ message) => {
    data.receive(message);
    frames.request();
  };
  model.on("msg:custom", onMessage);
  const unwatchTheme = watchTheme(() => frames.invalidateAll());
  frames.request();
  model.send({ type: "hello", page: "" });
  return () => {
    model.off("msg:custom", onMessage);
    unwatchTheme();
    frames.close();
    grid.plots.show([]);
    root.remove();
  };
}

export default { render };
