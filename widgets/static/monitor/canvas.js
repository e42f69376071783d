import { h, make, show } from "./elements.js";

/** Draws in one animation frame at a time for all views, and only what is in sight. */
export class FrameLoop {
  #plots = new Map();
  #frame = 0;
  #isClosed = false;
  #sightObserver = new IntersectionObserver((entries) => this.#onSight(entries), { rootMargin: "50px" });
  #sizeObserver = new ResizeObserver((entries) => this.#onSize(entries));
  #unwatchTheme = watchTheme(() => this.invalidateAll());
  #root;
  #paintViews;

  /** @param {() => void} paintViews called in each frame before plots are drawn */
  constructor(root, paintViews) {
    this.#root = root;
    this.#paintViews = paintViews;
  }

  /** Ask for a frame. */
  request() {
    if (!this.#isClosed) this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    try {
      // In each frame, because a front end may create a view before it adds it to the page, where the styles apply.
      const theme = readTheme(this.#root);
      this.#paintViews();
      for (const plot of this.#plots.values()) if (plot.isVisible && plot.isStale) plot.paint(theme);
    } finally {
      this.#frame = 0; // At the end: plots that became stale in this frame are painted in this frame.
    }
  }

  /** Paint a plot when it is stale and in sight, and tell it of its size. */
  watch(plot) {
    this.#plots.set(plot.target, plot);
    this.#sightObserver.observe(plot.target);
    this.#sizeObserver.observe(plot.target);
  }

  unwatch(plot) {
    this.#plots.delete(plot.target);
    this.#sightObserver.unobserve(plot.target);
    this.#sizeObserver.unobserve(plot.target);
  }

  /** Draw all plots again, for example in the colours of another theme. */
  invalidateAll() {
    for (const plot of this.#plots.values()) plot.isStale = true;
    this.request();
  }

  #onSight(entries) {
    for (const { target, isIntersecting } of entries) this.#plots.get(target)?.setVisible(isIntersecting);
    this.request();
  }

  #onSize(entries) {
    for (const { target, contentRect } of entries) this.#plots.get(target)?.setSize(contentRect);
    this.request();
  }

  close() {
    this.#isClosed = true;
    this.#unwatchTheme();
    cancelAnimationFrame(this.#frame);
    this.#sightObserver.disconnect();
    this.#sizeObserver.disconnect();
    for (const plot of this.#plots.values()) plot.setVisible(false);
    this.#plots.clear();
  }
}

const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 4], [9, 2, 2, 2, 2, 2], [1, 3]];
const PALETTE = 6;

/** Return the colour and the dash of a rank. Neighbours differ in both, and 48 ranks have 48 pairs. */
export const styleOf = (rank) => ({
  color: rank % PALETTE,
  dash: DASHES[(rank + Math.floor(rank / PALETTE)) % DASHES.length],
});

/** A sample of a line. */
export function lineSample(style) {
  const { color, dash } = styleOf(style);
  const look = `stroke: var(--nbl-rank-${color}); stroke-width: 2; stroke-dasharray: ${dash.join(" ") || "none"}`;
  return h("svg", { class: "nbl-sample", viewBox: "0 0 22 6", "aria-hidden": "true" }, h("path", { d: "M0 3h22", style: look }));
}

/** Return the colours of the style sheet, after choosing its dark or light ones by the background that the page has. */
function readTheme(root) {
  const style = getComputedStyle(root);
  const [red, green, blue] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  const name = 0.299 * red + 0.587 * green + 0.114 * blue < 110 ? "dark" : "light";
  if (root.dataset.theme !== name) root.dataset.theme = name;
  const ranks = Array.from({ length: PALETTE }, (_, at) => style.getPropertyValue(`--nbl-rank-${at}`).trim());
  return { ink: style.color, ground: style.backgroundColor, font: style.fontFamily, ranks };
}

/** Return a colour with this opacity; a colour that a theme does not write as rgb stays as it is. */
export function faded(color, opacity) {
  const parts = color.startsWith("#") ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/^rgba?\(([^)]+)/)?.[1].match(/[\d.]+/g);
  return parts ? `rgba(${parts.slice(0, 3).join()}, ${opacity})` : color;
}

/** Call a function whenever the page's theme may have changed. Return what ends this. */
function watchTheme(onChange) {
  const life = new AbortController();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange, { signal: life.signal });
  const themes = new MutationObserver(onChange);
  for (const target of [document.documentElement, document.body]) themes.observe(target, { attributes: true });
  life.signal.addEventListener("abort", () => themes.disconnect());
  return () => life.abort();
}

/** A small table that follows the pointer inside its parent. */
export class Tooltip {
  element = make("div", { class: "nbl-tip", "aria-live": "off", hidden: true });

  constructor(parent) {
    parent.append(this.element);
  }

  /** @param {{ label: string, value: string, color?: string }[]} rows */
  show(x, y, title, rows) {
    const row = ({ color = "transparent", label, value }) =>
      h("div", { class: "nbl-tip-row" }, h("i", { style: `background: ${color}` }), h("span", {}, label), h("b", {}, value));
    show(this.element, h("div", { class: "nbl-tip-title" }, title), rows.map(row));
    this.element.hidden = false;
    const fits = x + 14 + this.element.offsetWidth <= this.element.parentElement.clientWidth;
    this.element.style.left = `${Math.max(0, fits ? x + 14 : x - 14 - this.element.offsetWidth)}px`;
    this.element.style.top = `${y}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}
