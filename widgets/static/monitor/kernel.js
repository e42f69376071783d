export const DEAD_STATUSES = new Set(["restarting", "autorestarting", "dead", "terminating"]);

/** Call a function when the kernel of a model restarts or ends, which JupyterLab alone tells. Return what ends this. */
export function watchKernel(model, onDeath) {
  const signal = model.widget_manager?.kernel?.statusChanged;
  const listen = (_, status) => DEAD_STATUSES.has(status) && onDeath();
  signal?.connect(listen);
  return () => signal?.disconnect(listen);
}

/**
 * Leave the place to the picture below a widget once its kernel is gone. Return what ends this.
 *
 * The picture's style sheet looks for this class. ipywidgets sets it too, but anywidget cuts it off from the model.
 */
export function leaveToPicture(model, el) {
  const leave = () => el.classList.add("jupyter-widgets-disconnected");
  const unwatch = watchKernel(model, leave);
  model.on("comm:close", leave);
  return () => {
    unwatch();
    model.off("comm:close", leave);
  };
}
