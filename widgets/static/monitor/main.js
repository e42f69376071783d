// The live monitor of a run: an anywidget front end.
//
// wire.d.ts describes the messages. A message changes `RunData` and asks for an animation frame. In that frame views
// whose topics changed are painted: at most once per screen refresh, and never while the page is hidden. Text from the
// user's program goes into text nodes only.

import { make } from "./elements.js";
import { HANDOVERS, MonitorView } from "./view.js";

/**
 * Covers the static picture of a run with the monitor for as long as the model lives.
 *
 * The picture alone is saved in the notebook, so that a notebook without its kernel shows no missing widget.
 */
class Covering {
  /** Views by the element that they cover. */
  #covers = new Map();
  #model;
  #key;
  #observer = new MutationObserver((records) => this.#onChange(records));
  /** Rules that hide pictures: at first those that are older than the monitor itself, kept in case the kernel dies. */
  #style;

  constructor(model) {
    this.#model = model;
    this.#key = CSS.escape(model.get("key"));
    this.#style = make("style", {}, `[data-nbl-kept="${this.#key}"] { display: none }`);
    document.head.append(this.#style);
    this.#observer.observe(document.body, { childList: true, subtree: true });
    this.#coverPictures(document.body);
  }

  #onChange(records) {
    for (const [element, { view }] of this.#covers) {
      if (element.isConnected) continue;
      view.close();
      this.#covers.delete(element);
    }
    for (const { addedNodes } of records)
      for (const node of addedNodes) if (node instanceof Element) this.#coverPictures(node.parentElement ?? node);
  }

  #coverPictures(root) {
    for (const element of root.querySelectorAll(`[data-nbl-explore="${this.#key}"]`)) {
      if (this.#covers.has(element)) continue;
      const host = make("div", { "data-nbl-host": true });
      host.hidden = true;
      element.append(host);
      this.#covers.set(element, { host, view: new MonitorView(this.#model, host, () => this.#uncover(host)) });
    }
  }

  /** Show a view as soon as there is a run to show, and hide the pictures. */
  #uncover(host) {
    if (!host.hidden) return;
    host.hidden = false;
    const pictures = `[data-nbl-explore="${this.#key}"] > :not([data-nbl-host]), [data-nbl-cover="${this.#key}"]`;
    this.#style.append(`${pictures} { display: none !important }`);
  }

  close() {
    this.#observer.disconnect();
    this.#style.remove();
    for (const { host, view } of this.#covers.values()) {
      view.close();
      host.remove();
    }
    this.#covers.clear();
    HANDOVERS.delete(this.#model.get("key"));
  }
}

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
