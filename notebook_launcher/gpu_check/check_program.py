"""`notebook-launcher check`: each check in a process of its own, the table, and the report with the machine's facts.

The report is there to be attached to a report of a problem: names that identify a person or a place are replaced by
hashes (UUIDs, the host's name, paths).

A process of one check: `python -m notebook_launcher.gpu_check.check_program NAME GPUS SHARES FILE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime as dt
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.diagnosis.doctor import doctor
from notebook_launcher.diagnosis.facts import look_at_limits, look_at_software
from notebook_launcher.errors import ConfigError
from notebook_launcher.gpu_check.checks import CHECKS, Check, Hardware, Skipped
from notebook_launcher.machine import devices
from notebook_launcher.machine.allocation import SHARING_VARIABLE
from notebook_launcher.machine.memory import SHARED_MEMORY
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME_WIDTH = 50
PROVES_NOTHING = "No GPU is used: these are CPU forms, which prove nothing about GPUs."
LAST_LINES = 12
"""Lines of a failed check's output that are kept."""
UNSAID = "NVIDIA_REQUIRE_CUDA"
"""A variable of NVIDIA's container images: pages of drivers that the image accepts."""
VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "HIP_", "ROCR_", "HSA_", "NVIDIA_", "OMP_NUM_THREADS", "GLOO_")
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")
PATH = re.compile(
    r"(?<=[\"'])/[^\"'\n]+/[^\"'\n]*(?=[\"'])"  # In quotation marks, where it may have spaces.
    r"|(?<![\w./])(?<!http:)(?<!https:)/+(?:[\w.@+~-]+/)+[\w.@+~-]*"
)
"""A path of two parts at least; web addresses are left."""
TOPOLOGY = ("nvidia-smi", "topo", "-m")
KEPT_PATHS = (str(SHARED_MEMORY), "/dev/nvidia")


def check(
    *,
    only: Sequence[str] | None = None,
    names_only: bool = False,
    folder: str = ".",
    cpu: bool = False,
    share: bool = False,
) -> int:
    """Make the checks, print a line for each, write the report; return the exit status: 1 if one failed.

    `only` has words, of which the name of a check must have one; `cpu` leaves GPUs aside, and `share` lets ranks share
    a GPU with NCCL where there are fewer GPUs than a check needs. The folder gets the report.
    """
    chosen = [check for check in CHECKS if only is None or any(word.lower() in check.name.lower() for word in only)]
    if not chosen:
        raise LookupError(f"--only {' '.join(only or ())}: no check has such a name. --list prints all names.")
    if names_only:
        _print("\n".join(check.name for check in chosen))
        return 0
    hardware = Hardware(0 if cpu else count_gpus(), shares=share)
    _print(f"Checking {_gpus(hardware)}." if hardware.num_gpus else PROVES_NOTHING)
    if only is None:
        _print(str(doctor(launch=False)))
    facts = {**collect_facts(), "checked_gpus": hardware.num_gpus, "ranks_share": share}
    outcomes: list[Outcome] = []
    file = Path(folder) / f"gpu-check-{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}.json"
    try:
        write_report(file, outcomes, facts)
    except OSError as error:  # Rather now than after the checks.
        raise ConfigError(
            f"--folder {folder}: the report cannot be written there: {error.strerror}. Name another folder."
        ) from None
    for each in chosen:
        if sys.stdout.isatty():
            print(f"  ...   {each.name}", end="\r", flush=True)
        outcome = run_one(each, hardware)
        line = f"{outcome.state}  {outcome.name:<{NAME_WIDTH}} {outcome.seconds:6.1f} s  {outcome.reason}"
        _print(line.splitlines()[0].rstrip())
        if outcome.output:
            _print(textwrap.indent(outcome.output, " " * 10, lambda _: True))
        outcomes.append(outcome)
        write_report(file, outcomes, facts)  # After each, so that an interrupt leaves what is known.
    _print(last_lines(outcomes, hardware, complete=only is None))
    _print(f"Report: {file}")
    return int(any(outcome.state == "FAIL" for outcome in outcomes))


def _gpus(hardware: Hardware) -> str:
    return plural(hardware.num_gpus, "GPU") + (", which ranks share" if hardware.shares else "")


def last_lines(outcomes: Sequence[Outcome], hardware: Hardware, *, complete: bool) -> str:
    """Return the last lines: the counts, and the verdict on GPUs."""
    states = [outcome.state for outcome in outcomes]
    counts = f"{states.count('PASS')} passed, {states.count('FAIL')} failed, {states.count('SKIP')} skipped."
    if not hardware.num_gpus:
        return f"{counts} {PROVES_NOTHING}"
    if not complete or "SKIP" in states:
        return f"{counts} Not all checks were made, so nothing may be claimed of GPUs in general."
    if "FAIL" in states:
        return f"{counts} A check failed: please report it, with the file below."
    return f"{counts} All checks passed on {_gpus(hardware)}."


def _print(text: str) -> None:
    print(text, flush=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    state: str
    """`PASS`, `FAIL` or `SKIP`."""
    seconds: float
    reason: str
    """Observation, failure, or reason for the skip."""
    output: str = ""
    """The last lines that a failed check printed."""


def count_gpus() -> int:
    """Return how many GPUs launches can use."""
    machine = devices.detect()
    return 0 if machine.why_no_gpu else len(machine.gpus)


def run_one(check: Check, hardware: Hardware, command: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a check, made in a process of its own.

    The program (the package's own without a command) gets the check's name, the two fields of the hardware and a file
    for the outcome.
    """
    if why_not := check.why_not(hardware):
        return Outcome(name=check.name, state="SKIP", seconds=0.0, reason=why_not)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file, printed = Path(folder) / "outcome", Path(folder) / "printed"
        program = command or (sys.executable, "-m", "notebook_launcher.gpu_check.check_program")
        words = (check.name, str(hardware.num_gpus), str(hardware.shares), str(file))
        state, reason = "FAIL", ""
        try:
            reason = f"its process ended with status {_wait([*program, *words], printed, check.limit)}"
            state, reason = json.loads(file.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            reason = f"not done after {check.limit:g} s"
        except (OSError, ValueError):
            pass
        seconds = time.monotonic() - began
        text = printed.read_text(encoding="utf-8", errors="replace")
    output = "\n".join(text.splitlines()[-LAST_LINES:]) if state == "FAIL" else ""
    return Outcome(name=check.name, state=state, seconds=seconds, reason=reason, output=output)


def _wait(command: Sequence[str], printed: Path, limit: float) -> int:
    """Return the exit status; at the limit, end the process with all that it started, and raise `TimeoutExpired`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}  # The checks assert.
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        return process.wait(limit)
    finally:
        # The ranks are in sessions of their own, and end when this process, their kernel, does.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write_report(file: Path, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> None:
    """Write the outcomes so far into the file of the report, in place of its contents."""
    rows = [{**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 1)} for outcome in outcomes]
    now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    # Before JSON escapes what is not ASCII, and quotation marks.
    report = _hidden({"written": now, "facts": facts, "checks": rows})
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return hide_names(value)
    if isinstance(value, dict):
        return {name: _hidden(entry) for name, entry in value.items()}
    return list(map(_hidden, value)) if isinstance(value, list | tuple) else value


def hide_names(text: str) -> str:
    """Return the text with hashes in place of UUIDs, paths and the host's name; equal names have equal hashes."""
    text = UUID.sub(lambda found: f"{found[1]}-{_hash(found[0])}", text)
    text = PATH.sub(lambda found: _hide_path(found[0]), text)
    host = socket.gethostname()
    for name in (host, host.partition(".")[0]):
        if len(name) > 3:  # Shorter, it may be part of any word by chance.
            text = text.replace(name, _hash(name))
    return text


def _hide_path(path: str) -> str:
    return path if path.startswith(KEPT_PATHS) else f"/{_hash(path)}"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def collect_facts() -> dict[str, Any]:
    """Return what a reader of a report has to know of the machine."""
    import torch

    nccl: str | None = None
    machine, topology = devices.detect(), ""
    with contextlib.suppress(Exception):  # Only builds with NCCL have it.
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(TOPOLOGY, capture_output=True, text=True, timeout=20, check=True)
        topology = done.stdout
    return {
        "machine": {finding.name: finding.fact for finding in (*look_at_software(), *look_at_limits())},
        "driver": machine.driver,
        "gpus": [
            {"name": gpu.name, "memory": gpu.total_memory, "capability": gpu.capability, "slice": gpu.is_slice}
            for gpu in machine.gpus
        ],
        "slices": len(devices.find_slices()),
        "why_no_gpu": machine.why_no_gpu,
        "left_out": machine.left_out,
        "topology": topology,
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": nccl,
            "nccl_loaded": _loaded_nccl(),
            "devices": torch.cuda.device_count(),
        },
        "variables": {
            # The value may be one path, or several with colons in between, spaces included.
            name: ":".join(
                _hide_path(part) if part.count("/") > 1 and part[0] == "/" else part for part in value.split(":")
            )
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name != UNSAID
        },
    }


def _loaded_nccl() -> int | None:
    """Return the version of the NCCL that this process has loaded, such as 23102; torch tells its build's."""
    number = ctypes.c_int()
    try:
        # Torch has loaded it already, and the loader knows it by this name. RTLD_NOLOAD: not another one.
        status = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value if status == 0 else None


def main(checks: Sequence[Check], words: Sequence[str]) -> None:
    """Run one of the checks, as the words of `run_one` say, and write its state and reason into its file."""
    name, num_gpus, shares, file = words
    hardware = Hardware(int(num_gpus), shares=shares == "True")
    if hardware.shares:
        os.environ[SHARING_VARIABLE] = "1"
    try:
        state, reason = "PASS", next(check for check in checks if check.name == name).run(hardware) or ""
    except Skipped as skipped:
        state, reason = "SKIP", str(skipped)
    except Exception as error:  # whatever fails is the outcome
        state, reason = "FAIL", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    Path(file).write_text(json.dumps([state, reason]), encoding="utf-8")


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
