import { plainText } from "./text.js";

/** @import { Done, StateLook } from "./wire" */

/**
 * Paths in a box of 12. Each state has a shape of its own, so that no meaning is in its colour alone.
 * @type {Record<string, string>}
 */
const SHAPES = {
  ring: "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9zm0 2a2.5 2.5 0 1 1 0 5a2.5 2.5 0 1 1 0-5z",
  disc: "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9z",
  square: "M2 2h8v8H2z",
  check: "M1.2 6.4l1.6-1.6 2 2 4.4-4.6 1.6 1.6-6 6.2z",
  cross: "M2.8 1.4L6 4.6l3.2-3.2 1.4 1.4L7.4 6l3.2 3.2-1.4 1.4L6 7.4l-3.2 3.2-1.4-1.4L4.6 6 1.4 2.8z",
  hourglass: "M2 1h8v1.4L7 6l3 3.6V11H2V9.6L5 6 2 2.4z",
  arrow: "M4.8 1h2.4v4.6h2.4L6 9.4 2.4 5.6h2.4zM2 10h8v1.2H2z",
  diamond: "M6 .8L11.2 6 6 11.2.8 6z",
  dash: "M1.5 5h9v2h-9z",
};

const FOCUSABLE = new Set(["a", "button", "input", "select", "summary"]);

/**
 * Create an element. Attributes that are undefined are left out; a string among the children becomes a text node.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | undefined | ((event: any) => void)>} [attributes] listeners are named `onclick` etc.
 * @param {...(Node | string)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  // JupyterLab then leaves the keys to what has the focus: `b` in a list would insert a cell, two zeros restart the
  // kernel. Its shortcuts match the element with the focus itself, so the attribute at a parent comes too late.
  if (FOCUSABLE.has(tag) || attributes.tabindex) element.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Setters that leave an element alone where nothing changes: the browser then has nothing to lay out or to read aloud.

/** @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {Element} element @param {string} name @param {string} value */
export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** @param {HTMLElement} element @param {boolean} hidden */
export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** Show a text, or hide its element if the text is empty. @param {HTMLElement} element @param {string} text */
export function showText(element, text) {
  setText(element, text);
  setHidden(element, !text);
}

/** A table as ranks and the kernel give it: names of columns, and rows. @param {string[]} names @param {string[][]} rows @param {...Node} before */
export function tableOf(names, rows, ...before) {
  const head = h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, plainText(name))));
  const body = rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, plainText(cell)))));
  return h("table", {}, ...before, h("thead", {}, head), h("tbody", {}, ...body));
}

/**
 * Create an icon. Words beside it say the same, so screen readers skip it.
 * @param {string} [path]
 */
export function icon(path = "") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  shape.setAttribute("d", path);
  svg.append(shape);
  return { svg, shape };
}

/** A state: a coloured icon and its word. */
export class StateLight {
  constructor() {
    const { svg, shape } = icon();
    this.shape = shape;
    this.word = h("span", { class: "nbl-state-word" });
    this.element = h("span", { class: "nbl-state" }, svg, this.word);
  }

  /** @param {StateLook} state @param {string} [reason] */
  show({ word, tone, shape }, reason = "") {
    setAttribute(this.element, "data-tone", tone);
    setAttribute(this.shape, "d", SHAPES[shape] ?? "");
    setText(this.word, reason && reason !== word ? `${word}: ${reason}` : word);
    setAttribute(this.element, "title", this.word.textContent);
  }
}

/**
 * The children of an element, one for each key. A child whose key stays is kept and updated.
 * @template Key, Item
 * @template {{ element: Element, remove?: () => void }} View
 */
export class KeyedList {
  /** @type {Map<Key, View>} */
  views = new Map();
  #parent;
  #make;
  #update;

  /**
   * @param {Element} parent
   * @param {(item: Item, key: Key) => View} make
   * @param {(view: View, item: Item, key: Key) => void} [update]
   */
  constructor(parent, make, update = () => {}) {
    this.#parent = parent;
    this.#make = make;
    this.#update = update;
  }

  /**
   * Show these items in this order.
   * @param {[key: Key, item: Item][]} entries
   */
  show(entries) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (wanted.has(key)) continue;
      view.remove?.();
      view.element.remove();
      this.views.delete(key);
    }
    let next = this.#parent.firstElementChild;
    for (const [key, item] of entries) {
      const view = this.views.get(key) ?? this.#make(item, key);
      this.views.set(key, view);
      if (view.element === next) next = next.nextElementSibling;
      else this.#parent.insertBefore(view.element, next);
      this.#update(view, item, key);
    }
  }
}

/** @param {HTMLElement} control @param {string} label */
export const field = (control, label) => h("label", { class: "nbl-field" }, control, h("span", {}, label));

/** A row of tabs, of which one is selected. Arrow keys, Home and End move between them. @template {string | number} Key */
export class TabBar {
  /** @type {Key[]} */
  #keys = [];
  #onSelect;
  #uid = `nbl-${Math.random().toString(36).slice(2)}`;

  /** @param {string} label @param {Key} selected @param {() => void} onSelect called when the user has selected another tab */
  constructor(label, selected, onSelect) {
    this.selected = selected;
    this.#onSelect = onSelect;
    const onkeydown = (/** @type {KeyboardEvent} */ event) => this.#onKey(event);
    this.element = h("div", { class: "nbl-tabs", role: "tablist", "aria-label": label, onkeydown });
    this.list = new KeyedList(this.element, (/** @type {string} */ _, /** @type {Key} */ key) => {
      const attributes = { type: "button", class: "nbl-tab", role: "tab", id: this.idOf(key), "aria-controls": `${this.idOf(key)}-panel` };
      return { element: h("button", { ...attributes, onclick: () => this.select(key) }) };
    });
  }

  /** @param {Key} key */
  idOf(key) {
    return `${this.#uid}-${String(key).replaceAll(" ", "-")}`;
  }

  /** Show these tabs; if the selected one is not among them, the first one is selected. @param {[key: Key, text: string][]} tabs */
  show(tabs) {
    this.#keys = tabs.map(([key]) => key);
    if (!this.#keys.includes(this.selected) && tabs.length) this.selected = tabs[0][0];
    this.list.show(tabs);
    for (const [key, text] of tabs) {
      const tab = /** @type {Element} */ (this.list.views.get(key)?.element);
      setText(tab, text);
      setAttribute(tab, "aria-selected", String(key === this.selected));
      setAttribute(tab, "tabindex", key === this.selected ? "0" : "-1");
    }
  }

  /** @param {Key} key */
  select(key) {
    this.selected = key;
    this.#onSelect();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const at = this.#keys.indexOf(this.selected);
    /** @type {Record<string, number>} */
    const targets = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.#keys.length - 1 };
    const target = targets[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.select(this.#keys[(target + this.#keys.length) % this.#keys.length]);
    const tab = this.list.views.get(this.selected)?.element;
    tab?.focus();
    tab?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** A part of the page: heading, controls beside the heading, body. Hidden until it has something to show. */
export class Section {
  /** @param {string} title */
  constructor(title) {
    this.title = title;
    this.controls = h("div", { class: "nbl-controls" });
    this.body = h("div", { class: "nbl-body" });
    const heading = h(
      "div",
      { class: "nbl-heading" },
      h("div", { class: "nbl-title", role: "heading", "aria-level": "3" }, title),
      this.controls,
    );
    this.element = h("section", { class: "nbl-section", "aria-label": title }, heading, this.body);
    this.element.hidden = true;
  }
}

/** A progress bar. Without a total it shows stripes. */
export class ProgressBar {
  #fill = h("div", { class: "nbl-bar-fill" });

  /** @param {string} label */
  constructor(label) {
    this.element = h("div", { class: "nbl-bar", role: "progressbar", "aria-label": label }, this.#fill);
  }

  /** @param {Done} progress @param {string} text @param {StateLook} state */
  show({ done, total }, text, { tone }) {
    const share = total ? Math.min(1, (done ?? 0) / total) : null;
    this.element.toggleAttribute("data-endless", share === null);
    const width = `${share === null ? 100 : (100 * share).toFixed(2)}%`;
    if (this.#fill.style.width !== width) this.#fill.style.width = width;
    setAttribute(this.element, "data-tone", tone);
    setAttribute(this.element, "aria-valuetext", text);
    if (!total) return this.element.removeAttribute("aria-valuenow");
    setAttribute(this.element, "aria-valuemin", "0");
    setAttribute(this.element, "aria-valuemax", String(total));
    return setAttribute(this.element, "aria-valuenow", String(Math.min(done ?? 0, total)));
  }
}
