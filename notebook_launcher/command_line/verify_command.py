"""`verify`: train the documented toy model on real ranks, and compare its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.parser import Command, whole_number_reader

if TYPE_CHECKING:
    import argparse


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"reads": whole_number_reader(1), "nargs": "+", "metavar": "N"}
    parser.add_argument("--processes", default=[1, 2, 4], help="numbers of ranks", **several)
    parser.add_argument("--steps", default=[1, 2, 4, 8], help="accumulation steps", **several)


def _run(options: argparse.Namespace) -> int:
    from notebook_launcher.verification import verify_accumulation

    report = verify_accumulation(options.processes, options.steps)
    print(report)
    return 0 if report.ok else 1


COMMAND = Command(
    name="verify",
    summary="train the documented toy model on every combination of ranks and steps; exit 1 if a weight differs",
    description=(
        "Train the toy model of Accelerate's documentation on every combination of ranks and accumulation steps\n"
        "that divides its 8 samples. Every weight must be 2.04000, with accumulation and without."
    ),
    add_arguments=_add_arguments,
    run=_run,
)
