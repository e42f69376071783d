import { fold, h, Section, show } from "./elements.js";
import { plainText } from "./text.js";

const FACTOR = /^[x*]\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const EXAMPLES = {
  positive: "0.01 or x0.5",
  optional: "1.0, x0.5 or none",
  number: "0.5 or x0.5",
  integer: "4 or x2",
  switch: "on or off",
};

/** Return why a text is no value of a setting; empty if it is one. Python checks it again. */
function problemOf(kind, text) {
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

const whoOf = ({ source, update }) => `by ${source === "monitor" ? "the monitor" : "code"} after update ${update}`;

/** Settings that can be changed during the run, with a field for each, and the changes that were made. */
export class Settings extends Section {
  #send;
  /** What was typed for each setting: `problem`, the `answer` that is shown, and `asked`, its changes at the last request. */
  #typed = new Map();

  /** @param {(message: object) => boolean} send returns false if the kernel cannot be reached */
  constructor(send) {
    super("Settings");
    this.#send = send;
  }

  has({ run, settings, changes }) {
    return changes.length > 0 || (!run.is_over && settings.length > 0);
  }

  paint(data) {
    super.paint(data);
    const { changes, run } = data;
    const settings = run.is_over ? [] : data.settings;
    const lines = changes.map((change, at) => {
      const words = `${plainText(change.name)} ${change.before} → ${change.after}`;
      return h("li", { key: at }, h("code", {}, words), " ", h("span", { class: "nbl-quiet" }, whoOf(change)));
    });
    const count = `${changes.length} ${changes.length === 1 ? "change" : "changes"}`;
    show(
      this.body,
      h("div", { class: "nbl-settings" }, settings.map((setting) => this.#row(setting, data))),
      changes.length > 0 && fold(count, { class: "nbl-details nbl-changes" }, h("ol", {}, lines.reverse())),
    );
  }

  #row(setting, { run, link, changes, answers }) {
    const key = `${setting.name} ${setting.kind}`;
    const name = plainText(setting.name);
    if (!this.#typed.has(key)) this.#typed.set(key, { text: "", problem: "", asked: null, value: "", answer: undefined });
    const typed = this.#typed.get(key);
    const own = changes.filter((change) => change.name === setting.name);
    const answer = answers.get(setting.name);
    if (answer?.problem && answer !== typed.answer) [typed.asked, typed.problem] = [null, plainText(answer.problem)];
    typed.answer = answer;
    if (typed.asked !== null && own.length > typed.asked) [typed.asked, typed.text] = [null, ""];
    const disabled = link !== "up" || !run.actions?.set;
    const oninput = ({ target }) => {
      typed.text = target.value;
      typed.problem = typed.text.trim() && problemOf(setting.kind, typed.text.trim());
      this.refresh();
    };
    const submit = (event) => {
      event.preventDefault();
      const value = typed.text.trim();
      if (!value || problemOf(setting.kind, value)) return event.currentTarget.querySelector("input").focus();
      if (this.#send({ type: "set", name: setting.name, value })) Object.assign(typed, { asked: own.length, value });
      return this.refresh();
    };
    // A notebook may take the key's default action away, by which a form is submitted.
    const onkeydown = (event) => event.key === "Enter" && !event.isComposing && event.target.localName === "input" && submit(event);
    const input = {
      ...{ type: "text", autocomplete: "off", spellcheck: "false", "aria-label": `New value of ${name}` },
      placeholder: EXAMPLES[setting.kind] ?? setting.text,
      "aria-invalid": String(Boolean(typed.problem)),
    };
    const requested = typed.asked !== null && `requested ${typed.value}; takes effect after the next update`;
    const note = requested || (own.length > 0 && `changed ${whoOf(own[own.length - 1])}`);
    return h(
      "form",
      { key, class: "nbl-setting", "aria-label": name, onsubmit: submit, onkeydown },
      h("div", { class: "nbl-setting-value" }, h("code", { title: name }, name), h("output", {}, setting.text)),
      h(
        "div",
        { class: "nbl-setting-field" },
        h("input", { ...input, value: typed.text, disabled, oninput }),
        h("button", { type: "submit", class: "nbl-button", disabled, title: run.change_hint || "On all ranks after the same update" }, "Apply"),
      ),
      h("div", { class: "nbl-setting-problem", role: "alert", hidden: !typed.problem }, typed.problem),
      h("div", { class: "nbl-setting-note", role: "status", hidden: !note }, note),
    );
  }
}
