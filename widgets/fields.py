"""Fields of a form, from core ipywidgets (7.7 and 8): a label, a control, and a note that says what is wrong.

A field reports what the user does as `changed(key, value)`, and shows what it is told without reporting it.
"""

from __future__ import annotations

import contextlib
import html
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["STYLE", "WIDE", "CheckField", "ChoiceField", "CodeField", "Field", "SegmentField", "TextField"]

Level = Literal["hint", "warning", "error"]
MARKS = {"hint": "", "warning": "Note: ", "error": "✕ "}
STYLE = {"description_width": "initial"}
WIDE = {"width": "auto"}


class Field:
    """What all fields have; `box` is the widget to lay out."""

    def __init__(self, key: str, label: str, control: ipywidgets.Widget, changed: Callable[[str, Any], None]) -> None:
        self.key = key
        self.label = label
        self.control = control
        self.note = ipywidgets.HTML()
        self.note.add_class("nbp-note-box")
        self.box = ipywidgets.VBox([control, self.note])
        self.box.add_class("nbp-field")
        self.problem = ""
        self._changed = changed
        self._is_told = False

    def show(self, value: Any) -> None:
        """Show a value that did not come from this field."""
        raise NotImplementedError

    def say(self, text: str = "", level: Level = "hint") -> None:
        """Write the note below the control."""
        self.problem = text if level == "error" else ""
        role = ' role="alert"' if level == "error" else ""
        self.note.value = (
            f'<div class="nbp-note nbp-{level}"{role}>{MARKS[level]}{html.escape(text)}</div>' if text else ""
        )
        (self.box.add_class if level == "error" and text else self.box.remove_class)("nbp-invalid")

    def report(self, value: Any) -> None:
        """Tell what the user did, unless it was not the user."""
        if not self._is_told:
            self._changed(self.key, value)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Change the control without reporting it."""
        was, self._is_told = self._is_told, True
        try:
            yield
        finally:
            self._is_told = was


class TextField(Field):
    """One line of text."""

    def __init__(
        self,
        key: str,
        label: str,
        changed: Callable[[str, Any], None],
        *,
        placeholder: str = "",
        reads: Callable[[str], Any],
        writes: Callable[[Any], str],
    ) -> None:
        control = ipywidgets.Text(description=label, placeholder=placeholder, layout=WIDE, style=STYLE)
        super().__init__(key, label, control, changed)
        self._reads = reads
        self._writes = writes
        control.observe(lambda change: self.report(change["new"]), "value")

    def show(self, value: Any) -> None:
        """Show a value, unless what is typed means it already."""
        with contextlib.suppress(ValueError):
            if _are_same(self._reads(self.control.value), value):
                return
        with self.told():
            self.control.value = self._writes(value)

    def show_from_code(self, text: str) -> None:
        """Show that the value comes from code; typing replaces it."""
        with self.told():
            self.control.value = ""
        self.control.placeholder = f"from code: {text}"


class CheckField(Field):
    """Yes or no."""

    def __init__(self, key: str, label: str, changed: Callable[[str, Any], None]) -> None:
        control = ipywidgets.Checkbox(description=label, indent=False, layout=WIDE)
        super().__init__(key, label, control, changed)
        control.observe(lambda change: self.report(change["new"]), "value")

    def show(self, value: Any) -> None:
        """Tick or untick the box."""
        with self.told():
            self.control.value = bool(value)


class ChoiceField(Field):
    """One of several values, in a list that opens; what is unfit stays in it, with the reason."""

    def __init__(
        self,
        key: str,
        label: str,
        changed: Callable[[str, Any], None],
        *,
        choices: Mapping[str, Any],
        empty: bool = False,
    ) -> None:
        self._choices = {**({"choose": None} if empty else {}), **choices}
        control = ipywidgets.Dropdown(description=label, options=self._options({}), layout=WIDE, style=STYLE)
        super().__init__(key, label, control, changed)
        control.observe(self._picked, "value")

    def show(self, value: Any) -> None:
        """Choose a value; one that is not in the list leaves it as it is."""
        values = list(self._choices.values())
        at = next((at for at, each in enumerate(values) if _are_same(each, value)), None)
        with self.told():
            self.control.value = at if at is not None else 0

    def mark_unfit(self, reasons: Mapping[Any, str]) -> None:
        """Write beside values why they cannot be."""
        options = self._options(reasons)
        if options != list(self.control.options):
            with self.told():
                chosen = self.control.value
                self.control.options = options
                self.control.value = chosen

    def _options(self, reasons: Mapping[Any, str]) -> list[tuple[str, int]]:
        # By number: a front end that sends an index back cannot mix up True and 1, or None and nothing.
        words = [
            f"{label} ({reasons[value]})" if isinstance(value, str) and value in reasons else label
            for label, value in self._choices.items()
        ]
        return [(word, at) for at, word in enumerate(words)]

    def _picked(self, change: dict[str, Any]) -> None:
        label = list(self._choices)[change["new"]]
        if label != "choose":
            self.report(self._choices[label])


class SegmentField(Field):
    """One of a few values, side by side; what is unfit is grey, with the reason as its tip."""

    def __init__(
        self, key: str, label: str, changed: Callable[[str, Any], None], *, choices: Mapping[str, tuple[str, Any]]
    ) -> None:
        self._values = {word: value for word, (_, value) in choices.items()}
        self._tips = {word: tip for word, (tip, _) in choices.items()}
        self.buttons = {
            word: ipywidgets.ToggleButton(description=word, tooltip=tip, layout=WIDE)
            for word, tip in self._tips.items()
        }
        head = ipywidgets.HTML(f'<span class="nbp-label">{html.escape(label)}</span>')
        head.add_class("nbp-head")
        row = ipywidgets.HBox(list(self.buttons.values()))
        row.add_class("nbp-segments")
        super().__init__(key, label, ipywidgets.VBox([head, row]), changed)
        for word, button in self.buttons.items():
            button.observe(lambda change, word=word: self._pressed(word, is_down=change["new"]), "value")

    def show(self, value: Any) -> None:
        """Press the button of a value."""
        with self.told():
            for word, button in self.buttons.items():
                button.value = _are_same(self._values[word], value)

    def mark_unfit(self, reasons: Mapping[Any, str]) -> None:
        """Grey the buttons of values that cannot be."""
        for word, button in self.buttons.items():
            reason = reasons.get(self._values[word], "")
            button.disabled = bool(reason)
            button.tooltip = reason or self._tips[word]

    def _pressed(self, word: str, *, is_down: bool) -> None:
        if self._is_told:
            return
        self.show(self._values[word])  # One is always down: pressing it again leaves it so.
        if is_down:
            self.report(self._values[word])


class CodeField(Field):
    """An argument that cannot be typed: it comes from code."""

    def __init__(self, key: str, label: str, changed: Callable[[str, Any], None]) -> None:
        super().__init__(key, label, ipywidgets.HTML(), changed)

    def show(self, value: Any) -> None:
        """Show the short form of the value, given as text."""
        self.control.value = (
            f'<span class="nbp-label">{html.escape(self.label)}</span>'
            f'<div class="nbp-from-code">{html.escape(str(value))}</div>'
        )


def _are_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a reader: 1 and 1.0 are, 1 and True are not."""
    if type(one) is not type(other) and not {type(one), type(other)} <= {int, float}:
        return False
    return bool(one == other)
