// Runs side by side: their tables, and the plots of the monitor.

import { FrameLoop, readTheme, watchTheme } from "./canvas.js";
import { CurveGrid, CurveOptions } from "./curves.js";
import { h } from "./elements.js";
import { Notices } from "./messages.js";
import { RunData } from "./model.js";

/** @import { Model, Reset, Update } from "./wire" */

/**
 * Show a comparison, and return what ends it.
 * @param {Pick<Model, "on" | "off" | "send">} model whose messages are about the comparison, too
 * @param {string} html Tables: HTML of this package's own, in which every text is escaped.
 * @param {HTMLElement} parent
 */
export function showComparison(model, html, parent) {
  const data = new RunData("");
  const paint = () => {
    data.changed = new Set();
    for (const view of data.isKnown ? [grid, notices] : []) view.paint(data);
  };
  const frames = new FrameLoop(() => readTheme(root), paint);
  const grid = new CurveGrid(frames, new CurveOptions(), (message) => model.send(message));
  const notices = new Notices();
  const tables = h("div", {});
  tables.innerHTML = html;
  const root = h("div", { class: "nbl-monitor", role: "group", "aria-label": "Runs side by side" }, notices.element, grid.element, tables);
  parent.append(root);
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
