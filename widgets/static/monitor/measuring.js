import { drawingOf } from "./drawing.js";
import { h, Section, setHidden, showText, tableOf } from "./elements.js";
import { plainText } from "./text.js";

/** @import { RunData } from "./model.js" */
/** @import { FindingItem, Measure, PageMessage, Topic } from "./wire" */

/** @type {{ kind: Measure, label: string, unit: string, amount: string, max: string, title: string }[]} */
const MEASURES = [
  {
    ...{ kind: "sample", label: "Sample", unit: "seconds", amount: "5", max: "60" },
    title: "Sample the stacks of all ranks, and show where their time goes",
  },
  {
    ...{ kind: "profile", label: "Profile", unit: "updates", amount: "3", max: "100" },
    title: "Profile the next updates of rank 0 with torch.profiler",
  },
];

/** Where the time goes, on request: sampled stacks of all ranks, and a profile of some updates. */
export class Measurements extends Section {
  /** @type {Topic[]} */
  topics = ["run", "findings"];

  /** @param {(message: PageMessage) => boolean} send returns false if the kernel cannot be reached */
  constructor(send) {
    super("Where the time goes");
    this.parts = MEASURES.map((measure) => new Measurement(measure, send));
    this.controls.append(...this.parts.map(({ form }) => form));
    this.body.append(...this.parts.map(({ element }) => element));
  }

  /** @param {RunData} data */
  has({ run, findings }) {
    return findings.size > 0 || (!run.is_over && Boolean(run.actions?.stop));
  }

  /** @param {RunData} data */
  paint(data) {
    setHidden(this.controls, Boolean(data.run.is_over));
    for (const part of this.parts) part.paint(data);
  }
}

class Measurement {
  /** The finding that is shown. @type {FindingItem | undefined} */
  #shown;
  #isAsked = false;
  #measure;
  #send;

  /** @param {typeof MEASURES[number]} measure @param {(message: PageMessage) => boolean} send */
  constructor(measure, send) {
    this.#measure = measure;
    this.#send = send;
    const { label, unit, amount, max, kind } = measure;
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#ask();
    };
    const limits = { min: "1", max, step: "1", value: amount, required: "" };
    this.input = h("input", { type: "number", "aria-label": `${label}: ${unit}`, ...limits });
    this.button = h("button", { type: "submit", class: "nbl-button", "data-measure": kind }, label);
    this.form = h("form", { class: "nbl-measure", onsubmit }, this.button, this.input, h("span", {}, unit));
    this.note = h("div", { class: "nbl-setting-note", role: "status" });
    this.result = h("div", { class: "nbl-finding" });
    this.element = h("div", {}, this.note, this.result);
  }

  #ask() {
    const { kind, label, unit } = this.#measure;
    const amount = Number(this.input.value);
    if (!this.#send({ type: kind, amount })) return;
    this.#isAsked = this.button.disabled = true;
    showText(this.note, `${label}: ${amount} ${unit} …`);
  }

  /** @param {RunData} data */
  paint({ run, link, findings }) {
    const { kind, title } = this.#measure;
    const finding = findings.get(kind);
    if (finding !== this.#shown) {
      [this.#shown, this.#isAsked] = [finding, false];
      this.result.replaceChildren(...(finding ? contentOf(finding) : []));
      showText(this.note, plainText(finding?.problem ?? ""));
    }
    if (run.is_over && this.#isAsked) showText(this.note, "");
    this.button.disabled = this.#isAsked || link !== "up" || !run.actions?.[kind];
    this.button.title = (kind === "profile" && run.change_hint) || title;
  }
}

/** @param {FindingItem} finding */
function contentOf({ drawing, tables }) {
  /** @type {Element[]} */
  const parts = drawing ? [drawingOf(drawing)] : [];
  return [...parts, ...tables.map(tableElement)];
}

/** @param {FindingItem["tables"][number]} table */
function tableElement({ head, columns, rows, trace, trace_data: data, notes }) {
  const table = tableOf(columns, rows, h("caption", {}, head));
  const words = notes.map((note) => h("div", { class: "nbl-setting-note" }, plainText(note)));
  const viewer = { href: "https://ui.perfetto.dev", target: "_blank", rel: "noopener noreferrer" };
  const download = trace.split("/").pop() ?? "";
  const file = { href: `data:application/gzip;base64,${data}`, download };
  const link = data ? [h("a", file, "Download the trace"), "; "] : [];
  if (trace) words.push(h("div", {}, ...link, h("a", viewer, "Perfetto"), " opens it."));
  return h("div", { class: "nbl-scroll", tabindex: "0", role: "region", "aria-label": head }, table, ...words);
}
