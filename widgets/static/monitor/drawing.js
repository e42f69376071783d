const ELEMENTS = new Set(["svg", "g", "rect", "path", "text", "title"]);
const ATTRIBUTES = new Set(
  "x y width height viewBox role aria-label color fill font-family font-size font-weight text-anchor d transform".split(" "),
);

/** Return an `<svg>` that Python has drawn as an element, without anything that a drawing does not need. */
export function drawingOf(text) {
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  for (const element of [svg, ...svg.querySelectorAll("*")]) {
    if (!ELEMENTS.has(element.localName)) element.remove();
    for (const { name } of [...element.attributes]) if (!ATTRIBUTES.has(name)) element.removeAttribute(name);
  }
  return document.importNode(svg, true);
}
