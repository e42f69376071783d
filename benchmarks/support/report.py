"""The dated report: the machine, the tables, and how a figure is written."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import site
import statistics
import subprocess
from pathlib import Path

import psutil

RESULTS = Path(__file__).resolve().parents[1] / "results"
PACKAGES = ("torch", "accelerate", "torchrunx", "nbdistributed", "cloudpickle", "ipykernel", "numpy")


def median(values: list[float]) -> float:
    return statistics.median(values)


def milliseconds(values: list[float]) -> str:
    """Return `12.3 (11.0-14.1)`: the median and the quartiles, in milliseconds."""
    scaled = sorted(1e3 * value for value in values)
    text = _short(statistics.median(scaled))
    if len(scaled) < 4:
        return f"{text} (n={len(scaled)})"
    low, _, high = statistics.quantiles(scaled, n=4)
    return f"{text} ({_short(low)}-{_short(high)})"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def machine() -> str:
    """Return the machine and the versions as a markdown table."""
    rows = [
        ["cores", str(len(os.sched_getaffinity(0)))],
        ["processor", _processor()],
        ["memory", f"{psutil.virtual_memory().total / 1e9:.0f} GB"],
        *([["GPU", name]] if (name := _gpu()) else []),
        ["kernel", f"{platform.system()} {platform.release()}"],
        ["Python", platform.python_version()],
        ["torch is in", "the environment" if _has_own_torch() else "**another environment**: figures may be off"],
        *([name, _version(name)] for name in PACKAGES),
        ["commit", _commit()],
        ["load before", " ".join(f"{load:.2f}" for load in os.getloadavg())],
        ["date", dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")],
    ]
    return table(["machine", ""], rows)


def write(theme: str, text: str) -> Path:
    """Write a report to `<theme>_<hardware>_<yyyymm>.md`, and return its path."""
    hardware = f"{platform.machine()}-{len(os.sched_getaffinity(0))}cores{'-gpu' if _gpu() else ''}"
    month = dt.datetime.now(dt.timezone.utc).strftime("%Y%m")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{theme}_{hardware}_{month}.md"
    path.write_text(text, encoding="utf-8")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str:
    from notebook_launcher.machine.devices import detect

    gpus = [gpu.name for gpu in detect().gpus]
    return f"{len(gpus)} x {gpus[0]}" if gpus else ""


def _has_own_torch() -> bool:
    # A torch of another environment may count as the user's own code, whose files are checked at each call.
    spec = importlib.util.find_spec("torch")
    folders = tuple(site.getsitepackages())
    return spec is not None and spec.origin is not None and spec.origin.startswith(folders)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", "../notebook_launcher", "../pyproject.toml") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
