// Elements of the page. `h` describes one, `make` creates it, and `show` brings the children of one up to date.

import { plainText } from "./units.js";

// Paths in a box of 12. Each state has a shape of its own, so that no meaning is in its colour alone.
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
const SVG = new Set(["svg", "path"]);
const PROPERTIES = new Set(["checked", "defaultValue", "selectedIndex", "value"]);

/** Attributes that elements were given last, and keys among their siblings. */
const GIVEN = new WeakMap();
const KEYS = new WeakMap();

/**
 * Describe an element. A false or missing attribute is left out, and a false or missing child takes no place.
 * A list among the children keeps its elements by their `key`, or by their positions.
 */
export const h = (tag, attributes = {}, ...children) => ({ tag, attributes, children });

/** Create an element. */
export function make(tag, attributes = {}, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  // JupyterLab then leaves the keys to what has the focus: `b` in a list would insert a cell, two zeros restart the
  // kernel. Its shortcuts match the element with the focus itself, so the attribute at a parent comes too late.
  if (FOCUSABLE.has(tag) || attributes.tabindex) element.setAttribute("data-lm-suppress-shortcuts", "true");
  show(element, ...children);
  give(element, attributes); // After the children, of which a list chooses one.
  return element;
}

/** Give an element attributes and listeners. What the user has opened, or typed over a `defaultValue`, stays. */
function give(element, attributes) {
  const before = GIVEN.get(element) ?? {};
  GIVEN.set(element, attributes);
  for (const name of Object.keys({ ...before, ...attributes })) {
    const value = attributes[name];
    if (PROPERTIES.has(name)) {
      if (value !== undefined && String(element[name]) !== String(value)) element[name] = value;
    } else if (name === "key" || value === before[name]) continue;
    else if (name.startsWith("on")) {
      if (!before[name]) element.addEventListener(name.slice(2), (event) => GIVEN.get(element)[name](event));
    } else if (name === "style") element.style.cssText = value;
    else if (value === undefined || value === null || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

/** Make the children of an element those described. Elements that stay are updated; an unchanged one is not touched. */
export function show(parent, ...children) {
  const before = new Map([...parent.childNodes].map((node) => [KEYS.get(node), node]));
  const wanted = keyed(children).map(([key, child]) => {
    const node = nodeOf(child, before.get(key));
    KEYS.set(node, key);
    return node;
  });
  const kept = new Set(wanted);
  for (const node of [...parent.childNodes]) if (!kept.has(node)) node.remove();
  let next = parent.firstChild;
  for (const node of wanted) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
}

/** Return the children that take a place, each with a key that no other one has. */
function keyed(children, prefix = "") {
  return children.flatMap((child, at) => {
    if (Array.isArray(child)) return keyed(child, `${prefix}${at}.`);
    if (child === undefined || child === null || child === false || child === "") return [];
    return [[`${prefix}${child.attributes?.key ?? at}`, child]];
  });
}

function nodeOf(child, before) {
  if (child instanceof Node) return child;
  if (typeof child === "object") {
    const { tag, attributes, children } = child;
    if (!(before instanceof Element && before.localName === tag && GIVEN.has(before))) return make(tag, attributes, ...children);
    show(before, ...children);
    give(before, attributes);
    return before;
  }
  if (!(before instanceof Text)) return document.createTextNode(child);
  if (before.data !== String(child)) before.data = child;
  return before;
}

export const button = (text, onclick, attributes = {}) => h("button", { type: "button", ...attributes, onclick }, text);

/** A table as ranks and the kernel give it: names of columns, and rows. */
export const tableOf = (names, rows, ...before) =>
  h(
    "table",
    {},
    ...before,
    h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, plainText(name))))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, plainText(cell)))))),
  );

/** An icon. Words beside it say the same, so screen readers skip it. */
export const icon = (path = "") => h("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, h("path", { d: path }));

/** A state: a coloured icon and its word. */
export function stateLight({ word, tone, shape }, reason = "") {
  const text = reason && reason !== word ? `${word}: ${reason}` : word;
  return h("span", { class: "nbl-state", "data-tone": tone, title: text }, icon(SHAPES[shape]), h("span", { class: "nbl-state-word" }, text));
}

/** A box that scrolls, also by keys. */
export const scrolled = (label, ...content) => h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": label }, ...content);

export const field = (control, label, attributes = {}) => h("label", { class: "nbl-field", ...attributes }, control, h("span", {}, label));

/** A title that opens and closes what is below it. */
export const fold = (title, attributes, ...content) => h("details", { class: "nbl-details", ...attributes }, h("summary", {}, title), ...content);

/** A progress bar. Without a total it shows stripes. */
export function progressBar({ done, total }, text, { tone }, label) {
  const now = Math.min(done ?? 0, total ?? 0);
  const values = total ? { "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": now } : {};
  const attributes = { class: "nbl-bar", role: "progressbar", "aria-label": label, title: label, "aria-valuetext": text, ...values };
  const width = total ? ((100 * now) / total).toFixed(2) : 100;
  return h("div", { ...attributes, "data-endless": !total, "data-tone": tone }, h("div", { class: "nbl-bar-fill", style: `width: ${width}%` }));
}

/** A row of tabs, of which one is selected. Arrow keys, Home and End move between them. */
export class TabBar {
  element;
  #keys = [];
  #onSelect;
  #uid = `nbl-${Math.random().toString(36).slice(2)}`;

  constructor(label, selected, onSelect) {
    this.selected = selected;
    this.#onSelect = onSelect;
    const onkeydown = (event) => this.#onKey(event);
    this.element = make("div", { class: "nbl-tabs", role: "tablist", "aria-label": label, onkeydown });
  }

  idOf(key) {
    return `${this.#uid}-${String(key).replaceAll(" ", "-")}`;
  }

  /** Show these tabs, pairs of key and text; if the selected one is not among them, the first one is selected. */
  show(tabs) {
    this.#keys = tabs.map(([key]) => key);
    if (!this.#keys.includes(this.selected) && tabs.length) this.selected = tabs[0][0];
    const tab = ([key, text]) => {
      const [id, isSelected] = [this.idOf(key), key === this.selected];
      const state = { "aria-selected": String(isSelected), tabindex: isSelected ? "0" : "-1" };
      const attributes = { key, id, type: "button", class: "nbl-tab", role: "tab", "aria-controls": `${id}-panel`, ...state };
      return h("button", { ...attributes, onclick: () => this.select(key) }, text);
    };
    show(this.element, tabs.map(tab));
  }

  select(key) {
    this.selected = key;
    this.#onSelect();
  }

  #onKey(event) {
    const at = this.#keys.indexOf(this.selected);
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.#keys.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.select(this.#keys.at(target % this.#keys.length));
    const tab = this.element.querySelector("[aria-selected=true]");
    tab.focus();
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** A part of the page: heading, controls beside the heading, body. */
export class Section {
  data;

  /** @param {(data: any) => boolean} has returns true if there is something to show */
  constructor(title, has = () => true) {
    this.title = title;
    this.has = has;
    this.controls = make("div", { class: "nbl-controls" });
    this.body = make("div", { class: "nbl-body" });
    const heading = h("div", { class: "nbl-title", role: "heading", "aria-level": "3" }, title);
    this.element = make("section", { class: "nbl-section", "aria-label": title }, h("div", { class: "nbl-heading" }, heading, this.controls), this.body);
    this.element.hidden = true;
  }

  /** Paint again after a click of the user. */
  refresh() {
    if (this.data) this.paint(this.data);
  }

  paint(data) {
    this.data = data;
  }
}

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
