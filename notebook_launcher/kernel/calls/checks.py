"""Checks of a function and its arguments before any process is started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from notebook_launcher.config import LaunchConfig
from notebook_launcher.context import current
from notebook_launcher.errors import CallOrderError, ConfigError
from notebook_launcher.wording import describe_value, name_of, type_of, without_secrets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.travel import FunctionCall
    from notebook_launcher.travel.settings import SetupStep


P = ParamSpec("P")
T = TypeVar("T")

RANK_NAMES = ("rank", "local_rank", "gpu", "proc_id", "process_index", "index")
"""Usual names of the first parameter of functions for `torch.multiprocessing.spawn`, which passes the rank."""


def arguments_by_name(launcher: Callable[P, T]) -> Callable[P, T]:
    """Wrap a launcher so that it explains a call in which the function's arguments are given by position.

    Python's own `TypeError` names the launcher; the `ConfigError` that is raised instead shows what to write.
    """
    names = [
        name
        for name, parameter in inspect.signature(launcher).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    first = names.index("fn")

    @functools.wraps(launcher)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        function = args[first] if len(args) > first else kwargs.get("fn")
        if len(args) > len(names) or (len(args) > first + 1 and "num_processes" in kwargs):
            call = launcher.__name__ if first == 0 else f"session.{launcher.__name__}"
            raise ConfigError(_misplaced(call, function, args[first + 1 :], kwargs, counts="num_processes" in names))
        if "num_processes" in names:
            _check_options(function, kwargs)
        try:
            return launcher(*args, **kwargs)
        except KeyboardInterrupt as error:
            from notebook_launcher.kernel.failures.failure_display import show_as

            show_as(error, f"KeyboardInterrupt: {launcher.__name__} was interrupted")
            raise

    return checked


def check_not_in_rank(what: str) -> None:
    """Raise `CallOrderError` if this process is a rank."""
    context = current()
    if context is not None:
        raise CallOrderError(
            f"{what} was called inside rank {context.rank}, which is itself part of a launch. A rank cannot launch "
            "ranks: call it in the notebook, and let the function do the work of one rank."
        )


def check_call(
    function: Any, args: Any, kwargs: Any, *, launcher: str, steps: tuple[SetupStep, ...] = ()
) -> FunctionCall:
    """Return the call of a function with the arguments of a launcher; raises `ConfigError` if it cannot work.

    `launcher`: the beginning of the launcher's call, as an error shows it: `notebook_launch(fn, 2`. `steps`: code that
    each rank runs before the function.
    """
    from notebook_launcher.travel import FunctionCall

    if not isinstance(args, (tuple, list)):
        given = describe_value(args)
        raise ConfigError(f"args={given} is {type_of(args)}; it must be a tuple. Write args=({given},).")
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigError(
            f"kwargs={describe_value(kwargs)} must map the names of arguments to their values. "
            "Write kwargs={'lr': 0.1}."
        )
    args, kwargs = tuple(args), dict(kwargs)
    check_callable(function)
    _check_kind(function)
    _check_arguments(function, args, kwargs, launcher)
    return FunctionCall(function, args, kwargs, steps)


def check_callable(function: Any) -> None:
    """Raise `ConfigError` if this is no function."""
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        raise ConfigError(f"fn={describe_value(function)} is {type_of(function)}, which cannot be called.{hint}")


def called_signature(function: Any) -> inspect.Signature:
    """Return the signature of what a call reaches: a decorator's wrapper, which may supply arguments of the function.

    Raises:
        TypeError: The object is not a function.
        ValueError: It has no signature, as some functions written in C.
    """
    try:
        return inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return inspect.signature(function)  # a cache of functools has its function's


def _check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], launcher: str) -> None:
    try:
        signature = called_signature(function)
    except (TypeError, ValueError):
        # Some functions written in C have no signature, nor has a partial whose own arguments do not fit.
        if isinstance(function, functools.partial):
            _check_arguments(function.func, (*function.args, *args), {**function.keywords, **kwargs}, launcher)
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = _expects_its_rank(signature, args, kwargs)
        hint = hint or f"Arguments go by name: {launcher}, args=(...), kwargs={{...}})."
        raise ConfigError(
            f"{name_of(function)}{signature} cannot be called with args={describe_value(args)}, "
            f"kwargs={describe_value(kwargs)}: {error}. Nothing was started. {hint}"
        ) from None


def _expects_its_rank(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return advice for a function written for `torch.multiprocessing.spawn` that lacks only the rank; else nothing."""
    first = next(iter(signature.parameters), "")
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError:
        return ""
    if first not in RANK_NAMES:
        return ""
    return (
        f"The launcher does not pass the rank: remove the parameter {first}, and write "
        f"{first} = torch.distributed.get_rank() as the function's first line."
    )


def _misplaced(call: str, function: Any, places: tuple[Any, ...], kwargs: Mapping[str, Any], *, counts: bool) -> str:
    """Return the message for arguments of the function given by their place."""
    number = kwargs.get("num_processes")
    if counts and number is None:
        where = next((place for place, value in enumerate(places) if type(value) is int), len(places))
        number, places = (*places, 2)[where], places[:where] + places[where + 1 :]
    given = next((tuple(value) for value in places if isinstance(value, (tuple, list))), places)
    written = ", ".join([name_of(function), *([str(number)] if counts else []), f"args={describe_value(given)}"])
    return f"Arguments of the function go by name. Write {call}({written})."


def _check_options(function: Any, kwargs: Mapping[str, Any]) -> None:
    options = {"fn", "args", "kwargs", "config", *(field.name for field in dataclasses.fields(LaunchConfig))}
    unknown = {name: value for name, value in kwargs.items() if name not in options}
    if not unknown:
        return
    for name in unknown:
        close = difflib.get_close_matches(name, options, n=1)
        if close and close[0] in ("args", "kwargs"):
            raise ConfigError(f"unknown option {name}=. Did you mean {close[0]}=?")
    try:
        theirs = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    given = {name: value for name, value in unknown.items() if name in theirs}
    if given:
        raise ConfigError(
            f"unknown option {next(iter(given))}=. {name_of(function)} has a parameter of that name, and its arguments "
            f"must be passed together: write kwargs={describe_value(given)}."
        )


def _check_kind(function: Any) -> None:
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    call = bare if inspect.isroutine(bare) or isinstance(bare, type) else getattr(bare, "__call__", bare)  # noqa: B004
    if inspect.isasyncgenfunction(call):
        name = name_of(function)
        raise ConfigError(
            f"{name} is an async generator function (async def with a yield), so calling it runs nothing. Collect the "
            f"values: async def collect(): return [value async for value in {name}()], and launch "
            "def main(): return asyncio.run(collect())."
        )
    if inspect.iscoroutinefunction(call):
        raise ConfigError(
            f"{name_of(function)} is a coroutine function (async def), but a rank calls plain functions. Wrap it: "
            f"def main(): return asyncio.run({name_of(function)}())."
        )
    if inspect.isgeneratorfunction(call):
        raise ConfigError(
            f"{name_of(function)} is a generator function (it has a yield), so calling it runs nothing. Collect and "
            "return the values instead."
        )


# --------------------------------------------------------------------------------------------------------------------
# A test of `start_method="fork"`: a throw-away child tries what the ranks will need.
#
# A forked child has the kernel's memory but none of its threads. If the kernel has run a parallel operation, the
# threads of GNU OpenMP's pool are missing in the child, which hangs at its first parallel operation. If the kernel
# has touched CUDA, the child cannot use CUDA. The kernel itself cannot detect either case reliably
# (`torch.cuda.is_initialized()` does not see what other libraries did), so a child is forked to test both.


BUDGET = 1.0
"""Time limit of the child in seconds; a healthy child needs less than a millisecond for the parallel operation."""
DRIVER_BUDGET = 15.0
"""Time limit of the child in seconds if it asks the driver, which may wake up every GPU first."""
CUDA_SUCCESS = 0
CUDA_POISONED = b"c"
CUDA_CLEAN = b"-"
PARALLEL_WORKS = b"p"


@dataclasses.dataclass(frozen=True, slots=True)
class ForkHealth:
    """Test results of a fork of this process."""

    cuda: bool
    parallel: bool


def adapt(plan: Plan) -> Plan:
    """Return a plan that works in a fork of this process; raises `ConfigError` if none does."""
    if "torch" not in sys.modules or (plan.threads_per_process == 1 and not plan.use_gpu):
        return plan
    health = try_fork()
    if plan.use_gpu and not health.cuda:
        raise ConfigError(
            "start_method='fork' with GPUs: this kernel has touched CUDA, and a fork of it cannot use a GPU. Use "
            "start_method='forkserver', which does not depend on what the kernel did, or restart the kernel."
        )
    if health.parallel or plan.threads_per_process == 1:
        return plan
    note = " (this kernel has run parallel operations, so a fork of it can run none)"
    return dataclasses.replace(plan, threads_per_process=1, note=note)


def try_fork() -> ForkHealth:
    """Fork a child and return what works in it; call it only where torch is imported."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer(writer)
    os.close(writer)
    answers = b""
    try:
        budget = BUDGET if _loaded_driver() is None else DRIVER_BUDGET
        while select.select([reader], [], [], budget)[0] and (chunk := os.read(reader, 16)):
            answers += chunk
            budget = BUDGET  # The driver answers first.
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ForkHealth(cuda=CUDA_CLEAN in answers, parallel=PARALLEL_WORKS in answers)


def _answer(writer: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        import torch

        # torch sets this in a forked child, and nowhere else. It sees only what it did itself, not CuPy or JAX; the
        # driver refuses (CUDA_ERROR_NOT_INITIALIZED) where the parent had initialised it by whatever library.
        driver = _loaded_driver()
        refuses = driver is not None and driver.cuInit(0) != CUDA_SUCCESS
        poisoned = torch.cuda._is_in_bad_fork() or refuses  # noqa: SLF001
        os.write(writer, CUDA_POISONED if poisoned else CUDA_CLEAN)
        # Large enough that torch splits it among threads (32,768 elements an intra-op grain).
        torch.ones(1 << 18).add_(1)
        os.write(writer, PARALLEL_WORKS)
    finally:
        os._exit(0)


def _loaded_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver library if this process has loaded it: without it CUDA is not initialised."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------------------------
# A function's arguments in a few words each, for people who compare runs; the function cannot be called from them.


MAX_ARGUMENTS = 64


def describe_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return each argument in a few words, by name, including defaults and the arguments of a `functools.partial`.

    Arguments with names of secrets (`api_key`) are left out.
    """
    named = without_secrets(bound_arguments(function, args, kwargs).items())
    return {name: describe_value(value) for name, value in itertools.islice(named, MAX_ARGUMENTS)}


def bound_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, including defaults and those of a `functools.partial`."""
    while isinstance(function, functools.partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return {**{f"argument {place}": value for place, value in enumerate(args, 1)}, **kwargs}
    bound.apply_defaults()
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kinds[name] is not inspect.Parameter.VAR_POSITIONAL or value:
            named[name] = value
    return named
