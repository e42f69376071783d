"""Settings of libraries that a program makes once, at its top: ranks have the kernel's, as a fork of the kernel would.

Without them, a model made under `torch.set_default_dtype(torch.float64)` would meet float32 tensors in its ranks, and
`warnings.filterwarnings("ignore")` would hold in the kernel alone. A setting is read only if its library is loaded in
the kernel, and travels only if it is not the library's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.travel.afterimport import after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a library, or several of one kind."""

    library: str
    default: Any
    """The library's own value, in plain types."""
    read: Callable[[Any], Any]
    """Returns the value, in plain types; called with the library."""
    write: Callable[[Any, Any, Any], object]
    """Called with the library, the new value and the one before."""
    calls: frozenset[str] = frozenset()
    """Functions of which a cell must have called one, because libraries change the setting, too; empty: none."""


def _cudnn_switch(name: str) -> Setting:
    return Setting(
        "torch",
        False,
        lambda torch: bool(getattr(torch.backends.cudnn, name)),
        lambda torch, new, _: setattr(torch.backends.cudnn, name, new),
    )


def _torch_print_options(torch: Any) -> tuple[Any, ...]:
    options = torch._tensor_str.PRINT_OPTS  # noqa: SLF001 - torch has no other way to read them
    return options.precision, options.threshold, options.edgeitems, options.linewidth, options.sci_mode


def _set_torch_print_options(torch: Any, new: tuple[Any, ...], _: object) -> None:
    names = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
    torch.set_printoptions(**dict(zip(names, new, strict=True)))


VERBOSITY = ("set_verbosity", *(f"set_verbosity_{level}" for level in ("debug", "error", "info", "warning")))
LOGGING = frozenset({"basicConfig", "disable", "setLevel", *VERBOSITY})
FILTERING = frozenset({"filterwarnings", "resetwarnings", "simplefilter"})
NUMPY_PRINTING: dict[str, Any] = {"precision": 8, "threshold": 1000, "edgeitems": 3, "linewidth": 75, "suppress": False}
NUMPY_PRINTING |= {"nanstr": "nan", "infstr": "inf", "sign": "-", "floatmode": "maxprec"}
NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def _others(present: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: present[name] for name, default in defaults.items() if name in present and present[name] != default}


OF_THE_BACKEND = frozenset({"backend", "backend_fallback", "interactive", "toolbar", "webagg.port", "tk.window_focus"})
"""Entries of matplotlib's rcParams that belong to the process and its display."""


def _read_rc_params(matplotlib: Any) -> dict[str, Any]:
    own = matplotlib.rcParamsOrig
    # Not by the mapping's own methods, which look up a backend and warn of old names.
    return {
        name: value
        for name, value in dict.items(matplotlib.rcParams)
        if name not in OF_THE_BACKEND and value != dict.get(own, name)
    }


def _set_rc_params(matplotlib: Any, new: dict[str, Any], old: dict[str, Any]) -> None:
    own = {name: dict.get(matplotlib.rcParamsOrig, name) for name in old}
    matplotlib.rcParams.update({name: value for name, value in {**own, **new}.items() if name in matplotlib.rcParams})


def _read_pandas_options(pandas: Any) -> dict[str, Any]:
    config = pandas._config.config  # noqa: SLF001 - the public functions warn of old names and take 0.1 ms
    registered = config._registered_options  # noqa: SLF001
    found = dict(_flat(config._global_config))  # noqa: SLF001
    return {name: value for name, value in found.items() if name in registered and value != registered[name].defval}


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _set_pandas_options(pandas: Any, new: dict[str, Any], old: dict[str, Any]) -> None:
    registered = pandas._config.config._registered_options  # noqa: SLF001
    for name in {**old, **new}:
        if name in registered:
            pandas.set_option(name, new.get(name, registered[name].defval))


def _read_levels(logging: Any) -> dict[str, int]:
    """Return the levels of all loggers that have one, and the level up to which `logging.disable` stops records."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    levels = {logger.name: logger.level for logger in loggers if getattr(logger, "level", logging.NOTSET)}
    return {**levels, "": logging.root.manager.disable}


def _set_levels(logging: Any, new: dict[str, int], old: dict[str, int]) -> None:
    for name in {**old, **new}:
        own = logging.WARNING if name == "root" else logging.NOTSET
        if name:
            logging.getLogger(None if name == "root" else name).setLevel(new.get(name, own))
    logging.disable(new.get("", logging.NOTSET))


def _read_filters(warnings: Any) -> list[tuple[Any, ...]]:
    def text(pattern: Any) -> Any:
        return (pattern.pattern, pattern.flags) if isinstance(pattern, re.Pattern) else pattern

    return [
        (action, text(message), (category.__module__, category.__qualname__), text(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _set_filters(warnings: Any, new: list[tuple[Any, ...]], old: list[tuple[Any, ...]]) -> None:
    """Put these filters before those that this process has of its own."""

    def pattern(text: Any) -> Any:
        return re.compile(*text) if isinstance(text, tuple) else text

    ours, theirs, wanted = _read_filters(warnings), set(old) | set(new), []
    for action, message, (source, name), module, line in new:
        category: Any = sys.modules.get(source)
        for step in name.split("."):
            category = getattr(category, step, None)
        if isinstance(category, type):  # Otherwise nothing in this process gives such a warning yet.
            wanted.append((action, pattern(message), category, pattern(module), line))
    kept = [entry for entry, text in zip(warnings.filters, ours, strict=True) if text not in theirs]
    warnings.filters[:] = [*wanted, *kept]
    # Forgets what was decided by the filters before; there is nothing else to tell.
    warnings.simplefilter("default", append=True)
    del warnings.filters[-1]


SETTINGS: dict[str, Setting] = {
    "default_dtype": Setting(
        "torch",
        "float32",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, new, _: torch.set_default_dtype(getattr(torch, new)),
    ),
    "deterministic_algorithms": Setting(
        "torch",
        (False, False),
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, new, _: torch.use_deterministic_algorithms(new[0], warn_only=new[1]),
    ),
    "float32_matmul_precision": Setting(
        "torch",
        "highest",
        lambda torch: str(torch.get_float32_matmul_precision()),
        lambda torch, new, _: torch.set_float32_matmul_precision(new),
    ),
    "cudnn_benchmark": _cudnn_switch("benchmark"),
    "cudnn_deterministic": _cudnn_switch("deterministic"),
    "detect_anomaly": Setting(
        "torch",
        (False, True),
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, new, _: torch.autograd.set_detect_anomaly(new[0], check_nan=new[1]),
    ),
    "print_options": Setting("torch", (4, 1000, 3, 80, None), _torch_print_options, _set_torch_print_options),
    "numpy_print_options": Setting(
        "numpy",
        {},
        lambda numpy: _others(numpy.get_printoptions(), NUMPY_PRINTING),
        lambda numpy, new, old: numpy.set_printoptions(**{**{name: NUMPY_PRINTING[name] for name in old}, **new}),
    ),
    "numpy_errors": Setting(
        "numpy",
        {},
        lambda numpy: _others(numpy.geterr(), NUMPY_ERRORS),
        lambda numpy, new, old: numpy.seterr(**{**{name: NUMPY_ERRORS[name] for name in old}, **new}),
    ),
    "rc_params": Setting("matplotlib", {}, _read_rc_params, _set_rc_params),
    "pandas_options": Setting("pandas", {}, _read_pandas_options, _set_pandas_options),
    "log_levels": Setting("logging", {}, _read_levels, _set_levels, LOGGING),
    "warning_filters": Setting("warnings", [], _read_filters, _set_filters, FILTERING),
}
"""All settings, by name."""


def read_settings(called: Collection[str] = ()) -> dict[str, Any]:
    """Return this process's settings that are not their libraries' own, by name; cells have called what is `called`."""
    found = {}
    for name, setting in SETTINGS.items():
        library = sys.modules.get(setting.library)
        if library is None or (setting.calls and setting.calls.isdisjoint(called)):
            continue
        # Torch refuses to read an old setting beside its newer form, and no library is complete while it is imported.
        with contextlib.suppress(Exception):
            value = setting.read(library)
            if value != setting.default:
                found[name] = value
    return found


class KernelSettings:
    """The kernel's settings in a rank. Only what has changed in the kernel is set, so a rank's own settings stay.

    A fork of the kernel has some `inherited` from it.
    """

    def __init__(self, inherited: Mapping[str, Any] | None = None) -> None:
        self._kernels = {name: setting.default for name, setting in SETTINGS.items()} | dict(inherited or {})
        """The kernel's settings as this process has followed them."""
        self._wanted = dict(self._kernels)
        """The kernel's settings at the last call; those of a library that is not imported yet are still to follow."""

    def follow(self, sent: Mapping[str, Any]) -> None:
        """Set what differs from the last call; `sent` is what `read_settings` has returned in the kernel."""
        for name, setting in SETTINGS.items():
            before, self._wanted[name] = self._wanted[name], sent.get(name, setting.default)
            if self._wanted[name] == self._kernels[name]:
                continue
            if (library := sys.modules.get(setting.library)) is not None:
                self._set(name, library)
            elif self._wanted[name] != before:
                after_import({setting.library: functools.partial(self._set, name)})

    def _set(self, name: str, library: types.ModuleType) -> None:
        setting, new, old = SETTINGS[name], self._wanted[name], self._kernels[name]
        if new != old:
            setting.write(library, new, old)
            self._kernels[name] = new


# --------------------------------------------------------------------------------------------------------------------
# Code that each rank runs once, before the first call that comes with it: `setup=` and the cells of `%%everywhere`.


class SetupStep(NamedTuple):
    """A piece of code that each rank runs before it unpacks a call."""

    key: str
    """A rank runs one step of each key."""
    what: str
    """The code in words, for an error that it raises."""
    run: Callable[[], object]
    variables: Mapping[str, Any] = types.MappingProxyType({})
    """The notebook's variables that the code uses, which each call brings with their present values."""
    shared: Mapping[str, Any] | None = None
    """By name: what the same code has made in the kernel, where it has run, and each rank has of its own. In a rank the
    names alone. None: the code has not run in the kernel."""

    def __reduce__(self) -> tuple[Any, ...]:
        shared = None if self.shared is None else dict.fromkeys(self.shared)
        return SetupStep, (self.key, self.what, self.run, dict(self.variables), shared)


class SetupSteps:
    """The steps that this rank has run."""

    def __init__(self) -> None:
        self._done: set[str] = set()

    def inherit(self, steps: Iterable[SetupStep]) -> None:
        """Note what had run in the kernel when this rank was forked from it."""
        self._done |= {step.key for step in steps if step.shared is not None}

    def run(self, step: SetupStep) -> None:
        """Run a step, unless this rank has run it; raise what it raises, with a note that names the step."""
        vars(sys.modules["__main__"]).update(step.variables)
        if step.key in self._done:
            return
        try:
            step.run()
        except Exception as error:
            note = f"It was raised by {step.what}, which each rank runs before the function."
            # Not add_note(), which Python 3.10 lacks.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        self._done.add(step.key)
