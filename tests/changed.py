"""Runs the tests of the packages that changed since the branch left main: `make check`.

A package is tested in the folder of tests with its name. Two minutes do not suffice for every test there, so slow tests
are left out. Of the tests that need the machine alone, only those run that are in a changed file, or in a file that
shares a word of its name, or of its room's, with a changed file. The folder `tests/training` is too large to run whole:
the same rule holds for all of its tests, and the tests of the Accelerator run if no file shares a word:

    notebook_launcher/kernel/inspection/stacks.py   tests/kernel side by side, and of those alone, kernel/inspection
    notebook_launcher/training/data/x.py            tests/training/data/**/test_*.py
    widgets/static/monitor/plot.js                  tests/widgets and tests/page likewise, files test_monitor*.py
    notebook_launcher/config.py                     tests/foundations and tests/settings
    pyproject.toml, README.md, docs/...             tests/project
    tests/kernel/run/test_stop.py                   this file
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("origin/main", "main")
"""The first of these that exists is the branch to compare with."""
FOLDERS = {
    "widgets": ("widgets", "page"),
    "engines": ("engines", "processes"),
    "machine": ("machine", "settings", "kernel"),
    "settings": ("settings", "foundations"),
    "messaging": ("messaging", "processes", "engines"),
    "wording": ("wording", "drawing"),
}
"""Folders of tests for code whose tests are not only in the folder with its name."""
LARGE = {ROOT / "tests/training": "test_accelerator_*.py"}
"""Folders whose tests take two minutes by themselves, with the tests that run if no file shares a word."""
OPTIONS = {
    "tests that may run side by side": ("-n", "logical", "--dist", "loadfile", "-m", "not alone and not slow"),
    "tests that need the machine alone": ("-m", "alone and not slow"),
}
NO_TESTS = 5
"""Exit status of pytest if the options left no test."""


def changed_files() -> list[Path]:
    """Return the files that differ from the point at which the branch left main, new ones included."""
    main = next((name for name in MAIN if _git("rev-parse", "-q", "--verify", name)), "HEAD")
    base = _git("merge-base", "HEAD", main).strip()
    names = _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in names.splitlines()]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def folders_for(file: Path) -> list[Path]:
    """Return the folders of tests for a file: none for a test, which stands for itself, and for a benchmark."""
    match file.parts:
        case ("tests", *_, name) if name.startswith("test_"):
            return []
        case ("benchmarks", *_):
            return []
        case ("notebook_launcher", _) if not (ROOT / "tests" / file.stem).is_dir():
            names: tuple[str, ...] = ("foundations", "settings")
        case ("notebook_launcher", package, *_) | ("widgets" as package, *_):
            package = package.removesuffix(".py")
            names = FOLDERS.get(package, (package,))
        case _:
            names = ("project",)
    return [ROOT / "tests" / name for name in names]


def words_of(file: Path) -> set[str]:
    """Return the words of a file's name and of the folders below its package, in the singular."""
    words = {word for part in (*file.parts[1:-1], file.stem) for word in re.split(r"[_\W]+", part.lower())}
    return {word.removesuffix("s") for word in words - {"", "init"}}


def choose(files: list[Path]) -> tuple[set[Path], set[Path]]:
    """Return the tests that may run side by side, and those that need the machine alone."""
    side_by_side = {ROOT / file for file in files if file.name.startswith("test_") and (ROOT / file).is_file()}
    alone = set(side_by_side)
    for file in files:
        for folder in folders_for(file):
            words = words_of(file) - words_of(Path(folder.name))
            named = {test for test in folder.rglob("test_*.py") if words & words_of(test.relative_to(ROOT))}
            side_by_side |= (named or set(folder.glob(LARGE[folder]))) if folder in LARGE else {folder}
            alone |= named
    return side_by_side, alone


def main() -> int:
    """Run the chosen tests; return 1 if one of them failed."""
    good = True
    for (title, options), chosen in zip(OPTIONS.items(), choose(changed_files()), strict=True):
        paths = sorted(str(path.relative_to(ROOT)) for path in chosen)
        print(f"==> {title}: {', '.join(paths) or 'none'}", flush=True)
        if paths:
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", *options, *paths], cwd=ROOT, check=False)
            good = good and done.returncode in (0, NO_TESTS)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
