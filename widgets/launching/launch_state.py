"""State of a panel without its widgets: options of a launch, arguments of the function, and problems with both."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import traitlets

from notebook_launcher.config import LaunchConfig, changed_options
from notebook_launcher.errors import ConfigError
from notebook_launcher.kernel.calls import checks
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine import devices
from notebook_launcher.widgets.launching import hardware, typed
from notebook_launcher.widgets.launching.argument_values import Arguments
from notebook_launcher.widgets.launching.batch import EffectiveBatch
from notebook_launcher.widgets.launching.call import Namer, call_code
from notebook_launcher.widgets.launching.parameters import (
    MISSING,
    Parameter,
    is_literal,
    signature_parameters,
    takes_any_name,
)
from notebook_launcher.widgets.launching.sharding_hint import parameter_bytes, sharding_hint
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.settings.training_settings import TrainingSettings

__all__ = ["LaunchState"]

MICRO_BATCH_NAMES = (
    "micro_batch_size",
    "per_device_train_batch_size",
    "per_device_batch_size",
    "train_batch_size",
    "batch_size",
)
"""Names of the parameter with the samples of one `backward` on one rank; the first one that exists is taken."""

NO_FUNCTION = "There is no function to launch yet: make the panel with ConfigPanel(train), or call panel.launch(train)."


class LaunchState(traitlets.HasTraits):
    """A launch that is being configured.

    `config` is always valid in itself. `mistakes` holds what to type where a text is not a value; `problems` also holds
    the other reasons against a launch. The keys of both are options, `arguments.<name>`, and `""` for the rest.

    Args:
        function: The function to launch.
        config: The options to begin with.
        arguments: Arguments of the function to begin with, by name.
        holder: The panel that shows the launch, which the code of the call may name; None: there is none.
    """

    config = traitlets.Instance(LaunchConfig)
    revision = traitlets.Int(0)
    """Counter of changes, for observers."""

    def __init__(self, function: Any, config: LaunchConfig, arguments: Mapping[str, Any], holder: Any = None) -> None:
        self.function = function
        self.parameters: dict[str, Parameter] = {each.name: each for each in signature_parameters(function)}
        self.mistakes: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.plan: Plan | None = None
        self.machine = devices.detect()
        self.lock = threading.RLock()
        self._holder = holder
        self._field_put = ""
        self._takes_any = takes_any_name(function)
        self.arguments = Arguments(self._check_name, self._argument_changed)
        super().__init__(config=config)
        self.arguments.replace(arguments)

    @property
    def micro_batch(self) -> Parameter | None:
        """Parameter of the function that is the size of a micro-batch; None if there is none."""
        return next((self.parameters[name] for name in MICRO_BATCH_NAMES if name in self.parameters), None)

    @property
    def effective_batch(self) -> EffectiveBatch:
        """Number of samples that one update sees."""
        name = None if self.micro_batch is None else self.micro_batch.name
        size = None if name is None or f"arguments.{name}" in self.mistakes else self.value_of(name)
        steps = None if "gradient_accumulation_steps" in self.mistakes else self.training.gradient_accumulation_steps
        num = self.config.num_processes if self.plan is None else self.plan.num_processes
        return EffectiveBatch(
            micro_batch=size if type(size) is int and size > 0 else None,
            accumulation=steps,
            processes=None if "num_processes" in self.mistakes else num,
        )

    @property
    def sharding_hint(self) -> str:
        """Savings and costs of the option `shard`; empty while a number that it depends on is wrong."""
        steps, shard = self.training.gradient_accumulation_steps, self.config.shard or 1
        if self.plan is None or steps is None or {"shard", "gradient_accumulation_steps"} & set(self.problems):
            return ""
        values = [self.value_of(name) for name in {*self.parameters, *self.arguments}]
        return sharding_hint(self.plan.num_processes, shard, steps, parameter_bytes(self.function, values))

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of the ranks."""
        return {**os.environ, **self.config.env}

    @property
    def training(self) -> TrainingSettings:
        """Settings that an `Accelerator()` in a rank adopts: as given, else from the ranks' environment."""
        return self.config.training_settings().resolved(self.environ)

    def value_of(self, name: str) -> Any:
        """Return the value that the function gets for an argument; `MISSING` if it gets none."""
        parameter = self.parameters.get(name)
        return self.arguments.get(name, MISSING if parameter is None else parameter.default)

    def put(self, name: str, value: Any) -> None:
        """Set an option. An invalid value is noted in `mistakes` and leaves `config` as it is."""
        with self.lock:
            try:
                config = dataclasses.replace(self.config, **{name: value})
            except ConfigError as error:
                self.mistakes[name] = "Tick a GPU, or choose CPU." if name == "devices" else str(error)
                self.touch()
                return
            self.mistakes.pop(name, None)
            if config == self.config:
                self.touch()
                return
            self._field_put = name
            try:
                self.config = config
            finally:
                self._field_put = ""

    def put_typed(self, name: str, text: str) -> None:
        """Set an option to a number that was typed; an empty text means the default."""
        with self.lock:
            try:
                value = typed.reads(name, text)
            except ValueError as error:
                self.mistakes[name] = str(error)
                self.touch()
            else:
                self.put(name, value)

    def put_argument(self, name: str, text: str) -> None:
        """Set an argument to a value that was typed; an empty text means `Parameter.empty`."""
        with self.lock:
            try:
                value = self.parameters[name].parse(text)
            except ValueError as error:
                self.mistakes[f"arguments.{name}"] = str(error)
                self.touch()
            else:
                self.set_argument(name, value)

    def set_argument(self, name: str, value: Any) -> None:
        """Set an argument. Its default and `MISSING` remove it from `arguments`."""
        if value is MISSING or self._is_default(name, value):
            self.arguments.pop(name, None)
            self._argument_changed(name)
        else:
            self.arguments[name] = value

    def reset(self, keys: Iterable[str]) -> None:
        """Set options, and arguments as `arguments.<name>`, to their defaults."""
        with self.lock:
            for key in keys:
                if (name := key.removeprefix("arguments.")) != key:
                    self.set_argument(name, MISSING)
                else:
                    self.put(key, typed.default_of(key))

    def detect_again(self) -> None:
        """Read the machine again, because the GPUs' free memory changes."""
        self.machine = devices.detect()
        self.touch()

    def touch(self) -> None:
        """Find the present problems, and notify the observers of `revision`."""
        with self.lock:
            self.problems = dict(self.mistakes)
            for name, parameter in self.parameters.items():
                if parameter.is_required and name not in self.arguments:
                    self.problems.setdefault(f"arguments.{name}", _how_to_set(parameter))
            self._check_micro_batch()
            for name, reason in hardware.misfits(self.machine, self.config).items():
                self.problems.setdefault(name, reason)
            self.plan = None
            try:
                # The nodes of an engine are asked only at the launch, because that may take a login on each.
                if self.config.engine is None:
                    self.plan = make_plan(self.config, self.machine)
                if self.function is None:
                    self.problems[""] = NO_FUNCTION
                elif not any(key.startswith("arguments.") for key in self.problems):
                    checks.check_call(self.function, *self.call(), launcher="notebook_launch(fn, 2")
            except ConfigError as error:
                self.problems.setdefault(error.field or "", str(error))
            self.revision += 1

    def _check_micro_batch(self) -> None:
        name = "" if self.micro_batch is None else self.micro_batch.name
        size = self.value_of(name)
        # A default of -1 may have a meaning of its own in the function.
        if type(size) is int and size < 1 and not self._is_default(name, size):
            self.problems.setdefault(f"arguments.{name}", "Enter a whole number, 1 or more.")

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a call: positional-only ones by place, the others by name."""
        by_place, by_name = self._split()
        return tuple(by_place.values()), by_name

    def code(self) -> str:
        """Return the code for the same launch."""
        return self.preview()[0]

    def preview(self) -> tuple[str, str]:
        """Return the code for the same launch, and a note on what to do before it can be pasted."""
        namer = Namer(sys.modules["__main__"].__dict__, self._holder)
        by_place, by_name = self._split()
        by_name = {name: value for name, value in by_name.items() if not self._is_default(name, value)}
        code = call_code(self.function, by_place, by_name, changed_options(self.config), namer)
        return code, "Give the panel a name first: panel = ConfigPanel(...)" if namer.needs_a_panel else ""

    @property
    def is_redefined(self) -> bool:
        """True if the notebook's name for the function means another function by now."""
        name = getattr(self.function, "__name__", "")
        newer = sys.modules["__main__"].__dict__.get(name)
        return (
            newer is not None
            and newer is not self.function
            and getattr(newer, "__qualname__", None) == getattr(self.function, "__qualname__", "")
            and getattr(self.function, "__module__", None) == "__main__"
        )

    def _is_default(self, name: str, value: Any) -> bool:
        default = self.parameters[name].default if name in self.parameters else MISSING
        # Only literals are compared, because comparing two tensors gives no single truth value.
        return value is default or (type(value) is type(default) and is_literal(value) and bool(value == default))

    def _split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        by_place = {name: self.value_of(name) for name, each in self.parameters.items() if each.positional_only}
        while by_place and list(by_place)[-1] not in self.arguments:
            by_place.popitem()
        by_place = {name: value for name, value in by_place.items() if value is not MISSING}
        return by_place, {name: value for name, value in self.arguments.items() if name not in by_place}

    def _check_name(self, name: str) -> None:
        if name in self.parameters or self._takes_any:
            return
        close = difflib.get_close_matches(str(name), self.parameters, n=1)
        takes = f"It takes {', '.join(self.parameters)}." if self.parameters else "It takes none."
        hint = f"Did you mean {close[0]!r}?" if close else takes
        who = "nothing" if self.function is None else name_of(self.function)
        raise ConfigError(f"arguments[{name!r}]: {who} has no parameter of that name. {hint}")

    def _argument_changed(self, name: str | None) -> None:
        with self.lock:
            for key in [key for key in self.mistakes if key.startswith("arguments.")]:
                if name is None or key == f"arguments.{name}":
                    del self.mistakes[key]
            self.touch()

    @traitlets.observe("config")
    def _config_changed(self, _change: Any) -> None:
        with self.lock:
            if not self._field_put:  # The change came from code: every field is filled again.
                self.mistakes = {key: text for key, text in self.mistakes.items() if key.startswith("arguments.")}
            self.touch()


def _how_to_set(parameter: Parameter) -> str:
    if parameter.kind == "code":
        return f'Set it from code: panel.arguments["{parameter.name}"] = ...'
    return f"{'Choose' if parameter.kind == 'choice' else 'Enter'} a value: there is no default."
