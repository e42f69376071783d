// The live monitor of a run: an anywidget front end in one module, because anywidget loads one.
//
// Python -> page: {type: "reset", ...} is the whole run and answers {type: "hello"}; {type: "update", ...}
// has the same keys, each optional. `run` and the entries of `ranks` replace what was known; entries of
// `curves`, `lanes`, `logs`, `errors` and `notices` are appended. A number that is not finite is null.
// Page -> Python: hello, with a name for the page, stop, interrupt, stacks, save.
//
// A message changes `RunData` and asks for a frame; the frame brings the views up to date, at most once per
// screen refresh and not at all while the page is hidden. Text of the user's goes into text nodes only.

import { Covering } from "./covering.js";
import { MonitorView } from "./view.js";

function initialize({ model }) {
  if (!model.get("key")) return undefined;
  const covering = new Covering(model);
  return () => covering.close();
}

function render({ model, el }) {
  const view = new MonitorView(model, el);
  return () => view.close();
}

export default { initialize, render };
