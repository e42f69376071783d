import { faded, lineSample, styleOf, Tooltip } from "./canvas.js";
import { button, h, icon, make, show } from "./elements.js";
import { formatPlace, formatSeconds, formatTick, formatValue } from "./units.js";
import { uPlot } from "./uPlot.iife.min.js";

const HEAD = 24; // pixels above a plot in its picture, for its name
const PIN = "M3.5 1h5v1.2l-.9.6.3 2.4 1.6 1.5V8H6.6L6 11.4 5.4 8H2.5V6.7l1.6-1.5.3-2.4-.9-.6z";
const LARGE = "M1.5 1.5h4v1.2H3.6l2 2-.9.9-2-2v1.9H1.5zM10.500 10.500h-4V9.300h1.900l-2-2 .9-.9 2 2V6.500h1.200z";
const SHORTEST_DRAG = 4; // pixels; a shorter one is a click
const AWAY = { left: -10, top: -10 }; // a cursor that shows nothing
const REACH = 6; // pixels from a mark within which a pointer shows what was changed
const LARGEST = 1e30; // uPlot has no ticks beyond it
const SECONDS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const PARTS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
const WHOLE = Array.from({ length: 16 }, (_, at) => [1, 2, 5].map((factor) => factor * 10 ** at)).flat();

/** Plots by their keys, as far as they are shown. */
export class Plots {
  #plots = new Map();
  #frames;
  #grid;

  /**
   * @param {object} grid What all plots share: `options`, `tooltipRows()`, and what one asks of the others and of the
   * kernel: `onPin()`, `onZoom(plot, extent)`, `onCursor(plot, place)`.
   */
  constructor(frames, grid) {
    [this.#frames, this.#grid] = [frames, grid];
  }

  /** Show these plots and no others. Return their elements. */
  update(items) {
    const keys = new Set(items.map(({ key }) => key));
    for (const [key, plot] of this.#plots) {
      if (keys.has(key)) continue;
      plot.remove();
      this.#plots.delete(key);
    }
    return items.map((item) => {
      if (!this.#plots.has(item.key)) this.#plots.set(item.key, new Plot(item, this.#frames, this.#grid));
      this.#plots.get(item.key).update(item);
      return this.#plots.get(item.key).element;
    });
  }

  each(call) {
    this.#plots.forEach(call);
  }
}

/** A plot of uPlot's with name, last values, and a part to read values from (hover, keys) and to zoom (drag, keys). */
class Plot {
  isVisible = false;
  isStale = true;
  #size = { width: 0, height: 0 };
  /** Places that the plot is zoomed to. */
  #zoom = null;
  #isLarge = false;
  #uplot = null;
  /** What `#uplot` was made for: it is made again where this differs. */
  #shape = "";
  #lines = [];
  /** Positions in uPlot's data of the values of each line. */
  #columns = [];
  /** Places of all lines. */
  #extent = [0, 1];
  #theme;
  #isTold = false;
  #data;
  #grid;
  #frames;
  #caption = make("figcaption");
  #parts = make("div", { class: "nbl-parts" });
  #words = make("div", { class: "nbl-plot-words" });

  constructor(data, frames, grid) {
    [this.#data, this.#frames, this.#grid] = [data, frames, grid];
    const keys = { onkeydown: (event) => this.#onKey(event), onblur: () => this.#uplot?.setCursor(AWAY) };
    this.target = make("div", { class: "nbl-canvas nbl-plot-canvas", tabindex: "0", role: "img", ...keys });
    const frame = make("div", { class: "nbl-frame" }, this.target, this.#words);
    this.tooltip = new Tooltip(frame);
    this.element = make("figure", { class: "nbl-plot" }, this.#caption, this.#parts, frame);
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
    this.#grid.onPin();
    this.#caption.querySelector("button").focus(); // The plot moves to another place, and an element that moves loses the focus.
  }

  #toggleLarge() {
    this.#isLarge = this.element.toggleAttribute("data-large");
    this.update(this.#data);
    this.element.scrollIntoView({ block: "nearest" });
  }

  update(data) {
    if (data !== this.#data) this.invalidate();
    this.#data = data;
    const { title, names, latest, lines } = data;
    const last = lines.length > 1 && !latest ? "several curves" : `last value ${latest}`;
    const keys = "Arrow keys read values, plus and minus zoom, Escape shows all.";
    this.target.setAttribute("aria-label", `${title}, ${last}. ${keys}`);
    const iconButton = (path, label, words, isOn, onclick) =>
      button(icon(path), onclick, { class: "nbl-pin", "aria-label": `${label} ${title}`, "aria-pressed": String(isOn), title: words });
    const png = { class: "nbl-link nbl-quiet-link", title: "Download this chart as a picture", "aria-label": `Download ${title} as PNG` };
    const isPinned = this.#grid.options.pinned.has(title);
    show(
      this.#caption,
      this.#grid.onPin && iconButton(PIN, "Pin", "Keep this metric first", isPinned, () => this.#togglePin()),
      h("span", { class: "nbl-plot-name", title: names.join(", ") }, ...endsOf(title)),
      this.#zoom && button("Reset zoom", () => this.zoomTo(null), { class: "nbl-link", title: "Or double-click the plot" }),
      h("span", { class: "nbl-latest", title: latest }, latest),
      button("PNG", () => this.#uplot && downloadPng(this.#uplot.ctx.canvas, title, this.#theme), png),
      iconButton(LARGE, "Enlarge", "Show this chart large", this.#isLarge, () => this.#toggleLarge()),
    );
  }

  // As the loop of frames needs it.

  setSize({ width, height }) {
    this.isStale ||= width !== this.#size.width || height !== this.#size.height;
    this.#size = { width, height };
  }

  /** Note whether the plot is in sight. Out of sight it has no canvas: those of 200 plots take 100 MB. */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible) this.#drop();
  }

  #drop() {
    this.#uplot?.destroy();
    [this.#uplot, this.isStale] = [null, !this.isVisible];
    this.tooltip.hide();
  }

  paint(theme) {
    const { width, height } = this.#size;
    if (!width || !height) return;
    [this.#theme, this.isStale] = [theme, false];
    const { options } = this.#grid;
    this.#lines = this.#linesIn(theme);
    const isNamed = this.#lines.length > 1 && this.#lines.every(({ latest }) => latest);
    const part = ({ style, label, latest }) => h("span", {}, lineSample(style), h("span", {}, `${label} ${latest}`));
    show(this.#parts, isNamed && this.#lines.map(part));
    const { data, columns, series, bands } = this.#uplotData();
    this.#columns = columns;
    const places = data[0];
    const hasValue = data.slice(1).some((values) => values.some((value) => typeof value === "number"));
    show(this.#words, !hasValue && this.#whyEmpty());
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

  /** Return the lines to draw, the finer ones of a zoom if the kernel has sent them. */
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
    const onAxis = (value) =>
      value === null || (isLog && value <= 0) ? null : Math.max(least, Math.min(LARGEST, value));
    const series = [];
    const [tables, columns, bands] = [[], [], []];
    for (const { x, y, smooth, low, high, ink, dash } of this.#lines) {
      const table = [x];
      const add = (values, color = "", width = 0, hasDots = false, dashes = dash) => {
        table.push(values.map(onAxis));
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

  #uplotOptions(series, bands, theme, places) {
    const { axis, isLog, leastSpan } = this.#grid.options;
    const [quiet, font] = [faded(theme.ink, 0.62), `11px ${theme.font}`];
    const incrs = axis === "time" ? [...PARTS, ...SECONDS] : axis === "step" ? WHOLE : undefined;
    const widthOf = (u, texts) => {
      u.ctx.font = u.axes[1].font[0];
      return 8 + Math.ceil(Math.max(0, ...(texts ?? []).map((text) => u.ctx.measureText(text ?? "").width)) / devicePixelRatio);
    };
    return {
      ...this.#size,
      padding: [6, 1, 0, 1],
      legend: { show: false },
      scales: {
        x: { time: false, ...places },
        y: isLog ? { distr: 3 } : { range: (u, low, high) => this.#valueRange(u, low, high, leastSpan) },
      },
      series: [{}, ...series.map((one) => ({
        ...{ stroke: one.ink || "transparent", width: one.width, dash: one.dash?.length ? one.dash : undefined },
        points: { show: false, size: 4, fill: one.ink, filter: one.hasDots ? lonely : () => null },
      }))],
      bands,
      axes: [
        { stroke: quiet, font, size: 20, gap: 4, space: 70, incrs, grid: { show: false }, ticks: { show: false },
          values: (_, splits) => splits.map((split) => this.#tick(axis, split)) },
        { stroke: quiet, font, size: widthOf, gap: 5, space: 26, grid: { stroke: faded(theme.ink, 0.09), width: 1 }, ticks: { show: false },
          values: (_, splits) => splits.map((split) => (split === null ? "" : formatTick(split))) },
      ],
      cursor: {
        y: false,
        points: { size: 6, fill: (u, at) => (this.#columns.includes(at) ? u.series[at]._stroke : "transparent"), width: 0 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.zoomTo(null) },
      },
      hooks: {
        draw: [(u) => this.#drawMarks(u, theme)],
        setCursor: [(u) => this.#showValues(u)],
        setSelect: [(u) => this.#endDrag(u)],
      },
    };
  }

  #tick(axis, place) {
    return axis === "time" ? formatSeconds(place).replace(/ 00 (s|min)$/, "") : formatTick(place);
  }

  /** Return the vertical axis. */
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

  /** Draw a flag where settings were changed, and below the axis a tick for each value that is not finite. */
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

  #endDrag(u) {
    const { left, width } = u.select;
    if (!width) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width > SHORTEST_DRAG) this.zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  #onKey(event) {
    const u = this.#uplot;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = u.over.clientWidth;
    const at = u.cursor.left >= 0 ? u.cursor.left : width / 2;
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

  /** Show the values at a position, and have them read aloud. */
  #read(left) {
    this.tooltip.element.setAttribute("aria-live", "polite");
    this.#uplot.setCursor({ left, top: 0 });
    this.tooltip.element.setAttribute("aria-live", "off");
  }

  #scale(center, factor) {
    const { min, max } = this.#uplot.scales.x;
    const half = (factor * (max - min)) / 2;
    const [first, last] = this.#extent;
    const zoom = [Math.max(first, center - half), Math.min(last, center + half)];
    if (zoom[1] - zoom[0] >= last - first) this.zoomTo(null);
    else if (zoom[1] > zoom[0]) this.zoomTo(zoom);
  }

  zoomTo(zoom, isTold = false) {
    this.#zoom = zoom;
    this.update(this.#data);
    this.invalidate();
    if (!isTold) this.#grid.onZoom?.(this, zoom);
  }

  /** Show the values at the place that the cursor of another plot has. */
  follow(place) {
    if (!this.#uplot) return;
    this.#isTold = true;
    this.#uplot.setCursor(place === null ? AWAY : { left: this.#uplot.valToPos(place, "x"), top: 0 });
    this.#isTold = false;
  }

  #showValues(u) {
    const { left, idx } = u.cursor;
    const place = left >= 0 && idx !== null && idx !== undefined ? u.data[0][idx] : null;
    if (!this.#isTold) this.#grid.onCursor?.(this, place);
    if (place === null || !this.#lines.length) return this.tooltip.hide();
    const { marks, axis } = this.#grid.options;
    const near = marks.filter(([at]) => Math.abs(u.valToPos(at, "x") - left) <= REACH);
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

/** Return a long name as two parts: of the first one the end may be cut off, since names that belong together begin alike. */
function endsOf(name) {
  if (name.length <= 24) return [name];
  return [h("span", {}, name.slice(0, -14)), h("span", {}, name.slice(-14))];
}

const widened = (extent) => (extent[1] > extent[0] ? extent : [extent[0] - 0.5, extent[0] + 0.5]);

/** Return the positions of values that have no neighbour, which a line does not show. */
function lonely(u, at) {
  const values = u.data[at];
  const known = values.flatMap((value, position) => (value === undefined ? [] : [position]));
  return known.filter((position, number) => {
    const [before, after] = [known[number - 1], known[number + 1]].map((other) => (other === undefined ? null : values[other]));
    return values[position] !== null && before === null && after === null;
  });
}

/** Offer a file to the user, as the browser does with downloads. */
export function offerFile(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Offer a plot as a picture, with its name above it and on the background of the page. */
function downloadPng(canvas, title, theme) {
  const picture = document.createElement("canvas");
  const ratio = canvas.clientWidth ? canvas.width / canvas.clientWidth : 1;
  [picture.width, picture.height] = [canvas.width, canvas.height + HEAD * ratio];
  const context = picture.getContext("2d");
  context.fillStyle = theme.ground;
  context.fillRect(0, 0, picture.width, picture.height);
  Object.assign(context, { fillStyle: theme.ink, font: `600 ${12 * ratio}px ${theme.font}`, textBaseline: "middle" });
  context.fillText(title, 6 * ratio, (HEAD / 2) * ratio);
  context.drawImage(canvas, 0, HEAD * ratio);
  picture.toBlob((blob) => blob && offerFile(blob, `${title}.png`), "image/png");
}
