"""`check`: try on this machine's GPUs what can only be tried there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.command_line.command import Command

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="WORD", help="make only checks whose name has one of these words")
    parser.add_argument("--list", action="store_true", help="print the names of all checks, and make none")
    parser.add_argument("--folder", default=".", metavar="DIR", help="where the report goes (default: here)")
    parser.add_argument("--cpu", action="store_true", help="make the checks in their CPU forms, though there are GPUs")


def _run(options: argparse.Namespace) -> int:
    from notebook_launcher.gpu_check.check_program import check

    return check(only=options.only, names_only=options.list, folder=options.folder, cpu=options.cpu)


COMMAND = Command(
    name="check",
    summary="try everything that needs GPUs on this machine's, in about 5 minutes; exit 1 for a failure",
    description="""\
Try on this machine's GPUs what can only be tried there, without a network. Each check is a process of its own with a
time limit. A table tells what passed, failed or was skipped, and gpu-check-<date>.json, in which names are hashed, can
be attached to a report of a problem. Without a GPU each check runs in its CPU form, which proves nothing about GPUs.

  notebook-launcher check
  notebook-launcher check --only accumulation checkpoint""",
    add_arguments=_add_arguments,
    run=_run,
)
