import { h } from "./elements.js";
import { HANDOVERS, MonitorView } from "./view.js";

// The picture that a run leaves in the notebook is covered with the monitor for as long as the model lives. What is
// saved is the picture alone, so a notebook without its kernel shows no widget that is missing.
export class Covering {
  #views = new Map(); // by the element that is covered

  constructor(model) {
    this.model = model;
    this.key = model.get("key");
    this.observer = new MutationObserver((records) => this.#onChange(records));
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.#find(document.body);
  }

  #onChange(records) {
    for (const [element, view] of this.#views) {
      if (element.isConnected) continue;
      view.close();
      this.#views.delete(element);
    }
    for (const { addedNodes } of records)
      for (const node of addedNodes) if (node instanceof Element) this.#find(node.parentElement ?? node);
  }

  #find(root) {
    for (const element of root.querySelectorAll(`[data-nbl-explore="${CSS.escape(this.key)}"]`))
      if (!this.#views.has(element)) this.#cover(element);
    if (this.#views.size) this.#setCovered(true);
  }

  #cover(element) {
    const host = h("div", { "data-nbl-host": "" });
    host.hidden = true;
    element.append(host);
    const onKnown = () => {
      if (!host.hidden) return;
      host.hidden = false;
      this.#setCovered(true);
    };
    this.#views.set(element, new MonitorView(this.model, host, onKnown));
  }

  /** Hide the pictures, or show them again. */
  #setCovered(isCovered) {
    const isShown = [...this.#views.keys()].some((element) => !element.lastElementChild.hidden);
    const pictures = [...this.#views.keys()].flatMap((element) => [...element.children].slice(0, -1));
    const others = document.querySelectorAll(`[data-nbl-cover="${CSS.escape(this.key)}"]`);
    for (const picture of [...pictures, ...others]) picture.style.display = isCovered && isShown ? "none" : "";
  }

  close() {
    this.observer.disconnect();
    this.#setCovered(false);
    for (const view of this.#views.values()) view.close();
    for (const element of this.#views.keys()) element.lastElementChild.remove();
    this.#views.clear();
    HANDOVERS.delete(this.key);
  }
}
