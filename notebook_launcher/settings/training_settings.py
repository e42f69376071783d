"""Settings of a launch for training; Accelerate's environment variables give what the launch leaves open.

An argument in the code wins over both (`training/resolving.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any, Literal

from notebook_launcher.errors import ConfigError
from notebook_launcher.settings.option_checks import CHOICES, DEFAULT_STEPS, whole_number
from notebook_launcher.wording import is_secret, type_of, unknown

SettingName = Literal[
    "mixed_precision", "gradient_accumulation_steps", "max_grad_norm", "comm_hook", "check_ranks", "shard"
]
"""A field of `TrainingSettings`."""

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
STEPS_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
OF_ENVIRONMENT = " It is a variable of the environment: of the shell, of os.environ, or of the launch's env=."
"""End of an error about a variable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Fields of `LaunchConfig` that an `Accelerator()` made in a rank adopts, by the same names. None: not given."""

    mixed_precision: str | None
    gradient_accumulation_steps: int | None
    max_grad_norm: float | None
    comm_hook: str | None
    check_ranks: bool | None
    shard: int | None

    def asked_for(self) -> dict[str, Any]:
        """Return the fields that ask an Accelerator for something, by name; what it compares is not among them."""
        neutral = {
            "mixed_precision": "no", "gradient_accumulation_steps": DEFAULT_STEPS, "max_grad_norm": None,
            "comm_hook": "no", "shard": 1,
        }  # fmt: skip
        given = {name: getattr(self, name) for name in neutral}
        return {name: value for name, value in given.items() if value not in (None, neutral[name])}

    def resolved(self, environ: Mapping[str, str]) -> TrainingSettings:
        """Return the settings of ranks with this environment: as given, else from Accelerate's variables.

        A field stays None if its variable cannot be read. The rank then raises an error with the variable's name.
        """
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        with contextlib.suppress(ValueError):
            steps = steps_of(steps, environ)
        with contextlib.suppress(ValueError):
            precision = precision_of(precision, environ)
        return dataclasses.replace(
            self, mixed_precision=precision, gradient_accumulation_steps=steps, comm_hook=self.comm_hook or "no"
        )


def precision_of(launched: str | None, environ: Mapping[str, str]) -> str:
    """Return the precision of a launch, else the variable's, else "no"; raise ValueError if the variable has none."""
    if launched is not None:
        return launched
    return read_precision(PRECISION_VARIABLE, environ.get(PRECISION_VARIABLE, "no"))


def read_precision(name: str, value: object) -> str:
    """Return a precision in small letters; raise ValueError with the name of its source if there is none such."""
    words, text = CHOICES["mixed_precision"].words, str(value).lower()
    if text in words:
        return text
    raise ValueError(unknown(name, value, words))


def steps_of(launched: int | None, environ: Mapping[str, str]) -> int:
    """Return the accumulation steps of a launch, else the variable's, which must be a number, else DEFAULT_STEPS."""
    if launched is not None:
        return launched
    return whole_number(STEPS_VARIABLE, read_variable(environ, STEPS_VARIABLE, DEFAULT_STEPS), hint=OF_ENVIRONMENT)


def read_variable(environ: Mapping[str, str], variable: str, default: int) -> int | str:
    """Return the number that a variable holds; its text if that is no whole number, the default if it is not set."""
    text = environ.get(variable, str(default)).strip()
    return int(text) if text.lstrip("-").isdecimal() else text


# --------------------------------------------------------------------------------------------------------------------
# Check of `env=`, the environment variables that a launch adds for its ranks.


_NUMBERING = "num_processes= sets how many ranks there are, and the launcher numbers them"
_SPREAD = "nodes= and processes_per_node= spread the ranks over the machines of engine="
_MEETING_POINT = "the launcher binds a free port, at which the ranks of this run meet"
_NETWORK = "it is loopback on one machine, and network= of the engine names it for several"
RESERVED = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"), _NUMBERING),
    **dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"), _SPREAD),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _MEETING_POINT),
    **dict.fromkeys(("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"), _MEETING_POINT),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "max_restarts= sets it"),
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _NETWORK),
}
"""By variable that the launcher sets in each rank, whatever `env=` has: the way to what it would change."""
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CHOSEN = frozenset({*RESERVED, PRECISION_VARIABLE, STEPS_VARIABLE, _DEBUG, *_GPUS, *_THREADS})
"""Variables that the launcher chooses for each launch."""


def check_environment(value: object) -> Mapping[str, str]:
    """Return environment variables, which nothing can change.

    `{**os.environ, "MORE": "1"}` asks for one variable more. The kernel's values of variables that the launcher chooses
    are left out of it.
    """
    if not isinstance(value, Mapping):
        given = "env" if is_secret(repr(value), repr(value)) else f"env={value!r}"
        raise ConfigError(f"{given} is {type_of(value)}; it must map names to strings.", field="env")
    if os.environ.keys() <= value.keys():
        value = {name: text for name, text in value.items() if name not in _CHOSEN or os.environ.get(name) != text}
    for key, text in value.items():
        given = f"env[{key!r}]={'***' if is_secret(str(key), text) else repr(text)}"
        if not isinstance(key, str) or not isinstance(text, str):
            advice = "" if given.endswith("***") else f" Write {str(key)!r}: {str(text)!r}."
            raise ConfigError(f"{given}: names and values must be strings.{advice}", field="env")
        if not key or "=" in key or "\0" in key + text:
            raise ConfigError(
                f"{given}: a name must not be empty or contain '=', and neither may contain a null character.",
                field="env",
            )
        try:
            os.fsencode(key + text)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{given}: it cannot be put into an environment ({error.reason}).", field="env") from None
        if key in RESERVED:
            raise ConfigError(
                f"{given}: the launcher sets this variable in each rank, so a value of yours has no "
                f"effect. Leave it out: {RESERVED[key]}.",
                field="env",
            )
    return types.MappingProxyType(dict(value))


def check_no_contradiction(env: Mapping[str, str], options: Any) -> None:
    """Raise `ConfigError` if a variable of `env=` has another value than the option that sets the same."""
    for variable, option in (
        (PRECISION_VARIABLE, "mixed_precision"),
        (STEPS_VARIABLE, "gradient_accumulation_steps"),
        (_THREADS[0], "threads_per_process"),
    ):
        value = getattr(options, option)
        if value is not None and variable in env and env[variable].strip().lower() != str(value):
            raise _contradiction(variable, env[variable], f"{option}={value!r}")
    if options.check_collectives and env.get(_DEBUG, "DETAIL") != "DETAIL":
        raise _contradiction(_DEBUG, env[_DEBUG], "check_collectives=True")
    devices = options.devices
    shown = ("", "-1") if devices == "cpu" else (",".join(map(str, devices or ())),)
    for variable in _GPUS if devices is not None else ():
        if variable in env and env[variable].replace(" ", "") not in shown:
            as_typed = devices if devices == "cpu" else list(devices)
            raise _contradiction(variable, env[variable], f"devices={as_typed!r}")


def _contradiction(variable: str, text: str, option: str) -> ConfigError:
    return ConfigError(
        f"env[{variable!r}]={text!r} contradicts {option}, which sets the same. Write one of the two: to keep the "
        f"option, leave {variable} out of env=.",
        field="env",
    )
