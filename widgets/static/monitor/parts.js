import { h, setText } from "./elements.js";

/** @typedef {{ ink: string, line: string, text: string }} PartLook */

/** Name and last value of one part of a group, beside a sample of its line. */
export class PartLabel {
  constructor() {
    this.sample = h("i", {});
    this.words = h("span", {});
    this.element = h("span", {}, this.sample, this.words);
  }

  /** @param {PartLook} look */
  show({ ink, line, text }) {
    this.sample.style.borderTop = `2px ${line} ${ink}`;
    setText(this.words, text);
  }
}
