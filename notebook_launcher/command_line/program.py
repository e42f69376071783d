"""The program: reads the words of a command line, and calls the command that they name."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING

import notebook_launcher
from notebook_launcher.command_line import (
    attach_command,
    check_command,
    config_command,
    env_command,
    estimate_command,
    launch_command,
    runs_command,
    verify_command,
)
from notebook_launcher.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.command_line.command import Command

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS: tuple[Command, ...] = (
    launch_command.COMMAND,
    config_command.COMMAND,
    env_command.COMMAND,
    runs_command.COMMAND,
    attach_command.COMMAND,
    estimate_command.COMMAND,
    verify_command.COMMAND,
    check_command.COMMAND,
)
"""All commands, in the order in which `--help` lists them. A new command is a module here and a row there."""

PROGRAM = "notebook-launcher"
BAD_USE = 2
"""Exit status of a command that cannot be carried out as it was typed, as argparse has it."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the words name (default: those of this process); return its exit status."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        return _run(words)
    except (LaunchError, LookupError) as error:
        name = " ".join([PROGRAM, *words[:1]])
        print(f"{name}: {error}", file=sys.stderr)  # noqa: T201 - a program's error
        return BAD_USE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Without this the interpreter would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: list[str]) -> int:
    for command in COMMANDS:
        if words[:1] == [command.name]:
            command.check_words(words[1:])
    options = make_parser().parse_args(words)
    command = next(command for command in COMMANDS if command.name == options.command)
    return command.run(options)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Distributed PyTorch on one machine: from a notebook cell, and from a terminal.",
        epilog=f"`{PROGRAM} COMMAND --help` explains a command. `python -m notebook_launcher` is the same program.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {notebook_launcher.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        command.add_arguments(one)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Lists one spelling of each name: `--num_processes`, without `--num-processes`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=118)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not re.match(r"--.*-(?=.)", name)]
        if not names or len(names) == len(action.option_strings):
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, str(action.metavar or action.dest))}"
        return ", ".join(names) + value
