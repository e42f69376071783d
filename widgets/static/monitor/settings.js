import { fold, h, Section, show } from "./elements.js";
import { plainText } from "./units.js";

/** Settings that can be changed during the run, with a field for each, and the changes that were made. */
export class Settings extends Section {
  #send;
  /** What was typed for each setting: `problem`, the `answer` that is shown, and `asked`, its changes at the last request. */
  #typed = new Map();

  /** @param {(message: object) => boolean} send returns false if the kernel cannot be reached */
  constructor(send) {
    super("Settings", ({ run, settings, changes }) => changes.length > 0 || (!run.is_over && settings.length > 0));
    this.#send = send;
  }

  paint(data) {
    super.paint(data);
    const { changes, run } = data;
    const settings = run.is_over ? [] : data.settings;
    const line = ({ words, who }, at) => h("li", { key: at }, h("code", {}, plainText(words)), " ", h("span", { class: "nbl-quiet" }, who));
    const count = `${changes.length} ${changes.length === 1 ? "change" : "changes"}`;
    show(
      this.body,
      h("div", { class: "nbl-settings" }, settings.map((setting) => this.#row(setting, data))),
      changes.length > 0 && fold(count, { class: "nbl-details nbl-changes" }, h("ol", {}, changes.map(line).reverse())),
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
    const isValue = (text) => new RegExp(`^(${setting.pattern})$`, "i").test(text); // Python checks it again.
    const oninput = ({ target }) => {
      typed.text = target.value;
      typed.problem = !typed.text.trim() || isValue(typed.text.trim()) ? "" : setting.takes;
      this.refresh();
    };
    const submit = (event) => {
      event.preventDefault();
      const value = typed.text.trim();
      if (!isValue(value)) return event.currentTarget.querySelector("input").focus();
      if (this.#send({ type: "set", name: setting.name, value })) Object.assign(typed, { asked: own.length, value });
      return this.refresh();
    };
    // A notebook may take the key's default action away, by which a form is submitted.
    const onkeydown = (event) => event.key === "Enter" && !event.isComposing && event.target.localName === "input" && submit(event);
    const input = {
      ...{ type: "text", autocomplete: "off", spellcheck: "false", "aria-label": `New value of ${name}` },
      placeholder: setting.example,
      "aria-invalid": String(Boolean(typed.problem)),
    };
    const requested = typed.asked !== null && `requested ${typed.value}; takes effect after the next update`;
    const note = requested || (own.length > 0 && `changed ${own.at(-1).who}`);
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
