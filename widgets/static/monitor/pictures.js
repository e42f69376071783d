import { h, KeyedList, Section, setAttribute, setHidden, setText, tableOf } from "./elements.js";

/** @import { RunData } from "./model.js" */
/** @import { PictureItem, Topic } from "./wire" */

/** Images and histograms that ranks reported, and tables that they logged: of each name and rank the newest, and the earlier ones by a slider. */
export class Pictures extends Section {
  /** @type {Topic[]} */
  topics = ["pictures"];

  constructor() {
    super("Pictures and tables");
    const grid = h("div", { class: "nbl-pictures" });
    this.body.append(grid);
    this.list = new KeyedList(
      grid,
      () => new PictureView(),
      (view, /** @type {PictureItem[]} */ pictures) => view.show(pictures),
    );
  }

  /** @param {RunData} data */
  has({ pictures }) {
    return pictures.size > 0;
  }

  /** @param {RunData} data */
  paint({ pictures }) {
    this.list.show([...pictures]);
  }
}

/** The pictures of one name and rank. */
class PictureView {
  /** @type {PictureItem[]} */
  #pictures = [];
  /** True until the user moves the slider back from its end. */
  #followsNewest = true;

  constructor() {
    this.image = h("img", { class: "nbl-picture" });
    this.caption = h("figcaption", {});
    this.slider = h("input", { type: "range", min: "0", oninput: () => this.#choose() });
    this.table = h("div", { class: "nbl-scroll", tabindex: "0", role: "region" });
    this.download = h("a", { class: "nbl-link" }, "CSV");
    this.element = h("figure", { class: "nbl-plot" }, this.caption, this.image, this.table, this.download, this.slider);
  }

  #choose() {
    this.#followsNewest = Number(this.slider.value) === this.#pictures.length - 1;
    this.#paint();
  }

  /** @param {PictureItem[]} pictures */
  show(pictures) {
    this.#pictures = pictures;
    const last = pictures.length - 1;
    setAttribute(this.slider, "max", String(last));
    if (this.#followsNewest) this.slider.value = String(last);
    setHidden(this.slider, last === 0);
    this.#paint();
  }

  #paint() {
    const { name, rank, step, source, rows = [] } = this.#pictures[Number(this.slider.value)];
    const words = `${name}, rank ${rank}, step ${step}`;
    setText(this.caption, words);
    const isTable = rows.length > 0;
    for (const element of [this.table, this.download]) setHidden(element, !isTable);
    setHidden(this.image, isTable);
    if (isTable) this.#paintTable(words, rows, source);
    else setAttribute(this.image, "src", source);
    setAttribute(this.image, "alt", words);
    setAttribute(this.slider, "aria-label", `Steps of ${name}, rank ${rank}`);
    setAttribute(this.slider, "aria-valuetext", `step ${step}`);
  }

  /** @param {string} words @param {string[][]} rows @param {string} source */
  #paintTable(words, [names, ...rows], source) {
    if (this.download.href === source) return;
    this.table.replaceChildren(tableOf(names, rows));
    setAttribute(this.table, "aria-label", words);
    this.download.href = source;
    this.download.download = `${words.replace(/[^\w.-]+/g, "-")}.csv`;
  }
}
