"""`config`: ask for the options that the panel has, and write Accelerate's settings file."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.command_line.launch_command import devices_of
from notebook_launcher.command_line.parser import Command
from notebook_launcher.config import LaunchConfig, load_accelerate_file
from notebook_launcher.errors import ConfigError
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.settings.option_checks import CHOICES, NUMBERS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


YES_OR_NO = ("no", "yes")
HINTS = {"engine": "this machine, slurm, or ssh and names of hosts", "devices": "GPU indices such as 0,1, all, or cpu"}
"""What to type where the panel's label does not say it."""
UNSET = {"engine": "this machine", "devices": "all"} | {name: number.none for name, number in NUMBERS.items()}
"""Meaning of None, as the question shows it."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "the file to write; Accelerate's own if omitted"
    parser.add_argument("--config_file", metavar="FILE", help=where)
    parser.add_argument("--default", action="store_true", help="ask nothing: write the defaults")


def _run(options: argparse.Namespace) -> int:
    path = accelerate_yaml.path_to_write(options.config_file)
    config = LaunchConfig()
    if not options.default:
        if path.is_file():
            print(f"The answers in parentheses come from {path}.")
            config = load_accelerate_file(path)[0]
        from notebook_launcher.widgets.launching.launch_state import ADVANCED, ESSENTIAL

        for name in ESSENTIAL:
            config = _ask(config, name)
        if ask_choice("Other options: devices, backend, seed, clipping, restarts, ...", YES_OR_NO, "no") == "yes":
            for name in ADVANCED:
                config = _ask(config, name)
    written = config.to_yaml(path)
    print(f"written: {written}\nnotebook-launcher launch --config_file {written} SCRIPT")
    return 0


def _ask(config: LaunchConfig, name: str) -> LaunchConfig:
    """Return the options with the answer to one question."""
    from notebook_launcher.widgets.launching import parameters
    from notebook_launcher.widgets.launching.launch_state import LABELS

    now, question = getattr(config, name), ": ".join([LABELS[name], *filter(None, [HINTS.get(name)])])
    if isinstance(now, bool):
        value: Any = ask_choice(question, YES_OR_NO, YES_OR_NO[now]) == "yes"
        return dataclasses.replace(config, **{name: value})
    if name in CHOICES:
        choices = CHOICES[name]
        shown: Any = choices.none if now is None else now
        none = [] if choices.none is None or choices.none in choices.words else [choices.none]
        has_default_word = bool(LaunchConfig.__dataclass_fields__[name].default)  # The default comes first.
        chosen = ask_choice(question, [*choices.words, *none] if has_default_word else [*none, *choices.words], shown)
        # Enter changes nothing, also where a word and None mean the same.
        value = now if chosen == shown else chosen if chosen in choices.words else None
        return dataclasses.replace(config, **{name: value})

    def read(text: str) -> LaunchConfig:
        value = devices_of(text) if name == "devices" else parameters.reads(name, text)
        try:
            return dataclasses.replace(config, **{name: value})
        except ConfigError as error:
            raise ValueError(error) from None

    return ask_text(question, read, config, _shown(name, now))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return UNSET.get(name) or "none"
    if name == "engine":
        from notebook_launcher.engines.cluster import command_engines

        return command_engines.write(value) or str(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


COMMAND = Command(
    name="config",
    summary="ask for the options of a launch and write Accelerate's settings file",
    description="""\
Ask for the options of the panel, and write them to Accelerate's settings file, which `notebook-launcher launch`,
`accelerate launch` and the panel read. A terminal shows menus with arrow keys. Enter keeps the answer in parentheses.

  notebook-launcher config
  notebook-launcher config --config_file settings.yaml --default""",
    add_arguments=_add_arguments,
    run=_run,
)


# --------------------------------------------------------------------------------------------------------------------
# Questions in a terminal: a menu with arrow keys where there is one, a line to type elsewhere.


T = TypeVar("T")


def ask_choice(question: str, choices: Sequence[str], default: str) -> str:
    """Return one of the choices; Enter takes the default."""
    menu = _choose_in_menu()
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


def _choose_in_menu() -> Any:
    """Return prompt_toolkit's menu; None where there is no terminal, or the library is older than 3.0.52."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        from prompt_toolkit.shortcuts import choice
    except ImportError:
        return None
    return choice
