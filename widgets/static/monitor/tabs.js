import { make, TabBar } from "./elements.js";

/** Sections of which one is shown, each with a tab as soon as there is something in it. */
export class Tabs {
  #data;
  #parts;
  #bar;

  constructor(parts) {
    this.#parts = parts;
    this.#bar = new TabBar("Parts of the monitor", parts[0].title, () => this.#data && this.paint(this.#data));
    for (const { title, element } of parts) {
      element.classList.add("nbl-panel");
      element.id = `${this.#bar.idOf(title)}-panel`;
    }
    this.element = make("div", { class: "nbl-parts-of-run" }, this.#bar.element, ...parts.map(({ element }) => element));
  }

  paint(data) {
    this.#data = data;
    const known = this.#parts.filter((part) => part.has(data));
    this.#bar.show(known.map(({ title }) => [title, title]));
    this.element.hidden = !known.length;
    for (const part of this.#parts) {
      part.element.hidden = !(known.includes(part) && part.title === this.#bar.selected);
      if (!part.element.hidden) part.paint(data);
    }
  }
}
