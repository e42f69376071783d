"""The output of a hosted run as its cell showed it, kept in the run's folder for cells that attach after its end."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.detached.own_pickle import read_own_pickle, write_own_pickle
from notebook_launcher.history.host_files import OUTPUT

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.detached.requests import News

__all__ = ["read_output", "write_output"]


def write_output(folder: Path, news: News) -> None:
    """Keep the whole output of a run that is over; nothing if there was none. A full disk costs the output alone."""
    if news.position:
        with contextlib.suppress(OSError):
            write_own_pickle(folder, OUTPUT, news)


def read_output(folder: Path, position: int) -> News | None:
    """Return a run's output after a position; None if its folder keeps none that this version and user can read."""
    with contextlib.suppress(Exception):
        news: News = read_own_pickle(folder, OUTPUT)
        return dataclasses.replace(news, entries=news.entries[max(0, position - news.num_left_out) :])
    return None
