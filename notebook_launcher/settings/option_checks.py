"""Checks of single options of a launch: each returns the value in its one form, or raises `ConfigError`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import numbers
import operator
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from notebook_launcher.errors import ConfigError
from notebook_launcher.wording import describe_value, name_of, plural, type_of, unknown

if TYPE_CHECKING:
    from notebook_launcher.engines.engine import Engine


def check_setup(setup: object) -> None:
    """Check code that ranks run before the function: text, or a function that runs when it is called."""
    if setup is None:
        return
    if isinstance(setup, str):
        words = setup.strip()
        if words.endswith(".py") and len(words.split()) == 1:
            raise ConfigError(
                f"setup={setup!r} is text of code, not the path of a file. Write setup=Path({words!r}).read_text().",
                field="setup",
            )
        try:
            compile(setup, "setup=", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"the code of setup= is no Python: {error}.", field="setup") from None
        return
    if not callable(setup):
        raise ConfigError(
            f"setup={describe_value(setup)} is {type_of(setup)}. Pass a function without arguments, or text of code.",
            field="setup",
        )
    if inspect.iscoroutinefunction(setup) or inspect.isgeneratorfunction(setup) or inspect.isasyncgenfunction(setup):
        kind = "a generator function" if inspect.isgeneratorfunction(setup) else "an async function"
        raise ConfigError(
            f"setup={name_of(setup)} is {kind}, so calling it runs nothing. Write a plain def.", field="setup"
        )
    try:
        inspect.signature(setup).bind()
    except TypeError as error:
        name = name_of(setup)
        raise ConfigError(
            f"setup={name} cannot be called without arguments: {error}. Write setup=lambda: {name}(...).", field="setup"
        ) from None
    except ValueError:  # Some builtins tell nothing of their arguments.
        pass


def check_whole_number(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return a whole number as an int."""
    hint = ""
    if isinstance(value, float) and value.is_integer():
        hint = f" Write {int(value)}."
    elif isinstance(value, str) and value.strip().isdecimal():
        hint = f" Write {int(value)} without quotes."
    elif name == "num_processes" and isinstance(value, (tuple, list)):
        hint = " Arguments of the function go by name: notebook_launch(fn, 2, args=(...))."
    try:
        return whole_number(name, value, minimum=minimum, maximum=maximum, hint=hint)
    except ValueError as error:
        raise ConfigError(str(error), field=name) from None


def check_option_number(name: str, value: object, number: OptionNumber) -> int | float | None:
    """Return the value of an option that is a number, as an int or a float."""
    if value is None and number.none is not None:
        return None
    if number.is_whole:
        return check_whole_number(name, value, minimum=number.least, maximum=number.most)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        of_unit = number.unit and f" of {number.unit}"
        raise ConfigError(f"{name}={value!r} is {type_of(value)}; it must be a number{of_unit}, or None.", field=name)
    limit = float(value)
    if not limit > 0 or math.isinf(limit):
        unit = number.unit and f" {number.unit}"
        raise ConfigError(
            f"{name}={value!r} must be more than 0{unit} and finite; None means {number.none}.", field=name
        )
    return limit


def check_choice(name: str, value: object, choices: OptionChoices) -> None:
    """Raise `ConfigError` if an option is none of its choices."""
    takes_none = choices.none is not None
    if (takes_none and value is None) or (isinstance(value, str) and value in choices.words):
        return
    raise ConfigError(unknown(name, value, choices.words, more=" or None" if takes_none else ""), field=name)


def check_option_switch(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise `ConfigError` if an option is neither True nor False, nor with `or_none` None."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        words = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{name}={value!r} is {type_of(value)}; it must be {words}.", field=name)


GLOO_ON_GPUS = (
    "which ranks get that share a GPU: torch's sharding needs NCCL there (with gloo, a rank crashed in torch 2.11). "
    "Use as many ranks as GPUs, or devices='cpu', or NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1."
)
"""The end of an error about sharded models."""


def check_shard(shard: int, num_processes: int | None, *, by_default: bool = False) -> None:
    """Raise `ConfigError` if models cannot be shared out over `shard` of the ranks.

    `num_processes` is None if the machine has yet to decide; `by_default` says that it has decided.
    """
    if num_processes is not None and num_processes % shard:
        asked, way_out = f"num_processes={num_processes}", ""
        if by_default:
            asked, way_out = f"num_processes=None, which is {num_processes} here", f", or pass num_processes={shard}"
        raise ConfigError(f"{no_whole_replicas(shard, num_processes, asked)}{way_out}.", field="shard")


def check_shard_backend(shard: int, backend: str | None, *, use_gpu: bool) -> None:
    """Raise `ConfigError` if ranks would share models out over GPUs by gloo."""
    if shard > 1 and use_gpu and backend == "gloo":
        raise ConfigError(f"shard={shard} on GPUs with gloo, {GLOO_ON_GPUS}", field="shard")


def no_whole_replicas(shard: int, num_processes: int, asked: str) -> str:
    """Return `shard=3 with 4 ranks: 4 / 3 is not a whole number of replicas. It can be 1, 2, 4`."""
    divisors = ", ".join(str(size) for size in range(1, num_processes + 1) if num_processes % size == 0)
    return (
        f"shard={shard} with {asked}: {num_processes} / {shard} is not a whole number of replicas. It can be {divisors}"
    )


def check_monitor(value: object) -> None:
    """Raise `ConfigError` if `monitor` is none of its choices."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"monitor={value!r} is unknown. It can be True, False or 'auto'.", field="monitor")


def check_devices(value: object) -> tuple[int, ...] | str | None:
    """Return the indices of GPUs as a tuple; "cpu" and None as they are."""
    if value is None or value == "cpu":
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(
            f"devices={value!r} is unknown. Pass a list of GPU indices such as [0, 1], 'cpu', or None for all.",
            field="devices",
        )
    indices = tuple(check_whole_number("devices", item, minimum=0) for item in value)
    if not indices:
        raise ConfigError(f"devices={value!r} is empty. Pass 'cpu' to use no GPU, or None to use all.", field="devices")
    if len(set(indices)) < len(indices):
        raise ConfigError(
            f"devices={value!r} names a GPU twice. Name each once; num_processes sets the number of ranks.",
            field="devices",
        )
    return indices


def check_name(value: object) -> str | None:
    """Return the name of a run, one line of text, or None."""
    if value is not None and not (isinstance(value, str) and value.strip() and value.isprintable()):
        raise ConfigError(
            f"name={value!r} is not a name. Pass one line of text, or None for the function's name.", field="name"
        )
    return value


def check_tags(value: object) -> tuple[str, ...]:
    """Return the tags of a run as a tuple."""
    tags = (value,) if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) and tag.strip() for tag in tags):
        raise ConfigError(f"tags={value!r} are not tags. Pass words: tags=['baseline', 'lr sweep'].", field="tags")
    return tuple(tags)


def check_folder(name: str, value: object) -> str | None:
    """Return a folder as a text."""
    if value is None:
        return None
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        what = "not a path" if isinstance(path, str) else type_of(value)
        raise ConfigError(
            f"{name}={value!r} is {what}. Pass a folder, 'auto', or None to keep no run folder.", field=name
        )
    return path


# --------------------------------------------------------------------------------------------------------------------
# The option `engine`: as an object, as a text or as settings of a file, and the numbers that must fit it.


HOW = "Name the machines by an engine: engine=SSH([...]), Ray(), Slurm() or Commands([...])."


def chosen_engine(value: Any) -> Engine | None:
    """Return the engine that an option means: an engine, a text such as `"slurm"`, settings of a file, or None."""
    if isinstance(value, (str, Mapping)):
        from notebook_launcher.engines.cluster import command_engines

        return command_engines.read(value) if isinstance(value, str) else command_engines.from_settings(value)
    has_methods = all(callable(getattr(value, name, None)) for name in ("look", "start"))
    if value is not None and (isinstance(value, type) or not has_methods):
        raise ConfigError(
            f"engine={value!r} is not an engine. Pass Commands([...]), Ray(), SSH([...]) or Slurm(), 'ray', 'slurm' or "
            "'ssh HOST HOST', or None for this machine.",
            field="engine",
        )
    return value


def engine_settings(engine: Engine) -> dict[str, Any]:
    """Return an engine as plain values for a settings file; raises `ConfigError` for one that has none."""
    from notebook_launcher.engines.cluster import command_engines

    return command_engines.to_settings(engine)


def check_engine_fit(engine: Engine | None, start_method: str, devices: object) -> None:
    """Raise `ConfigError` if other options name things of the kernel's own machine."""
    if engine is None:
        return
    if start_method == "fork":
        raise ConfigError(
            f"start_method='fork' with engine={engine!r}: ranks of other machines cannot be forks of this kernel.",
            field="start_method",
        )
    if isinstance(devices, tuple):
        raise ConfigError(
            f"devices={list(devices)!r} with engine={engine!r}: the numbers count GPUs of this machine. Pass 'cpu', or "
            "None for the GPUs of all nodes.",
            field="devices",
        )


def check_spread(
    num_processes: int | None, nodes: int | None, processes_per_node: int | None, engine: Engine | None
) -> None:
    """Raise `ConfigError` if the numbers of processes, machines and processes of each machine contradict each other."""
    if engine is None and nodes not in (None, 1):
        raise ConfigError(f"nodes={nodes} without an engine: this is one machine. {HOW}", field="nodes")
    if num_processes is not None and nodes is not None and nodes > num_processes:
        raise ConfigError(
            f"nodes={nodes} with num_processes={num_processes}: a node would get no process. Pass "
            f"nodes={num_processes} or less.",
            field="nodes",
        )
    if num_processes is None or processes_per_node is None:
        return
    asked, each = f"num_processes={num_processes} with processes_per_node={processes_per_node}", processes_per_node
    nodes = 1 if engine is None else nodes
    if nodes is not None and num_processes != nodes * each:
        raise ConfigError(
            f"{asked}: {plural(nodes, 'node')} with {each} each make {nodes * each}. Omit one of the numbers.",
            field="processes_per_node",
        )
    if num_processes % each:
        raise ConfigError(
            f"{asked}: {num_processes} / {each} is not a whole number of nodes. "
            f"Pass num_processes={-(-num_processes // each) * each}, a multiple of {each}.",
            field="processes_per_node",
        )


# --------------------------------------------------------------------------------------------------------------------
# The options that are one of several words, and what None means, for all that check, ask for and show them.


Backend: TypeAlias = Literal["auto", "gloo", "nccl", "mpi", "ucc", "cpu:gloo,cuda:nccl"]
Precision: TypeAlias = Literal["no", "fp16", "bf16"]
CommHook: TypeAlias = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
StartMethod: TypeAlias = Literal["forkserver", "fork", "spawn"]
ShownRanks: TypeAlias = Literal["all", "rank0", "none"]
ResumePoint: TypeAlias = Literal["checkpoint"]
RankSeeds: TypeAlias = Literal["alike", "apart"]
PreemptionSignal: TypeAlias = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionChoices:
    """The words that an option takes."""

    words: tuple[str, ...]
    none: str | None = None
    """Meaning of None in a word of a menu; None: the option must be one of the words."""


CHOICES = {
    "backend": OptionChoices(words=get_args(Backend), none="none"),
    "mixed_precision": OptionChoices(words=get_args(Precision), none="from the environment"),
    "comm_hook": OptionChoices(words=get_args(CommHook), none="no"),
    "start_method": OptionChoices(words=get_args(StartMethod)),
    "output": OptionChoices(words=get_args(ShownRanks)),
    "display": OptionChoices(words=get_args(ShownRanks)),
    "rank_seeds": OptionChoices(words=get_args(RankSeeds), none="alike until prepare()"),
    "resume": OptionChoices(words=get_args(ResumePoint), none="none"),
    "preemption_signal": OptionChoices(words=get_args(PreemptionSignal), none="none"),
}
"""By name of the option."""


# --------------------------------------------------------------------------------------------------------------------
# The options that are numbers: their bounds, and what None means, for all that check, ask for and show them.


DEFAULT_STEPS = 1
"""Accumulation steps if nobody gives them: each micro-batch is an update."""

MAX_SEED = 2**32 - 1
"""Largest seed that NumPy's legacy generator takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionNumber:
    """The numbers that an option takes."""

    is_whole: bool = True
    least: int = 0
    """The least whole number; other numbers are more than this."""
    most: int | None = None
    unit: str = ""
    none: str | None = None
    """Meaning of None in words; None: the option must be a number."""

    @property
    def words(self) -> str:
        """Description of the numbers, for a note about what to type."""
        if not self.is_whole:
            return f"a number above {self.least}"
        bounds = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most:,}"
        return f"a whole number, {bounds}"


NUMBERS = {
    "num_processes": OptionNumber(least=1, none="one for each GPU, else 4, or fewer on fewer cores"),
    "nodes": OptionNumber(least=1, none="all machines"),
    "processes_per_node": OptionNumber(least=1, none="spread evenly"),
    "gradient_accumulation_steps": OptionNumber(least=1, none=str(DEFAULT_STEPS)),
    "shard": OptionNumber(least=1, none="no sharding"),
    "threads_per_process": OptionNumber(least=1, none="the cores, divided among the ranks"),
    "seed": OptionNumber(most=MAX_SEED, none="the random state of the kernel"),
    "max_restarts": OptionNumber(),
    "max_grad_norm": OptionNumber(is_whole=False, none="no clipping"),
    "timeout": OptionNumber(is_whole=False, unit="seconds", none="no limit"),
    "idle_timeout": OptionNumber(is_whole=False, unit="seconds", none="no limit"),
    "hang_notice": OptionNumber(is_whole=False, unit="seconds", none="no notice"),
}
"""By name of the option."""


# --------------------------------------------------------------------------------------------------------------------
# Whole numbers as users give them, which many places take.


def whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None, hint: str = "") -> int:
    """Return a value as an int; raise ValueError if it is not a whole number, of Python or NumPy, or out of bounds.

    The error begins with the option's name and value, and ends with the hint.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is {type_of(value)}; it must be a whole number.{hint}")
    if number < minimum:
        raise ValueError(f"{name}={value!r} is too small; it must be {minimum} or more.{hint}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}={value!r} is too large; it must be {maximum} or less.{hint}")
    return number
