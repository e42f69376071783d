import { h, scrolled, Section, show, tableOf } from "./elements.js";

/** Images and histograms that ranks reported, and tables that they logged: of each name and rank the newest, and the earlier ones by a slider. */
export class Pictures extends Section {
  /** By name and rank: the picture that the user went back to. */
  #chosen = new Map();

  constructor() {
    super("Pictures and tables", ({ pictures }) => pictures.size > 0);
  }

  paint(data) {
    super.paint(data);
    const figures = [...data.pictures].map(([key, pictures]) => this.#figure(key, pictures));
    show(this.body, h("div", { class: "nbl-pictures" }, figures));
  }

  #figure(key, pictures) {
    const last = pictures.length - 1;
    const at = Math.min(this.#chosen.get(key) ?? last, last);
    const { name, rank, step, source, rows } = pictures[at];
    const words = `${name}, rank ${rank}, step ${step}`;
    const oninput = ({ target }) => {
      if (Number(target.value) === last) this.#chosen.delete(key);
      else this.#chosen.set(key, Number(target.value));
      this.refresh();
    };
    const slider = { type: "range", min: 0, max: last, "aria-label": `Steps of ${name}, rank ${rank}`, "aria-valuetext": `step ${step}` };
    const file = { class: "nbl-link", href: source, download: `${words.replace(/[^\w.-]+/g, "-")}.csv` };
    return h(
      "figure",
      { key, class: "nbl-plot" },
      h("figcaption", {}, words),
      !rows?.length && h("img", { class: "nbl-picture", src: source, alt: words }),
      rows?.length && scrolled(words, tableOf(rows[0], rows.slice(1))),
      rows?.length && h("a", file, "CSV"),
      last > 0 && h("input", { ...slider, value: at, oninput }),
    );
  }
}
