"""The parser of the command line: argparse, whose errors name the word as it was typed and what to type next."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.wording import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


MISSING = "the following arguments are required: "
"""The beginning of argparse's own words for missing arguments."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `ConfigError`; an option with two values is refused.

    Args:
        options: Options of argparse's parser.
    """

    def __init__(self, **options: Any) -> None:
        width = min(118, shutil.get_terminal_size((120, 24)).columns - 2)
        form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width)
        super().__init__(**{"allow_abbrev": False, "formatter_class": form, **options})
        for name in (None, "store"):
            self.register("action", name, Once)
        names = Spellings(self._option_string_actions)
        for each in (self, *self._action_groups):
            each._option_string_actions = names  # noqa: SLF001 - argparse has no name for another spelling
        self._commands: Any = None
        self.refused: Mapping[str, str] = {}
        """Options that cannot work, each with the reason, which also holds for those whose names go on with `_`."""
        self.reminder = ""
        """The last sentence about an unknown option."""

    @property
    def option_names(self) -> list[str]:
        """All spellings of the options."""
        return [name for action in self._actions for name in action.option_strings]

    def add_subparsers(self, **options: Any) -> Any:
        """Add the commands behind this one's name."""
        self._commands = super().add_subparsers(**options)
        return self._commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the words; raise `ConfigError` for the first one that means nothing here."""
        if self._commands is not None and args:
            self._check_first(args[0])
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            raise ConfigError(self._unknown(rest[0]))
        return found, rest

    def error(self, message: str) -> Any:
        """Raise `ConfigError` for words that argparse refuses."""
        if message.startswith(MISSING):
            choices = f" (one of {', '.join(self._commands.choices)})" if self._commands is not None else ""
            message = f"{message.removeprefix(MISSING)} is missing{choices}: type `{self._pattern()}`"
        words = message.removeprefix("argument ")
        raise ConfigError(f"{words}. `{self.prog} --help` explains it.")

    def _check_first(self, word: str) -> None:
        """Raise `ConfigError` unless a line begins with a command, or an option of this parser."""
        known = self._commands.choices
        if word.startswith("-"):
            if word.partition("=")[0] not in self.option_names:
                raise ConfigError(self._unknown(word))
        elif word not in known:
            listed = ", ".join(known)
            hint = did_you_mean(word, known) or f"It can be {listed}."
            if "launch" in known and word.endswith(".py"):
                hint = f"To run a script: {self.prog} launch {word}."
            raise ConfigError(f"there is no command {word!r}. {hint}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one word too many: type `{self._pattern()}`. `{self.prog} --help` explains it."
        option, choices = word.partition("=")[0], {} if self._commands is None else self._commands.choices
        name = option.lstrip("-").replace("-", "_")
        for refused, reason in self.refused.items():
            if f"{name}_".startswith(f"{refused}_"):
                return f"{option}: {reason}."
        owner = next((name for name, parser in choices.items() if option in parser.option_names), None)
        hint = did_you_mean(option, self.option_names) or f"`{self.prog} --help` lists the options."
        if owner is not None:
            hint = f"It belongs behind a command: `{self.prog} {owner} {option}`."
        return f"unknown option {word}. {hint} {self.reminder}".rstrip()

    def _pattern(self) -> str:
        """Return the words that the command takes, without its options."""
        if self.usage is not None:
            return self.usage
        words = [
            f"{name} [{name} ...]" if action.nargs == "+" else f"[{name} ...]" if action.nargs == "*" else name
            for action in self._actions
            if not action.option_strings and (name := str(action.metavar or action.dest))
        ]
        has_options = any(set(action.option_strings) - {"-h", "--help"} for action in self._actions)
        return " ".join([self.prog, *(["[OPTIONS]"] if has_options else []), *words])


class Once(argparse.Action):
    """Stores an option's value with its text, and refuses a second value.

    Args:
        reads: Returns the value that a text means, or raises `ValueError` with a text that names what to type.
        options: Options of argparse's action.
    """

    def __init__(self, *, reads: Callable[[str], Any] = str, **options: Any) -> None:
        super().__init__(**options)
        self._reads = reads

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Store the value, and under `typed` the option and its text as the user wrote them."""
        if option is None:
            setattr(namespace, self.dest, values)
            return
        typed = vars(namespace).setdefault("typed", {})
        text = " ".join(values) if isinstance(values, list) else str(values)
        earlier = typed.setdefault(self.dest, (option, text))
        if earlier[1] != text:
            raise ConfigError(f"{' '.join(earlier)} and {option} {text} are the same option. Leave one of them out.")
        read = [self.read(option, value) for value in values] if isinstance(values, list) else self.read(option, values)
        setattr(namespace, self.dest, read)

    def read(self, option: str, text: str) -> Any:
        """Return the value of a text; raise `ConfigError` if it has none."""
        try:
            return self._reads(text)
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {error}.") from None


def whole_number_reader(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise ValueError(f"type a whole number, {least} or more")
        return int(text)

    return read


def positive_number(text: str) -> float:
    """Return the number above 0 that a text means."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or not float(text):
        raise ValueError("type a number above 0")
    return float(text)


def words_of(texts: Sequence[str]) -> list[str]:
    """Return the words of an option that takes several, each of which may also be typed as `a,b`."""
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def choice(known: Sequence[str]) -> Callable[[str], str]:
    """Return a function that reads one of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"{did_you_mean(text, known)} It can be {', '.join(known)}".strip())
        return text

    return read


class Spellings(dict[str, argparse.Action]):
    """The options of a parser by name, in which words may also be joined by `-`: `--num-processes`."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(_with_underscores(name))

    def __missing__(self, name: str) -> argparse.Action:
        return super().__getitem__(_with_underscores(name))


def _with_underscores(name: Any) -> str:
    return f"{name[:2]}{name[2:].replace('-', '_')}"


# --------------------------------------------------------------------------------------------------------------------
# `Command`: what the program needs to know of one command.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the program."""

    name: str
    """The word that people type."""
    summary: str
    """One line for the list of commands."""
    description: str
    """The beginning of the command's own `--help`."""
    add_arguments: Callable[[Parser], None]
    """Adds the command's arguments to its parser."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns its exit status."""


# --------------------------------------------------------------------------------------------------------------------
# Help texts for options of the command line: the docstrings of `LaunchConfig`'s fields, read from its source.


def field_help(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, by the field's name; empty where the source is missing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.replace("`", "").split())
    return texts
