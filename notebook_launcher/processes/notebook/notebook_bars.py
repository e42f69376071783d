"""tqdm.notebook in a rank: bars are widgets if the cell shows them, and otherwise text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types

    from notebook_launcher.processes.notebook.rank_widgets import RankWidgets

__all__ = ["divide_bars"]


def divide_bars(module: types.ModuleType, widgets: RankWidgets) -> None:
    """Make the module's class a text bar, which makes widget bars in its place for a rank whose widgets are shown.

    Subclasses, such as `tqdm.auto.tqdm`, did not ask for a widget; they are text bars everywhere.
    """
    bar: Any = module.tqdm_notebook
    methods = {name: value for name, value in vars(bar).items() if name in ("__init__", "__iter__") or name[:2] != "__"}
    for name in methods:
        # Without the methods that it overrides, tqdm.notebook's bar is tqdm's text bar.
        delattr(bar, name)
    widget_bar = type(bar.__name__, (bar,), {**methods, "__module__": bar.__module__})
    explained: list[bool] = []

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the method of the class
        is_widget = cls is bar and widgets.is_live and module.IProgress is not None
        made = widget_bar if is_widget else cls
        return super(bar, cls).__new__(made, *args, **kwargs)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the method of the class
        if type(self) is bar and not explained and not kwargs.get("disable"):
            explained.append(True)
            print(f"tqdm.notebook: {widgets.why_text}")  # noqa: T201
        super(bar, self).__init__(*args, **kwargs)

    bar.__new__, bar.__init__ = __new__, __init__
