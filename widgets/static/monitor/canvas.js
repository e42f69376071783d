import { h, setAttribute, setHidden, setText } from "./elements.js";

/** @typedef {ReturnType<typeof readTheme>} Theme */
/** @typedef {(context: CanvasRenderingContext2D, width: number, height: number, theme: Theme) => void} Draw */

/**
 * What a frame paints, if it is in sight and stale.
 * @typedef {{
 *   target: HTMLElement, isVisible: boolean, isStale: boolean, setVisible(isVisible: boolean): void,
 *   setSize(size: { width: number, height: number }): void, paint(theme: Theme): void,
 * }} Painted
 */

/** Draws in one animation frame at a time for all views, and only what is in sight. */
export class FrameLoop {
  /** @type {Map<Element, Painted>} */
  #surfaces = new Map();
  #frame = 0;
  #isClosed = false;
  #sightObserver = new IntersectionObserver((entries) => this.#onSight(entries), { rootMargin: "50px" });
  #sizeObserver = new ResizeObserver((entries) => this.#onSize(entries));
  #readTheme;
  #beforeSurfaces;
  /** Theme of the last frame. @type {Theme | undefined} */
  theme;

  /**
   * @param {() => Theme} readTheme
   * @param {() => void} beforeSurfaces called in each frame before canvases are drawn
   */
  constructor(readTheme, beforeSurfaces) {
    this.#readTheme = readTheme;
    this.#beforeSurfaces = beforeSurfaces;
  }

  /** Ask for a frame. */
  request() {
    if (!this.#isClosed) this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    try {
      // In each frame, because a front end may create a view before it adds it to the page, where the styles apply.
      this.theme = this.#readTheme();
      this.#beforeSurfaces();
      for (const surface of this.#surfaces.values()) {
        if (surface.isVisible && surface.isStale) surface.paint(this.theme);
      }
    } finally {
      this.#frame = 0; // At the end: surfaces that became stale in this frame are painted in this frame.
    }
  }

  /** @param {Painted} surface */
  watch(surface) {
    this.#surfaces.set(surface.target, surface);
    this.#sightObserver.observe(surface.target);
    this.#sizeObserver.observe(surface.target);
  }

  /** @param {Painted} surface */
  unwatch(surface) {
    this.#surfaces.delete(surface.target);
    this.#sightObserver.unobserve(surface.target);
    this.#sizeObserver.unobserve(surface.target);
  }

  /** Draw all canvases again, for example in other colours. */
  invalidateAll() {
    for (const surface of this.#surfaces.values()) surface.isStale = true;
    this.request();
  }

  /** @param {IntersectionObserverEntry[]} entries */
  #onSight(entries) {
    for (const { target, isIntersecting } of entries) this.#surfaces.get(target)?.setVisible(isIntersecting);
    this.request();
  }

  /** @param {ResizeObserverEntry[]} entries */
  #onSize(entries) {
    for (const { target, contentRect } of entries) this.#surfaces.get(target)?.setSize(contentRect);
    this.request();
  }

  close() {
    this.#isClosed = true;
    cancelAnimationFrame(this.#frame);
    this.#sightObserver.disconnect();
    this.#sizeObserver.disconnect();
    for (const surface of this.#surfaces.values()) surface.setVisible(false);
    this.#surfaces.clear();
  }
}

/** A canvas with its size in CSS pixels. */
export class Surface {
  isVisible = false;
  isStale = true;
  width = 0;
  height = 0;
  #frames;
  #draw;

  /** @param {FrameLoop} frames @param {Draw} draw @param {Record<string, string>} attributes of the canvas */
  constructor(frames, draw, attributes) {
    this.#frames = frames;
    this.#draw = draw;
    this.target = h("canvas", attributes);
    frames.watch(this);
  }

  /** Draw the canvas again in the next frame. */
  invalidate() {
    this.isStale = true;
    this.#frames.request();
  }

  remove() {
    this.#frames.unwatch(this);
  }

  /** @param {{ width: number, height: number }} size */
  setSize({ width, height }) {
    this.isStale ||= width !== this.width || height !== this.height;
    [this.width, this.height] = [width, height];
  }

  /**
   * Note whether the canvas is in sight. Out of sight it keeps no pixels: those of 200 plots take 100 MB.
   * @param {boolean} isVisible
   */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible) [this.target.width, this.target.height, this.isStale] = [0, 0, true];
  }

  /** @param {Theme} theme */
  paint(theme) {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (!width || !height) return;
    if (this.target.width !== width) this.target.width = width;
    if (this.target.height !== height) this.target.height = height;
    const context = contextOf(this.target);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${theme.font}`;
    this.#draw(context, this.width, this.height, theme);
    this.isStale = false;
  }
}

/** @param {HTMLCanvasElement} canvas */
export const contextOf = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 4], [9, 2, 2, 2, 2, 2], [1, 3]];
const PALETTE = 6;

/**
 * Return the colour and the dash of a rank. Neighbours differ in both, and 48 ranks have 48 pairs.
 * @param {number} rank
 */
export const styleOf = (rank) => ({
  color: rank % PALETTE,
  dash: DASHES[(rank + Math.floor(rank / PALETTE)) % DASHES.length],
});

/**
 * Return the colours of the style sheet, after choosing its dark or light ones by the background that the page has.
 * @param {HTMLElement} root
 */
export function readTheme(root) {
  const style = getComputedStyle(root);
  const [red, green, blue] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  setAttribute(root, "data-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 110 ? "dark" : "light");
  const color = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  return {
    ink: style.color,
    ground: style.backgroundColor,
    font: style.fontFamily,
    ranks: Array.from({ length: PALETTE }, (_, at) => color(`--nbl-rank-${at}`)),
    phaseInk: color("--nbl-phase-ink"),
  };
}

/**
 * Return a colour with this opacity; a colour that a theme does not write as rgb stays as it is.
 * @param {string} color
 * @param {number} opacity
 */
export function faded(color, opacity) {
  const parts = color.startsWith("#") ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/^rgba?\(([^)]+)/)?.[1].match(/[\d.]+/g);
  return parts ? `rgba(${parts.slice(0, 3).join()}, ${opacity})` : color;
}

/**
 * Call a function whenever the page's theme may have changed. Return what ends this.
 * @param {() => void} onChange
 */
export function watchTheme(onChange) {
  const life = new AbortController();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange, { signal: life.signal });
  const themes = new MutationObserver(onChange);
  for (const target of [document.documentElement, document.body]) themes.observe(target, { attributes: true });
  life.signal.addEventListener("abort", () => themes.disconnect());
  return () => life.abort();
}

/** @typedef {{ label: string, value: string, color?: string }} TooltipRow */

/** A small table that follows the pointer inside its parent. */
export class Tooltip {
  #parent;

  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.#parent = parent;
    this.title = h("div", { class: "nbl-tip-title" });
    this.rows = h("div", {});
    this.element = h("div", { class: "nbl-tip", "aria-live": "off" }, this.title, this.rows);
    this.element.hidden = true;
    parent.append(this.element);
  }

  /** @param {number} x @param {number} y @param {string} title @param {TooltipRow[]} rows */
  show(x, y, title, rows) {
    setText(this.title, title);
    this.rows.replaceChildren(
      ...rows.map(({ color, label, value }) => {
        const swatch = h("i", {});
        swatch.style.background = color ?? "transparent";
        return h("div", { class: "nbl-tip-row" }, swatch, h("span", {}, label), h("b", {}, value));
      }),
    );
    this.element.hidden = false;
    const fits = x + 14 + this.element.offsetWidth <= this.#parent.clientWidth;
    this.element.style.left = `${Math.max(0, fits ? x + 14 : x - 14 - this.element.offsetWidth)}px`;
    this.element.style.top = `${y}px`;
  }

  hide() {
    setHidden(this.element, true);
  }
}
