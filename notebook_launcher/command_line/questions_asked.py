"""Questions in a terminal: a menu with arrow keys where there is one, a line to type elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ask_choice", "ask_text"]

T = TypeVar("T")


def ask_choice(question: str, choices: Sequence[str], default: str) -> str:
    """Return one of the choices; Enter takes the default."""
    menu = _menu()
    if menu is not None:
        chosen: str = menu(question, options=[(choice, choice) for choice in choices], default=default)
        return chosen

    def read(text: str) -> str:
        if text in choices:
            return text
        raise ValueError(f"Type one of {', '.join(choices)}.")

    return ask_text(f"{question} [{', '.join(choices)}]", read, default, default)


def ask_text(question: str, read: Callable[[str], T], default: T, shown: str) -> T:
    """Return what `read` makes of the line that was typed, and ask again if it raises `ValueError`.

    An empty line means the default, which the question shows as `shown`.
    """
    while True:
        try:
            text = input(f"{question} ({shown}): ").strip()
        except EOFError:
            print()
            raise ConfigError(f"the input ended at {question!r}. Type the answers, or use --default.") from None
        if not text:
            return default
        try:
            return read(text)
        except ValueError as error:
            print(f"  {error}")


def _menu() -> Any:
    """Return prompt_toolkit's menu; None where there is no terminal, or the library is older than 3.0.52."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        from prompt_toolkit.shortcuts import choice
    except ImportError:
        return None
    return choice
