import { h, make, Section, show, tableOf } from "./elements.js";
import { plainText } from "./units.js";

const ELEMENTS = new Set(["svg", "g", "rect", "path", "text", "title"]);
const ATTRIBUTES = new Set(
  "x y width height viewBox role aria-label color fill font-family font-size font-weight text-anchor d transform".split(" "),
);

/** Where the time goes, on request: sampled stacks of all ranks, and a profile of some updates. */
export class Measurements extends Section {
  #send;
  /** By kind: the finding at the time of the last request, and what was asked for. */
  #asked = new Map();
  /** The elements of each finding, which are made once. */
  #parts = new WeakMap();

  /** @param {(message: object) => boolean} send returns false if the kernel cannot be reached */
  constructor(send) {
    super("Where the time goes", ({ run, findings }) => findings.size > 0 || (!run.is_over && Boolean(run.actions?.stop)));
    this.#send = send;
  }

  paint(data) {
    super.paint(data);
    this.controls.hidden = Boolean(data.run.is_over);
    show(this.controls, data.legend.measures.map((measure) => this.#form(measure, data)));
    show(this.body, data.legend.measures.map(({ kind }) => this.#result(kind, data)));
  }

  /** Return what is waited for, in words. */
  #waitsFor(kind, { findings }) {
    const asked = this.#asked.get(kind);
    if (asked?.finding !== findings.get(kind)) this.#asked.delete(kind);
    return this.#asked.get(kind)?.words;
  }

  #form({ kind, label, unit, amount, max, title }, data) {
    const { run, link, findings } = data;
    const onsubmit = (event) => {
      event.preventDefault();
      const wanted = Number(event.currentTarget.querySelector("input").value);
      if (this.#send({ type: kind, amount: wanted })) this.#asked.set(kind, { finding: findings.get(kind), words: `${label}: ${wanted} ${unit} …` });
      this.refresh();
    };
    const disabled = Boolean(this.#waitsFor(kind, data)) || link !== "up" || !run.actions?.[kind];
    const button = { type: "submit", class: "nbl-button", "data-measure": kind, disabled, title: (kind === "profile" && run.change_hint) || title };
    return h(
      "form",
      { class: "nbl-measure", onsubmit },
      h("button", button, label),
      h("input", { type: "number", "aria-label": `${label}: ${unit}`, min: 1, max, step: 1, defaultValue: amount, required: true }),
      h("span", {}, unit),
    );
  }

  #result(kind, data) {
    const finding = data.findings.get(kind);
    if (finding && !this.#parts.has(finding)) this.#parts.set(finding, partsOf(finding));
    const waitsFor = this.#waitsFor(kind, data);
    const note = waitsFor ? !data.run.is_over && waitsFor : plainText(finding?.problem);
    const status = h("div", { class: "nbl-setting-note", role: "status", hidden: !note }, note);
    return h("div", {}, status, h("div", { class: "nbl-finding" }, finding ? this.#parts.get(finding) : []));
  }
}

const partsOf = ({ drawing, tables }) => [...(drawing ? [drawingOf(drawing)] : []), ...tables.map(tablePart)];

function tablePart({ head, columns, rows, trace, trace_data: data, notes }) {
  const viewer = { href: "https://ui.perfetto.dev", target: "_blank", rel: "noopener noreferrer" };
  const file = { href: `data:application/gzip;base64,${data}`, download: trace.split("/").pop() };
  return make(
    "div",
    { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": head },
    tableOf(columns, rows, h("caption", {}, head)),
    notes.map((note) => h("div", { class: "nbl-setting-note" }, plainText(note))),
    trace && h("div", {}, data && h("a", file, "Download the trace"), data && "; ", h("a", viewer, "Perfetto"), " opens it."),
  );
}

/** Return an `<svg>` that Python has drawn as an element, without anything that a drawing does not need. */
function drawingOf(text) {
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  for (const element of [svg, ...svg.querySelectorAll("*")]) {
    if (!ELEMENTS.has(element.localName)) element.remove();
    for (const { name } of [...element.attributes]) if (!ATTRIBUTES.has(name)) element.removeAttribute(name);
  }
  return document.importNode(svg, true);
}
