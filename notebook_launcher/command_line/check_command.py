"""`check`: try on this machine's GPUs what can only be tried there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.command_line.parser import Command

if TYPE_CHECKING:
    import argparse


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="WORD", help="run only checks whose name has one of these words")
    parser.add_argument("--list", action="store_true", help="print the names of all checks, and run none")
    parser.add_argument("--folder", default=".", metavar="DIR", help="where the report goes (default: here)")
    parser.add_argument(
        "--cpu", action="store_true", help="run the checks in their CPU forms, even on a machine with GPUs"
    )
    parser.add_argument(
        "--share",
        action="store_true",
        help="on one GPU, also run the checks for two: ranks share it, which needs NCCL 2.30 or newer",
    )


def _run(options: argparse.Namespace) -> int:
    from notebook_launcher.gpu_check.check_program import check

    return check(
        only=options.only, names_only=options.list, folder=options.folder, cpu=options.cpu, share=options.share
    )


COMMAND = Command(
    name="check",
    summary="try this package on the machine's GPUs, in a few minutes; exit 1 for a failure",
    description="""\
Try on this machine's GPUs what must work there, without a network. Each check is a process of its own with a time
limit. A table shows what passed, failed or was skipped. Attach gpu-check-<date>.json, in which names are hashed, to a
report of a problem. Without a GPU each check runs in its CPU form, which proves nothing about GPUs.

  notebook-launcher check
  notebook-launcher check --only accumulation errors""",
    add_arguments=_add_arguments,
    run=_run,
)
