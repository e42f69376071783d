"""A progress bar that one process of each machine shows."""

from __future__ import annotations

from typing import Any

from notebook_launcher.training.process.process_state import ProcessState

__all__ = ["tqdm"]


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
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("tqdm, which shows progress bars, is not installed. Run `pip install tqdm`.") from error
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...): the first argument is the iterable. Write tqdm(iterable, "
            f"main_process_only={args[0]})."
        )
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not ProcessState().is_local_main_process
    return bar(*args, disable=hidden, **kwargs)
