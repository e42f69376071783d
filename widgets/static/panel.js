// The form that launches a function: an anywidget front end.
//
// Python sends all that is shown in two traits, `form` and `running` (widgets/panel/view.py and panel.py), and this
// page sends what was typed and clicked. Text goes into text nodes only.

import { button, h, make, show } from "./monitor/elements.js";
import { leaveToPicture } from "./monitor/kernel.js";

const LOOK_EVERY = 1000; // milliseconds between two requests to look for changed names in the notebook
const COPIED = 1500; // milliseconds for which the button says so
const MARKS = { error: "✕ ", warning: "Note: " };
const TRAITS = ["form", "running", "opened", "folded"];

const pushButton = (text, onclick, attributes = {}) => button(text, onclick, { class: "nbp-button", ...attributes });

const labelOf = (text, attributes = {}) => h("span", { class: "nbp-label", ...attributes }, text);

/** A text below a control. */
const noteOf = (text, level, id = undefined) =>
  h("div", { id, class: `nbp-note nbp-${level}`, role: level === "error" && "alert", hidden: !text }, text && `${MARKS[level] ?? ""}${text}`);

/** The monitor of the panel's run. */
class MonitorPlace {
  element = make("div");
  #shown = "";
  #ends = new AbortController();
  #model;
  #host;

  constructor(model, host) {
    this.#model = model;
    this.#host = host;
  }

  async show(name) {
    if (name === this.#shown) return;
    this.close();
    this.#shown = name;
    if (!name) return;
    const el = make("div");
    const { signal } = (this.#ends = new AbortController());
    this.element.replaceChildren(el);
    const relayed = this.#model.get("relayed");
    if (relayed._esm) await this.#showRelayed(relayed, el, signal);
    else if (this.#host) {
      // Only newer versions of anywidget, and marimo, have a host.
      const monitor = await this.#host.getWidget(`anywidget:${name}`);
      if (!signal.aborted) await monitor.render({ el, signal });
    } else {
      const manager = this.#model.widget_manager;
      const view = await manager.create_view(await manager.get_model(name), {});
      if (signal.aborted) return view.remove();
      el.append(view.el);
      signal.addEventListener("abort", () => view.remove());
    }
  }

  /** Draw a monitor whose messages go through the panel. */
  async #showRelayed({ title, _esm, _css }, el, signal) {
    const url = URL.createObjectURL(new Blob([_esm], { type: "text/javascript" }));
    const widget = (await import(url)).default;
    URL.revokeObjectURL(url);
    if (signal.aborted) return;
    let receive = (_) => {};
    const pass = ({ type, content }) => type === "monitor" && receive(content);
    const model = {
      get: (name) => (name === "title" ? title : ""),
      send: (content) => this.#model.send({ type: "monitor", content }),
      on: (event, listener) => event === "msg:custom" && (receive = listener), // The one of its only view.
      off: () => {},
    };
    this.#model.on("msg:custom", pass);
    el.before(make("style", {}, _css));
    const end = widget.render({ model, el });
    signal.addEventListener("abort", () => {
      this.#model.off("msg:custom", pass);
      end();
    });
  }

  close() {
    this.#ends.abort();
    this.element.replaceChildren();
  }
}

class Panel {
  #lookedAt = 0;
  #id = `nbp-${Math.random().toString(36).slice(2)}`;
  /** By the key of a field: the time at which a value was sent last, and the value. */
  #typed = new Map();
  #model;
  #element;
  #stay;
  #monitor;

  constructor(model, el, host) {
    this.#model = model;
    this.#stay = leaveToPicture(model, el);
    this.#monitor = new MonitorPlace(model, host);
    this.#element = make("div", { class: "nbp-panel", onpointerenter: this.#look, onfocusin: this.#look });
    el.append(this.#element);
    for (const name of TRAITS) model.on(`change:${name}`, this.#draw);
    this.#draw();
  }

  /** Have Python look for names of the notebook that may have changed. */
  #look = () => {
    if (Date.now() - this.#lookedAt < LOOK_EVERY) return;
    this.#lookedAt = Date.now();
    this.#model.send({ type: "look" });
  };

  #set(name, value) {
    this.#model.set(name, value);
    this.#model.save_changes();
  }

  #draw = () => {
    const [form, running] = [this.#model.get("form"), this.#model.get("running")];
    if (!form.fields || !running.buttons) return;
    // One line stands for the form, unless something that has to be fixed would be hidden.
    const isFolded = Boolean(this.#model.get("folded") && form.summary);
    const title = h("span", { class: "nbp-title" }, "Launch ", form.function ? h("code", {}, form.function) : "a function");
    const edit = pushButton(isFolded ? "Edit" : "Fold", () => this.#set("folded", !isFolded), { "aria-expanded": String(!isFolded) });
    const forget = this.#request("Back to defaults", "Take these settings back", "forget");
    show(
      this.#element,
      h(
        "div",
        {},
        h("div", { class: "nbp-head" }, title, h("span", { class: "nbp-summary" }, isFolded && form.summary), running.monitor && form.summary && edit),
        h("div", { class: "nbp-note", hidden: isFolded }, form.machine),
        h("div", { class: "nbp-recalled", hidden: !form.recalled }, h("span", { class: "nbp-note", role: "status" }, form.recalled), forget),
      ),
      h("div", { class: "nbp-form", hidden: isFolded }, ...this.#body(form)),
      this.#run(running),
    );
    void this.#monitor.show(running.monitor);
  };

  #request(text, title, type = text.toLowerCase()) {
    return pushButton(text, () => this.#model.send({ type }), { title });
  }

  #body(form) {
    const grid = (keys) => h("div", { class: "nbp-grid" }, keys.map((key) => this.#field(key, form.fields[key])));
    const load = this.#request("Load", "Replace the settings by the file's settings");
    const save = this.#request("Save", "Write the settings to the file, for `accelerate launch`");
    const exporting = this.#request("Export", "Write the script, and a job file if Slurm job is ticked");
    const onSlurm = ({ target }) => this.#model.send({ type: "path", key: "slurm", value: target.checked });
    const slurm = h("label", { class: "nbp-check" }, h("input", { type: "checkbox", checked: form.files.slurm, onchange: onSlurm }), "Slurm job");
    return [
      grid(form.essential),
      h("div", { class: "nbp-formula", role: "status" }, labelOf("Effective batch"), productOf(form.batch)),
      h("div", { class: "nbp-heading", hidden: !form.arguments.length }, "Arguments of ", h("code", {}, form.function)),
      grid(form.arguments),
      h(
        "div",
        {},
        this.#fold("advanced", "Advanced", grid(form.advanced), form.remark),
        this.#fold("file", "Accelerate's settings file", this.#file("file", "Path", form, load, save)),
        this.#fold("script", "Export as a script", this.#file("script", "Script", form, slurm, exporting)),
      ),
      codeOf(form.code),
    ];
  }

  /** A head that is a button, and a body that it shows. */
  #fold(name, title, content, remark = "") {
    const opened = this.#model.get("opened");
    const isOpen = opened.includes(name);
    const onclick = () => this.#set("opened", isOpen ? opened.filter((one) => one !== name) : [...opened, name]);
    const head = `${isOpen ? "▾" : "▸"} ${title}${remark && ` (${remark})`}`;
    return h(
      "div",
      { class: "nbp-section" },
      h("button", { type: "button", class: "nbp-section-head", "aria-expanded": String(isOpen), onclick }, head),
      h("div", { class: "nbp-section-body", hidden: !isOpen }, content),
    );
  }

  /** A path, what is done with it, and a note below them. */
  #file(key, label, form, ...controls) {
    const id = `${this.#id}-${key}-path`;
    const isTyped = this.#element.querySelector(`#${id}:focus`);
    const oninput = ({ target }) => this.#model.send({ type: "path", key, value: target.value });
    const path = h("input", { id, type: "text", autocomplete: "off", spellcheck: "false", value: isTyped ? undefined : form.files[key], oninput });
    return h("div", {}, h("div", { class: "nbp-file" }, h("label", { class: "nbp-field nbp-path" }, labelOf(label), path), ...controls), noteOf(...form.notes[key]));
  }

  /** A label, a control of the browser's, and a note below it. */
  #field(key, item) {
    const { kind, note, level, placeholder, disabled, choices = [], boxes = [] } = item;
    const id = `${this.#id}-${key}`;
    const typed = this.#typed.get(key);
    const value = typed && item.at < typed.at ? typed.value : item.value; // An older answer lacks what was typed since.
    const put = (sent, shown = sent) => {
      const at = Date.now();
      this.#typed.set(key, { at, value: shown });
      this.#model.send({ type: "put", key, value: sent, at });
    };
    const described = { id, "aria-describedby": `${id}-note` };
    const input = { ...described, "aria-invalid": String(level === "error") };
    const words = labelOf(item.label, { id: `${id}-label` });
    const head = h("label", { for: id }, words);
    const control = {
      text: () => [head, h("input", { ...input, type: "text", autocomplete: "off", spellcheck: "false", placeholder, disabled, value, oninput: ({ target }) => put(target.value) })],
      check: () => [h("label", { class: "nbp-check" }, h("input", { ...input, type: "checkbox", checked: value, onchange: ({ target }) => put(target.checked) }), words)],
      choice: () => [head, h("select", { ...input, selectedIndex: value, onchange: ({ target }) => put(target.selectedIndex) }, choices.map(({ word }) => h("option", {}, word)))],
      code: () => [words, h("div", { class: "nbp-from-code" }, value)],
    }[kind];
    const segment = (choice, at) => {
      const press = () => {
        put(at);
        this.#draw();
      };
      return pushButton(choice.word, press, { title: choice.tip, disabled: choice.disabled, "aria-pressed": String(at === value) });
    };
    const segments = () => [words, h("div", { ...described, class: "nbp-segments", role: "group", "aria-labelledby": `${id}-label` }, choices.map(segment))];
    return h(
      "div",
      { key: `${key} ${kind}`, class: `nbp-field${level === "error" ? " nbp-invalid" : ""}${boxes.length ? " nbp-wide" : ""}` },
      ...(control ?? segments)(),
      boxes.length > 0 && this.#boxes(boxes, item.boxes_disabled, (ticked) => put(ticked, value)),
      noteOf(note, level, `${id}-note`),
    );
  }

  /** A box for each GPU. */
  #boxes(boxes, whyDisabled, put) {
    const onchange = ({ target }) => {
      const inputs = [...target.closest(".nbp-gpus").querySelectorAll("input")];
      put(inputs.flatMap((input, at) => (input.checked ? [at] : [])));
    };
    const box = ({ text, value }) =>
      h("label", { class: "nbp-check" }, h("input", { type: "checkbox", checked: value, disabled: Boolean(whyDisabled), title: whyDisabled, onchange }), h("span", {}, text));
    return h("div", { class: "nbp-gpus" }, boxes.map(box), this.#request("Refresh memory", "Read the GPUs' free memory again", "refresh"));
  }

  /** Launch and Stop, the state of the run, its error, and its monitor. */
  #run({ buttons, status: [text, kind], error }) {
    const id = `${this.#id}-status`;
    const action = (type, look = "") => {
      const { description, tooltip, disabled } = buttons[type];
      const attributes = { class: `nbp-button${look}`, title: tooltip, disabled, "aria-describedby": disabled && id };
      return pushButton(description, () => this.#model.send({ type }), attributes);
    };
    const status = h("span", { class: `nbp-status nbp-${kind}`, role: "status", id }, text);
    const pieces = error.map(([piece, classes]) => (classes ? h("span", { class: classes }, piece) : piece));
    return h(
      "div",
      { class: "nbp-running" },
      h("div", { class: "nbp-actions" }, action("launch", " nbp-primary"), action("stop"), status),
      error.length > 0 && h("pre", { class: "nbp-traceback", tabindex: "0" }, pieces),
      this.#monitor.element,
    );
  }

  close() {
    for (const name of TRAITS) this.#model.off(`change:${name}`, this.#draw);
    this.#stay();
    this.#monitor.close();
  }
}

/** The effective batch as a product. */
function productOf({ factors, total, unit }) {
  const sign = (text) => h("span", { class: "nbp-sign" }, text);
  const factor = (value, name) => h("span", { class: "nbp-factor" }, h("b", {}, value), ` ${name}`);
  const product = factors.map(([value, name], at) => [at > 0 && sign("×"), factor(value, name)]);
  return h("span", { class: "nbp-product" }, product, sign("="), factor(total, `${unit} per update`));
}

/** The call that makes the same launch. */
function codeOf({ text, note }) {
  const copy = ({ currentTarget: button }) => {
    // If the browser refuses it, a click selects the code.
    void navigator.clipboard?.writeText(text).then(() => {
      show(button, "Copied");
      setTimeout(() => show(button, "Copy"), COPIED);
    });
  };
  return h(
    "div",
    { class: "nbp-code" },
    labelOf("The same in code"),
    h(
      "div",
      { class: `nbp-code-row${note ? " nbp-stale" : ""}` },
      h("pre", { tabindex: "0" }, h("code", {}, text)),
      !note && pushButton("Copy", copy, { class: "nbp-button nbp-copy" }),
    ),
    noteOf(note, "hint"),
  );
}

function render({ model, el, host }) {
  const panel = new Panel(model, el, host);
  return () => panel.close();
}

export default { render };
