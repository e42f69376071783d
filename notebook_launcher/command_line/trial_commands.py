"""`env`, `verify` and `check`: what this machine and its ranks are like, tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.parser import Command, whole_number_reader

if TYPE_CHECKING:
    import argparse


def _add_to_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, to paste into a report of a problem")
    parser.add_argument("--no_launch", action="store_true", help="leave out the launch of two ranks")


def _env(options: argparse.Namespace) -> int:
    from notebook_launcher.diagnosis.doctor import doctor

    diagnosis = doctor(launch=not options.no_launch)
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.ok else 1


ENV = Command(
    name="env",
    summary="check this machine for problems of a launch, and print what to type; exit 1 for a problem",
    description="""\
Look at versions, GPUs and who uses them, limits, look-ups of names and variables, and end with a real launch of two
ranks: reductions with their bandwidth, data-loader workers, a stop. Each warning or problem comes with what to type.

  notebook-launcher env
  notebook-launcher env --json --no-launch      for a report of a problem

In a notebook: `from notebook_launcher import doctor; doctor()`.""",
    add_arguments=_add_to_env,
    run=_env,
)


def _add_to_verify(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"reads": whole_number_reader(1), "nargs": "+", "metavar": "N"}
    parser.add_argument("--processes", default=[1, 2, 4], help="numbers of ranks", **several)
    parser.add_argument("--steps", default=[1, 2, 4, 8], help="accumulation steps", **several)


def _verify(options: argparse.Namespace) -> int:
    from notebook_launcher.verification import verify_accumulation

    report = verify_accumulation(options.processes, options.steps)
    print(report)
    return 0 if report.ok else 1


VERIFY = Command(
    name="verify",
    summary="train the documented toy model on every combination of ranks and steps; exit 1 if a weight differs",
    description=(
        "Train the toy model of Accelerate's documentation on every combination of ranks and accumulation steps\n"
        "that divides its 8 samples. Every weight must be 2.04000, with accumulation and without."
    ),
    add_arguments=_add_to_verify,
    run=_verify,
)


def _add_to_check(parser: argparse.ArgumentParser) -> None:
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


def _check(options: argparse.Namespace) -> int:
    from notebook_launcher.gpu_check.check_program import check

    return check(
        only=options.only, names_only=options.list, folder=options.folder, cpu=options.cpu, share=options.share
    )


CHECK = Command(
    name="check",
    summary="try this package on the machine's GPUs, in a few minutes; exit 1 for a failure",
    description="""\
Try on this machine's GPUs what must work there, without a network. Each check is a process of its own with a time
limit. A table shows what passed, failed or was skipped. Attach gpu-check-<date>.json, in which names are hashed, to a
report of a problem. Without a GPU each check runs in its CPU form, which proves nothing about GPUs.

  notebook-launcher check
  notebook-launcher check --only accumulation errors""",
    add_arguments=_add_to_check,
    run=_check,
)
