// Each state has a shape of its own, so that its colour says nothing alone. Paths in a box of 12.
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

/** Make an element. Attributes that are undefined are left out; children may be strings, which become text nodes. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** A shape beside words that say the same, so that a screen reader leaves it out. */
export function icon(shape = "") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", shape);
  svg.append(path);
  return svg;
}

/** A state as a shape in a colour; the word stands beside it. */
export class StateLight {
  constructor() {
    const svg = icon();
    this.path = svg.firstChild;
    this.word = h("span", { class: "nbl-state-word" });
    this.element = h("span", { class: "nbl-state" }, svg, this.word);
  }

  show({ word, tone, shape }, reason = "") {
    setAttribute(this.element, "data-tone", tone);
    setAttribute(this.path, "d", SHAPES[shape]);
    setText(this.word, reason && reason !== word ? `${word}: ${reason}` : word);
    setAttribute(this.element, "title", this.word.textContent);
  }
}

/** The children of an element, each standing for a key; those whose key stays are kept and updated. */
export class KeyedList {
  views = new Map();

  constructor(parent, make, update = () => {}) {
    Object.assign(this, { parent, make, update });
  }

  /** Show these [key, item] pairs in this order. */
  show(entries) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (wanted.has(key)) continue;
      view.remove?.();
      view.element.remove();
      this.views.delete(key);
    }
    let next = this.parent.firstElementChild;
    for (const [key, item] of entries) {
      let view = this.views.get(key);
      if (!view) this.views.set(key, (view = this.make(item, key)));
      if (view.element === next) next = next.nextElementSibling;
      else this.parent.insertBefore(view.element, next);
      this.update(view, item, key);
    }
  }
}

export const field = (control, label) => h("label", { class: "nbl-field" }, control, h("span", {}, label));

/** A section with a heading, controls at its right, and a body; hidden until it has something to show. */
export class Section {
  constructor(title, ...controls) {
    this.controls = h("div", { class: "nbl-controls" }, ...controls);
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

export const progressBar = (label) =>
  h("div", { class: "nbl-bar", role: "progressbar", "aria-label": label }, h("div", { class: "nbl-bar-fill" }));

export function showProgress(bar, { done, total }, text) {
  const share = total ? Math.min(1, done / total) : null;
  bar.toggleAttribute("data-endless", share === null);
  const width = `${share === null ? 100 : (100 * share).toFixed(2)}%`;
  if (bar.firstChild.style.width !== width) bar.firstChild.style.width = width;
  setAttribute(bar, "aria-valuetext", text);
  if (share === null) return bar.removeAttribute("aria-valuenow");
  setAttribute(bar, "aria-valuemin", "0");
  setAttribute(bar, "aria-valuemax", String(total));
  return setAttribute(bar, "aria-valuenow", String(Math.min(done, total)));
}
