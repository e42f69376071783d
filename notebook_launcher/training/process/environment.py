"""torchrun's variables: which of how many processes this one is, and where they meet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

from notebook_launcher.errors import ConfigError
from notebook_launcher.wording import plural_verb, read_bool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MEETING_POINT = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """The place of this process among the processes that were started together."""

    rank: int
    num_processes: int
    local_rank: int
    """The number of this process on its machine."""
    num_local: int | None
    """Number of processes on this machine; None: the variables do not give it."""


def read_place(environ: Mapping[str, str]) -> ProcessPlace | None:
    """Return the place that torchrun's variables give; None if they are not set.

    `WORLD_SIZE=1` counts only with all the others: some schedulers set it for every job.

    Raises:
        ConfigError: There are several processes, and a variable that they need to meet is missing or wrong.
    """
    num_processes = _number(environ, "WORLD_SIZE")
    if num_processes is None:
        return None
    missing = [name for name in MEETING_POINT if not environ.get(name)]
    if num_processes <= 1 and (missing or not environ.get("LOCAL_RANK")):
        return None
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={num_processes} makes this process part of {num_processes}, but "
            f"{' and '.join(missing)} {plural_verb('is', len(missing))} not set. notebook_launch(...) and "
            "torchrun set all of them; to run alone, unset WORLD_SIZE: os.environ.pop('WORLD_SIZE')."
        )
    rank = _number(environ, "RANK") or 0
    if not 0 <= rank < num_processes:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={num_processes}: it must be 0 to {num_processes - 1}.")
    local_rank = _number(environ, "LOCAL_RANK")
    return ProcessPlace(
        rank=rank,
        num_processes=num_processes,
        local_rank=rank if local_rank is None else local_rank,
        num_local=_number(environ, "LOCAL_WORLD_SIZE"),
    )


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Return True if a variable is on: 1, true, yes, on, t or y."""
    return bool(read_bool(environ.get(name, "")))


@contextlib.contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set environment variables in a `with` block, named in lower case if you like; then they are as before."""
    values = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Run a `with` block without any environment variable; then they are as before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} must be a whole number. torchrun and notebook_launch(...) set it."
        ) from None
