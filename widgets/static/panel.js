// ARIA attributes that core widgets do not set, derived from what the panel shows, for screen readers.
const LOOK_EVERY = 1000; // milliseconds between two questions for names of the notebook that have changed

let count = 0;

function set(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function idOf(element) {
  if (!element.id) element.id = `nbp-${++count}`;
  return element.id;
}

function describe(panel) {
  for (const field of panel.querySelectorAll(".nbp-field")) {
    const note = field.querySelector(".nbp-note");
    const wrong = String(field.classList.contains("nbp-invalid"));
    for (const control of field.querySelectorAll("input, select, .nbp-segments")) {
      if (control.matches("input, select")) set(control, "aria-invalid", wrong);
      set(control, "aria-describedby", note ? idOf(note) : null);
    }
  }
  for (const group of panel.querySelectorAll(".nbp-segments")) {
    set(group, "role", "group");
    set(group, "aria-labelledby", idOf(group.parentElement.querySelector(".nbp-label")));
  }
  for (const button of panel.querySelectorAll(".widget-toggle-button")) {
    const isHead = button.classList.contains("nbp-section-head");
    set(button, isHead ? "aria-expanded" : "aria-pressed", String(button.classList.contains("mod-active")));
  }
  const status = panel.querySelector(".nbp-status");
  for (const button of panel.querySelectorAll(".nbp-actions .widget-button")) {
    set(button, "aria-describedby", button.disabled && status ? idOf(status) : null);
  }
}

function render({ model, el }) {
  let panel = null;
  let due = 0;
  let asked = 0;
  const draw = () => {
    due = 0;
    panel ??= el.closest(".nbp-panel");
    if (panel) {
      describe(panel);
      // The attributes that are set here are not among those that are watched.
      observer.observe(panel, { childList: true, subtree: true, attributeFilter: ["class", "disabled"] });
      panel.addEventListener("pointerenter", ask);
      panel.addEventListener("focusin", ask);
    } else {
      due = requestAnimationFrame(draw); // The front end has not attached the widget yet.
    }
  };
  const ask = () => {
    if (Date.now() - asked > LOOK_EVERY) {
      asked = Date.now();
      model.send({ type: "look" });
    }
  };
  const observer = new MutationObserver(() => (due ||= requestAnimationFrame(draw)));
  draw();
  return () => {
    cancelAnimationFrame(due);
    observer.disconnect();
    panel?.removeEventListener("pointerenter", ask);
    panel?.removeEventListener("focusin", ask);
  };
}

export default { render };
