"""Fields of a form, from core ipywidgets (7.7 and 8): a label, a control, and a note below it.

A field reports the user's changes as `changed(key, value)`. Changes made through `show` are not reported.
"""

from __future__ import annotations

import contextlib
import html
import inspect
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["STYLE", "WIDE", "CheckField", "ChoiceField", "CodeField", "Field", "SegmentField", "Segments", "TextField"]

Level = Literal["hint", "warning", "error"]
MARKS = {"hint": "", "warning": "Note: ", "error": "✕ "}
STYLE = {"description_width": "initial"}
WIDE = {"width": "auto"}
_NOTHING = object()
"""Value of the entry that asks for a choice."""


class Field:
    """Base of all fields; `box` is the widget to lay out."""

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
        self._is_unreported = False

    def show(self, value: Any) -> None:
        """Show a value that did not come from this field."""
        raise NotImplementedError

    def set_note(self, text: str = "", level: Level = "hint") -> None:
        """Write the note below the control."""
        self.problem = text if level == "error" else ""
        role = ' role="alert"' if level == "error" else ""
        self.note.value = (
            f'<div class="nbp-note nbp-{level}"{role}>{MARKS[level]}{html.escape(text)}</div>' if text else ""
        )
        (self.box.add_class if level == "error" and text else self.box.remove_class)("nbp-invalid")

    def report(self, value: Any) -> None:
        """Report a change, unless `show` made it."""
        if not self._is_unreported:
            self._changed(self.key, value)

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """Change the control without reporting it."""
        was, self._is_unreported = self._is_unreported, True
        try:
            yield
        finally:
            self._is_unreported = was


class TextField(Field):
    """One line of text.

    Args:
        placeholder: Grey text of the empty field.
        reads: Function that returns the value of a text; raises ValueError for a text without a value.
        writes: Function that returns the text of a value.
    """

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
        self._is_typed = False
        self.placeholder = placeholder
        """Grey text of the empty field: the value that an empty field means."""
        control.observe(lambda change: self._typed(change["new"]), "value")

    @property
    def text(self) -> str:
        """Text in the field."""
        return str(self.control.value)

    @property
    def is_emptied(self) -> bool:
        """True if the user has emptied the field."""
        return self._is_typed and not self.text.strip()

    def show(self, value: Any) -> None:
        """Show a value, unless the user has typed a text with the same value."""
        self.control.placeholder = self.placeholder
        if self._is_typed:
            with contextlib.suppress(ValueError):
                if _are_same(self._reads(self.text), value):
                    return
        self._write(self._writes(value))

    def show_from_code(self, text: str) -> None:
        """Show that the value comes from code; typing replaces it."""
        self._write("")
        self.control.placeholder = f"from code: {text}"

    def _write(self, text: str) -> None:
        with self.unreported():
            self.control.value = text
        self._is_typed = False

    def _typed(self, text: str) -> None:
        if not self._is_unreported:
            self._is_typed = True
        self.report(text)


class CheckField(Field):
    """A checkbox."""

    def __init__(self, key: str, label: str, changed: Callable[[str, Any], None]) -> None:
        control = ipywidgets.Checkbox(description=label, indent=False, layout=WIDE, style=STYLE)
        super().__init__(key, label, control, changed)
        control.observe(lambda change: self.report(change["new"]), "value")

    def show(self, value: Any) -> None:
        """Tick or untick the box."""
        with self.unreported():
            self.control.value = bool(value)


class ChoiceField(Field):
    """One of several values, in a drop-down list; an unfit value stays in the list, with the reason.

    Args:
        choices: The values, each behind the word for it.
        empty: True if nothing is chosen at first.
    """

    def __init__(
        self,
        key: str,
        label: str,
        changed: Callable[[str, Any], None],
        *,
        choices: Sequence[tuple[str, Any]],
        empty: bool = False,
    ) -> None:
        self._choices = [*([("choose", _NOTHING)] if empty else []), *choices]
        self._from_code: list[tuple[str, Any]] = []
        self._reasons: Mapping[Any, str] = {}
        control = ipywidgets.Dropdown(description=label, options=self._options(), layout=WIDE, style=STYLE)
        super().__init__(key, label, control, changed)
        control.observe(self._picked, "value")

    def show(self, value: Any, words: str = "") -> None:
        """Choose a value. A value that is not in the list is added to it, as `words`."""
        at = next((at for at, (_, each) in enumerate(self._choices) if _are_same(each, value)), None)
        self._from_code = [] if at is not None or self._is_open(value) else [(f"from code: {words}", value)]
        self._draw(at if at is not None else len(self._choices) if self._from_code else 0)

    def mark_unfit(self, reasons: Mapping[Any, str]) -> None:
        """Show beside each value that does not work here the reason."""
        self._reasons = reasons
        self._draw(self.control.value)

    def _is_open(self, value: Any) -> bool:
        """Return True if no value was chosen yet."""
        return value is inspect.Parameter.empty and self._choices[0][1] is _NOTHING

    def _draw(self, chosen: int) -> None:
        options = self._options()
        with self.unreported():
            if options != list(self.control.options):
                self.control.options = options
            self.control.value = chosen

    def _options(self) -> list[tuple[str, int]]:
        # The values are positions: a front end that sends one back cannot confuse True with 1, or None with no choice.
        words = [
            f"{word} ({self._reasons[value]})" if isinstance(value, str) and value in self._reasons else word
            for word, value in [*self._choices, *self._from_code]
        ]
        return [(word, at) for at, word in enumerate(words)]

    def _picked(self, change: dict[str, Any]) -> None:
        if change["new"] is not None:
            _, value = [*self._choices, *self._from_code][change["new"]]
            if value is not _NOTHING:
                self.report(value)


class Segments:
    """Some words side by side, one of them chosen; an unfit word is grey, with the reason as its tip.

    The user's choice is reported as `chosen(word)`.
    """

    def __init__(self, label: str, tips: Mapping[str, str], chosen: Callable[[str], None]) -> None:
        self._tips = tips
        self._chosen = chosen
        self._is_unreported = False
        self.buttons = {
            word: ipywidgets.ToggleButton(description=word, tooltip=tip, layout=WIDE) for word, tip in tips.items()
        }
        head = ipywidgets.HTML(f'<span class="nbp-label">{html.escape(label)}</span>')
        head.add_class("nbp-head")
        row = ipywidgets.HBox(list(self.buttons.values()))
        row.add_class("nbp-segments")
        self.control = ipywidgets.VBox([head, row])
        for word, button in self.buttons.items():
            button.observe(lambda change, word=word: self._pressed(word, is_down=change["new"]), "value")

    def choose(self, chosen: str | None) -> None:
        """Press the button of a word."""
        self._is_unreported = True
        for word, button in self.buttons.items():
            button.value = word == chosen
        self._is_unreported = False

    def mark_unfit(self, reasons: Mapping[str, str]) -> None:
        """Grey the words that do not work here."""
        for word, button in self.buttons.items():
            button.disabled = word in reasons
            button.tooltip = reasons.get(word, self._tips[word])

    def _pressed(self, word: str, *, is_down: bool) -> None:
        if self._is_unreported:
            return
        self.choose(word)  # One button is always down, even if the user presses it again.
        if is_down:
            self._chosen(word)


class SegmentField(Field):
    """One of a few values, side by side."""

    def __init__(
        self, key: str, label: str, changed: Callable[[str, Any], None], *, choices: Mapping[str, tuple[str, Any]]
    ) -> None:
        self._values = {word: value for word, (_, value) in choices.items()}
        self._segments = Segments(label, {word: tip for word, (tip, _) in choices.items()}, self._chosen)
        self.buttons = self._segments.buttons
        super().__init__(key, label, self._segments.control, changed)

    def show(self, value: Any) -> None:
        """Press the button of a value."""
        self._segments.choose(next((word for word, each in self._values.items() if _are_same(each, value)), None))

    def mark_unfit(self, reasons: Mapping[Any, str]) -> None:
        """Grey the buttons of values that do not work here."""
        self._segments.mark_unfit({word: reasons[each] for word, each in self._values.items() if each in reasons})

    def _chosen(self, word: str) -> None:
        self.report(self._values[word])


class CodeField(Field):
    """An argument that cannot be typed and comes from code."""

    def __init__(self, key: str, label: str, changed: Callable[[str, Any], None]) -> None:
        super().__init__(key, label, ipywidgets.HTML(), changed)

    def show(self, value: Any) -> None:
        """Show the short form of the value, given as text."""
        self.control.value = (
            f'<span class="nbp-label">{html.escape(self.label)}</span>'
            f'<div class="nbp-from-code">{html.escape(str(value))}</div>'
        )


def _are_same(one: Any, other: Any) -> bool:
    """Return True if two values look equal to a reader: 1 and 1.0 do, 1 and True do not."""
    if type(one) is not type(other) and not {type(one), type(other)} <= {int, float}:
        return False
    return bool(one == other)
