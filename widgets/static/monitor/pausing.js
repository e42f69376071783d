import { h, setAttribute, setText } from "./elements.js";

/** @import { RunData } from "./model.js" */
/** @import { PageMessage } from "./wire" */

const PAUSE = { type: /** @type {const} */ ("pause"), label: "Pause", title: "Hold all ranks after the same update" };
const RESUME = { type: /** @type {const} */ ("resume"), label: "Resume", title: "Continue training on all ranks" };

/** Button that holds all ranks after the same update, and lets them continue. */
export class PauseButton {
  #action = /** @type {typeof PAUSE | typeof RESUME} */ (PAUSE);

  /** @param {(message: PageMessage) => boolean} send @param {(label: string) => void} onSent */
  constructor(send, onSent) {
    const onclick = () => {
      if (send({ type: this.#action.type })) onSent(this.#action.label);
    };
    this.element = h("button", { type: "button", class: "nbl-button", onclick });
  }

  /** @param {RunData} data */
  paint({ run, link }) {
    this.#action = run.state === "paused" ? RESUME : PAUSE;
    const { type, label, title } = this.#action;
    this.element.disabled = link !== "up" || Boolean(run.is_over) || !run.actions?.[type];
    setAttribute(this.element, "data-action", type);
    setAttribute(this.element, "title", (this.element.disabled && run.change_hint) || title);
    setText(this.element, label);
  }
}
