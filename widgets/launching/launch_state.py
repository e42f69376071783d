"""State of a panel without its widgets: options, arguments, problems with both, and code for the same launch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import hashlib
import json
import keyword
import os
import sys
import threading
import types
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig, changed_options
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import read_json
from notebook_launcher.history.run_files import replace
from notebook_launcher.kernel.calls import checks
from notebook_launcher.kernel.launch import notebook_launch
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine import devices
from notebook_launcher.widgets.launching import hardware, parameters
from notebook_launcher.widgets.launching.parameters import MISSING, Parameter, default_of, is_literal
from notebook_launcher.wording import is_secret, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.settings.training_settings import TrainingSettings


MICRO_BATCH_NAMES = (
    "micro_batch_size",
    "per_device_train_batch_size",
    "per_device_batch_size",
    "train_batch_size",
    "batch_size",
)
"""Names of the parameter with the samples of one `backward` on one rank; the first one that exists is taken."""

NO_FUNCTION = "There is no function to launch yet: make the panel with ConfigPanel(train), or call panel.launch(train)."


class LaunchState:
    """A launch that is being configured.

    `config` is always valid in itself. `mistakes` holds what to type where a text is not a value; `problems` also holds
    the other reasons against a launch. The keys of both are options, `arguments.<name>`, and `""` for the rest.

    Args:
        function: The function to launch.
        config: The options to begin with.
        arguments: Arguments of the function to begin with, by name.
        holder: The panel that shows the launch, which the code of the call may name; None: there is none.
    """

    def __init__(self, function: Any, config: LaunchConfig, arguments: Mapping[str, Any], holder: Any = None) -> None:
        self.function = function
        self.name = "" if function is None else name_of(function)
        self.parameters: dict[str, Parameter] = {each.name: each for each in parameters.signature_parameters(function)}
        self.mistakes: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.plan: Plan | None = None
        self.machine = devices.detect()
        self.lock = threading.RLock()
        self.changed: Callable[[], object] = lambda: None
        """Called after each change."""
        self._holder = holder or self
        self._config = config
        self._takes_any = parameters.takes_any_name(function)
        self.arguments = parameters.Arguments(self._check_name, self._argument_changed)
        self.arguments.replace(arguments)

    @property
    def config(self) -> LaunchConfig:
        """The options. To set them fills every field again."""
        return self._config

    @config.setter
    def config(self, config: LaunchConfig) -> None:
        with self.lock:
            if config != self._config:
                self._config = config
                self.mistakes = {key: text for key, text in self.mistakes.items() if key.startswith("arguments.")}
                self.touch()

    @property
    def micro_batch(self) -> Parameter | None:
        """Parameter of the function that is the size of a micro-batch; None if there is none."""
        return next((self.parameters[name] for name in MICRO_BATCH_NAMES if name in self.parameters), None)

    @property
    def batch_factors(self) -> dict[str, int | None]:
        """Factors of the samples that one update sees, by name; None for one that is unknown."""
        name = None if self.micro_batch is None else self.micro_batch.name
        size = None if name is None or f"arguments.{name}" in self.mistakes else self.value_of(name)
        steps = None if "gradient_accumulation_steps" in self.mistakes else self.training.gradient_accumulation_steps
        num = self.config.num_processes if self.plan is None else self.plan.num_processes
        return {
            "micro-batch": size if type(size) is int and size > 0 else None,
            "accumulation": steps,
            "processes": None if "num_processes" in self.mistakes else num,
        }

    @property
    def sharding_hint(self) -> str:
        """Savings and costs of the option `shard`; empty while a number that it depends on is wrong."""
        steps, shard = self.training.gradient_accumulation_steps, self.config.shard or 1
        if self.plan is None or steps is None or {"shard", "gradient_accumulation_steps"} & set(self.problems):
            return ""
        values = [self.value_of(name) for name in {*self.parameters, *self.arguments}]
        num_bytes = hardware.parameter_bytes(self.function, values)
        return hardware.sharding_hint(self.plan.num_processes, shard, steps, num_bytes)

    @property
    def training(self) -> TrainingSettings:
        """Settings that an `Accelerator()` in a rank adopts: as given, else from the ranks' environment."""
        return self.config.training_settings().resolved({**os.environ, **self.config.env})

    def value_of(self, name: str) -> Any:
        """Return the value that the function gets for an argument; `MISSING` if it gets none."""
        parameter = self.parameters.get(name)
        return self.arguments.get(name, MISSING if parameter is None else parameter.default)

    def put(self, key: str, value: Any) -> None:
        """Set an option, or an argument as `arguments.<name>`; `MISSING` stands for an argument's default.

        An invalid value is noted in `mistakes` and leaves `config` as it is.
        """
        with self.lock:
            if (name := key.removeprefix("arguments.")) != key:
                if value is not MISSING and not self._is_default(name, value):
                    self.arguments[name] = value
                else:
                    self.arguments.pop(name, None)
                    self._argument_changed(name)
                return
            try:
                self._config = dataclasses.replace(self.config, **{name: value})
                self.mistakes.pop(name, None)  # The other fields keep theirs.
            except ConfigError as error:
                self.mistakes[name] = "Tick a GPU, or choose CPU." if name == "devices" else str(error)
            self.touch()

    def put_typed(self, key: str, text: str) -> None:
        """Set an option or an argument to what was typed; an empty text means the default."""
        name = key.removeprefix("arguments.")
        try:
            value = parameters.reads(key, text) if name == key else self.parameters[name].parse(text)
        except ValueError as error:
            with self.lock:
                self.mistakes[key] = str(error)
                self.touch()
        else:
            self.put(key, value)

    def touch(self) -> None:
        """Find the present problems, and tell of the change."""
        with self.lock:
            found = self._argument_problems() | hardware.misfits(self.machine, self.config)
            self.problems = {**self.mistakes, **found, **self.mistakes}
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
            self.changed()

    def _argument_problems(self) -> dict[str, str]:
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.is_required and name not in self.arguments:
                way = f"{'Choose' if parameter.kind == 'choice' else 'Enter'} a value: there is no default."
                is_code = parameter.kind == "code"
                found[f"arguments.{name}"] = f'Set it from code: panel.arguments["{name}"] = ...' if is_code else way
        if (micro := self.micro_batch) is not None:
            size = self.value_of(micro.name)
            # A default of -1 may have a meaning of its own in the function.
            if type(size) is int and size < 1 and not self._is_default(micro.name, size):
                found[f"arguments.{micro.name}"] = "Enter a whole number, 1 or more."
        return found

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a call: positional-only ones by place, the others by name."""
        by_place, by_name = self._split()
        return tuple(by_place.values()), by_name

    def code(self) -> tuple[str, str]:
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
        newer = sys.modules["__main__"].__dict__.get(name, self.function)
        is_same_name = getattr(newer, "__qualname__", None) == getattr(self.function, "__qualname__", "")
        return newer is not self.function and is_same_name and self.function.__module__ == "__main__"

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
        raise ConfigError(f"arguments[{name!r}]: {self.name or 'nothing'} has no parameter of that name. {hint}")

    def _argument_changed(self, name: str | None) -> None:
        with self.lock:
            for key in [f"arguments.{name}"] if name is not None else [*self.mistakes]:
                if key.startswith("arguments."):
                    self.mistakes.pop(key, None)
            self.touch()


# --------------------------------------------------------------------------------------------------------------------
# Options of a launch that have a field in a panel, in the order of their fields.


LABELS = {
    "num_processes": "Processes",
    "gradient_accumulation_steps": "Accumulation steps",
    "mixed_precision": "Mixed precision",
    "engine": "Machines",
    "devices": "Devices",
    "backend": "Backend",
    "start_method": "Start method",
    "output": "Output in the cell",
    "shard": "Shard models over",
    "seed": "Seed",
    "max_grad_norm": "Maximum gradient norm",
    "comm_hook": "Gradient compression",
    "timeout": "Time limit, seconds",
    "idle_timeout": "Idle limit, seconds",
    "max_restarts": "Restarts after a failure",
    "resume": "Restarts resume from",
    "check_collectives": "Check collectives",
    "detached": "Outlive the kernel",
    "preemption_signal": "Save and stop at the signal",
}
"""Label of each field."""
ESSENTIAL, ADVANCED = tuple(LABELS)[:3], tuple(LABELS)[3:]
"""Options that are always in view, and those in the section that is folded at first; they are seldom changed."""


# --------------------------------------------------------------------------------------------------------------------
# Settings of a panel's last run, kept for the next panel of the same function in the same notebook.
#
# The file lies beside the run folders. Nothing is kept if runs leave no folder, or if the notebook is unknown. Values
# that cannot be typed, and arguments with names of secrets, are left out.


def settings_of(state: LaunchState) -> dict[str, dict[str, Any]]:
    """Return the options and arguments that differ from their defaults and can be typed, as plain JSON values."""
    options = {name: getattr(state.config, name) for name in LABELS}
    options = {name: value for name, value in options.items() if value != default_of(name)}
    if "engine" in options:
        options["engine"] = command_engines.write(options["engine"])
    arguments = {
        name: _encode(parameter, state.arguments[name])
        for name, parameter in state.parameters.items()
        if name in state.arguments and not is_secret(name, state.arguments[name])
    }
    return {
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "arguments": {name: data for name, data in arguments.items() if data is not MISSING},
    }


def fill(state: LaunchState, settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Fill the fields that have their defaults; return the keys of the fields that were filled."""
    filled = []
    for name, value in settings["options"].items():
        if name in LABELS and getattr(state.config, name) == default_of(name) != value:
            with contextlib.suppress(ConfigError):  # of another version
                state.config = dataclasses.replace(state.config, **{name: value})
                filled.append(name)
    for name, data in settings["arguments"].items():
        parameter = state.parameters.get(name)
        value = MISSING if parameter is None or name in state.arguments else _decode(parameter, data)
        if value is not MISSING:
            state.put(f"arguments.{name}", value)
            filled.append(f"arguments.{name}")
    return filled


def file_of(function: Any, config: LaunchConfig) -> Path | None:
    """Return the file for a function of this notebook; None if no settings are kept."""
    # VS Code names the notebook in a variable of its cells, Jupyter's server in the environment.
    named = sys.modules["__main__"].__dict__.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    try:
        home = run_folders.find_home(config.runs_folder)
    except RuntimeError:
        return None
    if home is None or not named or function is None:
        return None
    key = "\n".join([str(named), os.getcwd(), name_of(function)])
    return home / "panels" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def write(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings to a file; if the disk is full, only the next panel lacks them."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(path, json.dumps(settings).encode("ascii"), path.with_suffix(f".{os.getpid()}"))


def read(path: Path) -> dict[str, dict[str, Any]] | None:
    """Return the settings in a file; None if there are none."""
    data = read_json(path.parent, path.name) or {}
    return data if all(isinstance(data.get(name), dict) for name in ("options", "arguments")) else None


def _encode(parameter: Parameter, value: Any) -> Any:
    if parameter.kind == "code" or not parameter.fits(value):
        return MISSING
    if parameter.kind == "choice":
        return repr(value)
    return value if value is None or parameter.kind == "bool" else parameter.text_of(value)


def _decode(parameter: Parameter, data: Any) -> Any:
    if parameter.kind == "choice":
        return next((choice for choice in parameter.choices if repr(choice) == data), MISSING)
    if data is None or parameter.kind == "bool":
        return data if parameter.fits(data) else MISSING
    with contextlib.suppress(ValueError):
        return parameter.parse(data) if isinstance(data, str) and parameter.kind != "code" else MISSING
    return MISSING


# --------------------------------------------------------------------------------------------------------------------
# Code for the launch that a panel shows, to be copied; values that equal their defaults are left out.


WIDTH = 96
"""Characters of a line: as many as a cell of 1,000 pixels shows without scrolling."""


class Namer:
    """Finds names for objects in the user's cells, and notes the imports that the cells lack."""

    def __init__(self, namespace: Mapping[str, Any], panel: Any) -> None:
        self._namespace = dict(namespace)
        self._panel = panel
        self.imports: set[str] = set()
        self.needs_a_panel = False
        """True if the code refers to the panel, but no name of the user's cells holds the panel."""

    def name_of(self, value: Any) -> str | None:
        """Return a name whose value is this very object; None if there is none."""
        own = getattr(value, "__name__", None)
        if isinstance(own, str) and self._namespace.get(own) is value:
            return own
        if (name := self._held(value)) is not None:
            return name
        if isinstance(value, types.MethodType) and (owner := self.name_of(value.__self__)) is not None:
            return f"{owner}.{value.__name__}"
        home = getattr(value, "__module__", None)
        if not isinstance(own, str) or not isinstance(home, str) or own in self._namespace:
            return None
        # The top level of the package comes first, if it offers the same object.
        for module in (home.partition(".")[0], home):
            if module in sys.modules and getattr(sys.modules[module], own, None) is value:
                if module not in ("__main__", "builtins"):
                    self.imports.add(f"from {module} import {own}")
                return own
        return None

    def expression(self, value: Any, otherwise: str) -> str:
        """Return code for a value; `otherwise` names the panel's attribute that holds it."""
        if is_literal(value):
            return literal(value)
        if isinstance(value, PurePath):
            self.imports |= set() if self._namespace.get("Path") is Path else {"from pathlib import Path"}
            return f"Path({literal(str(value))})"
        if isinstance(value, enum.Enum) and (cls := self.name_of(type(value))) is not None:
            return f"{cls}.{value.name}"
        if (name := self.name_of(value)) is not None:
            return name
        panel = self._held(self._panel)
        self.needs_a_panel = panel is None
        return f"{panel or 'panel'}.{otherwise}"

    def _held(self, value: Any) -> str | None:
        """Return the name of an object in the user's cells."""
        fits = (name for name, held in self._namespace.items() if held is value and name.isidentifier())
        return next((name for name in fits if not name.startswith("_") and not keyword.iskeyword(name)), None)


def call_code(
    function: Any, args: Mapping[str, Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], namer: Namer
) -> str:
    """Return the call of `notebook_launch` with these options, and the imports that it needs; None: no function yet."""
    given = dict(options)
    parts = ["train" if function is None else namer.expression(function, "fn")]
    if (num := given.pop("num_processes", None)) is not None:
        parts.append(str(num))
    items = {name: namer.expression(value, f"arguments[{literal(name)}]") for name, value in {**args, **kwargs}.items()}
    if args:
        parts.append(f"args=({', '.join(items[name] for name in args)}{',' * (len(args) == 1)})")
    if kwargs:
        named = [f"{literal(name)}: {items[name]}" for name in kwargs]
        parts.append("kwargs=" + _bracketed("{", named, "}", indent=4))
    setup, env = given.pop("setup", None), given.pop("env", {})
    parts += [f"{name}={literal(_plain(value))}" for name, value in given.items()]
    if env:
        # The code of a panel is saved with its notebook.
        hidden = {name for name, text in env.items() if is_secret(name, text)}
        namer.imports |= {"import os"} if hidden else set()
        items = {name: f"os.environ[{literal(name)}]" if name in hidden else literal(env[name]) for name in env}
        parts.append(f"env={{{', '.join(f'{literal(name)}: {item}' for name, item in items.items())}}}")
    if setup is not None:
        parts.append(f"setup={namer.expression(setup, 'config.setup')}")
    call = namer.name_of(notebook_launch) or "notebook_launch"
    head = [*sorted(namer.imports), ""] if namer.imports else []
    return "\n".join([*head, _bracketed(f"{call}(", parts, ")", indent=0)])


def literal(value: Any) -> str:
    """Return the value's literal, strings in double quotes."""
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    if type(value) in (list, tuple) and len(value) != 1:
        opening, closing = "[]" if isinstance(value, list) else "()"
        return opening + ", ".join(map(literal, value)) + closing
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _plain(value: Any) -> Any:
    """Return an option as it is written in code."""
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):  # An engine.
        return command_engines.write(value) or value  # type: ignore[arg-type]
    return dict(value) if hasattr(value, "keys") else value


def _bracketed(opening: str, parts: Sequence[str], closing: str, *, indent: int) -> str:
    """Return the parts in one line, else in a line of their own, else one below the other."""
    inside, pad = ", ".join(parts), " " * indent
    if "\n" not in inside:
        if indent + len(opening + inside + closing) <= WIDTH:
            return opening + inside + closing
        if not indent and 4 + len(inside) <= WIDTH:
            return f"{opening}\n    {inside}\n{closing}"
    return "\n".join([opening, *(f"{pad}    {part}," for part in parts), pad + closing])
