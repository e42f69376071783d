// Runs side by side: their tables, and the plots of the monitor.

import { FrameLoop } from "./canvas.js";
import { CurveGrid, CurveOptions } from "./curves.js";
import { make } from "./elements.js";
import { Notices } from "./messages.js";
import { RunData } from "./model.js";

/**
 * Show a comparison, and return what ends it.
 * @param model whose messages are about the comparison, too
 * @param {string} html Tables: HTML of this package's own, in which every text is escaped.
 */
export function showComparison(model, html, parent) {
  const data = new RunData("");
  const root = make("div", { class: "nbl-monitor", role: "group", "aria-label": "Runs side by side" });
  const frames = new FrameLoop(root, () => data.isKnown && [grid, notices].forEach((view) => view.paint(data)));
  const grid = new CurveGrid(frames, new CurveOptions(), (message) => model.send(message));
  const notices = new Notices();
  const tables = make("div");
  tables.innerHTML = html;
  root.append(notices.element, grid.element, tables);
  parent.append(root);
  const onMessage = (message) => {
    data.receive(message);
    frames.request();
  };
  model.on("msg:custom", onMessage);
  frames.request();
  model.send({ type: "hello", page: "" });
  return () => {
    model.off("msg:custom", onMessage);
    frames.close();
    grid.close();
    root.remove();
  };
}
