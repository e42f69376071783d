import { h, KeyedList, Section, setAttribute, setHidden, setText, showText } from "./elements.js";
import { plainText } from "./text.js";

/** @import { RunData } from "./model.js" */
/** @import { ChangeItem, PageMessage, SettingKind, SettingItem, Topic } from "./wire" */

const FACTOR = /^[x*]\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const EXAMPLES = {
  positive: "0.01 or x0.5",
  optional: "1.0, x0.5 or none",
  count: "4",
  number: "0.5 or x0.5",
  integer: "4 or x2",
  switch: "on or off",
};

/**
 * Return why a text is no value of a setting; empty if it is one. Python checks it again.
 * @param {SettingKind} kind
 * @param {string} text
 */
export function problemOf(kind, text) {
  const number = Number(text);
  const isFinite = text !== "" && Number.isFinite(number);
  const isFactor = FACTOR.test(text);
  if (kind === "switch") return /^(on|off)$/i.test(text) ? "" : "on or off";
  if (kind === "count") return isFinite && Number.isInteger(number) && number >= 1 ? "" : "A whole number, 1 or more";
  if (kind === "integer") return isFactor || Number.isInteger(isFinite ? number : NaN) ? "" : "A whole number, or x2";
  if (kind === "number") return isFactor || isFinite ? "" : "A number, or a factor such as x0.5";
  if (isFactor || (isFinite && number > 0) || (kind === "optional" && /^none$/i.test(text))) return "";
  return `A number above 0, a factor such as x0.5${kind === "optional" ? ", or none" : ""}`;
}

/** @param {SettingItem} setting */
const keyOf = ({ name, kind }) => `${name} ${kind}`;

/** @param {ChangeItem} change */
const whoOf = ({ source, update }) => `changed by ${source === "monitor" ? "the monitor" : "code"} after update ${update}`;

/** Settings that can be changed during the run, with a field for each, and the changes that were made. */
export class Settings extends Section {
  /** @type {Topic[]} */
  topics = ["settings", "changes", "answers", "run"];

  /** @param {(message: PageMessage) => boolean} send returns false if the kernel cannot be reached */
  constructor(send) {
    super("Settings");
    const rows = h("div", { class: "nbl-settings" });
    const lines = h("ol", {});
    this.count = h("summary", {});
    this.history = h("details", { class: "nbl-details nbl-changes" }, this.count, lines);
    this.body.append(rows, this.history);
    this.rows = new KeyedList(rows, (/** @type {SettingItem} */ setting) => new SettingRow(setting, send));
    this.lines = new KeyedList(lines, changeLine);
  }

  /** @param {RunData} data */
  has({ run, settings, changes }) {
    return changes.length > 0 || (!run.is_over && settings.length > 0);
  }

  /** @param {RunData} data */
  paint(data) {
    const { changes, run } = data;
    const settings = run.is_over ? [] : data.settings;
    this.rows.show(settings.map((setting) => [keyOf(setting), setting]));
    // A row is found by its key: rows stay in the order in which they were made, and settings may come in another.
    for (const setting of settings) this.rows.views.get(keyOf(setting))?.show(setting, data);
    setHidden(this.history, !changes.length);
    setText(this.count, `${changes.length} ${changes.length === 1 ? "change" : "changes"}`);
    // The newest first, each under the number that it has for good.
    const entries = changes.map((change, at) => /** @type {[number, ChangeItem]} */ ([at, change]));
    this.lines.show(entries.reverse());
  }
}

/** @param {ChangeItem} change */
function changeLine(change) {
  const words = `${plainText(change.name)} ${change.before} → ${change.after}`;
  const who = h("span", { class: "nbl-quiet" }, whoOf(change).replace("changed ", ""));
  return { element: h("li", {}, h("code", {}, words), " ", who) };
}

/** One setting: its value, who changed it last, and a field to change it. */
class SettingRow {
  /** Changes of the setting when another one was asked for; null if none is under way. @type {number | null} */
  #asked = null;
  #numChanges = 0;
  /** The answer that is shown already. @type {unknown} */
  #answer;
  #setting;
  #send;

  /** @param {SettingItem} setting @param {(message: PageMessage) => boolean} send */
  constructor(setting, send) {
    this.#setting = setting;
    this.#send = send;
    const name = plainText(setting.name);
    this.value = h("output", {});
    this.note = h("div", { class: "nbl-setting-note", role: "status" });
    this.problem = h("div", { class: "nbl-setting-problem", role: "alert" });
    this.input = h("input", {
      type: "text",
      "aria-label": `New value of ${name}`,
      placeholder: EXAMPLES[setting.kind],
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.#check(),
      // A notebook may take the key's default action away, by which a form is submitted.
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key !== "Enter" || event.isComposing) return;
        event.preventDefault();
        this.#submit();
      },
    });
    this.apply = h("button", { type: "submit", class: "nbl-button", title: "On all ranks after the same update" }, "Apply");
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#submit();
    };
    this.element = h(
      "form",
      { class: "nbl-setting", "aria-label": name, onsubmit },
      h("div", { class: "nbl-setting-value" }, h("code", { title: name }, name), this.value),
      h("div", { class: "nbl-setting-field" }, this.input, this.apply),
      this.problem,
      this.note,
    );
  }

  /** Show whether the text in the field is a value. Return it, or null. */
  #check() {
    const text = this.input.value.trim();
    const problem = text ? problemOf(this.#setting.kind, text) : "";
    this.#showProblem(problem);
    return text && !problem ? text : null;
  }

  /** @param {string} problem */
  #showProblem(problem) {
    showText(this.problem, problem);
    this.input.setCustomValidity(problem);
    setAttribute(this.input, "aria-invalid", String(Boolean(problem)));
  }

  #submit() {
    const value = this.#check();
    if (value === null) return this.input.focus();
    if (!this.#send({ type: "set", name: this.#setting.name, value })) return undefined;
    this.#asked = this.#numChanges;
    return showText(this.note, `requested ${value}; takes effect after the next update`);
  }

  /** @param {SettingItem} setting @param {RunData} data */
  show(setting, { run, link, changes, answers }) {
    this.#setting = setting;
    const own = changes.filter(({ name }) => name === setting.name);
    this.#numChanges = own.length;
    setText(this.value, setting.text);
    if (setting.kind === "count") setAttribute(this.input, "placeholder", setting.text);
    this.input.disabled = this.apply.disabled = link !== "up" || !run.actions?.set;
    this.apply.title = run.change_hint || "On all ranks after the same update";
    const answer = answers.get(setting.name);
    if (answer?.problem && answer !== this.#answer) {
      this.#asked = null;
      this.#showProblem(plainText(answer.problem));
    }
    this.#answer = answer;
    if (this.#asked !== null && own.length > this.#asked) [this.#asked, this.input.value] = [null, ""];
    if (this.#asked === null) showText(this.note, own.length ? whoOf(own[own.length - 1]) : "");
  }
}
