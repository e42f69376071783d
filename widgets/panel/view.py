"""What the page of a panel shows, as plain JSON, and the changes that the page sends.

`PanelView.draw` makes one dictionary from the state of the launch; `static/panel.js` draws it with the browser's own
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
from notebook_launcher.widgets.launching import hardware, parameters
from notebook_launcher.widgets.launching.launch_state import ADVANCED, lifetime_hints
from notebook_launcher.widgets.launching.parameters import MISSING
from notebook_launcher.wording import describe_value, name_of, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from notebook_launcher.widgets.launching.launch_state import LaunchState, Settings
    from notebook_launcher.widgets.launching.parameters import Parameter
    from notebook_launcher.widgets.panel.running import RunArea


MICRO = "micro-batch"
MAX_SUMMARY = 6
"""Arguments in the line that stands for a folded form."""

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
DEVICES = {
    "all": "All GPUs: one process for each, unless you set Processes",
    "some": "The GPUs that are ticked",
    "CPU": "No GPU",
}
"""A tip for each choice of devices."""


def _same(name: str) -> dict[str, Any]:
    """Return the words of an option, each for itself."""
    return {word: word for word in CHOICES[name].words}


CHOICE_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "backend": ("Backend", {**_same("backend"), "none: the function starts its own group": None}),
    "comm_hook": ("Gradient compression", _same("comm_hook")),
    "resume": ("Restarts resume from", {"the beginning": None, "the newest checkpoint": "checkpoint"}),
    "preemption_signal": ("Save and stop at the signal", {"automatic": None, **_same("preemption_signal")}),
}
CHECK_FIELDS = {"check_collectives": "Check collectives", "detached": "Outlive the kernel"}
FILE_HINTS = {
    "file": "Written by `accelerate config`, read by `accelerate launch`. It does not hold the function's arguments.",
    "script": "The launch as a script for torchrun, notebook-launcher and Slurm; a seed makes its numbers the same.",
}

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
    def name(self) -> str:
        """Name of the option or argument."""
        return self.key.removeprefix("arguments.")

    @property
    def empty(self) -> str:
        """Grey text of an empty field: the value that it means."""
        if self.parameter is None:
            return EMPTY[self.key]
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
        return _write(self.key, value) if self.parameter is None else self.parameter.text_of(value)

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


def option_fields() -> list[Field]:
    """Return the fields of the options."""
    fields = [Field(name, label, "text") for name, label in TEXT_FIELDS.items()]
    for name, (label, tips) in SEGMENT_FIELDS.items():
        words = CHOICES[name].words
        fields.append(Field(name, label, "segments", choices=tuple(zip(words, words, tips, strict=True))))
    for name, (label, values) in CHOICE_FIELDS.items():
        fields.append(Field(name, label, "choice", choices=tuple((*item, "") for item in values.items())))
    fields += [Field(name, label, "check") for name, label in CHECK_FIELDS.items()]
    return [*fields, Field("devices", "Devices", "devices")]


def argument_field(parameter: Parameter, label: str) -> Field:
    """Return the field of a parameter of the function."""
    kinds: dict[str, Any] = {"bool": "check", "choice": "choice", "code": "code"}
    words = [each.name if isinstance(each, enum.Enum) else str(each) for each in parameter.choices]
    if len(set(words)) < len(words):  # If both 1 and "1" can be chosen, the text has quotes.
        words = [repr(each) for each in parameter.choices]
    choices = tuple((word, value, "") for word, value in zip(words, parameter.choices, strict=True))
    return Field(f"arguments.{parameter.name}", label, kinds.get(parameter.kind, "text"), parameter, choices)


class PanelView:
    """The form of a panel.

    Args:
        state: The launch that is drawn.
        running: Launch, Stop, the run's state and its monitor.
        show: Called with what the page shows, whenever that may have changed.
    """

    def __init__(self, state: LaunchState, running: RunArea, show: Callable[[dict[str, Any]], None]) -> None:
        self.state = state
        self.run_area = running
        self._show = show
        bound = None if state.micro_batch is None else state.micro_batch.name
        named = {name: "Micro-batch size" if name == bound else name for name in state.parameters}
        fields = [*option_fields(), *(argument_field(state.parameters[name], named[name]) for name in named)]
        self.fields: dict[str, Field] = {field.key: field for field in fields}
        """Fields by key."""
        self._typed: dict[str, Any] = {}
        """What the page has sent for each field, as long as it has the value that the field has."""
        self._sent_at: dict[str, float] = {}
        """Time of the page at which it sent the newest value of a field; it leaves older answers alone."""
        name = "train" if state.function is None else name_of(state.function).rpartition(".")[2]
        self.files: dict[str, Any] = {
            "file": str(accelerate_yaml.default_path()),
            "script": f"{name}.py",
            "slurm": False,
        }
        """The paths of the settings file and of the script, and if a job file is written."""
        self.file_notes = {name: (text, "hint") for name, text in FILE_HINTS.items()}
        """Note below each of the two, with its level."""
        self._recalled: list[str] = []
        self._recalled_note = ""
        state.observe(lambda _: self.draw(), "revision")
        self.draw()

    def receive(self, content: Mapping[str, Any]) -> None:
        """Carry out what the page asks for: a new value, or a button."""
        key, value = content.get("key"), content.get("value")
        match content.get("type"):
            case "put" if key in self.fields:
                self._sent_at[key] = content.get("at", 0.0)
                self.run_area.attempt(lambda: self._put(self.fields[key], value))
            case "path" if key in self.files:
                self.files[key] = value
            case "look":
                self.draw()
            case "refresh":
                self.state.detect_again()
            case "forget":
                self.run_area.attempt(self._forget)
            case "load" | "save" | "export" as act:
                self._work_with_file("script" if act == "export" else "file", getattr(self, f"_{act}"))

    def _put(self, field: Field, value: Any) -> None:
        state, is_option = self.state, field.parameter is None
        self._typed[field.key] = value
        if field.kind == "text":
            state.put_typed(field.key, str(value))
            return
        if field.kind == "devices":
            value = (
                tuple(value) if isinstance(value, list) else (None, tuple(range(len(state.machine.gpus))), "cpu")[value]
            )
        elif field.kind in ("choice", "segments"):
            value = field.choices_with(self._value_of(field))[value][1]
        if value is not _NOTHING:
            (state.put if is_option else state.set_argument)(field.name, value)

    def draw(self) -> None:
        """Show the state: values that were set from code, mistakes, the effective batch and the code."""
        with self.state.lock:
            notes = self._hints()
            fields = {key: self._draw_field(field, notes.get(key, "")) for key, field in self.fields.items()}
            self._draw_unfit(fields)
            problems = self.state.problems
            num_hidden = len(set(ADVANCED) & set(problems))
            bound = None if self.state.micro_batch is None else f"arguments.{self.state.micro_batch.name}"
            if bound is None:
                fields["micro"] = self._no_micro_batch()
            first, *others = ("num_processes", "gradient_accumulation_steps", "mixed_precision")
            self._show(
                {
                    "function": "" if self.state.function is None else name_of(self.state.function),
                    "machine": hardware.describe_machine(self.state.machine),
                    "recalled": self._recalled_note,
                    "fields": fields,
                    "essential": [first, bound or "micro", *others],
                    "arguments": [key for key, field in self.fields.items() if field.parameter and key != bound],
                    "advanced": list(ADVANCED),
                    "remark": f"{num_hidden} to fix" if num_hidden else "",
                    "batch": self._batch(),
                    "code": self._code(),
                    "summary": "" if problems else self._summary(),
                    "files": dict(self.files),
                    "notes": {name: list(note) for name, note in self.file_notes.items()},
                }
            )
            self._draw_readiness()

    def recall(self, settings: Settings, source: str) -> None:
        """Fill fields that have their defaults with earlier settings, and name them after their source."""
        with self.state.lock:
            self._recalled = settings.apply(self.state)
            words = self.words()
            listed = ", ".join(f"{label} {words[label]}" for label in self._label_list(self._recalled))
            self._recalled_note = f"{source}: {listed}." if listed else ""
            self.draw()

    def _forget(self) -> None:
        keys, self._recalled, self._recalled_note = self._recalled, [], ""
        self.state.reset(keys)
        self.draw()

    def words(self) -> dict[str, str]:
        """Return the value that each field shows, by the field's label."""
        plan, training = self.state.plan, self.state.training
        settled = {
            "num_processes": None if plan is None else plan.num_processes,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "mixed_precision": training.mixed_precision,
            "comm_hook": training.comm_hook,
        }
        words = {}
        for key, field in self.fields.items():
            value = self.state.value_of(field.name) if field.parameter else getattr(self.state.config, key)
            if field.parameter:
                words[field.label] = "not set" if value is MISSING else describe_value(value)
            elif key not in ADVANCED or value != parameters.default_of(key):
                words[field.label] = str(settled.get(key) if value is None else value)
        return words

    def _summary(self) -> str:
        """Return the line that stands for a folded form."""
        words, plan = self.words(), self.state.plan
        arguments = [field.label for field in self.fields.values() if field.parameter]
        shown = [f"{label} {words[label]}" for label in arguments[:MAX_SUMMARY]]
        shown += ["…"] if len(arguments) > MAX_SUMMARY else []
        for key, field in self.fields.items():
            is_changed = field.parameter is None and getattr(self.state.config, key) != parameters.default_of(key)
            if is_changed and key != "num_processes" and field.label in words:
                shown.append(f"{field.label[0].lower()}{field.label[1:]} {words[field.label]}")
        return " · ".join([*shown, *([] if plan is None else [plural(plan.num_processes, "rank")])])

    def _value_of(self, field: Field) -> Any:
        """Return a value as its field shows it: if it was not given, a choice shows the environment's value."""
        if field.parameter is not None:
            return self.state.value_of(field.name)
        value = getattr(self.state.config, field.key)
        return getattr(self.state.training, field.key, None) if value is None and field.kind != "text" else value

    def _draw_field(self, field: Field, hint: str) -> dict[str, Any]:
        key, value, problems = field.key, self._value_of(field), self.state.problems
        is_wrong = key in self.state.mistakes
        shown: Any = value
        drawn: dict[str, Any] = {"label": field.label, "kind": field.kind, "at": self._sent_at.get(key, 0.0)}
        match field.kind:
            case "text":
                from_code = field.parameter is not None and not field.parameter.fits(value)
                shown = self._text(field, MISSING if from_code else value)
                drawn["placeholder"] = f"from code: {describe_value(value)}" if from_code else self._placeholder(field)
                if not hint and field.parameter is not None:
                    hint = field.parameter.reading(shown)
                if key in self._typed and not shown.strip() and drawn["placeholder"] and not hint.startswith("Empty:"):
                    hint = f"Empty means {drawn['placeholder']}. {hint}".rstrip()
            case "check":
                shown = bool(value)
            case "choice" | "segments":
                choices = field.choices_with(value)
                at = next((at for at, (_, each, _) in enumerate(choices) if are_same(each, value)), None)
                shown = 0 if at is None and field.kind == "choice" else at
                drawn["choices"] = [{"word": word, "tip": tip, "disabled": False} for word, _, tip in choices]
            case "devices":
                shown = self._draw_devices(drawn, value, is_wrong=is_wrong)
            case "code":
                shown = "not set" if value is MISSING else describe_value(value)
        if is_wrong and field.kind not in ("text", "devices"):
            shown = self._typed.get(key, shown)
        note, level = (problems[key], "error") if key in problems else (hint, "hint")
        return {**drawn, "value": shown, "note": note, "level": level}

    def _text(self, field: Field, value: Any) -> str:
        """Return the text of a field: as it was typed, if it has this value or none."""
        typed = self._typed.get(field.key)
        if typed is not None:
            if field.key in self.state.mistakes:
                return str(typed)
            with contextlib.suppress(ValueError):
                if are_same(field.read(typed), value):
                    return str(typed)
            del self._typed[field.key]
        return field.write(value)

    def _draw_devices(self, drawn: dict[str, Any], value: Any, *, is_wrong: bool) -> int:
        why_no_gpu, gpus = self.state.machine.why_no_gpu, self.state.machine.gpus
        if is_wrong:  # No GPU is ticked.
            value = tuple(self._typed.get("devices", ()))
        is_cpu = value == "cpu" or (value is None and bool(why_no_gpu))
        drawn["choices"] = [
            {"word": word, "tip": why_no_gpu or tip, "disabled": True}
            if why_no_gpu and word != "CPU"
            else {"word": word, "tip": tip, "disabled": False}
            for word, tip in DEVICES.items()
        ]
        can_tick = not why_no_gpu and isinstance(value, tuple)
        drawn["boxes"] = [
            {"text": hardware.describe_gpu(at, gpu), "value": not is_cpu and (value is None or at in value)}
            for at, gpu in enumerate(gpus)
        ]
        drawn["boxes_disabled"] = "" if can_tick else why_no_gpu or "Choose 'some' to pick GPUs"
        return 2 if is_cpu else 0 if value is None else 1

    def _placeholder(self, field: Field) -> str:
        plan, state = self.state.plan, self.state
        if field.key == "num_processes" and plan is not None and state.config.num_processes is None:
            return f"{plan.num_processes} (automatic)"
        if field.key == "gradient_accumulation_steps":
            source = f" ({STEPS_VARIABLE})" if STEPS_VARIABLE in state.environ else ""
            return f"{state.training.gradient_accumulation_steps or '?'}{source}"
        return field.empty

    def _no_micro_batch(self) -> dict[str, Any]:
        name = "the function" if self.state.function is None else name_of(self.state.function)
        note = f"{name} has no parameter for the micro-batch size. Add a parameter named batch_size to set it here."
        return {
            "label": "Micro-batch size",
            "kind": "text",
            "value": "",
            "at": 0.0,
            "disabled": True,
            "placeholder": "set by the function",
            "note": note,
            "level": "hint",
        }

    def _hints(self) -> dict[str, str]:
        """Return the notes below fields without mistakes, by key."""
        machine, config = self.state.machine, self.state.config
        hints = {
            "num_processes": hardware.processes_hint(machine, self.state.plan),
            "gradient_accumulation_steps": "Micro-batches for each optimizer update",
            "shard": self.state.sharding_hint,
            "engine": command_engines.describe_found(os.environ),
            "devices": machine.why_no_gpu[:1].upper() + machine.why_no_gpu[1:],
        }
        if config.engine is not None:
            hints["num_processes"] = "Empty: one for each GPU of the machines, or one for each machine without GPUs"
            hints["devices"] = "The GPUs of the machines; CPU: none of them"
        for name, parameter in self.state.parameters.items():
            if parameter is self.state.micro_batch:
                hints[f"arguments.{name}"] = f"Samples for each backward, on each process: {name}"
            elif parameter.kind == "code" and self.state.value_of(name) is not MISSING:
                hints[f"arguments.{name}"] = f'Taken from code: panel.arguments["{name}"]'
        return hints | lifetime_hints(config)

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
        counted = {name: value for name, value in factors.items() if self.state.micro_batch or name != MICRO}
        return {
            "factors": [["?" if value is None else f"{value:,}", name] for name, value in counted.items()],
            "total": "?" if (total := product(counted)) is None else f"{total:,}",
            "unit": "samples" if MICRO in counted else "micro-batches",
        }

    def _code(self) -> dict[str, str]:
        """Return the same launch in code; a note says why it cannot be copied yet."""
        code, note = self.state.preview()
        missing = [f"arguments.{name}" for name, each in self.state.parameters.items() if each.is_required]
        missing = [key for key in missing if key.removeprefix("arguments.") not in self.state.arguments]
        mistakes = self.state.mistakes  # The code does not have the value of these fields.
        if wrong := self._labels([*mistakes, *(key for key in missing if key not in mistakes)]):
            note = f"Fix {wrong} to bring this code up to date."
        elif unfit := self._labels(key for key in self.state.problems if key):
            note = f"Fix {unfit} to run this code on this machine."
        return {"text": code, "note": note}

    def _label_list(self, keys: Iterable[str]) -> list[str]:
        return [self.fields[key].label if key in self.fields else key for key in keys]

    def _labels(self, keys: Iterable[str]) -> str:
        labels = self._label_list(keys)
        return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))

    def _draw_readiness(self) -> None:
        problems, plan = self.state.problems, self.state.plan
        if problems:
            labels = self._labels(key for key in problems if key)
            text = f"Fix {labels} to enable Launch." if labels else problems[""]
            self.run_area.set_ready(text, is_ready=False)
        elif plan is not None:
            # The kernel's random state is another one by the time that the button is pressed.
            summary = plan.summary if plan.seed is not None else plan.summary.removesuffix(f", {plan.random_summary}")
            is_old = self.state.is_redefined
            name = name_of(self.state.function)
            newer = f" {name} was defined again: run this cell again to launch the new version." if is_old else ""
            self.run_area.set_ready(f"{summary}.{newer}", is_ready=True, is_news=is_old)
        else:
            self.run_area.set_ready("The machines' cores and GPUs are checked when you press Launch.", is_ready=True)

    def _work_with_file(self, name: str, act: Callable[[], tuple[str, str]]) -> None:
        """Call a function; the note below shows what it did, or its error, because no cell would."""
        try:
            self.file_notes[name] = act()
        except Exception as error:  # no cell would show the error
            self.file_notes[name] = str(error), "error"
        self.draw()

    def _load(self) -> tuple[str, str]:
        self.state.config, file = load_accelerate_file(self.files["file"])
        ignored = "; ".join(file.ignored)
        return (
            (f"Loaded. Not used here, but kept when you save: {ignored}.", "warning")
            if ignored
            else ("Loaded.", "done")
        )

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


def _write(name: str, value: Any) -> str:
    if value == parameters.default_of(name):
        return ""
    if dataclasses.is_dataclass(value):  # An engine; one without a text is shown as in code.
        return command_engines.write(value) or repr(value)  # type: ignore[arg-type]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def product(factors: Mapping[str, int | None]) -> int | None:
    """Return the product of factors; None if one is unknown."""
    known = [factor for factor in factors.values() if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None
