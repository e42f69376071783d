"""The widgets of a panel, drawn from its state."""

from __future__ import annotations

import dataclasses
import enum
import functools
import html
import math
import os
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_launcher.config import load_accelerate_file
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.exporting import export
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.settings.option_checks import CHOICES, NUMBERS
from notebook_launcher.settings.training_settings import STEPS_VARIABLE
from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.launching import hardware, parameters
from notebook_launcher.widgets.launching.launch_state import ADVANCED, lifetime_hints
from notebook_launcher.widgets.launching.parameters import MISSING
from notebook_launcher.widgets.panel.fields import (
    WIDE,
    Attributes,
    CheckField,
    ChoiceField,
    CodeField,
    DevicesField,
    FileRow,
    Section,
    SegmentField,
    TextField,
)
from notebook_launcher.wording import describe_value, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.widgets.launching.launch_state import LaunchState, Settings
    from notebook_launcher.widgets.launching.parameters import Parameter
    from notebook_launcher.widgets.panel.fields import Field
    from notebook_launcher.widgets.panel.running import RunArea


STYLE = join_modules(STATIC / "panel.css")
MICRO = "micro-batch"
# Core widgets have no other way to the clipboard. If the browser refuses it, a click selects the code.
COPY = (
    "const text = this.parentNode.querySelector('code').textContent;"
    "navigator.clipboard &amp;&amp; navigator.clipboard.writeText(text).then(() => {"
    "this.textContent = 'Copied'; setTimeout(() => { this.textContent = 'Copy' }, 1500) })"
)
COPY_BUTTON = f'<button type="button" class="nbp-copy" onclick="{COPY}">Copy</button>'


class PanelView:
    """The widgets of a panel; `draw` brings them up to date with the state."""

    def __init__(self, state: LaunchState, running: RunArea) -> None:
        self.state = state
        """The model that is drawn."""
        self.run_area = running
        """Launch, Stop, the run's state and its monitor."""
        self.fields: dict[str, Field] = option_fields(state, self._option_changed)
        """Fields of the options, by name."""
        self.argument_fields: dict[str, Field] = {
            name: argument_field(each, self._argument_changed, self._label_of(each))
            for name, each in state.parameters.items()
        }
        """Fields of the function's parameters, by name."""
        self.file = SettingsFile(lambda: state.config, functools.partial(setattr, state, "config"))
        """Load and Save for Accelerate's settings file."""
        self.script = ScriptFile(state.function, lambda: (*state.call(), state.config))
        """Export as a script."""
        self.recalled = Recalled(lambda: running.attempt(self._forget))
        """Line about settings of an earlier run."""
        self._recalled: list[str] = []
        self.formula, self.code = ipywidgets.HTML(), ipywidgets.HTML()
        """The effective batch as a formula, and the code for the same launch."""
        self.advanced = Section("Advanced", _grid([self.fields[name] for name in ADVANCED]))
        """Section with the options that are seldom changed."""
        self.files = Section("Accelerate's settings file", self.file.box)
        """Section with `file`."""
        self.scripts = Section("Export as a script", self.script.box)
        """Section with `script`."""
        sections = ipywidgets.VBox([self.advanced.box, self.files.box, self.scripts.box])
        self.children = [
            ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"}),
            ipywidgets.VBox([ipywidgets.HTML(self._title()), self.recalled.box]),
            _grid(self._essential()),
            self.formula,
            *self._arguments(),
            sections,
            self.code,
            running.box,
            Attributes(self._look, layout={"display": "none"}),
        ]
        state.observe(lambda _: self.draw(), "revision")
        self.draw()

    def draw(self) -> None:
        """Show the state: values that were set from code, mistakes, the effective batch and the code."""
        with self.state.lock:
            config, mistakes = self.state.config, self.state.mistakes
            self._draw_placeholders()
            for name, field in self.fields.items():
                if name not in mistakes:
                    field.show(self._value_of(name))
            for name, parameter in self.state.parameters.items():
                if f"arguments.{name}" not in mistakes:
                    self._show_argument(parameter)
            self._draw_notes(config)
            self.formula.value, self.code.value = self._formula_html(), self._code_html()
            self._draw_readiness()

    def recall(self, settings: Settings, source: str) -> None:
        """Fill fields that have their defaults with earlier settings, and name them after their source."""
        with self.state.lock:
            self._recalled = settings.apply(self.state)
        words = self.words()
        listed = ", ".join(f"{label} {words[label]}" for label in self._label_list(self._recalled))
        self.recalled.show(f"{source}: {listed}." if listed else "")

    def words(self) -> dict[str, str]:
        """Return the value that each field shows, by the field's label."""
        plan, training = self.state.plan, self.state.training
        values: dict[str, Any] = {name: getattr(self.state.config, name) for name in self.fields}
        settled = {
            "num_processes": None if plan is None else plan.num_processes,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "mixed_precision": training.mixed_precision,
            "comm_hook": training.comm_hook,
        }
        words = {
            self.fields[name].label: str(settled.get(name) if value is None else value)
            for name, value in values.items()
            if name not in ADVANCED or value != parameters.default_of(name)
        }
        for name, field in self.argument_fields.items():
            value = self.state.value_of(name)
            words[field.label] = "not set" if value is MISSING else describe_value(value)
        return words

    def _title(self) -> str:
        function = self.state.function
        name = "a function" if function is None else f"<code>{html.escape(name_of(function))}</code>"
        return (
            f'<div class="nbp-title">Launch {name}</div>'
            f'<div class="nbp-note">{html.escape(hardware.describe_machine(self.state.machine))}</div>'
        )

    def _essential(self) -> list[Field]:
        bound = self.state.micro_batch
        if bound is not None:
            micro_batch = self.argument_fields[bound.name]
        else:
            micro_batch = TextField(
                "", "Micro-batch size", lambda *_: None, placeholder="set by the function", reads=str, writes=str
            )
            micro_batch.control.disabled = True
            name = "the function" if self.state.function is None else name_of(self.state.function)
            micro_batch.set_note(
                f"{name} has no parameter for the micro-batch size. Add a parameter named batch_size to set it here."
            )
        first = [self.fields["num_processes"], micro_batch, self.fields["gradient_accumulation_steps"]]
        return [*first, self.fields["mixed_precision"]]

    def _arguments(self) -> list[ipywidgets.Widget]:
        bound = self.state.micro_batch
        fields = [field for name, field in self.argument_fields.items() if bound is None or name != bound.name]
        if not fields:
            return []
        name = html.escape(name_of(self.state.function))
        return [ipywidgets.HTML(f'<div class="nbp-heading">Arguments of <code>{name}</code></div>'), _grid(fields)]

    def _label_of(self, parameter: Parameter) -> str:
        bound = self.state.micro_batch
        return "Micro-batch size" if bound is not None and bound.name == parameter.name else parameter.name

    def _option_changed(self, name: str, value: Any) -> None:
        put = self.state.put_typed if isinstance(self.fields[name], TextField) else self.state.put
        self.run_area.attempt(lambda: put(name, value))

    def _argument_changed(self, name: str, value: Any) -> None:
        is_text = isinstance(self.argument_fields[name], TextField)
        put = self.state.put_argument if is_text else self.state.set_argument
        self.run_area.attempt(lambda: put(name, value))

    def _look(self) -> None:
        """Draw the parts that depend on the notebook's names, which may have changed."""
        with self.state.lock:
            self.code.value = self._code_html()
            self._draw_readiness()

    def _forget(self) -> None:
        keys, self._recalled = self._recalled, []
        self.recalled.show("")
        self.state.reset(keys)

    def _value_of(self, name: str) -> Any:
        """Return an option as its field shows it: if it was not given, a choice shows the environment's value."""
        value = getattr(self.state.config, name)
        is_choice = not isinstance(self.fields[name], TextField)
        return getattr(self.state.training, name, None) if value is None and is_choice else value

    def _show_argument(self, parameter: Parameter) -> None:
        field, value = self.argument_fields[parameter.name], self.state.value_of(parameter.name)
        if isinstance(field, TextField) and not parameter.fits(value):
            field.show_from_code(describe_value(value))
        elif isinstance(field, ChoiceField):
            field.show(value, describe_value(value))
        else:
            field.show(argument_value(self.state, parameter))

    def _draw_notes(self, config: LaunchConfig) -> None:
        machine = self.state.machine
        hints = {"num_processes": hardware.processes_hint(machine, self.state.plan)}
        hints["gradient_accumulation_steps"] = "Micro-batches for each optimizer update"
        hints["shard"] = self.state.sharding_hint
        hints["engine"] = command_engines.describe_found(os.environ)
        hints["devices"] = machine.why_no_gpu[:1].upper() + machine.why_no_gpu[1:]
        if config.engine is not None:
            hints["num_processes"] = "Empty: one for each GPU of the machines, or one for each machine without GPUs"
            hints["devices"] = "The GPUs of the machines; CPU: none of them"
        hints |= lifetime_hints(config)
        for name, field in self.fields.items():
            self._draw_note(field, name, hints.get(name, ""))
        for name, field in self.argument_fields.items():
            self._draw_note(field, f"arguments.{name}", self._argument_hint(field, self.state.parameters[name]))
        self._draw_unfit(config)

    def _draw_note(self, field: Field, key: str, hint: str) -> None:
        if key in self.state.problems:
            field.set_note(self.state.problems[key], "error")
        elif isinstance(field, TextField) and field.is_emptied and field.placeholder and not hint.startswith("Empty:"):
            field.set_note(f"Empty means {field.placeholder}. {hint}".rstrip())
        else:
            field.set_note(hint)

    def _draw_placeholders(self) -> None:
        processes, plan = self.fields["num_processes"], self.state.plan
        if isinstance(processes, TextField) and plan is not None and self.state.config.num_processes is None:
            processes.placeholder = f"{plan.num_processes} (automatic)"
        steps, source = self.fields["gradient_accumulation_steps"], f" ({STEPS_VARIABLE})"
        if isinstance(steps, TextField):
            settled = self.state.training.gradient_accumulation_steps or "?"
            steps.placeholder = f"{settled}{source if STEPS_VARIABLE in self.state.environ else ''}"

    def _draw_unfit(self, config: LaunchConfig) -> None:
        """Grey the choices that this hardware does not support, with the reason."""
        machine, precision, devices = self.state.machine, self.fields["mixed_precision"], self.fields["devices"]
        unfit = hardware.unfit_precisions(machine, config)
        precision.mark_unfit(unfit)  # type: ignore[attr-defined]
        if not precision.problem:
            chosen = unfit.get(self.state.training.mixed_precision or "")
            precision.set_note(chosen or " ".join(unfit.values()), "warning" if chosen else "hint")
        self.fields["backend"].mark_unfit(hardware.unfit_backends(machine, config))  # type: ignore[attr-defined]
        if isinstance(devices, DevicesField):
            devices.describe(machine)

    def _argument_hint(self, field: Field, parameter: Parameter) -> str:
        if isinstance(field, TextField) and (reading := parameter.reading(field.text)):
            return reading
        bound = self.state.micro_batch
        if bound is not None and parameter.name == bound.name:
            return f"Samples for each backward, on each process: {bound.name}"
        value = self.state.value_of(parameter.name)
        if parameter.kind == "code" and value is not MISSING:
            return f'Taken from code: panel.arguments["{parameter.name}"]'
        return ""

    def _formula_html(self) -> str:
        batch = self.state.effective_batch
        counted = {name: value for name, value in batch.factors.items() if self.state.micro_batch or name != MICRO}
        unit = "samples" if MICRO in counted else "micro-batches"
        total = None if None in counted.values() else math.prod(value or 0 for value in counted.values())
        factors = '<span class="nbp-sign">×</span>'.join(  # noqa: RUF001 - the sign
            f'<span class="nbp-factor"><b>{"?" if value is None else f"{value:,}"}</b> {name}</span>'
            for name, value in counted.items()
        )
        return (
            '<div class="nbp-formula" role="status"><span class="nbp-label">Effective batch</span>'
            f'<span class="nbp-product">{factors}<span class="nbp-sign">=</span>'
            f'<span class="nbp-factor"><b>{"?" if total is None else f"{total:,}"}</b> {unit} per update</span>'
            "</span></div>"
        )

    def _code_html(self) -> str:
        code, note = self.state.preview()
        if wrong := self._labels(self._wrong_values()):
            note = f"Fix {wrong} to bring this code up to date."
        elif unfit := self._labels(key for key in self.state.problems if key):
            note = f"Fix {unfit} to run this code on this machine."
        stale, copy = (" nbp-stale", "") if note else ("", COPY_BUTTON)
        words = f'<div class="nbp-note">{html.escape(note)}</div>' if note else ""
        return (
            '<div class="nbp-code"><span class="nbp-label">The same in code</span>'
            f'<div class="nbp-code-row{stale}"><pre tabindex="0"><code>{html.escape(code)}</code></pre>{copy}</div>'
            f"{words}</div>"
        )

    def _wrong_values(self) -> list[str]:
        """Return the keys of fields whose value is not the one in the code."""
        missing = [f"arguments.{name}" for name, each in self.state.parameters.items() if each.is_required]
        missing = [key for key in missing if key.removeprefix("arguments.") not in self.state.arguments]
        return [*self.state.mistakes, *(key for key in missing if key not in self.state.mistakes)]

    def _label_list(self, keys: Iterable[str]) -> list[str]:
        fields = {**self.fields, **{f"arguments.{name}": field for name, field in self.argument_fields.items()}}
        return [fields[key].label if key in fields else key for key in keys]

    def _labels(self, keys: Iterable[str]) -> str:
        labels = self._label_list(keys)
        return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))

    def _draw_readiness(self) -> None:
        problems, plan = self.state.problems, self.state.plan
        num_hidden = len(set(ADVANCED) & set(problems))
        self.advanced.remark(f"{num_hidden} to fix" if num_hidden else "")
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


def _grid(fields: list[Field]) -> ipywidgets.GridBox:
    grid = ipywidgets.GridBox([field.box for field in fields])
    grid.add_class("nbp-grid")
    return grid


# --------------------------------------------------------------------------------------------------------------------
# Fields of a panel: kinds, labels, tips and placeholders.


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
        reads, writes = (
            functools.partial(parameters.reads, name),
            functools.partial(_write, parameters.default_of(name)),
        )
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
        return command_engines.write(value) or repr(value)  # type: ignore[arg-type]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _words(choices: Sequence[Any]) -> list[str]:
    """Return a distinct word for each choice: if both 1 and "1" can be chosen, the text has quotes."""
    words = [each.name if isinstance(each, enum.Enum) else str(each) for each in choices]
    return words if len(set(words)) == len(words) else [repr(each) for each in choices]


# --------------------------------------------------------------------------------------------------------------------
# Line of a panel that lists the settings taken from an earlier run, with a button that resets them.


class Recalled:
    """A text and a button, which are hidden at first; `box` is the widget to lay out."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self.note = ipywidgets.HTML()
        tip = "Take these settings back"
        self.button = ipywidgets.Button(description="Back to defaults", layout=WIDE, tooltip=tip)
        self.box = ipywidgets.HBox([self.note, self.button], layout={"display": "none"})
        self.box.add_class("nbp-recalled")
        self.button.on_click(lambda _: forget())

    def show(self, text: str) -> None:
        """Show the line; hide it if the text is empty."""
        self.note.value = f'<span class="nbp-note" role="status">{html.escape(text)}</span>'
        self.box.layout.display = None if text else "none"


# --------------------------------------------------------------------------------------------------------------------
# Export button: the panel's launch as a script.


SCRIPT_HINT = (
    "The launch as a script for torchrun, notebook-launcher and Slurm, with the same numbers if a seed is set."
)


class ScriptFile:
    """A path, a box for a Slurm job, and a button; below them a note with the commands, or with the error.

    Args:
        function: The function of the panel; None: there is none to export.
        get_call: Returns the positional arguments, the arguments by name, and the options.
    """

    def __init__(
        self, function: Any, get_call: Callable[[], tuple[tuple[Any, ...], dict[str, Any], LaunchConfig]]
    ) -> None:
        self._function = function
        self._get_call = get_call
        name = "train" if function is None else name_of(function).rpartition(".")[2]
        self.slurm = ipywidgets.Checkbox(value=False, description="Slurm job", indent=False, layout={"width": "auto"})
        self.export_button = ipywidgets.Button(
            description="Export", layout=WIDE, tooltip="Write the script, and a job file if Slurm job is ticked"
        )
        self._row = FileRow(f"{name}.py", "Script", self.slurm, self.export_button, hint=SCRIPT_HINT)
        self.path, self.note, self.box = self._row.path, self._row.note, self._row.box
        self.export_button.on_click(lambda _: self._row.attempt(self._export))

    def _export(self) -> None:
        args, kwargs, config = self._get_call()
        if self._function is None:
            self._row.set_note("✕ The panel has no function: make it with ConfigPanel(train).", "error")
            return
        exported = export(
            self._function, self.path.value, args=args, kwargs=kwargs, config=config, slurm=self.slurm.value
        )
        self._row.set_note(f"Written. {' · '.join([*exported.commands, *exported.notes])}", "done")


# --------------------------------------------------------------------------------------------------------------------
# Load and Save buttons for Accelerate's settings file.


SETTINGS_HINT = (
    "Written by `accelerate config`, read by `accelerate launch`. It does not hold the function's arguments."
)


class SettingsFile:
    """A path and two buttons; below them a note with errors, or with the keys that a load ignored."""

    def __init__(self, get: Callable[[], LaunchConfig], put: Callable[[LaunchConfig], None]) -> None:
        self._get = get
        self._put = put
        self.load_button = ipywidgets.Button(
            description="Load", layout=WIDE, tooltip="Replace the settings by the file's settings"
        )
        self.save_button = ipywidgets.Button(
            description="Save", layout=WIDE, tooltip="Write the settings to the file, for `accelerate launch`"
        )
        self._row = FileRow(
            str(accelerate_yaml.default_path()), "Path", self.load_button, self.save_button, hint=SETTINGS_HINT
        )
        self.path, self.note, self.box = self._row.path, self._row.note, self._row.box
        self.load_button.on_click(lambda _: self._row.attempt(self._load))
        self.save_button.on_click(lambda _: self._row.attempt(self._save))

    def _load(self) -> None:
        config, file = load_accelerate_file(self.path.value)
        self._put(config)
        ignored = "; ".join(file.ignored)
        left_out = f" Not used here, but kept when you save: {ignored}." if ignored else ""
        self._row.set_note(f"Loaded.{left_out}", "warning" if left_out else "done")

    def _save(self) -> None:
        path = self._get().to_yaml(self.path.value)
        self._row.set_note(f"Saved: accelerate launch --config_file {path}", "done")
