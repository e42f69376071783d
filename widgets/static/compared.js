import { showComparison } from "./monitor/comparison.js";

/** @import { Model } from "./monitor/wire" */

/** @param {{ model: Model, el: HTMLElement }} context */
const render = ({ model, el }) => showComparison(model, model.get("tables"), el);

export default { render };
