// Sets the ARIA attributes that core widgets lack, from what the panel shows, for screen readers.

/** @import { Model } from "./monitor/wire" */

const LOOK_EVERY = 1000; // milliseconds between two requests to look for changed names in the notebook

let numIds = 0;

/** @param {Element} element @param {string} name @param {string | null} value null removes the attribute */
function set(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** @param {Element} element */
function idOf(element) {
  if (!element.id) element.id = `nbp-${++numIds}`;
  return element.id;
}

/** @param {Element} panel */
function describe(panel) {
  for (const field of panel.querySelectorAll(".nbp-field")) {
    const note = field.querySelector(".nbp-note");
    const isInvalid = String(field.classList.contains("nbp-invalid"));
    for (const control of field.querySelectorAll("input, select, .nbp-segments")) {
      if (control.matches("input, select")) set(control, "aria-invalid", isInvalid);
      set(control, "aria-describedby", note ? idOf(note) : null);
    }
  }
  for (const group of panel.querySelectorAll(".nbp-segments")) {
    const label = group.parentElement?.querySelector(".nbp-label");
    set(group, "role", "group");
    set(group, "aria-labelledby", label ? idOf(label) : null);
  }
  for (const button of panel.querySelectorAll(".widget-toggle-button")) {
    const isHead = button.classList.contains("nbp-section-head");
    set(button, isHead ? "aria-expanded" : "aria-pressed", String(button.classList.contains("mod-active")));
  }
  const status = panel.querySelector(".nbp-status");
  for (const button of panel.querySelectorAll(".nbp-actions .widget-button")) {
    set(button, "aria-describedby", button.matches(":disabled") && status ? idOf(status) : null);
  }
}

/** @param {{ model: Model, el: HTMLElement }} context */
function render({ model, el }) {
  /** @type {Element | null} */
  let panel = null;
  let frame = 0;
  let lookedAt = 0;
  const draw = () => {
    frame = 0;
    panel ??= el.closest(".nbp-panel");
    if (panel) {
      describe(panel);
      // The attributes that `describe` sets are not observed.
      observer.observe(panel, { childList: true, subtree: true, attributeFilter: ["class", "disabled"] });
      panel.addEventListener("pointerenter", look);
      panel.addEventListener("focusin", look);
    } else {
      frame = requestAnimationFrame(draw); // The front end has not added the widget to the page yet.
    }
  };
  const look = () => {
    if (Date.now() - lookedAt > LOOK_EVERY) {
      lookedAt = Date.now();
      model.send({ type: "look" });
    }
  };
  const observer = new MutationObserver(() => {
    frame ||= requestAnimationFrame(draw);
  });
  draw();
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    panel?.removeEventListener("pointerenter", look);
    panel?.removeEventListener("focusin", look);
  };
}

export default { render };
