"""`Command`: what the program needs to know of one command."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["Command"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the program."""

    name: str
    """The word that people type."""
    summary: str
    """One line for the list of commands."""
    description: str
    """The beginning of the command's own `--help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds the command's arguments to its parser."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns its exit status."""
    check_words: Callable[[Sequence[str]], None] = lambda _words: None
    """Reads the words behind the command before they are parsed; raises `ConfigError` for one that cannot work."""
