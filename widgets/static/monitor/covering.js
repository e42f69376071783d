import { make } from "./elements.js";
import { HANDOVERS, MonitorView } from "./view.js";

/**
 * Covers the static picture of a run with the monitor for as long as the model lives.
 *
 * The picture alone is saved in the notebook, so that a notebook without its kernel shows no missing widget.
 */
export class Covering {
  /** Views by the element that they cover. */
  #covers = new Map();
  #model;
  #key;
  #observer = new MutationObserver((records) => this.#onChange(records));

  constructor(model) {
    this.#model = model;
    this.#key = CSS.escape(model.get("key"));
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
    for (const element of root.querySelectorAll(`[data-nbl-explore="${this.#key}"]`))
      if (!this.#covers.has(element)) this.#cover(element);
    if (this.#covers.size) this.#updatePictures();
    this.#showKept(root, false);
  }

  /** Show or hide the pictures that are kept in case the kernel dies: they are older than the monitor itself. */
  #showKept(root, isShown) {
    for (const picture of root.querySelectorAll(`[data-nbl-kept="${this.#key}"]`))
      if (picture instanceof HTMLElement) picture.style.display = isShown ? "" : "none";
  }

  #cover(element) {
    const host = make("div", { "data-nbl-host": true });
    host.hidden = true; // until there is a run to show
    element.append(host);
    const onKnown = () => {
      if (!host.hidden) return;
      host.hidden = false;
      this.#updatePictures();
    };
    this.#covers.set(element, { host, view: new MonitorView(this.#model, host, onKnown) });
  }

  /** Hide the pictures while a view covers them, and show them otherwise. */
  #updatePictures() {
    const covers = [...this.#covers];
    const isCovered = covers.some(([, { host }]) => !host.hidden);
    const pictures = covers.flatMap(([element, { host }]) => [...element.children].filter((child) => child !== host));
    pictures.push(...document.querySelectorAll(`[data-nbl-cover="${this.#key}"]`));
    for (const picture of pictures) if (picture instanceof HTMLElement) picture.style.display = isCovered ? "none" : "";
  }

  close() {
    this.#observer.disconnect();
    this.#showKept(document.body, true);
    for (const { host, view } of this.#covers.values()) {
      view.close();
      host.hidden = true;
    }
    this.#updatePictures();
    for (const { host } of this.#covers.values()) host.remove();
    this.#covers.clear();
    HANDOVERS.delete(this.#model.get("key"));
  }
}
