"""The table of `notebook-launcher check`, line by line, and its conclusion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.diagnosis.doctor import doctor
from notebook_launcher.errors import ConfigError
from notebook_launcher.gpu_check.catalogue import ALL_CHECKS
from notebook_launcher.gpu_check.check_kind import Hardware
from notebook_launcher.gpu_check.check_report import collect_facts, report_file, write_report
from notebook_launcher.gpu_check.check_run import count_gpus, run_all
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.gpu_check.check_kind import Check
    from notebook_launcher.gpu_check.check_run import Outcome

__all__ = ["check", "check_sharing", "last_lines"]

NAME_WIDTH = 50
FIRST_SHARING_NCCL = 23_000
LEGEND = "A check with a * decides whether GPUs count as working."
PROVES_NOTHING = "No GPU is used: these are CPU forms, which prove nothing about GPUs."


def check(
    *,
    only: Sequence[str] | None = None,
    names_only: bool = False,
    folder: str = ".",
    cpu: bool = False,
    share: bool = False,
) -> int:
    """Make the checks, print a line for each, write the report; return the exit status: 1 if one failed.

    Args:
        only: Words; only checks whose name has one of the words are made. None: all checks.
        names_only: True to print the names alone.
        folder: Folder for the report.
        cpu: True to leave GPUs aside.
        share: True to let ranks share a GPU with NCCL where there are fewer GPUs than a check needs.

    Raises:
        LookupError: No name has one of the words.
        ConfigError: The report cannot be written, or the NCCL that torch has loaded lets no ranks share.
    """
    chosen = [check for check in ALL_CHECKS if only is None or any(word.lower() in check.name.lower() for word in only)]
    if not chosen:
        raise LookupError(f"--only {' '.join(only or ())}: no check has such a name. --list prints all names.")
    if names_only:
        _print("\n".join(f"{'*' if check.decides else ' '} {check.name}" for check in chosen))
        return 0
    hardware = Hardware(0 if cpu else count_gpus(), shares=share)
    _print(f"Checking {_gpus(hardware)}." if hardware.num_gpus else PROVES_NOTHING)
    if only is None:
        _print(str(doctor(launch=False)))
    facts = {**collect_facts(), "checked_gpus": hardware.num_gpus, "ranks_share": share}
    if share:
        check_sharing(facts["torch"]["nccl_loaded"])
    outcomes: list[Outcome] = []
    file = report_file(Path(folder))
    try:
        write_report(file, outcomes, facts)
    except OSError as error:  # Rather now than after the checks.
        raise ConfigError(
            f"--folder {folder}: the report cannot be written there: {error.strerror}. Name another folder."
        ) from None
    _print(LEGEND)
    for outcome in run_all(chosen, hardware, _announce):
        _print(_line(outcome))
        outcomes.append(outcome)
        write_report(file, outcomes, facts)  # After each, so that an interrupt leaves what is known.
    _print(last_lines(outcomes, hardware, complete=only is None))
    _print(f"Report: {file}")
    return int(any(outcome.state == "FAIL" for outcome in outcomes))


def check_sharing(nccl: int | None) -> None:
    """Raise `ConfigError` if this version of NCCL, such as 22809 for 2.28.9, refuses ranks that share a GPU."""
    if nccl is not None and nccl < FIRST_SHARING_NCCL:
        version = f"{nccl // 10_000}.{nccl // 100 % 100}.{nccl % 100}"
        raise ConfigError(
            f"--share needs NCCL 2.30 or newer, and torch has loaded {version}. Name a newer one in the environment: "
            "LD_PRELOAD=/path/to/libnccl.so.2 notebook-launcher check --share, or leave --share out."
        )


def _announce(check: Check) -> None:
    if sys.stdout.isatty():
        print(f"  ...   {check.name}", end="\r", flush=True)


def _line(outcome: Outcome) -> str:
    sign = "*" if outcome.decides else " "
    line = f"{outcome.state}  {sign} {outcome.name:<{NAME_WIDTH}} {outcome.seconds:6.1f} s  {outcome.reason}"
    shown = line.splitlines()[0].rstrip()
    return shown + "".join(f"\n          {text}" for text in outcome.output.splitlines())


def _gpus(hardware: Hardware) -> str:
    return plural(hardware.num_gpus, "GPU") + (", which ranks share" if hardware.shares else "")


def last_lines(outcomes: Sequence[Outcome], hardware: Hardware, *, complete: bool) -> str:
    """Return the last lines: the counts, and the verdict on GPUs."""
    states = [outcome.state for outcome in outcomes]
    counts = f"{states.count('PASS')} passed, {states.count('FAIL')} failed, {states.count('SKIP')} skipped."
    if not hardware.num_gpus:
        return f"{counts} {PROVES_NOTHING}"
    deciding = [outcome.state for outcome in outcomes if outcome.decides]
    if not complete or "SKIP" in deciding:
        return f"{counts} Not all checks that decide (*) were made, so nothing may be claimed of GPUs in general."
    if "FAIL" in deciding:
        return f"{counts} A check that decides (*) failed: please report it, with the file below."
    return f"{counts} All checks that decide (*) passed on {_gpus(hardware)}."


def _print(text: str) -> None:
    print(text, flush=True)
