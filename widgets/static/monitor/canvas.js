import { h, setAttribute, setHidden, setText } from "./elements.js";

/** What draws: one animation frame at a time for all views, and only canvases that can be seen. */
export class FrameLoop {
  #surfaces = new Map();
  #frame = 0;
  #seen = new IntersectionObserver((entries) => this.#onSeen(entries), { rootMargin: "50px" });
  #sized = new ResizeObserver((entries) => this.#onSized(entries));

  constructor(readTheme, beforeSurfaces) {
    this.readTheme = readTheme;
    this.beforeSurfaces = beforeSurfaces;
  }

  request() {
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    try {
      // Each time: a view is made before it is put on the page, where no style is known yet.
      this.theme = this.readTheme();
      this.beforeSurfaces();
      for (const surface of this.#surfaces.values()) {
        if (surface.isVisible && surface.isStale) surface.paint(this.theme);
      }
    } finally {
      this.#frame = 0; // last: what became stale meanwhile has just been painted
    }
  }

  watch(surface) {
    this.#surfaces.set(surface.canvas, surface);
    this.#seen.observe(surface.canvas);
    this.#sized.observe(surface.canvas);
  }

  unwatch(surface) {
    this.#surfaces.delete(surface.canvas);
    this.#seen.unobserve(surface.canvas);
    this.#sized.unobserve(surface.canvas);
  }

  invalidateAll() {
    for (const surface of this.#surfaces.values()) surface.isStale = true;
    this.request();
  }

  #onSeen(entries) {
    for (const { target, isIntersecting } of entries) this.#surfaces.get(target)?.setVisible(isIntersecting);
    this.request();
  }

  #onSized(entries) {
    for (const { target, contentRect } of entries) this.#surfaces.get(target)?.setSize(contentRect);
    this.request();
  }

  close() {
    cancelAnimationFrame(this.#frame);
    this.#seen.disconnect();
    this.#sized.disconnect();
    for (const surface of this.#surfaces.values()) surface.setVisible(false);
    this.#surfaces.clear();
    this.request = () => {};
  }
}

/** A canvas with its size in CSS pixels; `draw(context, width, height, theme)` fills it. */
export class Surface {
  isVisible = false;
  isStale = true;
  width = 0;
  height = 0;

  constructor(frames, draw, attributes) {
    this.frames = frames;
    this.draw = draw;
    this.canvas = h("canvas", attributes);
    frames.watch(this);
  }

  invalidate() {
    this.isStale = true;
    this.frames.request();
  }

  setSize({ width, height }) {
    this.isStale ||= width !== this.width || height !== this.height;
    Object.assign(this, { width, height });
  }

  /** A canvas out of sight gives its pixels back: 200 plots would hold 100 MB. */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible) [this.canvas.width, this.canvas.height, this.isStale] = [0, 0, true];
  }

  paint(theme) {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (!width || !height) return;
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${theme.font}`;
    this.draw(context, this.width, this.height, theme);
    this.isStale = false;
  }
}

const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 4], [9, 2, 2, 2, 2, 2], [1, 3]];
const PALETTE = 8;

/** Colour and dash of a rank: neighbours differ in both, and 64 ranks have 64 pairs. */
export const styleOf = (rank) => ({
  color: rank % PALETTE,
  dash: DASHES[(rank + Math.floor(rank / PALETTE)) % DASHES.length],
});

/** The colours in force, read from the style sheet; whether they are dark is told by the ground itself. */
export function readTheme(root) {
  const style = getComputedStyle(root);
  const [red, green, blue] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  setAttribute(root, "data-theme", 0.299 * red + 0.587 * green + 0.114 * blue < 110 ? "dark" : "light");
  const color = (name) => style.getPropertyValue(name).trim();
  return {
    ink: style.color,
    ground: style.backgroundColor,
    font: style.fontFamily,
    ranks: Array.from({ length: PALETTE }, (_, at) => color(`--nbl-rank-${at}`)),
    phaseInk: color("--nbl-phase-ink"),
    bad: color("--nbl-bad"),
  };
}

/** A small table that follows the pointer inside `parent`. */
export class Tooltip {
  constructor(parent) {
    this.title = h("div", { class: "nbl-tip-title" });
    this.rows = h("div", {});
    this.element = h("div", { class: "nbl-tip", "aria-live": "off" }, this.title, this.rows);
    this.element.hidden = true;
    parent.append(this.element);
  }

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
    const room = this.element.parentElement.clientWidth;
    const isLeft = x + 14 + this.element.offsetWidth <= room;
    this.element.style.left = `${Math.max(0, isLeft ? x + 14 : x - 14 - this.element.offsetWidth)}px`;
    this.element.style.top = `${y}px`;
  }

  hide() {
    setHidden(this.element, true);
  }
}
