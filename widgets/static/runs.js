// The table of kept runs: filter, sort, select; deleting, editing and comparing are requests to Python.

import { showComparison } from "./monitor/comparison.js";
import { h } from "./monitor/elements.js";

/**
 * @typedef {{
 *   id: string, name: string, kind: string, tags: string[], notes: string, when: string, started: number, state: string,
 *   time: string, seconds: number, ranks: number, disk: string, bytes: number, metrics: string,
 *   arguments?: Record<string, string>,
 * }} RunRow
 */
/** @typedef {keyof RunRow} Key */
/**
 * A widget's model, as far as this page uses it.
 * @typedef {{
 *   get(name: string): any,
 *   on(event: string, listener: (message?: any) => void): void,
 *   off(event: string, listener: (message?: any) => void): void,
 *   send(message: object): unknown,
 * }} RunsModel
 */

/** Columns: what is shown, and what is sorted by. @type {[title: string, shown: string, sorted: string][]} */
const COLUMNS = [
  ["name", "name", "name"],
  ["tags", "tags", "tags"],
  ["when", "when", "started"],
  ["state", "state", "state"],
  ["time", "time", "seconds"],
  ["ranks", "ranks", "ranks"],
  ["disk", "disk", "bytes"],
  ["last metrics", "metrics", "metrics"],
  ["notes", "notes", "notes"],
];
const NUMBERS = new Set(["seconds", "ranks", "bytes"]);
const ARGUMENT = "argument ";
const LONG = 20; // characters from which on a text may wrap

/** Return what a row has in a column, or under `argument NAME` the argument of that name. @param {RunRow} row @param {string} key */
const valueOf = (row, key) => (key.startsWith(ARGUMENT) ? (row.arguments?.[key.slice(ARGUMENT.length)] ?? "") : (row[/** @type {Key} */ (key)] ?? ""));

/** @param {string} text @param {() => void} onclick */
const button = (text, onclick) => h("button", { type: "button", onclick }, text);

/** @param {RunRow} row */
const wordsOf = (row) =>
  [row.id, row.name, row.kind, row.tags.join(" "), row.state, row.metrics, row.notes].join(" ").toLowerCase();

class RunsView {
  /** @type {Set<string>} */
  #selected = new Set();
  /** @type {string} */
  #sortedBy = "started";
  #isDescending = true;
  #endComparison = () => {};
  #model;

  /** @param {RunsModel} model @param {HTMLElement} parent */
  constructor(model, parent) {
    this.#model = model;
    this.filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs", oninput: () => this.paint() });
    this.tag = h("select", { "aria-label": "Tag", onchange: () => this.paint() });
    this.actions = h("span", { class: "nbr-actions" });
    this.caption = h("div", { class: "nbr-caption", role: "status" });
    this.form = h("div", { class: "nbr-form" });
    this.head = h("tr");
    this.body = h("tbody");
    this.compared = h("div");
    const table = h("table", { "aria-label": "Runs" }, h("thead", {}, this.head), this.body);
    this.root = h(
      "div",
      { class: "nbr-runs" },
      h("div", { class: "nbr-bar" }, this.filter, this.tag, this.actions),
      this.form,
      h("div", { class: "nbr-scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, table),
      this.caption,
      this.compared,
    );
    parent.append(this.root);
    this.paint();
    this.paintComparison();
  }

  /** @returns {RunRow[]} */
  get rows() {
    return this.#model.get("rows") ?? [];
  }

  /** Rows that the filters leave, in order. */
  get #shown() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [key, sign] = [this.#sortedBy, this.#isDescending ? -1 : 1];
    const fits = (/** @type {RunRow} */ row) =>
      words.every((word) => wordsOf(row).includes(word)) && (!this.tag.value || row.tags.includes(this.tag.value));
    return this.rows.filter(fits).sort((a, b) => {
      const [left, right] = [valueOf(a, key), valueOf(b, key)];
      if (left !== "" && right !== "" && !Number.isNaN(Number(left)) && !Number.isNaN(Number(right)))
        return sign * (Number(left) - Number(right));
      return sign * String(left).localeCompare(String(right));
    });
  }

  #chosen() {
    return this.rows.filter(({ id }) => this.#selected.has(id));
  }

  paint() {
    const known = new Set(this.rows.map(({ id }) => id));
    for (const id of this.#selected) if (!known.has(id)) this.#selected.delete(id);
    this.#paintTags();
    const shown = this.#shown;
    const all = h("input", { type: "checkbox", "aria-label": "Select all shown runs" });
    all.checked = shown.length > 0 && shown.every(({ id }) => this.#selected.has(id));
    all.addEventListener("change", () => {
      for (const { id } of shown) this.#select(id, all.checked);
      this.paint();
    });
    this.head.replaceChildren(h("th", {}, all), ...this.#columns.map((column) => this.#heading(column)));
    this.body.replaceChildren(...shown.map((row) => this.#row(row)));
    const bytes = this.#model.get("answer");
    const count = shown.length === this.rows.length ? "" : `${shown.length} shown of `;
    this.caption.textContent = [`${count}${this.#model.get("caption")}`, bytes].filter(Boolean).join(" · ");
    this.#paintActions();
  }

  #paintTags() {
    const tags = [...new Set(this.rows.flatMap((row) => row.tags))].sort();
    const chosen = tags.includes(this.tag.value) ? this.tag.value : "";
    this.tag.replaceChildren(
      h("option", { value: "" }, "all tags"),
      ...tags.map((tag) => h("option", { value: tag }, tag)),
    );
    this.tag.value = chosen;
    this.tag.hidden = !tags.length;
  }

  /** The columns, with those of arguments that differ behind the tags. @returns {typeof COLUMNS} */
  get #columns() {
    /** @type {string[]} */
    const names = this.#model.get("arguments") ?? [];
    return [...COLUMNS.slice(0, 2), ...names.map((name) => /** @type {typeof COLUMNS[number]} */ ([name, ARGUMENT + name, ARGUMENT + name])), ...COLUMNS.slice(2)];
  }

  /** @param {[title: string, shown: string, sorted: string]} column */
  #heading([title, , key]) {
    const isSorted = key === this.#sortedBy;
    const sort = button(title + (isSorted ? (this.#isDescending ? " ↓" : " ↑") : ""), () => {
      this.#isDescending = isSorted ? !this.#isDescending : NUMBERS.has(key) || key === "started";
      this.#sortedBy = key;
      this.paint();
    });
    const order = isSorted ? (this.#isDescending ? "descending" : "ascending") : "none";
    return h("th", { "aria-sort": order, ...(NUMBERS.has(key) ? { class: "nbr-number" } : {}) }, sort);
  }

  /** @param {RunRow} row */
  #row(row) {
    const box = h("input", { type: "checkbox", "aria-label": `Select ${row.name}` });
    box.checked = this.#selected.has(row.id);
    box.addEventListener("change", () => {
      this.#select(row.id, box.checked);
      this.paint();
    });
    const cells = this.#columns.map(([, shown, key]) => {
      const value = valueOf(row, shown);
      const kind = shown === "name" && row.kind ? ` (${row.kind})` : "";
      const text = Array.isArray(value) ? value.join(", ") : `${value}${kind}`;
      const look = NUMBERS.has(key) ? "nbr-number" : text.length > LONG ? "nbr-long" : "";
      return h("td", { title: shown === "name" ? row.id : text, class: look }, text);
    });
    return h("tr", {}, h("td", {}, box), ...cells);
  }

  /** @param {string} id @param {boolean} isSelected */
  #select(id, isSelected) {
    if (isSelected) this.#selected.add(id);
    else this.#selected.delete(id);
    this.form.replaceChildren();
  }

  #paintActions() {
    const chosen = this.#chosen();
    const ids = chosen.map(({ id }) => id);
    const actions = [
      button("Compare", () => this.#model.send({ type: "compare", ids })),
      button("Edit", () => this.#askForEdits(chosen[0])),
      button("Delete", () => this.#askToDelete(chosen)),
    ];
    actions[1].disabled = chosen.length !== 1;
    actions[1].title = actions[1].disabled ? "Select one run to edit it" : "";
    this.actions.replaceChildren(...(chosen.length ? actions : []));
  }

  /** @param {RunRow[]} chosen */
  #askToDelete(chosen) {
    const bytes = chosen.reduce((sum, { bytes }) => sum + bytes, 0);
    const size = bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
    const ids = chosen.map(({ id }) => id);
    const runs = chosen.length === 1 ? "this run" : `these ${chosen.length} runs`;
    const close = () => this.form.replaceChildren();
    const yes = button(`Delete ${chosen.length}`, () => {
      this.#model.send({ type: "delete", ids });
      close();
    });
    const question = `Delete ${runs} from the disk (${size})? It cannot be undone.`;
    this.form.replaceChildren(h("span", { role: "alert" }, question), yes, button("Keep", close));
    yes.focus();
  }

  /** @param {RunRow} row */
  #askForEdits(row) {
    const field = (/** @type {string} */ label, /** @type {string} */ value) => {
      const input = h("input", { type: "text", value });
      return { input, element: h("label", {}, label, input) };
    };
    const [name, tags, notes] = [field("name", row.name), field("tags", row.tags.join(", ")), field("notes", row.notes)];
    const close = () => this.form.replaceChildren();
    const save = button("Save", () => {
      const edits = { name: name.input.value, tags: tags.input.value, notes: notes.input.value };
      this.#model.send({ type: "edit", ids: [row.id], ...edits });
      close();
    });
    this.form.replaceChildren(name.element, tags.element, notes.element, save, button("Cancel", close));
    name.input.focus();
  }

  /** Show the comparison in place of the one before. */
  paintComparison() {
    this.#endComparison();
    const tables = this.#model.get("compared");
    this.#endComparison = tables ? showComparison(this.#model, tables, this.compared) : () => {};
  }

  close() {
    this.#endComparison();
    this.root.remove();
  }
}

/** @param {{ model: RunsModel, el: HTMLElement }} context */
function render({ model, el }) {
  const view = new RunsView(model, el);
  const [paint, compare] = [() => view.paint(), () => view.paintComparison()];
  for (const name of ["rows", "caption", "answer"]) model.on(`change:${name}`, paint);
  model.on("change:compared", compare);
  return () => {
    for (const name of ["rows", "caption", "answer"]) model.off(`change:${name}`, paint);
    model.off("change:compared", compare);
    view.close();
  };
}

export default { render };
