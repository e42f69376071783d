"""Runs the tests: `make test`. Tests that failed run once more, alone, as in CPython's `regrtest --rerun`.

The tests start real kernels, processes and browsers. On a busy machine, one of some 5,400 meets a race now and then.
A test that passes the second time is named as unsteady at the end and does not fail the run. More than `MAX_AGAIN`
failures are not chance: then nothing runs again.

    python tests/everything.py              # the tests of this project, without the slow ones
    python tests/everything.py --slow       # with them, as in CI
    python tests/everything.py FOLDER       # the tests in another folder
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

ROOT = Path(__file__).resolve().parents[1]
WORKERS = min(4, (os.cpu_count() or 1) + 1)
"""One more than the cores, because a test often waits for processes that start or end."""
SIDE_BY_SIDE = ("-n", str(WORKERS), "--dist", "loadfile", "-m")
ALONE = frozenset({"image", "deaths", "forking", "hangs", "leaks", "monitor", "phases", "robustness", "stop"})
"""Test files that need the machine alone: they measure time, or look at processes and memory of the whole machine."""
FAILED = 1
"""Exit status of pytest if it ran all tests and some of them failed."""
MAX_AGAIN = 8
"""Failed tests that run again; more than these are no chance."""


def run(title: str, options: tuple[str, ...], folder: Path) -> int:
    """Run pytest in a folder and return its exit status."""
    print(f"==> {title}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=folder, check=False).returncode


def failed_tests(folder: Path) -> list[str]:
    """Return the names of the tests that failed when they ran last."""
    record = folder / ".pytest_cache/v/cache/lastfailed"
    return sorted(json.loads(record.read_text())) if record.exists() else []


def main(folder: Path, *, has_slow: bool) -> int:
    """Run the parts, then what failed; return 0 if every test has passed."""
    (folder / ".pytest_cache/v/cache/lastfailed").unlink(missing_ok=True)
    # Importing all files takes 15 s, so those that run alone are named.
    files = sorted(str(path) for path in folder.glob("tests/**/test_*.py") if path.stem.removeprefix("test_") in ALONE)
    parts = {
        "tests that may run side by side": (*SIDE_BY_SIDE, "not alone" if has_slow else "not alone and not slow"),
        "tests that need the machine alone": ("-m", "alone", *files),
    }
    # mypy takes a minute and a half of one core.
    types = subprocess.Popen(["make", "typecheck"], cwd=ROOT, stdout=PIPE, stderr=STDOUT) if folder == ROOT else None
    statuses = [run(title, options, folder) for title, options in parts.items()]
    if types:
        print(types.communicate()[0].decode(), end="", flush=True)
    if not has_slow:
        print("==> left out: the slow tests, which `make test SLOW=1` runs, as CI does", flush=True)
    if types and types.returncode:
        return 1
    if not any(statuses):
        return 0
    failed = failed_tests(folder)
    has_unread_files = any("::" not in name for name in failed)
    if not {0, FAILED}.issuperset(statuses) or has_unread_files or not 0 < len(failed) <= MAX_AGAIN:
        return 1
    if run(f"tests that failed, again and alone: {len(failed)}", ("--last-failed",), folder):
        return 1
    print(f"==> unsteady, failed once and passed alone: {', '.join(failed)}", flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="the folder that holds tests/")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    arguments = parser.parse_args()
    sys.exit(main(arguments.folder, has_slow=arguments.slow))
