"""Fields of a panel: kinds, labels, tips and placeholders."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import engine_texts
from notebook_launcher.settings.option_choices import CHOICES
from notebook_launcher.settings.option_numbers import NUMBERS
from notebook_launcher.widgets.launching import typed
from notebook_launcher.widgets.launching.parameters import MISSING
from notebook_launcher.widgets.panel.fields import CheckField, ChoiceField, CodeField, SegmentField, TextField
from notebook_launcher.widgets.panel.gpus import DevicesField
from notebook_launcher.wording.value_text import describe_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.widgets.launching.launch_state import LaunchState
    from notebook_launcher.widgets.launching.parameters import Parameter
    from notebook_launcher.widgets.panel.fields import Field

__all__ = ["argument_field", "argument_value", "option_fields"]

TEXT_FIELDS = {
    "num_processes": "Processes",
    "gradient_accumulation_steps": "Accumulation steps",
    "engine": "Machines",
    "shard": "Shard models over",
    "max_grad_norm": "Maximum gradient norm",
    "seed": "Seed",
    "timeout": "Time limit, seconds",
    "idle_timeout": "Idle limit, seconds",
    "max_restarts": "Restarts after a failure",
}
"""Label of each field."""
EMPTY = {
    **{name: number.none or "0" for name, number in NUMBERS.items()},
    "engine": "this machine",
    "num_processes": "automatic",  # The words of the others would not fit into the field.
}
"""Words for an empty field."""
SEGMENT_FIELDS = {
    "mixed_precision": ("Mixed precision", ("Full precision", "float16", "bfloat16")),
    "start_method": (
        "Start method",
        (
            "Processes are forked from a clean helper process: independent of what the kernel did before",
            "Processes start as copies of the kernel and share its data, without pickling",
            "Processes start as new interpreters, which takes longest",
        ),
    ),
    "output": ("Output in the cell", ("Of all ranks", "Of rank 0", "None: the monitor has all logs")),
}
"""Label of each field, and a tip for each word of the option."""


def _same(name: str) -> dict[str, Any]:
    """Return the words of an option, each for itself."""
    return {word: word for word in CHOICES[name].words}


CHOICE_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "backend": ("Backend", {**_same("backend"), "none: the function starts its own group": None}),
    "comm_hook": ("Gradient compression", _same("comm_hook")),
    "resume": ("Restarts resume from", {"the beginning": None, "the newest checkpoint": "checkpoint"}),
    "preemption_signal": ("Save and stop at the signal", {"automatic": None, **_same("preemption_signal")}),
}


def option_fields(state: LaunchState, changed: Callable[[str, Any], None]) -> dict[str, Field]:
    """Return the fields for the options, by the option's name."""
    fields: dict[str, Field] = {}
    for name, label in TEXT_FIELDS.items():
        reads, writes = functools.partial(typed.reads, name), functools.partial(_write, typed.default_of(name))
        fields[name] = TextField(name, label, changed, placeholder=EMPTY[name], reads=reads, writes=writes)
    for name, (label, tips) in SEGMENT_FIELDS.items():
        segments = {word: (tip, word) for word, tip in zip(CHOICES[name].words, tips, strict=True)}
        fields[name] = SegmentField(name, label, changed, choices=segments)
    for name, (label, words) in CHOICE_FIELDS.items():
        fields[name] = ChoiceField(name, label, changed, choices=list(words.items()))
    fields["check_collectives"] = CheckField("check_collectives", "Check collectives", changed)
    fields["detached"] = CheckField("detached", "Outlive the kernel", changed)
    fields["devices"] = DevicesField("devices", changed, machine=state.machine, detect_again=state.detect_again)
    return fields


def argument_field(parameter: Parameter, changed: Callable[[str, Any], None], label: str = "") -> Field:
    """Return the field for a parameter of the function."""
    key, label = parameter.name, label or parameter.name
    match parameter.kind:
        case "bool":
            return CheckField(key, label, changed)
        case "choice":
            choices = list(zip(_words(parameter.choices), parameter.choices, strict=True))
            return ChoiceField(key, label, changed, choices=choices, empty=parameter.default is MISSING)
        case "code":
            return CodeField(key, label, changed)
    return TextField(
        key,
        label,
        changed,
        placeholder=_placeholder(parameter),
        reads=lambda text: parameter.parse(text) if text.strip() else parameter.empty,
        writes=parameter.text_of,
    )


def _placeholder(parameter: Parameter) -> str:
    value = parameter.empty
    if value is None:
        return "None"
    if value == "":
        return '""'
    return parameter.text_of(value) if parameter.fits(value) else describe_value(value)


def argument_value(state: LaunchState, parameter: Parameter) -> Any:
    """Return the value that the field of a parameter shows."""
    value = state.value_of(parameter.name)
    if parameter.kind == "code":
        return "not set" if value is MISSING else describe_value(value)
    return value


def _write(default: Any, value: Any) -> str:
    if value == default:
        return ""
    if dataclasses.is_dataclass(value):  # An engine; one without a text is shown as in code.
        return engine_texts.write(value) or repr(value)  # type: ignore[arg-type]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _words(choices: Sequence[Any]) -> list[str]:
    """Return a distinct word for each choice: if both 1 and "1" can be chosen, the text has quotes."""
    words = [each.name if isinstance(each, enum.Enum) else str(each) for each in choices]
    return words if len(set(words)) == len(words) else [repr(each) for each in choices]
