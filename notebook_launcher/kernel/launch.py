"""`notebook_launch` and `launch`: ranks for one call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.starting import fork_server
from notebook_launcher.kernel.checks import arguments_by_name, check_not_in_rank
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.kernel.results import Results

__all__ = ["launch", "notebook_launch", "prewarm"]


@arguments_by_name
def notebook_launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    **options: Any,
) -> Results:
    """Call a function on every rank and return what the ranks returned.

    The ranks have found each other before `fn` starts: the default process group is up, and the
    variables of torchrun are set. Their output appears in the cell as it comes. The kernel's interrupt
    ends the run.

    Args:
        fn: What to call; any callable, defined anywhere.
        num_processes: How many ranks; None: one for each GPU, else a sensible number of CPU ranks.
        args: Positional arguments of `fn`.
        kwargs: Keyword arguments of `fn`.
        config: Options.
        options: Fields of `LaunchConfig` by name; they win over `config`.

    Returns:
        The values in rank order: `results[0]` is rank 0's. Tensors arrive on the CPU.

    Raises:
        ConfigError: An option, the function or its arguments cannot work. Nothing was started.
        CaptureError: Something that `fn` captured cannot travel. Nothing was started.
        CallOrderError: Called inside a rank.
        ResourceError: No memory, process or descriptor is left for it.
        RankFailedError: A rank was killed or exited.
        RunTimeoutError: The run outlived `timeout`.
        ReturnValueError: A returned value cannot travel.
        KeyboardInterrupt: The kernel was interrupted.
        Exception: What a rank raised, as its original type, with the attributes `rank` (the culprit),
            `failures` (every rank that failed) and `results` (what the others returned).
    """
    check_not_in_rank("notebook_launch")
    ranks = Ranks.planned(num_processes, config, options, many_calls=False)
    return Run.start(ranks, fn, args, kwargs, in_cell=True).wait_in_cell()


@arguments_by_name
def launch(
    fn: Callable[..., Any],
    num_processes: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    **options: Any,
) -> Run:
    """Do the same without waiting: return the run's handle at once.

    Takes what `notebook_launch` takes. `run.result()` or `await run` gives what it would have returned
    or raised; a rank that asks for input gets an `EOFError`, since no cell waits.
    """
    check_not_in_rank("launch")
    ranks = Ranks.planned(num_processes, config, options, many_calls=False)
    return Run.start(ranks, fn, args, kwargs, in_cell=False)


def prewarm() -> None:
    """Start the fork server in the background, so that the first launch does not wait for torch's import."""
    check_not_in_rank("prewarm")
    fork_server().start(os.environ)
