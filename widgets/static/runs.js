// The table of kept runs: filter, sort, select; deleting, editing and comparing are requests to Python.

import { showComparison } from "./monitor/comparison.js";
import { button, h, make, show } from "./monitor/elements.js";
import { leaveToPicture } from "./monitor/kernel.js";

const LONG = 20; // characters from which on a text may wrap

class RunsView {
  #selected = new Set();
  #sortedBy = "when";
  #isDescending = true;
  /** What the form asks for: "delete", "edit" or nothing. */
  #asks = "";
  #endComparison = () => {};
  #model;

  constructor(model, parent) {
    this.#model = model;
    this.filter = make("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs", oninput: () => this.paint() });
    this.tag = make("select", { "aria-label": "Tag", onchange: () => this.paint() });
    this.compared = make("div");
    this.root = make("div", { class: "nbr-runs" });
    parent.append(this.root);
    this.paint();
    this.paintComparison();
  }

  /** Rows that the filters leave, in order. */
  #shown(rows) {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [key, sign] = [this.#sortedBy, this.#isDescending ? -1 : 1];
    const fits = (row) => words.every((word) => row.searched.includes(word)) && (!this.tag.value || row.tags.includes(this.tag.value));
    return rows.filter(fits).sort((a, b) => {
      const [left, right] = [a, b].map((row) => row.order[key] ?? row.cells[key] ?? "");
      return sign * (typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right)));
    });
  }

  paint() {
    const rows = this.#model.get("rows") ?? [];
    const tags = [...new Set(rows.flatMap((row) => row.tags))].sort();
    const tag = tags.includes(this.tag.value) ? this.tag.value : "";
    show(this.tag, h("option", { value: "" }, "all tags"), tags.map((value) => h("option", { key: value, value }, value)));
    this.tag.value = tag;
    const columns = this.#model.get("columns") ?? [];
    const shown = this.#shown(rows);
    const chosen = rows.filter(({ id }) => this.#selected.has(id));
    const count = shown.length === rows.length ? "" : `${shown.length} shown of `;
    const caption = [`${count}${this.#model.get("caption")}`, this.#model.get("answer")].filter(Boolean).join(" · ");
    const all = { "aria-label": "Select all shown runs", checked: shown.length > 0 && shown.every(({ id }) => this.#selected.has(id)) };
    const heads = [h("th", {}, this.#box(all, shown)), columns.map((column) => this.#heading(column))];
    const table = h("table", { "aria-label": "Runs" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, shown.map((row) => this.#row(row, columns))));
    show(
      this.root,
      h("div", { class: "nbr-bar" }, this.filter, tags.length > 0 && this.tag, h("span", { class: "nbr-actions" }, chosen.length > 0 && this.#actions(chosen))),
      h("div", { class: "nbr-form" }, chosen.length > 0 && this.#form(chosen)),
      h("div", { class: "nbr-scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, table),
      h("div", { class: "nbr-caption", role: "status" }, caption),
      this.compared,
    );
  }

  /** A box that selects these rows. */
  #box(attributes, rows) {
    const onchange = ({ target }) => {
      for (const { id } of rows) this.#selected[target.checked ? "add" : "delete"](id);
      this.#ask("");
    };
    return h("input", { type: "checkbox", ...attributes, onchange });
  }

  #heading({ title, key, is_number: isNumber }) {
    const isSorted = key === this.#sortedBy;
    const onclick = () => {
      this.#isDescending = isSorted ? !this.#isDescending : isNumber || key === "when";
      this.#sortedBy = key;
      this.paint();
    };
    const [sign, order] = !isSorted ? ["", "none"] : this.#isDescending ? [" ↓", "descending"] : [" ↑", "ascending"];
    return h("th", { key, "aria-sort": order, class: isNumber && "nbr-number" }, button(title + sign, onclick));
  }

  #row(row, columns) {
    const cell = ({ key, is_number: isNumber }) => {
      const text = row.cells[key] ?? "";
      return h("td", { key, title: key === "name" ? row.id : text, class: isNumber ? "nbr-number" : text.length > LONG && "nbr-long" }, text);
    };
    const box = this.#box({ "aria-label": `Select ${row.name}`, checked: this.#selected.has(row.id) }, [row]);
    return h("tr", { key: row.id }, h("td", {}, box), columns.map(cell));
  }

  #actions(chosen) {
    const ids = chosen.map(({ id }) => id);
    const disabled = chosen.length !== 1;
    return [
      button("Compare", () => this.#model.send({ type: "compare", ids })),
      button("Edit", () => this.#ask("edit"), { disabled, title: disabled && "Select one run to edit it" }),
      button("Delete", () => this.#ask("delete")),
    ];
  }

  /** Ask the user, or end the form, and set the focus to what it begins with. */
  #ask(what) {
    this.#asks = what;
    this.paint();
    this.root.querySelector(".nbr-form :is(input, button)")?.focus();
  }

  #form(chosen) {
    const ids = chosen.map(({ id }) => id);
    const send = (message) => {
      this.#model.send({ ...message, ids });
      this.#ask("");
    };
    if (this.#asks === "delete") {
      const bytes = chosen.reduce((sum, row) => sum + row.order.disk, 0);
      const size = bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
      const runs = chosen.length === 1 ? "this run" : `these ${chosen.length} runs`;
      const question = `Delete ${runs} from the disk (${size})? It cannot be undone.`;
      return [h("span", { role: "alert" }, question), button(`Delete ${chosen.length}`, () => send({ type: "delete" })), button("Keep", () => this.#ask(""))];
    }
    if (this.#asks !== "edit") return [];
    const [{ id, name, cells }] = chosen;
    const fields = Object.entries({ name, tags: cells.tags, notes: cells.notes });
    const save = () => {
      const inputs = [...this.root.querySelectorAll(".nbr-form input")];
      send({ type: "edit", ...Object.fromEntries(fields.map(([field], at) => [field, inputs[at].value])) });
    };
    const label = ([field, value]) => h("label", { key: `${id} ${field}` }, field, h("input", { type: "text", defaultValue: value }));
    return [fields.map(label), button("Save", save), button("Cancel", () => this.#ask(""))];
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

function render({ model, el }) {
  const view = new RunsView(model, el);
  const stay = leaveToPicture(model, el);
  const calls = { rows: () => view.paint(), caption: () => view.paint(), answer: () => view.paint(), compared: () => view.paintComparison() };
  for (const [name, call] of Object.entries(calls)) model.on(`change:${name}`, call);
  return () => {
    for (const [name, call] of Object.entries(calls)) model.off(`change:${name}`, call);
    stay();
    view.close();
  };
}

export default { render };
