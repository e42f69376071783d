"""What the page of a panel shows, as plain JSON, and the changes that the page sends.

`PanelView.form` makes one dictionary from the state of the launch; `static/panel.js` draws it with the browser's own
inputs. A field is `{"label", "kind", "value", "note", "level"}`, with the placeholder of a text and the choices of a
list. Choices are sent back by their position: a page that sends one back cannot confuse True with 1, or None with no
choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.config import load_accelerate_file
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.exporting import export
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.settings.option_checks import CHOICES, NUMBERS
from notebook_launcher.settings.training_settings import STEPS_VARIABLE
from notebook_launcher.widgets.launching import hardware, launch_state, parameters
from notebook_launcher.widgets.launching.launch_state import ADVANCED, ESSENTIAL, LABELS
from notebook_launcher.widgets.launching.parameters import MISSING, default_of
from notebook_launcher.wording import describe_value, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.widgets.launching.launch_state import LaunchState
    from notebook_launcher.widgets.launching.parameters import Parameter

MICRO = "micro-batch"
MAX_SUMMARY = 6
"""Arguments in the line that stands for a folded form."""
SEGMENT_TIPS = {
    "mixed_precision": ("Full precision", "float16", "bfloat16"),
    "start_method": (
        "Processes are forked from a clean helper process: independent of what the kernel did before",
        "Processes start as copies of the kernel and share its data, without pickling",
        "Processes start as new interpreters, which takes longest",
    ),
    "output": ("Of all ranks", "Of rank 0", "None: the monitor has all logs"),
}
"""A tip for each word of an option whose words are all in view."""
NONE_WORDS = {
    "backend": "none: the function starts its own group",
    "resume": "the beginning",
    "preemption_signal": "automatic",
}
"""Word for None in the list of an option."""
DEVICES = {
    "all": "All GPUs: one process for each, unless you set Processes",
    "some": "The GPUs that are ticked",
    "CPU": "No GPU",
}
"""A tip for each choice of devices."""
FILE_HINTS = {
    "file": "Written by `accelerate config`, read by `accelerate launch`. It does not hold the function's arguments.",
    "script": "The launch as a script for torchrun, notebook-launcher and Slurm; a seed makes its numbers the same.",
}
EMPTY = {"engine": "this machine", "num_processes": "automatic"}
"""Words for an empty field where those of `NUMBERS` would not fit."""
SIGNAL = "Sent by a cluster before it takes the machine: the run saves after its next update, and stops"
_NOTHING = object()
"""Value of the entry that asks for a choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field for an option or, if it has a parameter, for an argument of the function."""

    key: str
    """Name of the option, or `arguments.<name>`."""
    label: str
    kind: Literal["text", "check", "choice", "segments", "devices", "code"]
    parameter: Parameter | None = None
    choices: tuple[tuple[str, Any, str], ...] = ()
    """Word, value and tip of each choice."""

    @property
    def empty(self) -> str:
        """Grey text of an empty field: the value that it means."""
        if self.parameter is None:
            return EMPTY.get(self.key) or NUMBERS[self.key].none or "0"
        value = self.parameter.empty
        if value is None or value == "":
            return "None" if value is None else '""'
        return self.parameter.text_of(value) if self.parameter.fits(value) else describe_value(value)

    def read(self, text: str) -> Any:
        """Return the value of a text; raises ValueError."""
        if self.parameter is None:
            return parameters.reads(self.key, text)
        return self.parameter.parse(text) if text.strip() else self.parameter.empty

    def write(self, value: Any) -> str:
        """Return the text of a value."""
        if self.parameter is not None:
            return self.parameter.text_of(value)
        if value == default_of(self.key):
            return ""
        if self.key == "engine":  # One without a text is shown as in code.
            return command_engines.write(value) or repr(value)
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    def choices_with(self, value: Any) -> list[tuple[str, Any, str]]:
        """Return the choices: a value from code that is none of them is added, and nothing may be chosen yet."""
        choices = list(self.choices)
        if self.parameter is not None and self.parameter.default is MISSING:
            choices.insert(0, ("choose", _NOTHING, ""))
            if value is MISSING:
                return choices
        if self.kind == "choice" and not any(are_same(each, value) for _, each, _ in choices):
            choices.append((f"from code: {describe_value(value)}", value, ""))
        return choices


def option_field(name: str) -> Field:
    """Return the field of an option."""
    if name == "devices":
        return Field(name, LABELS[name], "devices")
    if name not in CHOICES:
        return Field(name, LABELS[name], "check" if isinstance(default_of(name), bool) else "text")
    words = CHOICES[name].words
    if name in SEGMENT_TIPS:
        return Field(name, LABELS[name], "segments", None, tuple(zip(words, words, SEGMENT_TIPS[name], strict=True)))
    named = [("the newest checkpoint" if word == "checkpoint" else word, word, "") for word in words]
    none = [(NONE_WORDS[name], None, "")] if name in NONE_WORDS else []
    return Field(name, LABELS[name], "choice", None, (*named, *none) if name == "backend" else (*none, *named))


def argument_field(parameter: Parameter) -> Field:
    """Return the field of a parameter of the function."""
    kinds: dict[str, Any] = {"bool": "check", "choice": "choice", "code": "code"}
    words = [each.name if isinstance(each, enum.Enum) else str(each) for each in parameter.choices]
    if len(set(words)) < len(words):  # If both 1 and "1" can be chosen, the text has quotes.
        words = [repr(each) for each in parameter.choices]
    choices = tuple((word, value, "") for word, value in zip(words, parameter.choices, strict=True))
    return Field(f"arguments.{parameter.name}", parameter.name, kinds.get(parameter.kind, "text"), parameter, choices)


class PanelView:
    """The form of a panel.

    Args:
        state: The launch that is drawn.
    """

    def __init__(self, state: LaunchState) -> None:
        self.state = state
        self.micro = "" if state.micro_batch is None else f"arguments.{state.micro_batch.name}"
        """Key of the argument that is the micro-batch; empty if there is none."""
        fields = [*map(option_field, LABELS), *map(argument_field, state.parameters.values())]
        self.fields: dict[str, Field] = {field.key: field for field in fields}
        """Fields by key."""
        if self.micro:
            self.fields[self.micro] = dataclasses.replace(self.fields[self.micro], label="Micro-batch size")
        self._typed: dict[str, Any] = {}
        """What the page has sent for each field, as long as it has the value that the field has."""
        self._sent_at: dict[str, float] = {}
        """Time of the page at which it sent the newest value of a field; it leaves older answers alone."""
        path, script = str(accelerate_yaml.default_path()), f"{(state.name or 'train').rpartition('.')[2]}.py"
        self.files: dict[str, Any] = {"file": path, "script": script, "slurm": False}
        """The paths of the settings file and of the script, and if a job file is written."""
        self._notes = {name: (text, "hint") for name, text in FILE_HINTS.items()}
        """Note below each of the two, with its level."""
        self._recalled: list[str] = []
        self._recalled_note = ""

    def put(self, key: str, value: Any, at: float) -> None:
        """Take over a value that the page sent at this time: a text, a tick, or the position of a choice."""
        field, state = self.fields[key], self.state
        self._typed[key], self._sent_at[key] = value, at
        if field.kind == "text":
            state.put_typed(key, str(value))
            return
        if field.kind == "devices":
            every = tuple(range(len(state.machine.gpus)))
            value = tuple(value) if isinstance(value, list) else (None, every, "cpu")[value]
        elif field.kind != "check":
            value = field.choices_with(self._value_of(field))[value][1]
        if value is not _NOTHING:
            state.put(key, value)

    def form(self) -> dict[str, Any]:
        """Return the state as the page draws it: fields and notes, mistakes, the effective batch and the code."""
        problems, notes = self.state.problems, self._hints()
        fields = {key: self._draw_field(field, notes.get(key, "")) for key, field in self.fields.items()}
        self._draw_unfit(fields)
        if not self.micro:
            name = self.state.name or "the function"
            note = f"{name} has no parameter for the micro-batch size. Add a parameter named batch_size to set it here."
            fields["micro"] = {"label": "Micro-batch size", "kind": "text", "value": "", "at": 0.0, "disabled": True}
            fields["micro"] |= {"placeholder": "set by the function", "note": note, "level": "hint"}
        num_hidden = len(set(ADVANCED) & set(problems))
        return {
            "function": self.state.name,
            "machine": hardware.describe_machine(self.state.machine),
            "recalled": self._recalled_note,
            "fields": fields,
            "essential": [ESSENTIAL[0], self.micro or "micro", *ESSENTIAL[1:]],
            "arguments": [key for key, field in self.fields.items() if field.parameter and key != self.micro],
            "advanced": list(ADVANCED),
            "remark": f"{num_hidden} to fix" if num_hidden else "",
            "batch": self._batch(),
            "code": self._code(),
            "summary": "" if problems else self._summary(),
            "files": dict(self.files),
            "notes": {name: list(note) for name, note in self._notes.items()},
        }

    def readiness(self) -> dict[str, Any]:
        """Return the launch that a click would start, or why none can be started, as `RunArea.set_ready` takes it."""
        problems, plan = self.state.problems, self.state.plan
        if problems:
            labels = self._labels(key for key in problems if key)
            return {"text": f"Fix {labels} to enable Launch." if labels else problems[""], "is_ready": False}
        if plan is None:
            return {"text": "The machines' cores and GPUs are checked when you press Launch.", "is_ready": True}
        # The kernel's random state is another one by the time that the button is pressed.
        summary = plan.summary if plan.seed is not None else plan.summary.removesuffix(f", {plan.random_summary}")
        is_old, name = self.state.is_redefined, self.state.name
        newer = f" {name} was defined again: run this cell again to launch the new version." if is_old else ""
        return {"text": f"{summary}.{newer}", "is_ready": True, "is_news": is_old}

    def recall(self, settings: Mapping[str, Mapping[str, Any]], source: str) -> None:
        """Fill fields that have their defaults with earlier settings, and name them after their source."""
        with self.state.lock:
            self._recalled = launch_state.fill(self.state, settings)
            words = self.words()
            listed = ", ".join(f"{self.fields[key].label} {words[self.fields[key].label]}" for key in self._recalled)
            self._recalled_note = f"{source}: {listed}." if listed else ""

    def forget(self) -> None:
        """Take back what was recalled."""
        keys, self._recalled, self._recalled_note = self._recalled, [], ""
        for key in keys:
            self.state.put(key, MISSING if self.fields[key].parameter else default_of(key))

    def words(self) -> dict[str, str]:
        """Return the value that each field shows, by the field's label."""
        words, plan = {}, self.state.plan
        for key, field in self.fields.items():
            value = self.state.value_of(field.parameter.name) if field.parameter else getattr(self.state.config, key)
            if field.parameter:
                words[field.label] = "not set" if value is MISSING else describe_value(value)
            elif key == "num_processes" and value is None:
                words[field.label] = str(plan and plan.num_processes)
            elif key in ESSENTIAL:
                words[field.label] = str(getattr(self.state.training, key, None) if value is None else value)
            elif value != default_of(key):
                words[field.label] = str(value)
        return words

    def _summary(self) -> str:
        """Return the line that stands for a folded form."""
        words, plan, config = self.words(), self.state.plan, self.state.config
        arguments = [field.label for field in self.fields.values() if field.parameter]
        shown = [f"{label} {words[label]}" for label in arguments[:MAX_SUMMARY]]
        shown += ["…"] if len(arguments) > MAX_SUMMARY else []
        changed = [LABELS[key] for key in [*LABELS][1:] if getattr(config, key) != default_of(key)]
        shown += [f"{label[0].lower()}{label[1:]} {words[label]}" for label in changed]
        return " · ".join([*shown, *([] if plan is None else [plural(plan.num_processes, "rank")])])

    def _value_of(self, field: Field) -> Any:
        """Return a value as its field shows it: if it was not given, a choice shows the environment's value."""
        if field.parameter is not None:
            return self.state.value_of(field.parameter.name)
        value = getattr(self.state.config, field.key)
        return getattr(self.state.training, field.key, None) if value is None and field.kind != "text" else value

    def _draw_field(self, field: Field, hint: str) -> dict[str, Any]:
        key, value, problems = field.key, self._value_of(field), self.state.problems
        drawn: dict[str, Any] = {"label": field.label, "kind": field.kind, "at": self._sent_at.get(key, 0.0)}
        shown: Any
        match field.kind:
            case "text":
                shown, hint = self._draw_text(field, drawn, value, hint)
            case "check":
                shown = bool(value)
            case "devices":
                shown = self._draw_devices(drawn, value)
            case "code":
                shown = "not set" if value is MISSING else describe_value(value)
            case _:
                choices = field.choices_with(value)
                at = next((at for at, (_, each, _) in enumerate(choices) if are_same(each, value)), None)
                shown = 0 if at is None and field.kind == "choice" else at
                drawn["choices"] = [{"word": word, "tip": tip, "disabled": False} for word, _, tip in choices]
        if key in self.state.mistakes and field.kind not in ("text", "devices"):
            shown = self._typed.get(key, shown)
        note, level = (problems[key], "error") if key in problems else (hint, "hint")
        return {**drawn, "value": shown, "note": note, "level": level}

    def _draw_text(self, field: Field, drawn: dict[str, Any], value: Any, hint: str) -> tuple[str, str]:
        """Return the text, as it was typed if it has the field's value or none, and the note."""
        key, state, parameter, placeholder = field.key, self.state, field.parameter, field.empty
        if parameter is not None and not parameter.fits(value):
            placeholder, value = f"from code: {describe_value(value)}", MISSING
        elif key == "num_processes" and state.plan is not None and state.config.num_processes is None:
            placeholder = f"{state.plan.num_processes} (automatic)"
        elif key == "gradient_accumulation_steps":
            source = f" ({STEPS_VARIABLE})" if STEPS_VARIABLE in {*os.environ, *state.config.env} else ""
            placeholder = f"{state.training.gradient_accumulation_steps or '?'}{source}"
        typed, text = self._typed.get(key), field.write(value)
        if typed is not None:
            is_as_typed = key in state.mistakes
            with contextlib.suppress(ValueError):
                is_as_typed = is_as_typed or are_same(field.read(typed), value)
            if is_as_typed:
                text = str(typed)
            else:
                del self._typed[key]
        if not hint and parameter is not None:
            hint = parameter.reading(text)
        if key in self._typed and not text.strip() and placeholder and not hint.startswith("Empty:"):
            hint = f"Empty means {placeholder}. {hint}".rstrip()
        drawn["placeholder"] = placeholder
        return text, hint

    def _draw_devices(self, drawn: dict[str, Any], value: Any) -> int:
        why_no_gpu, gpus = self.state.machine.why_no_gpu, self.state.machine.gpus
        if "devices" in self.state.mistakes:  # No GPU is ticked.
            value = tuple(self._typed.get("devices", ()))
        is_cpu = value == "cpu" or (value is None and bool(why_no_gpu))
        drawn["choices"] = [
            {"word": word, "tip": tip, "disabled": False}
            if word == "CPU" or not why_no_gpu
            else {"word": word, "tip": why_no_gpu, "disabled": True}
            for word, tip in DEVICES.items()
        ]
        drawn["boxes"] = [
            {"text": hardware.describe_gpu(at, gpu), "value": not is_cpu and (value is None or at in value)}
            for at, gpu in enumerate(gpus)
        ]
        can_tick = not why_no_gpu and isinstance(value, tuple)
        drawn["boxes_disabled"] = "" if can_tick else why_no_gpu or "Choose 'some' to pick GPUs"
        return 2 if is_cpu else 0 if value is None else 1

    def _hints(self) -> dict[str, str]:
        """Return the notes below fields without mistakes, by key."""
        machine, config = self.state.machine, self.state.config
        hints = {
            "num_processes": hardware.processes_hint(machine, self.state.plan),
            "gradient_accumulation_steps": "Micro-batches for each optimizer update",
            "shard": self.state.sharding_hint,
            "engine": command_engines.describe_found(os.environ),
            "devices": machine.why_no_gpu[:1].upper() + machine.why_no_gpu[1:],
            "idle_timeout": "Stops the run after this time without output, reports or updates",
            "detached": "The run continues when the kernel ends or restarts; attach() reconnects to the run",
            "resume": "The function starts from the beginning, unless it loads a checkpoint itself",
            "preemption_signal": SIGNAL,
        }
        if config.engine is not None:
            hints["num_processes"] = "Empty: one for each GPU of the machines, or one for each machine without GPUs"
            hints["devices"] = "The GPUs of the machines; CPU: none of them"
        if config.resume is not None:
            hints["resume"] = (
                "accelerator.load_state() without a folder loads the newest checkpoint, or nothing if there is none yet"
                if config.max_restarts or config.detached
                else "No restarts are allowed yet: enter their number in Restarts after a failure"
            )
        if config.preemption_signal is None:
            hints["preemption_signal"] = (
                f"SIGTERM. {SIGNAL}"
                if config.detached and config.resume is not None
                else "Automatic: no signal; if restarts resume from a checkpoint, SIGTERM saves and stops the run"
            )
        elif not config.detached:
            hints["preemption_signal"] = 'Only for a run that outlives the kernel: tick "Outlive the kernel", too'
        for name, parameter in self.state.parameters.items():
            if parameter is self.state.micro_batch:
                hints[self.micro] = f"Samples for each backward, on each process: {name}"
            elif parameter.kind == "code" and self.state.value_of(name) is not MISSING:
                hints[f"arguments.{name}"] = f'Taken from code: panel.arguments["{name}"]'
        return hints

    def _draw_unfit(self, fields: dict[str, dict[str, Any]]) -> None:
        """Grey the choices that this hardware does not support, with the reason."""
        machine, config, precision = self.state.machine, self.state.config, fields["mixed_precision"]
        unfit = hardware.unfit_precisions(machine, config)
        for choice in precision["choices"]:
            if choice["word"] in unfit:
                choice |= {"tip": unfit[choice["word"]], "disabled": True}
        if precision["level"] != "error":
            chosen = unfit.get(self.state.training.mixed_precision or "")
            precision |= {"note": chosen or " ".join(unfit.values()), "level": "warning" if chosen else "hint"}
        unfit = hardware.unfit_backends(machine, config)
        for choice in fields["backend"]["choices"]:
            if choice["word"] in unfit:
                choice["word"] += f" ({unfit[choice['word']]})"

    def _batch(self) -> dict[str, Any]:
        """Return the effective batch as a product."""
        factors = self.state.batch_factors
        counted = {name: value for name, value in factors.items() if self.micro or name != MICRO}
        return {
            "factors": [["?" if value is None else f"{value:,}", name] for name, value in counted.items()],
            "total": "?" if (total := product(counted)) is None else f"{total:,}",
            "unit": "samples" if MICRO in counted else "micro-batches",
        }

    def _code(self) -> dict[str, str]:
        """Return the same launch in code; a note says why it cannot be copied yet."""
        code, note = self.state.code()
        required = (name for name, each in self.state.parameters.items() if each.is_required)
        missing = [f"arguments.{name}" for name in required if name not in self.state.arguments]
        mistakes = self.state.mistakes  # The code does not have the value of these fields.
        if wrong := self._labels(dict.fromkeys([*mistakes, *missing])):
            note = f"Fix {wrong} to bring this code up to date."
        elif unfit := self._labels(key for key in self.state.problems if key):
            note = f"Fix {unfit} to run this code on this machine."
        return {"text": code, "note": note}

    def _labels(self, keys: Iterable[str]) -> str:
        labels = [self.fields[key].label if key in self.fields else key for key in keys]
        return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))

    def work_with_file(self, act: str) -> None:
        """Load, save or export; the note below shows what was done, or the error, because no cell would."""
        acts = {"load": self._load, "save": self._save, "export": self._export}
        place = "script" if act == "export" else "file"
        try:
            self._notes[place] = acts[act]()
        except Exception as error:  # no cell would show the error
            self._notes[place] = str(error), "error"

    def _load(self) -> tuple[str, str]:
        self.state.config, file = load_accelerate_file(self.files["file"])
        if not file.ignored:
            return "Loaded.", "done"
        return f"Loaded. Not used here, but kept when you save: {'; '.join(file.ignored)}.", "warning"

    def _save(self) -> tuple[str, str]:
        path = self.state.config.to_yaml(self.files["file"])
        return f"Saved: accelerate launch --config_file {path}", "done"

    def _export(self) -> tuple[str, str]:
        if self.state.function is None:
            return "The panel has no function: make it with ConfigPanel(train).", "error"
        args, kwargs = self.state.call()
        path, is_slurm = self.files["script"], self.files["slurm"]
        exported = export(self.state.function, path, args=args, kwargs=kwargs, config=self.state.config, slurm=is_slurm)
        return f"Written. {' · '.join([*exported.commands, *exported.notes])}", "done"


def are_same(one: Any, other: Any) -> bool:
    """Return True if two values look equal to a reader: 1 and 1.0 do, 1 and True do not."""
    if type(one) is not type(other) and not {type(one), type(other)} <= {int, float}:
        return False
    return bool(one == other)


def product(factors: Mapping[str, int | None]) -> int | None:
    """Return the product of factors; None if one is unknown."""
    known = [factor for factor in factors.values() if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None
