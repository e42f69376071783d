import { h, setHidden, TabBar } from "./elements.js";

/** @import { Section } from "./elements.js" */
/** @import { RunData } from "./model.js" */
/** @import { Topic } from "./wire" */

/**
 * A section that has a tab as soon as there is something in it.
 * @typedef {Section & { topics: Topic[], has(data: RunData): boolean, paint(data: RunData, changed: Set<Topic>): void }} Part
 */

/** Sections of which one is shown. The others are painted when they are. */
export class Tabs {
  /** @type {Topic[]} */
  topics;
  /** @type {RunData | undefined} */
  #data;
  #parts;
  #bar;
  /** Topics that changed since a section was painted. @type {Map<Part, Set<Topic>>} */
  #stale = new Map();

  /** @param {Part[]} parts */
  constructor(parts) {
    this.#parts = parts;
    this.topics = [...new Set(parts.flatMap((part) => part.topics))];
    this.#bar = new TabBar("Parts of the monitor", parts[0].title, () => this.#data && this.paint(this.#data, new Set()));
    for (const part of parts) {
      this.#stale.set(part, new Set(part.topics));
      part.element.classList.add("nbl-panel");
      part.element.id = `${this.#bar.idOf(part.title)}-panel`;
    }
    this.element = h("div", { class: "nbl-parts-of-run" }, this.#bar.element, ...parts.map(({ element }) => element));
  }

  /** @param {RunData} data @param {Set<Topic>} changed */
  paint(data, changed) {
    this.#data = data;
    const known = this.#parts.filter((part) => part.has(data));
    this.#bar.show(known.map(({ title }) => [title, title]));
    setHidden(this.element, !known.length);
    for (const part of this.#parts) {
      const stale = /** @type {Set<Topic>} */ (this.#stale.get(part));
      for (const topic of part.topics) if (changed.has(topic)) stale.add(topic);
      const isShown = known.includes(part) && part.title === this.#bar.selected;
      setHidden(part.element, !isShown);
      if (!isShown || !stale.size) continue;
      part.paint(data, stale);
      stale.clear();
    }
  }
}
