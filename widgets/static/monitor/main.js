// The live monitor of a run: an anywidget front end.
//
// wire.d.ts describes the messages. A message changes `RunData` and asks for an animation frame. In that frame views
// whose topics changed are painted: at most once per screen refresh, and never while the page is hidden. Text from the
// user's program goes into text nodes only.

import { Covering } from "./covering.js";
import { MonitorView } from "./view.js";

/** Cover the pictures of the run. A model without a key has none. */
function initialize({ model }) {
  if (!model.get("key")) return undefined;
  const covering = new Covering(model);
  return () => covering.close();
}

function render({ model, el }) {
  el.dataset["nblLive"] = model.get("key"); // The style sheet of the kept picture looks for it.
  const view = new MonitorView(model, el);
  return () => view.close();
}

export default { initialize, render };
