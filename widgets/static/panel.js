// The form that launches a function: an anywidget front end.
//
// Python sends all that is shown in two traits, `form` and `running` (widgets/panel/view.py and running.py), and this
// page sends what was typed and clicked. Text goes into text nodes only.

import { h, setAttribute, setHidden, setText } from "./monitor/elements.js";

/**
 * @typedef {{ word: string, tip: string, disabled: boolean }} Choice
 * @typedef {{ text: string, value: boolean }} Box
 * @typedef {{
 *   label: string, kind: string, value: any, note: string, level: string, at: number, placeholder?: string,
 *   disabled?: boolean, choices?: Choice[], boxes?: Box[], boxes_disabled?: string,
 * }} FieldItem
 * @typedef {{
 *   function: string, machine: string, recalled: string, fields: Record<string, FieldItem>, essential: string[],
 *   arguments: string[], advanced: string[], remark: string, summary: string, code: { text: string, note: string },
 *   batch: { factors: [value: string, name: string][], total: string, unit: string },
 *   files: { file: string, script: string, slurm: boolean }, notes: Record<string, [text: string, level: string]>,
 * }} FormItem
 * @typedef {{ description: string, tooltip: string, disabled: boolean }} ButtonItem
 * @typedef {{
 *   buttons: { launch: ButtonItem, stop: ButtonItem }, status: [text: string, kind: string],
 *   error: [text: string, classes: string][], monitor: string,
 * }} RunningItem
 */
/**
 * What a front end gives a widget, as far as this page uses it. Only newer versions of anywidget, and marimo, have a host.
 * @typedef {{
 *   get(name: string): any, set(name: string, value: any): void, save_changes(): void, send(message: object): unknown,
 *   on(event: string, listener: (content: any) => void): void, off(event: string, listener: (content: any) => void): void,
 *   widget_manager: any,
 * }} PanelModel
 * @typedef {{ getWidget(name: string): Promise<{ render(view: { el: Element, signal: AbortSignal }): Promise<void> }> }} Host
 */

const LOOK_EVERY = 1000; // milliseconds between two requests to look for changed names in the notebook
const DEAD_STATUSES = new Set(["restarting", "autorestarting", "dead", "terminating"]); // of a kernel
const COPIED = 1500; // milliseconds for which the button says so
/** @type {Record<string, string>} */
const MARKS = { error: "✕ ", warning: "Note: " };

let numIds = 0;
const newId = () => `nbp-${++numIds}-${Math.random().toString(36).slice(2)}`;

/** @param {string} text @param {() => void} onclick @param {Record<string, string>} [attributes] */
const pushButton = (text, onclick, attributes = {}) => h("button", { type: "button", class: "nbp-button", onclick, ...attributes }, text);

/** A text below a control. */
class Note {
  element = h("div", { class: "nbp-note", id: newId() });

  /** @param {string} text @param {string} level */
  show(text, level) {
    setAttribute(this.element, "class", `nbp-note nbp-${level}`);
    if (level === "error") setAttribute(this.element, "role", "alert");
    else this.element.removeAttribute("role");
    setText(this.element, text && `${MARKS[level] ?? ""}${text}`);
    setHidden(this.element, !text);
  }
}

/** A label, a control of the browser's, and a note below it. */
class Field {
  #note = new Note();
  #label = h("span", { class: "nbp-label", id: newId() });
  #sentAt = 0;
  #id = newId();
  #kind = "";
  #key;
  #send;
  /** The control that the label names. @type {HTMLInputElement | HTMLSelectElement | null} */
  #input = null;
  /** @type {HTMLElement} */
  #control = h("div");
  #list = h("div", { class: "nbp-gpus" });
  element = h("div", { class: "nbp-field" });

  /** @param {string} key @param {(message: object) => void} send */
  constructor(key, send) {
    this.#key = key;
    this.#send = send;
  }

  /** @param {any} value */
  #put(value) {
    this.#sentAt = Date.now();
    this.#send({ type: "put", key: this.#key, value, at: this.#sentAt });
  }

  /** @param {FieldItem} item */
  show(item) {
    if (this.#kind !== item.kind) this.#make(item);
    setText(this.#label, item.label);
    this.#note.show(item.note, item.level);
    this.element.classList.toggle("nbp-invalid", item.level === "error");
    if (this.#input) setAttribute(this.#input, "aria-invalid", String(item.level === "error"));
    this.#showChoices(item.choices ?? []);
    if (item.at >= this.#sentAt) this.#showValue(item); // An older answer lacks what was typed since.
    if (item.boxes) this.#showBoxes(item.boxes, item.boxes_disabled ?? "");
  }

  /** @param {FieldItem} item */
  #make({ kind, boxes }) {
    this.#kind = kind;
    const described = { id: this.#id, "aria-describedby": this.#note.element.id };
    const grouped = { ...described, role: "group", "aria-labelledby": this.#label.id };
    if (kind === "text") {
      const input = h("input", { ...described, type: "text", autocomplete: "off", spellcheck: "false", oninput: () => this.#put(input.value) });
      this.#input = this.#control = input;
    } else if (kind === "check") {
      const input = h("input", { ...described, type: "checkbox", onchange: () => this.#put(input.checked) });
      this.#input = input;
      this.#control = h("label", { class: "nbp-check" }, input, this.#label);
    } else if (kind === "choice") {
      const select = h("select", { ...described, onchange: () => this.#put(select.selectedIndex) });
      this.#input = this.#control = select;
    } else {
      this.#control = kind === "code" ? h("div", { class: "nbp-from-code" }) : h("div", { class: "nbp-segments", ...grouped });
    }
    const head = this.#input ? h("label", { for: this.#id }, this.#label) : this.#label;
    this.element.replaceChildren(...(kind === "check" ? [] : [head]), this.#control, this.#list, this.#note.element);
    this.element.classList.toggle("nbp-wide", Boolean(boxes?.length));
  }

  /** @param {FieldItem} item */
  #showValue({ kind, value, placeholder, disabled }) {
    if (kind === "text") {
      const input = /** @type {HTMLInputElement} */ (this.#input);
      if (input.value !== value) input.value = value;
      setAttribute(input, "placeholder", placeholder ?? "");
      input.disabled = Boolean(disabled);
    } else if (kind === "check") /** @type {HTMLInputElement} */ (this.#input).checked = value;
    else if (kind === "choice") /** @type {HTMLSelectElement} */ (this.#input).selectedIndex = value;
    else if (kind === "code") setText(this.#control, value);
    else [...this.#control.children].forEach((button, at) => setAttribute(button, "aria-pressed", String(at === value)));
  }

  /** @param {Choice[]} choices */
  #showChoices(choices) {
    const isList = this.#kind === "choice";
    while (this.#control.children.length > choices.length && choices.length) this.#control.lastChild?.remove();
    choices.forEach(({ word, tip, disabled }, at) => {
      const option = this.#control.children[at] ?? this.#control.appendChild(isList ? h("option") : pushButton("", () => this.#press(at)));
      setText(option, word);
      if (isList) return;
      setAttribute(option, "title", tip);
      /** @type {HTMLButtonElement} */ (option).disabled = disabled;
    });
  }

  /** @param {number} chosen */
  #press(chosen) {
    [...this.#control.children].forEach((button, at) => setAttribute(button, "aria-pressed", String(at === chosen)));
    this.#put(chosen);
  }

  /** @param {Box[]} boxes @param {string} whyDisabled */
  #showBoxes(boxes, whyDisabled) {
    if (!boxes.length) return;
    const inputs = () => [...this.#list.querySelectorAll("input")];
    if (!this.#list.children.length) {
      const ticked = () => this.#put(inputs().flatMap((input, at) => (input.checked ? [at] : [])));
      const lines = boxes.map(() => h("label", { class: "nbp-check" }, h("input", { type: "checkbox", onchange: ticked }), h("span")));
      const title = "Read the GPUs' free memory again";
      this.#list.append(...lines, pushButton("Refresh memory", () => this.#send({ type: "refresh" }), { title }));
    }
    inputs().forEach((input, at) => {
      [input.checked, input.disabled, input.title] = [boxes[at].value, Boolean(whyDisabled), whyDisabled];
      setText(/** @type {Element} */ (input.nextElementSibling), boxes[at].text);
    });
  }
}

/** A grid of fields. */
class Grid {
  element = h("div", { class: "nbp-grid" });
  /** @type {Map<string, Field>} */
  #fields = new Map();
  #send;

  /** @param {(message: object) => void} send */
  constructor(send) {
    this.#send = send;
  }

  /** @param {string[]} keys @param {Record<string, FieldItem>} items */
  show(keys, items) {
    for (const key of keys) {
      const field = this.#fields.get(key) ?? new Field(key, this.#send);
      if (!field.element.isConnected && !this.#fields.has(key)) this.element.append(field.element);
      this.#fields.set(key, field);
      field.show(items[key]);
    }
  }
}

/** A head that is a button, and a body that it shows. */
class Fold {
  #body;
  #title;
  #head;
  element;

  /** @param {string} title @param {Element} content @param {() => void} toggle */
  constructor(title, content, toggle) {
    this.#title = title;
    this.#body = h("div", { class: "nbp-section-body" }, content);
    this.#head = h("button", { type: "button", class: "nbp-section-head", onclick: toggle });
    this.element = h("div", { class: "nbp-section" }, this.#head, this.#body);
  }

  /** @param {boolean} isOpen @param {string} [remark] */
  show(isOpen, remark = "") {
    setText(this.#head, `${isOpen ? "▾" : "▸"} ${this.#title}${remark && ` (${remark})`}`);
    setAttribute(this.#head, "aria-expanded", String(isOpen));
    setHidden(this.#body, !isOpen);
  }
}

/** A path, what is done with it, and a note below them. */
class FileRow {
  #note = new Note();
  #path;
  element;

  /** @param {string} key @param {string} label @param {(message: object) => void} send @param {...Element} controls */
  constructor(key, label, send, ...controls) {
    const oninput = () => send({ type: "path", key, value: this.#path.value });
    this.#path = h("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput });
    const head = h("label", { class: "nbp-field nbp-path" }, h("span", { class: "nbp-label" }, label), this.#path);
    this.element = h("div", {}, h("div", { class: "nbp-file" }, head, ...controls), this.#note.element);
  }

  /** @param {string} path @param {[text: string, level: string]} note */
  show(path, note) {
    if (!this.#path.matches(":focus") && this.#path.value !== path) this.#path.value = path;
    this.#note.show(...note);
  }
}

/** The call that makes the same launch. */
class CodeView {
  #code = h("code");
  #note = new Note();
  #copy = pushButton("Copy", () => this.#copyCode(), { class: "nbp-button nbp-copy" });
  #row = h("div", { class: "nbp-code-row" }, h("pre", { tabindex: "0" }, this.#code), this.#copy);
  element = h("div", { class: "nbp-code" }, h("span", { class: "nbp-label" }, "The same in code"), this.#row, this.#note.element);

  /** @param {FormItem["code"]} item */
  show({ text, note }) {
    setText(this.#code, text);
    this.#note.show(note, "hint");
    this.#row.classList.toggle("nbp-stale", Boolean(note));
    setHidden(this.#copy, Boolean(note));
  }

  #copyCode() {
    // If the browser refuses it, a click selects the code.
    void navigator.clipboard?.writeText(this.#code.textContent).then(() => {
      this.#copy.textContent = "Copied";
      setTimeout(() => (this.#copy.textContent = "Copy"), COPIED);
    });
  }
}

/** Launch and Stop, the state of the run, its error, and its monitor. */
class RunView {
  #status = h("span", { class: "nbp-status", role: "status", id: newId() });
  #error = h("pre", { class: "nbp-traceback", tabindex: "0" });
  #monitor = h("div");
  #shown = "";
  /** Ends the view of the monitor. */
  #ends = new AbortController();
  #buttons;
  #model;
  #host;
  element;

  /** @param {PanelModel} model @param {Host | undefined} host */
  constructor(model, host) {
    this.#model = model;
    this.#host = host;
    this.#buttons = {
      launch: pushButton("Launch", () => model.send({ type: "launch" }), { class: "nbp-button nbp-primary" }),
      stop: pushButton("Stop", () => model.send({ type: "stop" })),
    };
    const row = h("div", { class: "nbp-actions" }, this.#buttons.launch, this.#buttons.stop, this.#status);
    this.element = h("div", { class: "nbp-running" }, row, this.#error, this.#monitor);
  }

  /** @param {RunningItem} item */
  show({ buttons, status: [text, kind], error, monitor }) {
    for (const key of /** @type {("launch" | "stop")[]} */ (["launch", "stop"])) {
      const [button, { description, tooltip, disabled }] = [this.#buttons[key], buttons[key]];
      setText(button, description);
      setAttribute(button, "title", tooltip);
      button.disabled = disabled;
      if (disabled) setAttribute(button, "aria-describedby", this.#status.id);
      else button.removeAttribute("aria-describedby");
    }
    setText(this.#status, text);
    setAttribute(this.#status, "class", `nbp-status nbp-${kind}`);
    this.#error.replaceChildren(...error.map(([piece, classes]) => (classes ? h("span", { class: classes }, piece) : piece)));
    setHidden(this.#error, !error.length);
    if (monitor !== this.#shown) void this.#showMonitor(monitor);
  }

  /** @param {string} name */
  async #showMonitor(name) {
    this.close();
    this.#shown = name;
    if (!name) return;
    const el = h("div");
    const { signal } = (this.#ends = new AbortController());
    this.#monitor.replaceChildren(el);
    const relayed = this.#model.get("relayed");
    if (relayed._esm) await this.#showRelayed(relayed, el, signal);
    else if (this.#host) {
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

  /**
   * Draw a monitor whose messages go through the panel.
   * @param {{ title: string, _esm: string, _css: string }} relayed @param {HTMLElement} el @param {AbortSignal} signal
   */
  async #showRelayed({ title, _esm, _css }, el, signal) {
    const url = URL.createObjectURL(new Blob([_esm], { type: "text/javascript" }));
    const widget = (await import(url)).default;
    URL.revokeObjectURL(url);
    if (signal.aborted) return;
    /** @type {Set<(content: any) => void>} */
    const listeners = new Set();
    const pass = (/** @type {any} */ message) => {
      if (message.type === "monitor") for (const listener of listeners) listener(message.content);
    };
    const model = {
      get: (/** @type {string} */ name) => (name === "title" ? title : ""),
      send: (/** @type {object} */ content) => this.#model.send({ type: "monitor", content }),
      on: (/** @type {string} */ event, /** @type {(content: any) => void} */ listener) => event === "msg:custom" && listeners.add(listener),
      off: (/** @type {string} */ _, /** @type {(content: any) => void} */ listener) => listeners.delete(listener),
    };
    this.#model.on("msg:custom", pass);
    el.before(h("style", {}, _css));
    const end = widget.render({ model, el });
    signal.addEventListener("abort", () => {
      this.#model.off("msg:custom", pass);
      end();
    });
  }

  close() {
    this.#ends.abort();
    this.#monitor.replaceChildren();
  }
}

class Panel {
  #lookedAt = 0;
  #function = h("code");
  #title = h("span", { class: "nbp-title" });
  #machine = h("div", { class: "nbp-note" });
  #recalled = h("span", { class: "nbp-note", role: "status" });
  #recalledRow;
  #summary = h("span", { class: "nbp-summary" });
  #edit = pushButton("Edit", () => this.#set("folded", !this.#isFolded()));
  #head = h("div", { class: "nbp-head" }, this.#title, this.#summary, this.#edit);
  #heading = h("div", { class: "nbp-heading" });
  #product = h("span", { class: "nbp-product" });
  #code = new CodeView();
  #body;
  #grids;
  #sections;
  #files;
  #slurm;
  #run;
  #model;
  #el;
  #kernel;

  /** @param {PanelModel} model @param {HTMLElement} el @param {Host | undefined} host */
  constructor(model, el, host) {
    this.#model = model;
    this.#el = el;
    this.#kernel = model.widget_manager?.kernel;
    this.#kernel?.statusChanged?.connect(this.#onKernel);
    model.on("comm:close", this.#onClose);
    const send = (/** @type {object} */ message) => void model.send(message);
    const ask = (/** @type {string} */ text, /** @type {string} */ title) => pushButton(text, () => send({ type: text.toLowerCase() }), { title });
    const forget = pushButton("Back to defaults", () => send({ type: "forget" }), { title: "Take these settings back" });
    this.#recalledRow = h("div", { class: "nbp-recalled" }, this.#recalled, forget);
    this.#grids = { essential: new Grid(send), arguments: new Grid(send), advanced: new Grid(send) };
    this.#slurm = h("input", { type: "checkbox", onchange: () => send({ type: "path", key: "slurm", value: this.#slurm.checked }) });
    const load = ask("Load", "Replace the settings by the file's settings");
    const save = ask("Save", "Write the settings to the file, for `accelerate launch`");
    const exporting = ask("Export", "Write the script, and a job file if Slurm job is ticked");
    this.#files = {
      file: new FileRow("file", "Path", send, load, save),
      script: new FileRow("script", "Script", send, h("label", { class: "nbp-check" }, this.#slurm, "Slurm job"), exporting),
    };
    this.#sections = {
      advanced: new Fold("Advanced", this.#grids.advanced.element, () => this.#toggle("advanced")),
      file: new Fold("Accelerate's settings file", this.#files.file.element, () => this.#toggle("file")),
      script: new Fold("Export as a script", this.#files.script.element, () => this.#toggle("script")),
    };
    const batch = h("div", { class: "nbp-formula", role: "status" }, h("span", { class: "nbp-label" }, "Effective batch"), this.#product);
    this.#body = h(
      "div",
      { class: "nbp-form" },
      this.#grids.essential.element,
      batch,
      this.#heading,
      this.#grids.arguments.element,
      h("div", {}, ...Object.values(this.#sections).map((section) => section.element)),
      this.#code.element,
    );
    this.#run = new RunView(model, host);
    const head = h("div", {}, this.#head, this.#machine, this.#recalledRow);
    const element = h("div", { class: "nbp-panel" }, head, this.#body, this.#run.element);
    element.addEventListener("pointerenter", this.#look);
    element.addEventListener("focusin", this.#look);
    el.append(element);
    for (const name of ["form", "running", "opened", "folded"]) model.on(`change:${name}`, this.#draw);
    this.#draw();
  }

  /** Show the picture below instead: ipywidgets sets this class too, but anywidget cuts it off from the model. */
  #onClose = () => this.#el.classList.add("jupyter-widgets-disconnected");

  #onKernel = (/** @type {unknown} */ _, /** @type {string} */ status) => {
    if (DEAD_STATUSES.has(status)) this.#onClose();
  };

  /** Have Python look for names of the notebook that may have changed. */
  #look = () => {
    if (Date.now() - this.#lookedAt < LOOK_EVERY) return;
    this.#lookedAt = Date.now();
    this.#model.send({ type: "look" });
  };

  /** @param {string} name @param {any} value */
  #set(name, value) {
    this.#model.set(name, value);
    this.#model.save_changes();
  }

  /** @param {string} section */
  #toggle(section) {
    /** @type {string[]} */
    const opened = this.#model.get("opened");
    this.#set("opened", opened.includes(section) ? opened.filter((one) => one !== section) : [...opened, section]);
  }

  /** Return true if one line stands for the form; nothing that has to be fixed is hidden. */
  #isFolded() {
    return Boolean(this.#model.get("folded") && this.#model.get("form").summary);
  }

  #draw = () => {
    /** @type {[FormItem, RunningItem, string[]]} */
    const [form, running, opened] = [this.#model.get("form"), this.#model.get("running"), this.#model.get("opened")];
    if (!form.fields || !running.buttons) return;
    const isFolded = this.#isFolded();
    setText(this.#function, form.function);
    this.#title.replaceChildren("Launch ", form.function ? this.#function : "a function");
    setText(this.#machine, form.machine);
    setHidden(this.#machine, isFolded);
    setText(this.#recalled, form.recalled);
    setHidden(this.#recalledRow, !form.recalled);
    setText(this.#summary, isFolded ? form.summary : "");
    setText(this.#edit, isFolded ? "Edit" : "Fold");
    setAttribute(this.#edit, "aria-expanded", String(!isFolded));
    setHidden(this.#edit, !running.monitor || !form.summary);
    setHidden(this.#body, isFolded);
    for (const part of /** @type {("essential" | "arguments" | "advanced")[]} */ (["essential", "arguments", "advanced"]))
      this.#grids[part].show(form[part], form.fields);
    this.#heading.replaceChildren("Arguments of ", h("code", {}, form.function));
    setHidden(this.#heading, !form.arguments.length);
    this.#showBatch(form.batch);
    this.#sections.advanced.show(opened.includes("advanced"), form.remark);
    this.#sections.file.show(opened.includes("file"));
    this.#sections.script.show(opened.includes("script"));
    this.#files.file.show(form.files.file, form.notes.file);
    this.#files.script.show(form.files.script, form.notes.script);
    this.#slurm.checked = form.files.slurm;
    this.#code.show(form.code);
    this.#run.show(running);
  };

  /** @param {FormItem["batch"]} batch */
  #showBatch({ factors, total, unit }) {
    const sign = (/** @type {string} */ text) => h("span", { class: "nbp-sign" }, text);
    const factor = (/** @type {string} */ value, /** @type {string} */ name) => h("span", { class: "nbp-factor" }, h("b", {}, value), ` ${name}`);
    const product = factors.flatMap(([value, name], at) => [...(at ? [sign("×")] : []), factor(value, name)]);
    const text = [...product, sign("="), factor(total, `${unit} per update`)];
    if (this.#product.textContent !== text.map((part) => part.textContent).join("")) this.#product.replaceChildren(...text);
  }

  close() {
    for (const name of ["form", "running", "opened", "folded"]) this.#model.off(`change:${name}`, this.#draw);
    this.#kernel?.statusChanged?.disconnect(this.#onKernel);
    this.#model.off("comm:close", this.#onClose);
    this.#run.close();
  }
}

/** @param {{ model: PanelModel, el: HTMLElement, host?: Host }} context */
function render({ model, el, host }) {
  const panel = new Panel(model, el, host);
  return () => panel.close();
}

export default { render };
