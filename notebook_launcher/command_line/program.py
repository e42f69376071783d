"""The program: reads the words of a command line, and calls the command that they name."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import notebook_launcher
from notebook_launcher.command_line import (
    attach_command,
    config_command,
    estimate_command,
    launch_command,
    runs_command,
    trial_commands,
)
from notebook_launcher.command_line.parser import Parser
from notebook_launcher.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.command_line.parser import Command

COMMANDS: tuple[Command, ...] = (
    launch_command.COMMAND,
    config_command.COMMAND,
    trial_commands.ENV,
    runs_command.COMMAND,
    attach_command.COMMAND,
    estimate_command.COMMAND,
    trial_commands.VERIFY,
    trial_commands.CHECK,
)
"""All commands, in the order in which `--help` lists them. A new command is a module here and a row there."""

PROGRAM = "notebook-launcher"
BAD_USE = 2
"""Exit status of a command that cannot be carried out as it was typed, as argparse has it."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the words name (default: the arguments of this process); return its exit status."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        options = make_parser().parse_args(words)
        return next(command for command in COMMANDS if command.name == options.command).run(options)
    except (LaunchError, LookupError) as error:
        name = " ".join([PROGRAM, *(command.name for command in COMMANDS if words[:1] == [command.name])])
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Without this the interpreter would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog=PROGRAM,
        description="Distributed PyTorch from a notebook cell and from a terminal, on one machine or several.",
        epilog=f"`{PROGRAM} COMMAND --help` explains a command. `python -m notebook_launcher` is the same program.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {notebook_launcher.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_arguments(commands.add_parser(command.name, help=command.summary, description=command.description))
    return parser
