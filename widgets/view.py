"""The widgets of a panel, drawn from its state."""

from __future__ import annotations

import functools
import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_launcher.kernel import checks
from notebook_launcher.kernel.arguments import describe_value
from notebook_launcher.settings import STEPS_VARIABLE
from notebook_launcher.widgets import hardware
from notebook_launcher.widgets.fields import ChoiceField, TextField
from notebook_launcher.widgets.form import argument_field, argument_value, option_fields
from notebook_launcher.widgets.gpus import DevicesField
from notebook_launcher.widgets.parameters import MISSING
from notebook_launcher.widgets.section import Section
from notebook_launcher.widgets.settings_file import SettingsFile

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.widgets.fields import Field
    from notebook_launcher.widgets.parameters import Parameter
    from notebook_launcher.widgets.running import RunArea
    from notebook_launcher.widgets.state import LaunchState

__all__ = ["PanelView"]

CSS = Path(__file__).parent / "static" / "panel.css"
ADVANCED = (
    "devices",
    "backend",
    "start_method",
    "output",
    "seed",
    "max_grad_norm",
    "comm_hook",
    "timeout",
    "max_restarts",
)
MICRO = "micro-batch"
# A page has no other way to the clipboard from a core widget; without it a click selects the code.
COPY = (
    "const text = this.parentNode.querySelector('code').textContent;"
    "navigator.clipboard &amp;&amp; navigator.clipboard.writeText(text).then(() => {"
    "this.textContent = 'Copied'; setTimeout(() => { this.textContent = 'Copy' }, 1500) })"
)


class PanelView:
    """What a panel shows; `draw` brings it up to date with the state."""

    def __init__(self, state: LaunchState, running: RunArea) -> None:
        self._state = state
        self._running = running
        self.fields: dict[str, Field] = option_fields(state, self._option_changed)
        """The fields of the options, by name."""
        self.argument_fields: dict[str, Field] = {
            name: argument_field(each, self._argument_changed, self._label_of(each))
            for name, each in state.parameters.items()
        }
        """The fields of the function's parameters, by name."""
        self.file = SettingsFile(lambda: state.config, functools.partial(setattr, state, "config"))
        """Load and Save for Accelerate's settings file."""
        self._formula, self._code = ipywidgets.HTML(), ipywidgets.HTML()
        self.advanced = Section("Advanced", _grid([self.fields[name] for name in ADVANCED]))
        """The options that one seldom changes."""
        self.files = Section("Accelerate's settings file", self.file.box)
        """Around `file`."""
        sections = ipywidgets.VBox([self.advanced.box, self.files.box])
        self.children = [
            ipywidgets.HTML(f"<style>{CSS.read_text(encoding='utf-8')}</style>", layout={"display": "none"}),
            ipywidgets.HTML(self._title()),
            _grid(self._essential()),
            self._formula,
            *self._arguments(),
            sections,
            self._code,
            running.box,
        ]
        state.observe(lambda _: self.draw(), "revision")
        self.draw()

    def draw(self) -> None:
        """Show the state: values that did not come from their field, what is wrong, what it comes to."""
        with self._state.lock:
            config, mistakes = self._state.config, self._state.mistakes
            for name, field in self.fields.items():
                if name not in mistakes:
                    field.show(self._value_of(name))
            for name, parameter in self._state.parameters.items():
                if f"arguments.{name}" not in mistakes:
                    self._show_argument(parameter)
            self._draw_notes(config)
            self._formula.value, self._code.value = self._formula_html(), self._code_html()
            self._draw_readiness()

    # Making.

    def _title(self) -> str:
        function = self._state.function
        name = "a function" if function is None else f"<code>{html.escape(checks.name_of(function))}</code>"
        return (
            f'<div class="nbp-title">Launch {name}</div>'
            f'<div class="nbp-note">{html.escape(hardware.describe_machine(self._state.machine))}</div>'
        )

    def _essential(self) -> list[Field]:
        bound = self._state.micro_batch
        if bound is not None:
            micro_batch = self.argument_fields[bound.name]
        else:
            micro_batch = TextField(
                "", "Micro-batch size", lambda *_: None, placeholder="set by the function", reads=str, writes=str
            )
            micro_batch.control.disabled = True
            name = "the function" if self._state.function is None else checks.name_of(self._state.function)
            micro_batch.say(f"{name} has no parameter for it. Give it one called batch_size to set it here.")
        first = [self.fields["num_processes"], micro_batch, self.fields["gradient_accumulation_steps"]]
        return [*first, self.fields["mixed_precision"]]

    def _arguments(self) -> list[ipywidgets.Widget]:
        bound = self._state.micro_batch
        fields = [field for name, field in self.argument_fields.items() if bound is None or name != bound.name]
        if not fields:
            return []
        name = html.escape(checks.name_of(self._state.function))
        return [ipywidgets.HTML(f'<div class="nbp-heading">Arguments of <code>{name}</code></div>'), _grid(fields)]

    def _label_of(self, parameter: Parameter) -> str:
        bound = self._state.micro_batch
        return "Micro-batch size" if bound is not None and bound.name == parameter.name else parameter.name

    # Hearing.

    def _option_changed(self, name: str, value: Any) -> None:
        put = self._state.put_typed if isinstance(self.fields[name], TextField) else self._state.put
        self._running.attempt(lambda: put(name, value))

    def _argument_changed(self, name: str, value: Any) -> None:
        is_text = isinstance(self.argument_fields[name], TextField)
        put = self._state.put_argument if is_text else self._state.set_argument
        self._running.attempt(lambda: put(name, value))

    # Drawing.

    def _value_of(self, name: str) -> Any:
        """Return an option as its field shows it: a choice that was not given is the choice of the environment."""
        value = getattr(self._state.config, name)
        is_choice = not isinstance(self.fields[name], TextField)
        return getattr(self._state.training, name, None) if value is None and is_choice else value

    def _show_argument(self, parameter: Parameter) -> None:
        field, value = self.argument_fields[parameter.name], self._state.value_of(parameter.name)
        if isinstance(field, TextField) and not parameter.fits(value):
            field.show_from_code(describe_value(value))
        elif isinstance(field, ChoiceField):
            field.show(value, describe_value(value))
        else:
            field.show(argument_value(self._state, parameter))

    def _draw_notes(self, config: LaunchConfig) -> None:
        machine, problems = self._state.machine, self._state.problems
        hints = {"num_processes": hardware.processes_hint(machine, self._state.plan)}
        hints["gradient_accumulation_steps"] = "Micro-batches for each optimizer update"
        hints["devices"] = machine.why_no_gpu[:1].upper() + machine.why_no_gpu[1:]
        for name, field in self.fields.items():
            if name in problems:
                field.say(problems[name], "error")
            else:
                field.say(hints.get(name, ""))
        for name, field in self.argument_fields.items():
            if f"arguments.{name}" in problems:
                field.say(problems[f"arguments.{name}"], "error")
            else:
                field.say(self._argument_hint(self._state.parameters[name]))
        self._draw_unfit(config)

    def _draw_unfit(self, config: LaunchConfig) -> None:
        """Grey what this hardware cannot do, and say why."""
        machine, precision, devices = self._state.machine, self.fields["mixed_precision"], self.fields["devices"]
        unfit = hardware.unfit_precisions(machine, config)
        precision.mark_unfit(unfit)  # type: ignore[attr-defined]
        if not precision.problem:
            chosen = unfit.get(self._state.training.mixed_precision or "")
            precision.say(chosen or " ".join(unfit.values()), "warning" if chosen else "hint")
        self.fields["backend"].mark_unfit(hardware.unfit_backends(machine, config))  # type: ignore[attr-defined]
        if isinstance(devices, DevicesField):
            devices.look(machine)
        text = self.fields["num_processes"]
        if isinstance(text, TextField) and self._state.plan is not None and config.num_processes is None:
            text.control.placeholder = f"{self._state.plan.num_processes} (automatic)"
        steps, source = self.fields["gradient_accumulation_steps"], f" ({STEPS_VARIABLE})"
        if isinstance(steps, TextField):
            settled = self._state.training.gradient_accumulation_steps or "?"
            steps.control.placeholder = f"{settled}{source if STEPS_VARIABLE in self._state.environ else ''}"

    def _argument_hint(self, parameter: Parameter) -> str:
        bound = self._state.micro_batch
        if bound is not None and parameter.name == bound.name:
            return f"Samples for each backward, on each process: {bound.name}"
        value = self._state.value_of(parameter.name)
        if parameter.kind == "code" and value is not MISSING:
            return f'Taken from code: panel.arguments["{parameter.name}"]'
        return ""

    def _formula_html(self) -> str:
        batch = self._state.effective_batch
        counted = {name: value for name, value in batch.factors.items() if self._state.micro_batch or name != MICRO}
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
        code = html.escape(self._state.code())
        stale = " nbp-stale" if self._state.mistakes else ""
        note = '<div class="nbp-note">Without what is marked above.</div>' if stale else ""
        return (
            '<div class="nbp-code"><span class="nbp-label">The same in code</span>'
            f'<div class="nbp-code-row{stale}"><pre tabindex="0"><code>{code}</code></pre>'
            f'<button type="button" class="nbp-copy" onclick="{COPY}">Copy</button></div>{note}</div>'
        )

    def _draw_readiness(self) -> None:
        problems, plan = self._state.problems, self._state.plan
        fields = {**self.fields, **{f"arguments.{name}": field for name, field in self.argument_fields.items()}}
        num_hidden = len(set(ADVANCED) & set(problems))
        self.advanced.remark(f"{num_hidden} to correct" if num_hidden else "")
        if problems:
            labels = [fields[key].label if key in fields else key for key in problems if key]
            text = problems.get("", "") or f"Launch is off until this is right: {', '.join(labels)}."
            self._running.set_ready(text, is_ready=False)
        elif plan is not None:
            seed = f", seed {plan.seed}"
            summary = plan.summary if plan.config.seed is not None else plan.summary.removesuffix(seed)
            self._running.set_ready(f"{summary}.", is_ready=True)


def _grid(fields: list[Field]) -> ipywidgets.GridBox:
    grid = ipywidgets.GridBox([field.box for field in fields])
    grid.add_class("nbp-grid")
    return grid
