"""`notebook_launcher` and `debug_launcher` with Accelerate's signatures, on this package's launcher."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - the rest of Accelerate's module
from notebook_launcher.errors import CaptureError, ConfigError, LaunchError
from notebook_launcher.kernel.failures.culprit import Failure
from notebook_launcher.kernel.launch import notebook_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes, as `accelerate.notebook_launcher` does; one process runs it here.

    Args:
        function: Function that each process runs.
        args: Its positional arguments.
        num_processes: Number of processes. None is refused, as in Accelerate.
        mixed_precision: Precision that an `Accelerator()` inside adopts. (Accelerate 1.15 drops it.)
        use_port: Accepted; no port is needed, here and in the next arguments, since ranks meet on one machine.
        master_addr: Accepted.
        node_rank: Accepted.
        num_nodes: 1.
        rdzv_backend: Accepted; the rendezvous is the launcher's own.
        rdzv_endpoint: Accepted.
        rdzv_conf: Accepted.
        rdzv_id: Accepted.
        max_restarts: Number of times that all processes start again after one failed.
        monitor_interval: Accepted; deaths are noticed at once.
        log_line_prefix_template: Accepted; each line begins with its rank.

    Raises:
        ChildFailedError: A process failed; the message has its traceback, and the cause is the exception itself.
        ValueError: `num_processes` was left out, there is more than one node, or the environment asks for a TPU.
    """
    del use_port, master_addr, monitor_interval, log_line_prefix_template
    del rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id
    if os.environ.get("PJRT_DEVICE") == "TPU" or "TPU_NAME" in os.environ:
        raise ValueError(
            "TPUs are not supported (PJRT_DEVICE or TPU_NAME asks for one): ranks compute on CPUs and NVIDIA GPUs. Use "
            "Accelerate's own notebook_launcher, or take the variable out of the environment to compute on CPUs."
        )
    if num_processes is None:
        raise ValueError("num_processes=None: pass the number of processes to start, as in num_processes=2.")
    if num_nodes != 1 or node_rank != 0:
        raise ValueError(f"num_nodes={num_nodes}, node_rank={node_rank}: one node is supported. Leave both out.")
    if num_processes == 1:
        function(*args)
        return
    # "no" is the default, so that it counts as not given.
    precision = mixed_precision.lower() if mixed_precision.lower() != "no" else None
    _launch(function, tuple(args), num_processes, max_restarts=max_restarts, mixed_precision=precision)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several processes on the CPU, as `accelerate.debug_launcher` does."""
    _launch(function, tuple(args), num_processes, devices="cpu")


def _launch(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int, **options: Any) -> None:
    try:
        _start(function, args, num_processes, options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failures = getattr(error, "failures", ())
        if isinstance(error, LaunchError) and not failures:
            raise  # nothing was started
        raise _child_failed(function, error, failures) from error


def _start(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int, options: dict[str, Any]) -> None:
    try:
        notebook_launch(function, num_processes, args=args, **options)
    except CaptureError as error:
        if error.failures:
            raise
        # A queue, a lock or a socket, for instance: it can only be inherited, as Accelerate's forks inherit all.
        try:
            notebook_launch(function, num_processes, args=args, start_method="fork", **options)
        except ConfigError:  # this kernel cannot be forked
            raise error from None


def _child_failed(function: Callable[..., Any], error: BaseException, failures: tuple[Failure, ...]) -> Exception:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if failures:
        # torch names the earliest failure as the cause; of several equally early ones, the first.
        cause = failures[0].time
        found = {failure.rank: _process_failure(failure, max(failure.time, cause)) for failure in failures}
    else:
        rank, now = getattr(error, "rank", None) or 0, time.monotonic()
        alone = Failure(rank=rank, kind="exit", time=now, summary=f"{type(error).__name__}: {error}")
        found = {rank: _process_failure(alone, now)}
    return ChildFailedError(getattr(function, "__name__", type(function).__name__), found)


def _process_failure(failure: Failure, at: float) -> ProcessFailure:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    exitcode = 1 if failure.exitcode is None else failure.exitcode
    made = ProcessFailure(failure.rank, failure.pid or 0, exitcode, "")
    made.message = failure.traceback or failure.summary
    made.timestamp = int(time.time() - time.monotonic() + at)
    return made
