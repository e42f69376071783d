"""Origin of a run: source of its function, versions, git commit, changes since. Its folder keeps them."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.exporting.needs import Needs
from notebook_launcher.history.run_folders import CHANGES, ENVIRONMENT, SOURCE

__all__ = ["describe_environment", "git_commit", "origin_of", "source_of"]

ALWAYS = ("accelerate", "datasets", "lightning", "notebook-launcher", "numpy", "torch", "transformers")
"""Packages whose versions are recorded even if the kernel has not imported them."""
VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|ACCELERATE|CUDA|HF|TOKENIZERS)_\w+")
SECRET = re.compile(r"key|token(?!izers)|secret|password|auth", re.IGNORECASE)
GIT_SECONDS = 1.0
"""Seconds that git gets to compare the working tree with the commit."""
MAX_PATCH = 1_000_000
"""Bytes of the changes that are kept."""
CHANGED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
HASH = re.compile(r"[0-9a-f]{40,64}")


def origin_of(function: Any, *, source: str | None = None) -> dict[str, str]:
    """Return the files of a run's folder that say where the run comes from, by name; `source` is the function's."""
    environment = describe_environment()
    files = {}
    if source is None:
        source = source_of(function)
    if source:
        files[SOURCE] = source
    git: dict[str, Any] = environment["git"]
    if git and (patch := _changes(git["repository"])) is not None:
        git |= {"dirty": bool(patch), "changed": CHANGED.findall(patch)}
        if patch:
            files[CHANGES] = patch[:MAX_PATCH]
    files[ENVIRONMENT] = json.dumps(environment) + "\n"
    return files


def describe_environment() -> dict[str, Any]:
    """Return versions, git commit, working directory and variables that change a launch; no secrets."""
    cwd = _cwd()
    variables = {k: v for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k) and not SECRET.search(k)}
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": _packages(),
        "cwd": cwd,
        "git": git_commit(Path(cwd)) if cwd else {},
        "variables": variables,
    }


def _cwd() -> str:
    with contextlib.suppress(OSError):  # It was deleted.
        return os.getcwd()
    return ""


def source_of(function: Any) -> str:
    """Return the source of a function, after that of the notebook's functions, classes and constants that it uses."""
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) == "__main__":
        with contextlib.suppress(ConfigError, OSError, TypeError, AttributeError, SyntaxError):
            return _with_helpers(function)
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(inspect.unwrap(function))
    return ""


def _with_helpers(function: Any) -> str:
    needs = Needs(vars(sys.modules["__main__"]))
    needs.add(function.__name__, function)
    values = [f"# {name} is a value of the notebook, which is not kept here" for name in needs.values]
    constants = [f"{name} = {text}" for name, text in needs.constants.items()]
    head = ["\n".join(lines) + "\n" for lines in (list(needs.imports), values + constants) if lines]
    return "\n\n".join([*head, *needs.definitions.values()])


def _changes(repository: str) -> str | None:
    """Return the difference between the working tree and the commit; None if git cannot tell, or not in time."""
    git = shutil.which("git")
    if git is None:
        return None
    words = [git, "--no-optional-locks", "-C", repository, "diff", "--no-ext-diff", "--no-color", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, timeout=GIT_SECONDS, check=True)
        return done.stdout.decode("utf-8", "replace")
    return None


def _packages() -> dict[str, str]:
    """Return the versions of the packages that this kernel has imported, and of those in `ALWAYS`."""
    names = {name for name in list(sys.modules) if "." not in name and not name.startswith("_")}
    found = {}
    for name in sorted((names - set(sys.stdlib_module_names)) | set(ALWAYS)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            found[name] = importlib.metadata.version(name)
    return found


def git_commit(folder: Path) -> dict[str, str]:
    """Return commit and branch of the repository around a folder; empty if there is none. Starts no process."""
    for parent in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            git = _git_folder(parent / ".git")
            if git is not None:
                return _head(git) | {"repository": str(parent)}
    return {}


def _git_folder(entry: Path) -> Path | None:
    if entry.is_file():  # A worktree or submodule: `gitdir: <path>`.
        return (entry.parent / entry.read_text("utf-8").partition(":")[2].strip()).resolve()
    return entry if entry.is_dir() else None


def _head(git: Path) -> dict[str, str]:
    text = (git / "HEAD").read_text("utf-8").strip()
    if not text.startswith("ref:"):
        return {"commit": text}
    ref = text.partition(":")[2].strip()
    branch = {"branch": ref.removeprefix("refs/heads/")}
    shared = git
    with contextlib.suppress(OSError):
        shared = (git / (git / "commondir").read_text("utf-8").strip()).resolve()
    for home in (git, shared):
        with contextlib.suppress(OSError):
            return {"commit": (home / ref).read_text("utf-8").strip(), **branch}
    with contextlib.suppress(OSError):
        for line in (shared / "packed-refs").read_text("utf-8").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref and HASH.fullmatch(commit):
                return {"commit": commit, **branch}
    return branch
