"""Fields of a form, from core ipywidgets (7.7 and 8): a label, a control, and a note below it.

A field reports the user's changes as `changed(key, value)`. Changes made through `show` are not reported.
"""

from __future__ import annotations

import contextlib
import html
import inspect
from typing import TYPE_CHECKING, Any, Literal

import anywidget
import ipywidgets

from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.launching.hardware import describe_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.machine.devices import Machine


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


# --------------------------------------------------------------------------------------------------------------------
# Attributes for screen readers, which core widgets do not set: a script beside them in the page sets them.


class Attributes(anywidget.AnyWidget):
    """An invisible widget that sets the ARIA attributes of the panel around it.

    Args:
        looked_at: Called when the user turns to the panel with the pointer or the keyboard.
    """

    _esm = join_modules(STATIC / "panel.js")

    def __init__(self, looked_at: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, __: content.get("type") == "look" and looked_at())


# --------------------------------------------------------------------------------------------------------------------
# Part of a form that opens and closes; unlike ipywidgets' Accordion, its head can be reached by the keyboard.


class Section:
    """A head that is a button, and a body that it shows; `box` is the widget to lay out."""

    def __init__(self, title: str, body: ipywidgets.Widget) -> None:
        self._title = title
        self._remark = ""
        self.head = ipywidgets.ToggleButton(layout={"width": "auto"})
        self.head.add_class("nbp-section-head")
        self.body = ipywidgets.VBox([body])
        self.body.add_class("nbp-section-body")
        self.box = ipywidgets.VBox([self.head, self.body])
        self.box.add_class("nbp-section")
        self.head.observe(lambda _: self._draw(), "value")
        self._draw()

    @property
    def is_open(self) -> bool:
        """True while the body is shown."""
        return bool(self.head.value)

    def remark(self, text: str) -> None:
        """Write a remark behind the title, which is seen while the section is closed."""
        self._remark = text
        self._draw()

    def _draw(self) -> None:
        self.head.description = f"{'▾' if self.is_open else '▸'} {self._title}{self._remark and f' ({self._remark})'}"
        self.head.tooltip = "Hide" if self.is_open else "Show"
        self.body.layout.display = None if self.is_open else "none"


# --------------------------------------------------------------------------------------------------------------------
# A row of the panel that works with a file: its path, its controls, and a note below them.


class FileRow:
    """A path with controls beside it; the note below shows what was done, or what failed.

    Args:
        path: Shown at first.
        description: Label of the path.
        controls: Widgets to the right of the path.
        hint: Text of the note before anything is done.
    """

    def __init__(self, path: str, description: str, *controls: ipywidgets.Widget, hint: str) -> None:
        self.path = ipywidgets.Text(value=path, description=description, layout=WIDE, style=STYLE)
        self.note = ipywidgets.HTML()
        self.note.add_class("nbp-note-box")
        field = ipywidgets.VBox([self.path])
        field.add_class("nbp-field")
        field.add_class("nbp-path")
        row = ipywidgets.HBox([field, *controls])
        row.add_class("nbp-file")
        self.box = ipywidgets.VBox([row, self.note])
        self.set_note(hint, "hint")

    def attempt(self, act: Callable[[], None]) -> None:
        """Call a function; the note shows the error that it raises, because no cell would."""
        try:
            act()
        except OSError as error:
            self.set_note(f"✕ {error.filename}: {error.strerror}" if error.strerror else f"✕ {error}", "error")
        except Exception as error:  # no cell would show the error
            self.set_note(f"✕ {error}", "error")

    def set_note(self, text: str, level: str) -> None:
        """Show plain text below the row, as a "hint", "done", "warning" or "error"."""
        role = "alert" if level == "error" else "status"
        self.note.value = f'<div class="nbp-note nbp-{level}" role="{role}">{html.escape(text)}</div>'


# --------------------------------------------------------------------------------------------------------------------
# Field for `devices`: all GPUs, some of them, or the CPU.


TIPS = {
    "all": "All GPUs: one process for each, unless you set Processes",
    "some": "The GPUs that are ticked",
    "CPU": "No GPU",
}


class DevicesField(Field):
    """A field that reports values of `LaunchConfig.devices`: None, a tuple of indices, or `"cpu"`."""

    def __init__(
        self, key: str, changed: Callable[[str, Any], None], *, machine: Machine, detect_again: Callable[[], None]
    ) -> None:
        self.segments = Segments("Devices", TIPS, self._switched)
        self.boxes = [ipywidgets.Checkbox(indent=False, layout=WIDE) for _ in machine.gpus]
        tip = "Read the GPUs' free memory again"
        self.refresh = ipywidgets.Button(description="Refresh memory", layout=WIDE, tooltip=tip)
        self._list = ipywidgets.VBox([*self.boxes, self.refresh])
        self._list.add_class("nbp-gpus")
        super().__init__(key, "Devices", ipywidgets.VBox([self.segments.control, self._list]), changed)
        if self.boxes:
            self.box.add_class("nbp-wide")
        for box in self.boxes:
            box.observe(lambda _: self._ticked(), "value")
        self.refresh.on_click(lambda _: detect_again())
        self.describe(machine)

    def describe(self, machine: Machine) -> None:
        """Describe the GPUs as they are now."""
        self._why_no_gpu = machine.why_no_gpu
        for box, (at, gpu) in zip(self.boxes, enumerate(machine.gpus), strict=False):
            box.description = describe_gpu(at, gpu)
        self.segments.mark_unfit(dict.fromkeys(("all", "some"), machine.why_no_gpu) if machine.why_no_gpu else {})

    def show(self, value: Any) -> None:
        """Show the chosen devices; if no GPU can be used, None is shown as the CPU."""
        is_cpu = value == "cpu" or (value is None and self._why_no_gpu)
        self.segments.choose("CPU" if is_cpu else "all" if value is None else "some")
        with self.unreported():
            for at, box in enumerate(self.boxes):
                box.value = not is_cpu and (value is None or at in value)
                box.disabled = bool(self._why_no_gpu) or not isinstance(value, tuple)
                box.tooltip = self._why_no_gpu or ("Choose 'some' to pick GPUs" if box.disabled else "")
        self._list.layout.display = None if self.boxes else "none"

    def _switched(self, word: str) -> None:
        everything = tuple(range(len(self.boxes)))
        self.report({"all": None, "CPU": "cpu"}.get(word, everything))

    def _ticked(self) -> None:
        self.report(tuple(at for at, box in enumerate(self.boxes) if box.value))
