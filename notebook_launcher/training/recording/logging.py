"""Logging from several processes: by default only process 0 speaks."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.training.process.process_state import ProcessState

if TYPE_CHECKING:
    import types
    from collections.abc import MutableMapping

    Adapter = logging.LoggerAdapter[logging.Logger]


if not TYPE_CHECKING:
    Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscript it.


class MultiProcessAdapter(Adapter):
    """A logger that knows which process it speaks in; every message starts with `[RANK r]`.

    Its methods take two more keyword arguments:

    * `main_process_only` (True): whether only process 0 logs.
    * `in_order` (False): whether all processes log, one after the other by rank; `main_process_only` is
      ignored then. Every process must make the call, at a level that is enabled on all or on none.

    The rank is asked for at each message: from the default process group, before there is one from the
    variable `RANK`, and otherwise it is 0. No Accelerator is needed.
    """

    calling_line = 1
    """The `stacklevel` of the line that logs, as in `logging`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[str] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        return f"[RANK {_place()[0]}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log at `level`, on the processes that `main_process_only` and `in_order` select."""
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        # `logging` counts this frame too.
        kwargs["stacklevel"] = kwargs.get("stacklevel", self.calling_line) - self.calling_line + 2
        if sys.version_info < (3, 11) and kwargs["stacklevel"] > 2 and _is_of_logging(sys._getframe(1)):  # noqa: SLF001
            kwargs["stacklevel"] += 1  # before 3.11, `logging` counts its own frames as well
        rank, num_processes = _place()
        msg, changed = self.process(msg, kwargs)
        if not (in_order and num_processes > 1):
            if in_order or rank == 0 or not main_process_only:
                self.logger.log(level, msg, *args, **changed)
            return
        for turn in range(num_processes):
            if turn == rank:
                self.logger.log(level, msg, *args, **changed)
            dist.barrier()

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this logger has given the same warning with the same arguments before."""
        call = f"{msg!r} {args!r} {kwargs!r}"
        if call not in self._warned:
            self._warned.add(call)
            stacklevel = kwargs.pop("stacklevel", self.calling_line) + 1
            self.log(logging.WARNING, msg, *args, stacklevel=stacklevel, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes.

    Args:
        name: As for `logging.getLogger`; usually `__name__`.
        log_level: Its level, `"DEBUG"` for instance; None: the value of the variable `ACCELERATE_LOG_LEVEL`, or as
            it is. The root logger's level is left alone.

    Raises:
        ValueError: The level is unknown.
    """
    level = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return MultiProcessAdapter(logger)


def _is_of_logging(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename == logging.__file__


def _place() -> tuple[int, int]:
    """Return the rank, and how many processes can take turns."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0, 1


# --------------------------------------------------------------------------------------------------------------------
# A progress bar that one process of each machine shows.


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of `tqdm.auto`, which stays hidden where it would be one too many.

    Args:
        args: For tqdm: what to iterate over, usually.
        main_process_only: True if only the first process of each machine shows it.
        kwargs: For tqdm. `disable=True` hides it everywhere.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: The first argument is True or False: `main_process_only` must be named.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...): the first argument is the iterable. Write tqdm(iterable, "
            f"main_process_only={args[0]})."
        )
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not ProcessState().is_local_main_process
    return bar(*args, disable=hidden, **kwargs)
