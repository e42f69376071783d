import { showComparison } from "./monitor/comparison.js";
import { leaveToPicture } from "./monitor/kernel.js";

function render({ model, el }) {
  const ends = [leaveToPicture(model, el), showComparison(model, model.get("tables"), el)];
  return () => ends.forEach((end) => end());
}

export default { render };
