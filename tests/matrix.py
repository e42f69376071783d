"""Runs the core of the tests in several environments: the oldest and the newest Pythons and torches that are promised.

    make matrix                             # environments in build/matrix: several GB, most of them CUDA's libraries
    make matrix MATRIX=/elsewhere           # the environments go there
    make matrix ONLY=py310-oldest           # one environment
    PYTHON310=/opt/python3.10 make matrix   # an interpreter that is not on PATH

An environment whose interpreter is missing is skipped with a line.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOK = "import platform, torch; print('Python', platform.python_version() + ', torch', torch.__version__)"
NOT_CORE = (
    "architecture",  # as with every Python
    "demo",
    "docs",
    "extras",
    "frontend",  # a browser, here and below
    "import_costs",  # as architecture
    "ipykernels",  # makes environments of its own
    "jupyterlab",
    "monitor_browser",
    "notebooks",
    "packaging",
    "readme",
)
"""Test files that are left out: they depend on neither Python nor torch, or run for minutes."""


PARTS = (
    ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "-m", "not alone and not slow"),
    ("-m", "alone and not slow"),
)
"""Options of pytest for what may run side by side, and for what needs the machine alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter, and what pip installs into it besides the extra `test`."""

    name: str
    python: str
    packages: tuple[str, ...] = ()

    def interpreter(self) -> str | None:
        """Return the command: the one that a variable such as PYTHON310 names, else the first that runs."""
        named = os.environ.get(f"PYTHON{self.python.replace('.', '')}")
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{self.python}.*/bin/python{self.python}"))
        candidates = [named] if named else [f"python{self.python}", *map(str, reversed(pyenv))]
        return next((each for each in candidates if self._runs(each)), None)

    def _runs(self, command: str) -> bool:
        code = f"import sys; sys.exit('.'.join(map(str, sys.version_info[:2])) != {self.python!r})"
        if shutil.which(command) is None:
            return False
        # A shim of pyenv is found and may not run.
        return subprocess.run([command, "-c", code], capture_output=True, check=False).returncode == 0


ENVIRONMENTS = (
    Environment(name="py310-oldest", python="3.10", packages=("torch==2.6.0",)),
    Environment(name="py311-between", python="3.11", packages=("torch==2.11.0",)),  # FSDP2's older states, on CPUs too
    Environment(name="py312-newest", python="3.12"),  # The newest torch, from PyPI with CUDA's libraries.
    Environment(name="py313", python="3.13", packages=("-c", "constraints-tests.txt")),
)


def install(environment: Environment, interpreter: str, folder: Path) -> Path:
    """Make the environment unless it is there and newer than pyproject.toml; return its Python."""
    python, stamp = folder / "bin/python", folder / "installed"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"==> packages for {environment.name} (torch is large: the first time takes minutes)", flush=True)
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        command = [str(python), "-m", "pip", "install", "-q", "-e", ".[test]", *environment.packages]
        subprocess.run(command, cwd=ROOT, check=True)
        stamp.touch()
    return python


def run(python: Path, options: tuple[str, ...]) -> str:
    """Run a part of the core of the tests; return the summary line of pytest."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.stem.removeprefix("test_") not in NOT_CORE
    ]
    command = [str(python), "-m", "pytest", "-q", *options, *files]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return last


def main() -> int:
    """Run all, print a table; return 1 if a test failed anywhere or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/matrix", help="where the environments are made")
    parser.add_argument("--only", default="", help="names of environments, by commas")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else [each.name for each in ENVIRONMENTS]
    rows, good = [], []
    for environment in ENVIRONMENTS:
        if environment.name not in only:
            continue
        interpreter = environment.interpreter()
        if interpreter is None:
            rows.append((environment.name, f"skipped: there is no Python {environment.python}"))
            continue
        python = install(environment, interpreter, options.folder.resolve() / environment.name)
        look = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, check=True)
        print(f"==> {environment.name}: {look.stdout.strip()}", flush=True)
        began = time.monotonic()
        summaries = [run(python, part) for part in PARTS]
        good += [re.fullmatch(r"\d+ passed\b(?!.*\b(failed|errors?)\b).*", each) is not None for each in summaries]
        seconds = f"{time.monotonic() - began:.0f} s"
        rows.append((environment.name, "; ".join([look.stdout.strip(), *summaries, seconds])))
    print(*(f"{name:<14} {text}" for name, text in rows), sep="\n")
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
