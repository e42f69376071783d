"""`env`: the findings of `doctor()` in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.command_line.parser import Command

if TYPE_CHECKING:
    import argparse


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, to paste into a report of a problem")
    parser.add_argument("--no-launch", "--no_launch", action="store_true", help="leave out the launch of two ranks")


def _run(options: argparse.Namespace) -> int:
    from notebook_launcher.diagnosis.doctor import doctor

    diagnosis = doctor(launch=not options.no_launch)
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.ok else 1


COMMAND = Command(
    name="env",
    summary="check this machine for problems of a launch, and print what to type; exit 1 for a problem",
    description="""\
Look at versions, GPUs and who uses them, limits, look-ups of names and variables, and end with a real launch of two
ranks: reductions with their bandwidth, data-loader workers, a stop. Each warning or problem comes with what to type.

  notebook-launcher env
  notebook-launcher env --json --no-launch      for a report of a problem

In a notebook: `from notebook_launcher import doctor; doctor()`.""",
    add_arguments=_add_arguments,
    run=_run,
)
