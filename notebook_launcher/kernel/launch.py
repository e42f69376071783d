"""`notebook_launch` and `launch`: ranks for one call.

What a run needs is imported by the first call, so that the import in a notebook's first cell takes little.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, overload

from notebook_launcher.kernel.calls.checks import arguments_by_name, check_not_in_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.attached_run import AttachedRun
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.handle import Run
    from notebook_launcher.messaging.messages import ImageMade


@arguments_by_name
def notebook_launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    detached: bool | None = None,
    **options: Any,
) -> Results:
    """Call a function on every rank and return the values that the ranks returned.

    Before `fn` starts, the default process group is initialized and torchrun's environment variables are
    set. The ranks' output appears in the cell as it arrives. The kernel's interrupt ends the run.

    Args:
        fn: The function to call; any callable, defined anywhere.
        num_processes: Number of ranks; None: one for each GPU, otherwise a sensible number of CPU ranks.
        args: Positional arguments of `fn`.
        kwargs: Keyword arguments of `fn`.
        config: Options.
        detached: True: the run outlives the kernel, and `attach(id)` reconnects to it from any kernel or terminal.
            The first interrupt releases the cell and the run continues; a second within 3 seconds stops the run. It is
            stopped after `timeout`, by default 7 days. None: the value in `config`.
        options: Fields of `LaunchConfig` by name; they override `config`.

    Returns:
        The values in rank order: `results[0]` is the value of rank 0. Tensors arrive on the CPU. A value that cannot
        travel costs itself alone: a line in the cell names it, and asking for it raises `ReturnValueError`.

    Raises:
        ConfigError: An option, the function or its arguments cannot work. Nothing was started.
        CaptureError: Something that `fn` captured cannot travel. Nothing was started.
        CallOrderError: The call was made inside a rank.
        ResourceError: The machine has no memory, process or descriptor left for the ranks.
        RankFailedError: A rank was killed or exited.
        RunTimeoutError: The run exceeded `timeout` or `idle_timeout`.
        KeyboardInterrupt: The kernel was interrupted.
        Exception: The exception that a rank raised, in its original type, with the attributes `rank` (the
            culprit), `failures` (every rank that failed) and `results` (the values of the other ranks).
    """
    check_not_in_rank("notebook_launch")
    config = _build(config, options, num_processes=num_processes, detached=detached)
    if config.detached:
        return _start_detached(fn, args, kwargs, config).wait_in_cell()
    return _start(fn, args, kwargs, config, in_cell=True).wait_in_cell()


@overload
def launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    detached: Literal[False] | None = None,
    **options: Any,
) -> Run: ...
@overload
def launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    detached: Literal[True],
    **options: Any,
) -> AttachedRun: ...
@arguments_by_name
def launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    detached: bool | None = None,
    **options: Any,
) -> Run | AttachedRun:
    """Call a function on every rank without waiting: return the run's handle at once.

    Takes the arguments of `notebook_launch`. `run.result()` or `await run` returns or raises what
    `notebook_launch` would. A rank that asks for input gets an `EOFError`, because no cell waits, but for a
    detached run, which waits for a client. A detached run's handle is an `AttachedRun`.
    """
    check_not_in_rank("launch")
    config = _build(config, options, num_processes=num_processes, detached=detached)
    if config.detached:
        run = _start_detached(fn, args, kwargs, config)
        run.follow_in_cell()
        return run
    return _start(fn, args, kwargs, config, in_cell=False)


def prewarm() -> None:
    """Start the fork server in the background, so that the first launch does not wait for the import of torch."""
    check_not_in_rank("prewarm")
    from notebook_launcher.engines.fork_server_handle import fork_server

    fork_server().start(os.environ)


def inherited_imports() -> ImageMade:
    """Return what ranks inherit of this process's imports, and what they import by themselves, as known by now."""
    from notebook_launcher.engines.fork_server_handle import fork_server

    return fork_server().image()


def _build(config: LaunchConfig | None, options: dict[str, Any], **others: Any) -> LaunchConfig:
    """Return the options of a call; `config` gives each option that the call leaves at None."""
    from notebook_launcher.config import LaunchConfig

    given = {name: value for name, value in others.items() if value is not None}
    return LaunchConfig.build(config, {**options, **given})


def _start(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    config: LaunchConfig,
    *,
    in_cell: bool,
) -> Run:
    from notebook_launcher.kernel.plan import make_plan
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.handle import Run
    from notebook_launcher.kernel.run.ladder import limited_start

    began = time.monotonic()
    with limited_start(config.timeout, began):
        plan = make_plan(config)
    return Run.start(Ranks(plan, many_calls=False), fn, args, kwargs, in_cell=in_cell, began=began)


def _start_detached(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, config: LaunchConfig
) -> AttachedRun:
    from notebook_launcher.detached.host_start import start_detached

    return start_detached(fn, args, kwargs, config)


# --------------------------------------------------------------------------------------------------------------------
# `live_runs()`: handles on the runs in progress in this kernel, in case a handle was lost.


def live_runs() -> list[Run]:
    """Return a handle on each run in progress in this kernel, the newest first: `live_runs()[0].stop()`.

    It finds a run whose handle no variable holds any more. Calls and cells of sessions in progress are among the runs.
    Detached runs are not, because hosts conduct them: `attach()` returns their handles.
    """
    check_not_in_rank("live_runs")
    from notebook_launcher.kernel.run.conduct import RunThread
    from notebook_launcher.kernel.run.handle import Run

    # The interpreter's list of threads has them.
    threads = (thread for thread in threading.enumerate() if isinstance(thread, RunThread))
    found = (conduct for thread in threads if (conduct := thread.conduct) is not None)
    live = [conduct for conduct in found if not (conduct.data.over.is_set or conduct.data.scope.is_widget_call)]
    return [Run(conduct) for conduct in sorted(live, key=lambda conduct: conduct.data.launched, reverse=True)]
