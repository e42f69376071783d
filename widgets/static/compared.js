import { showComparison } from "./monitor/comparison.js";

const render = ({ model, el }) => showComparison(model, model.get("tables"), el);

export default { render };
