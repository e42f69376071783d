import { faded, styleOf, Tooltip } from "./canvas.js";
import { downloadPng } from "./downloads.js";
import { h, icon, KeyedList, setAttribute, setHidden, setText } from "./elements.js";
import { formatPlace, formatSeconds, formatTick, formatValue } from "./units.js";
import { uPlot } from "./uPlot.iife.min.js";

/** @import { FrameLoop, Theme, TooltipRow } from "./canvas.js" */
/** @import { CurveOptions } from "./curves.js" */
/** @import { PlotData, Line } from "./model.js" */
/** @import { AxisKind, Value } from "./wire" */

/** @typedef {[low: number, high: number]} Extent */
/** A line with its appearance. @typedef {Line & { ink: string, dash: number[] }} Drawn */
/** What all plots of a grid share: options, and what one plot asks of the others and of the kernel.
 * @typedef {{
 *   options: CurveOptions,
 *   onPin?: () => void,
 *   onZoom?: (plot: Plot, extent: Extent | null) => void,
 *   onCursor?: (plot: Plot, place: number | null) => void,
 *   tooltipRows: () => number,
 * }} Grid */

const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";
const LARGE = "M1.5 1.5h4v1.2H3.6l2 2-.9.9-2-2v1.9H1.5zM10.500 10.500h-4V9.300h1.900l-2-2 .9-.9 2 2V6.500h1.200z";
const SHORTEST_DRAG = 4; // pixels; a shorter one is a click
const REACH = 6; // pixels from a mark within which a pointer shows what was changed
const LARGEST = 1e30; // uPlot has no ticks beyond it
const SECONDS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const PARTS = [0.001, 0.01, 0.1].flatMap((power) => [1, 2, 5].map((factor) => Number((power * factor).toPrecision(1))));
const WHOLE = Array.from({ length: 16 }, (_, at) => [1, 2, 5].map((factor) => factor * 10 ** at)).flat();

/** A plot of uPlot's with name, last values, and a part to read values from (hover, keys) and to zoom (drag, keys). */
export class Plot {
  isVisible = false;
  isStale = true;
  #size = { width: 0, height: 0 };
  /** Places that the plot is zoomed to. @type {Extent | null} */
  #zoom = null;
  /** @type {any} */
  #uplot = null;
  /** What `#uplot` was made for: it is made again where this differs. */
  #shape = "";
  /** @type {Drawn[]} */
  #lines = [];
  /** Positions in uPlot's data of the values of each line. @type {number[]} */
  #columns = [];
  /** Places of all lines. @type {Extent} */
  #extent = [0, 1];
  /** @type {Theme | undefined} */
  #theme;
  #isTold = false;
  /** @type {PlotData} */
  #data;
  /** @type {Grid} */
  #grid;
  /** @type {FrameLoop} */
  #frames;

  /** @param {PlotData} data @param {FrameLoop} frames @param {Grid} grid */
  constructor(data, frames, grid) {
    [this.#data, this.#frames, this.#grid] = [data, frames, grid];
    const { title } = data;
    const attributes = { class: "nbl-canvas nbl-plot-canvas", tabindex: "0", role: "img" };
    this.target = h("div", attributes);
    this.target.addEventListener("keydown", (event) => this.#onKey(event));
    this.target.addEventListener("blur", () => this.#leave());
    this.latest = h("span", { class: "nbl-latest" });
    const parts = h("div", { class: "nbl-parts" });
    this.parts = new KeyedList(parts, () => new PartLabel(), (label, /** @type {Drawn} */ line) => label.show(line));
    this.words = h("div", { class: "nbl-plot-words" });
    const reset = { type: "button", class: "nbl-link", title: "Or double-click the plot", onclick: () => this.zoomTo(null) };
    this.reset = h("button", reset, "Reset zoom");
    this.reset.hidden = true;
    const png = h(
      "button",
      {
        ...{ type: "button", class: "nbl-link nbl-quiet-link", title: "Download this chart as a picture" },
        "aria-label": `Download ${title} as PNG`,
        onclick: () => this.#uplot && this.#theme && downloadPng(this.#uplot.ctx.canvas, title, this.#theme),
      },
      "PNG",
    );
    this.pin = iconButton(PIN, `Pin ${title}`, "Keep this metric first", () => this.#togglePin());
    this.pin.hidden = !grid.onPin;
    this.large = iconButton(LARGE, `Enlarge ${title}`, "Show this chart large", () => this.#toggleLarge());
    const name = h("span", { class: "nbl-plot-name", title: data.names.join(", ") }, ...endsOf(title));
    const frame = h("div", { class: "nbl-frame" }, this.target, this.words);
    this.tooltip = new Tooltip(frame);
    const caption = h("figcaption", {}, this.pin, name, this.reset, this.latest, png, this.large);
    this.element = h("figure", { class: "nbl-plot" }, caption, parts, frame);
    this.update(data);
    frames.watch(this);
  }

  remove() {
    this.#frames.unwatch(this);
    this.setVisible(false);
  }

  invalidate() {
    this.isStale = true;
    this.#frames.request();
  }

  #togglePin() {
    const { pinned } = this.#grid.options;
    if (!pinned.delete(this.#data.title)) pinned.add(this.#data.title);
    this.#grid.onPin?.();
    this.pin.focus(); // The plot moves to another place, and an element that moves loses the focus.
  }

  #toggleLarge() {
    const isLarge = this.element.toggleAttribute("data-large");
    setAttribute(this.large, "aria-pressed", String(isLarge));
    this.element.scrollIntoView({ block: "nearest" });
  }

  /** @param {PlotData} data */
  update(data) {
    this.#data = data;
    setAttribute(this.pin, "aria-pressed", String(this.#grid.options.pinned.has(data.title)));
    setText(this.latest, data.latest);
    setAttribute(this.latest, "title", data.latest);
    const keys = "Arrow keys read values, plus and minus zoom, Escape shows all.";
    const last = data.lines.length > 1 && !data.latest ? "several curves" : `last value ${data.latest}`;
    setAttribute(this.target, "aria-label", `${data.title}, ${last}. ${keys}`);
    this.invalidate();
  }

  // As the loop of frames needs it.

  /** @param {{ width: number, height: number }} size */
  setSize({ width, height }) {
    this.isStale ||= width !== this.#size.width || height !== this.#size.height;
    this.#size = { width, height };
  }

  /** Note whether the plot is in sight. Out of sight it has no canvas: those of 200 plots take 100 MB. @param {boolean} isVisible */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible) this.#drop();
  }

  #drop() {
    this.#uplot?.destroy();
    [this.#uplot, this.isStale] = [null, !this.isVisible];
    this.tooltip.hide();
  }

  /** @param {Theme} theme */
  paint(theme) {
    const { width, height } = this.#size;
    if (!width || !height) return;
    [this.#theme, this.isStale] = [theme, false];
    const { options } = this.#grid;
    this.#lines = this.#linesIn(theme);
    const isNamed = this.#lines.length > 1 && this.#lines.every(({ latest }) => latest);
    this.parts.show(isNamed ? this.#lines.map((line, at) => [at, line]) : []);
    const { data, columns, series, bands } = this.#uplotData();
    this.#columns = columns;
    const places = data[0];
    const hasValue = data.slice(1).some((/** @type {Value[]} */ values) => values.some((value) => typeof value === "number"));
    setText(this.words, hasValue ? "" : this.#whyEmpty());
    if (places.length) this.#extent = [places[0], places[places.length - 1]];
    const shape = JSON.stringify([series, options.isLog, options.axis, theme.ink]);
    const cursor = this.#uplot?.cursor.left ?? -1;
    if (!hasValue || shape !== this.#shape) this.#drop();
    this.#shape = shape;
    if (!hasValue) return;
    if (this.#uplot && (this.#uplot.width !== width || this.#uplot.height !== height)) this.#uplot.setSize({ width, height });
    const [min, max] = this.#zoom ?? widened(this.#extent);
    if (this.#uplot) {
      this.#uplot.batch(() => {
        this.#uplot.setData(data, false);
        this.#uplot.setScale("x", { min, max });
      });
    } else this.#uplot = new uPlot(this.#uplotOptions(series, bands, theme, { min, max }), data, this.target);
    // A pointer that rests reads other values now; uPlot has its scales only after this.
    if (cursor >= 0) queueMicrotask(() => this.#uplot?.setCursor({ left: cursor, top: 0 }));
  }

  #whyEmpty() {
    const { lines } = this.#data;
    const isFinite = lines.some(({ y }) => y.some((value) => value !== null));
    if (this.#grid.options.isLog && isFinite) return "No value above zero, which a log scale needs";
    return isFinite && !this.#lines.length ? "All ranks are hidden" : "No finite value";
  }

  /** Return the lines to draw, the finer ones of a zoom if the kernel has sent them. @param {Theme} theme @returns {Drawn[]} */
  #linesIn(theme) {
    const { lines, zoomed } = this.#data;
    const isFine = this.#zoom && zoomed && this.#zoom.every((place, at) => place === zoomed.range[at]);
    return lines.flatMap((line) => {
      if (line.rank !== null && this.#grid.options.hidden.has(line.rank)) return [];
      const { color, dash } = styleOf(line.style);
      const fine = isFine ? zoomed.lines.find(({ label }) => label === line.label) : {};
      return [{ ...line, ...fine, ink: theme.ranks[color], dash }];
    });
  }

  /** Return the lines as columns over common places, and what uPlot has to know about each. */
  #uplotData() {
    const { isLog } = this.#grid.options;
    const least = isLog ? 1 / LARGEST : -LARGEST;
    const onAxis = (/** @type {Value} */ value) =>
      value === null || (isLog && value <= 0) ? null : Math.max(least, Math.min(LARGEST, value));
    /** @type {{ ink: string, width: number, dash?: number[], hasDots: boolean }[]} */
    const series = [];
    const [tables, columns, bands] = [/** @type {any[]} */ ([]), /** @type {number[]} */ ([]), /** @type {any[]} */ ([])];
    for (const { x, y, smooth, low, high, ink, dash } of this.#lines) {
      const table = [x];
      const add = (/** @type {Value[]} */ values, color = "", width = 0, hasDots = false, dashes = dash) => {
        table.push(/** @type {any} */ (values.map(onAxis)));
        series.push({ ink: color, width, dash: dashes, hasDots });
      };
      if (low && high) {
        add(high);
        add(low);
        bands.push({ series: [series.length - 1, series.length], fill: faded(ink, 0.16) });
      }
      if (smooth) add(y, faded(ink, 0.25), 1, false, []);
      // Dashes of a line that goes up and down in each pixel column cannot be seen.
      add(smooth ?? y, ink, 1.6, true, x.length > this.#size.width ? [] : dash);
      columns.push(series.length);
      tables.push(table);
    }
    return { data: tables.length ? uPlot.join(tables) : [[]], columns, series, bands };
  }

  /** @param {{ ink: string, width: number, dash?: number[], hasDots: boolean }[]} series @param {any[]} bands @param {Theme} theme @param {{ min: number, max: number }} places */
  #uplotOptions(series, bands, theme, places) {
    const { axis, isLog, leastSpan } = this.#grid.options;
    const [quiet, font] = [faded(theme.ink, 0.62), `11px ${theme.font}`];
    const incrs = axis === "time" ? [...PARTS, ...SECONDS] : axis === "step" ? WHOLE : undefined;
    const widthOf = (/** @type {any} */ u, /** @type {string[] | null} */ texts) => {
      u.ctx.font = u.axes[1].font[0];
      return 8 + Math.ceil(Math.max(0, ...(texts ?? []).map((text) => u.ctx.measureText(text ?? "").width)) / devicePixelRatio);
    };
    return {
      ...this.#size,
      padding: [6, 1, 0, 1],
      legend: { show: false },
      scales: {
        x: { time: false, ...places },
        y: isLog ? { distr: 3 } : { range: (/** @type {any} */ u, /** @type {number} */ low, /** @type {number} */ high) => this.#valueRange(u, low, high, leastSpan) },
      },
      series: [{}, ...series.map((one) => ({
        ...{ stroke: one.ink || "transparent", width: one.width, dash: one.dash?.length ? one.dash : undefined },
        points: { show: false, size: 4, fill: one.ink, filter: one.hasDots ? lonely : () => null },
      }))],
      bands,
      axes: [
        { stroke: quiet, font, size: 20, gap: 4, space: 70, incrs, grid: { show: false }, ticks: { show: false },
          values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map((split) => this.#tick(axis, split)) },
        { stroke: quiet, font, size: widthOf, gap: 5, space: 26, grid: { stroke: faded(theme.ink, 0.09), width: 1 }, ticks: { show: false },
          values: (/** @type {any} */ _, /** @type {Value[]} */ splits) => splits.map((split) => (split === null ? "" : formatTick(split))) },
      ],
      cursor: {
        y: false,
        points: { size: 6, fill: (/** @type {any} */ u, /** @type {number} */ at) => (this.#columns.includes(at) ? u.series[at]._stroke : "transparent"), width: 0 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.zoomTo(null) },
      },
      hooks: {
        draw: [(/** @type {any} */ u) => this.#drawMarks(u, theme)],
        setCursor: [(/** @type {any} */ u) => this.#showValues(u)],
        setSelect: [(/** @type {any} */ u) => this.#endDrag(u)],
      },
    };
  }

  /** @param {AxisKind} axis @param {number} place */
  #tick(axis, place) {
    return axis === "time" ? formatSeconds(place).replace(/ 00 (s|min)$/, "") : formatTick(place);
  }

  /** Return the vertical axis. @param {any} u @param {number} low @param {number} high @param {number} leastSpan @returns {Extent} */
  #valueRange(u, low, high, leastSpan) {
    if (this.#grid.options.hidesOutliers) {
      const inside = this.#columns.flatMap((at) => u.data[at].slice(u.series[0].idxs[0], u.series[0].idxs[1] + 1));
      const sorted = inside.filter((value) => typeof value === "number").sort((a, b) => a - b);
      if (sorted.length > 20) [low, high] = [0.025, 0.975].map((part) => sorted[Math.round(part * (sorted.length - 1))]);
    }
    if (low === null) return [0, 1];
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const missing = leastSpan * largest - (high - low);
    const pad = Math.max(0.06 * (high - low) || 0.1 * largest || 1, missing / 2);
    return [low - pad, high + pad];
  }

  /** Draw a flag where settings were changed, and below the axis a tick for each value that is not finite. @param {any} u @param {Theme} theme */
  #drawMarks(u, theme) {
    const { ctx, bbox, scales: { x } } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    Object.assign(ctx, { strokeStyle: theme.ink, fillStyle: theme.ink, globalAlpha: 0.55, lineWidth: ratio });
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    for (const [place] of this.#grid.options.marks) {
      if (place < x.min || place > x.max) continue;
      const at = Math.round(u.valToPos(place, "x", true)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      for (const [right, down] of [[0, 0], [7, 3.5], [0, 7]]) ctx.lineTo(at + right * ratio, bbox.top + down * ratio);
      ctx.fill();
    }
    ctx.globalAlpha = 1;
    for (const { x: places, y, ink } of this.#lines) {
      ctx.fillStyle = ink;
      y.forEach((value, at) => {
        if (value !== null || places[at] < x.min || places[at] > x.max) return;
        ctx.fillRect(Math.round(u.valToPos(places[at], "x", true)) - ratio, bbox.top + bbox.height + ratio, 2 * ratio, 4 * ratio);
      });
    }
    ctx.restore();
  }

  // Pointer and keys.

  /** @param {any} u */
  #endDrag(u) {
    const { left, width } = u.select;
    if (!width) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width > SHORTEST_DRAG) this.zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const u = this.#uplot;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = u.over.clientWidth;
    const at = u.cursor.left >= 0 ? u.cursor.left : width / 2;
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => this.#read(Math.max(0, at - width / 40)),
      ArrowRight: () => this.#read(Math.min(width, at + width / 40)),
      "+": () => this.#scale(u.posToVal(at, "x"), 0.5),
      "=": () => this.#scale(u.posToVal(at, "x"), 0.5),
      "-": () => this.#scale(u.posToVal(at, "x"), 2),
      Escape: () => this.zoomTo(null),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  /** Show the values at a position, and have them read aloud. @param {number} left */
  #read(left) {
    setAttribute(this.tooltip.element, "aria-live", "polite");
    this.#uplot.setCursor({ left, top: 0 });
    setAttribute(this.tooltip.element, "aria-live", "off");
  }

  #leave() {
    this.#uplot?.setCursor({ left: -10, top: -10 });
  }

  /** @param {number} center @param {number} factor of the places in sight */
  #scale(center, factor) {
    const { min, max } = this.#uplot.scales.x;
    const half = (factor * (max - min)) / 2;
    const [first, last] = this.#extent;
    /** @type {Extent} */
    const zoom = [Math.max(first, center - half), Math.min(last, center + half)];
    if (zoom[1] - zoom[0] >= last - first) this.zoomTo(null);
    else if (zoom[1] > zoom[0]) this.zoomTo(zoom);
  }

  /** @param {Extent | null} zoom @param {boolean} isTold true: another plot has asked for it */
  zoomTo(zoom, isTold = false) {
    this.#zoom = zoom;
    setHidden(this.reset, !zoom);
    this.invalidate();
    if (!isTold) this.#grid.onZoom?.(this, zoom);
  }

  /** Show the values at the place that the cursor of another plot has. @param {number | null} place */
  follow(place) {
    if (!this.#uplot) return;
    this.#isTold = true;
    this.#uplot.setCursor(place === null ? { left: -10, top: -10 } : { left: this.#uplot.valToPos(place, "x"), top: 0 });
    this.#isTold = false;
  }

  /** @param {any} u */
  #showValues(u) {
    const { left, idx } = u.cursor;
    const place = left >= 0 && idx !== null && idx !== undefined ? u.data[0][idx] : null;
    if (!this.#isTold) this.#grid.onCursor?.(this, place);
    if (place === null || !this.#lines.length) return this.tooltip.hide();
    const { marks, axis } = this.#grid.options;
    const near = marks.filter(([at]) => Math.abs(u.valToPos(at, "x") - left) <= REACH);
    /** @type {TooltipRow[]} */
    const rows = near.slice(-4).map(([, words]) => ({ label: words, value: "" }));
    this.#lines.forEach(({ x, y, smooth, low, high, label, ink }) => {
      const at = x.lastIndexOf(place);
      if (at < 0) return;
      rows.push({ color: ink, label, value: formatValue((smooth ?? y)[at]) });
      if (low && high) rows.push({ label: "lowest", value: formatValue(low[at]) }, { label: "highest", value: formatValue(high[at]) });
    });
    const more = rows.length - this.#grid.tooltipRows();
    if (more > 0) rows.splice(-more, more, { label: `and ${more} more`, value: "" });
    return this.tooltip.show(u.valToPos(place, "x") + u.over.offsetLeft, 0, formatPlace(axis, place), rows);
  }
}

/** Name and last value of a line, beside a sample of it. */
class PartLabel {
  sample = h("i", {});
  words = h("span", {});
  element = h("span", {}, this.sample, this.words);

  /** @param {Drawn} line */
  show({ ink, dash, label, latest }) {
    this.sample.style.borderTop = `2px ${dash.length ? "dashed" : "solid"} ${ink}`;
    setText(this.words, `${label} ${latest}`);
  }
}

/** @param {string} path @param {string} label @param {string} title @param {() => void} onclick */
function iconButton(path, label, title, onclick) {
  return h("button", { type: "button", class: "nbl-pin", "aria-label": label, "aria-pressed": "false", title, onclick }, icon(path).svg);
}

/** Return a long name as two parts: of the first one the end may be cut off, since names that belong together begin alike. @param {string} name */
function endsOf(name) {
  if (name.length <= 24) return [name];
  return [h("span", {}, name.slice(0, -14)), h("span", {}, name.slice(-14))];
}

/** @param {Extent} extent @returns {Extent} */
const widened = ([low, high]) => (high > low ? [low, high] : [low - 0.5, high + 0.5]);

/** Return the positions of values that have no neighbour, which a line does not show. @param {any} u @param {number} at */
function lonely(u, at) {
  /** @type {(Value | undefined)[]} */
  const values = u.data[at];
  const known = values.flatMap((value, position) => (value === undefined ? [] : [position]));
  return known.filter((position, number) => {
    const [before, after] = [known[number - 1], known[number + 1]].map((other) => (other === undefined ? null : values[other]));
    return values[position] !== null && before === null && after === null;
  });
}
