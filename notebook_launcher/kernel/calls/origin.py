"""Origin of a run: source of its function, versions, git commit, changes since. Its folder keeps them."""

from __future__ import annotations

import contextlib
import errno
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
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.history.run_folders import CHANGES, ENVIRONMENT, SOURCE
from notebook_launcher.notebook_code import Needs
from notebook_launcher.wording import is_secret, redact

if TYPE_CHECKING:
    from collections.abc import Mapping


ALWAYS = ("accelerate", "datasets", "lightning", "notebook-launcher", "numpy", "torch", "transformers")
"""Packages whose versions are recorded even if the kernel has not imported them."""
VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|ACCELERATE|CUDA|HF|TOKENIZERS)_\w+")
MAX_PATCH = 1_000_000
"""Bytes of the changes that are kept."""
CHANGED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)


class Origin:
    """The files of a run's folder about the origin of the run.

    Git compares the working tree with the commit in a process of its own, because that takes 12 ms, and 160 ms among
    20,000 files, during which the ranks' records would wait. It begins when it is first asked for. `source` and
    `environment` are the results of `source_with_needs` and `describe_environment` in the kernel that launched.
    """

    def __init__(self, source: str, environment: Mapping[str, Any]) -> None:
        self._environment = dict(environment)
        self.files = {ENVIRONMENT: self._encoded(), **({SOURCE: source} if source else {})}
        """Files that are known at once, by name."""
        self._git: GitChanges | None = None
        """Git's process; None before it is asked for, and once it has answered."""
        self._has_answer = not self._environment["git"]
        """True if there is nothing to ask git any more."""

    def later(self, *, wait: bool) -> dict[str, str] | None:
        """Return the files that git has listed, by name; None if git has not finished and `wait` is False."""
        if self._has_answer:
            return {}
        if self._git is None:
            self._git = GitChanges(self._environment["git"]["repository"])
        is_over, patch = self._git.poll(wait=wait)
        if not is_over:
            return None
        self._git, self._has_answer = None, True
        if patch is None:
            return {}
        self._environment["git"] |= {"dirty": bool(patch), "changed": CHANGED.findall(patch)}
        return {ENVIRONMENT: self._encoded(), **({CHANGES: redact(patch[:MAX_PATCH])} if patch else {})}

    def _encoded(self) -> str:
        return json.dumps(self._environment) + "\n"


def describe_environment() -> dict[str, Any]:
    """Return versions, git commit, working directory and variables that change a launch; no secrets."""
    cwd = ""
    with contextlib.suppress(OSError):  # The working directory was deleted.
        cwd = os.getcwd()
    variables = {k: v for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k) and not is_secret(k, v)}
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": _packages(),
        "cwd": cwd,
        "git": git_commit(Path(cwd)) if cwd else {},
        "variables": variables,
    }


def source_with_needs(function: Any) -> str:
    """Return the source of a function, after the notebook's functions, classes and constants that it uses."""
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) == "__main__":
        with contextlib.suppress(ConfigError, OSError, TypeError, AttributeError, SyntaxError):
            return redact(_with_helpers(function))
    with contextlib.suppress(OSError, TypeError):
        return redact(inspect.getsource(inspect.unwrap(function)))
    return ""


def _with_helpers(function: Any) -> str:
    needs = Needs(vars(sys.modules["__main__"]))
    needs.add(function.__name__, function)
    secret = [name for name, text in needs.constants.items() if is_secret(name, text)]
    values = [f"# {name} is a value of the notebook, which is not kept here" for name in (*needs.values, *secret)]
    constants = [f"{name} = {text}" for name, text in needs.constants.items() if name not in secret]
    head = ["\n".join(lines) + "\n" for lines in (list(needs.imports), values + constants) if lines]
    return "\n\n".join([*head, *needs.definitions.values()])


def _packages() -> dict[str, str]:
    """Return the versions of the packages that this kernel has imported, and of the packages in `ALWAYS`."""
    names = {name for name in list(sys.modules) if "." not in name and not name.startswith("_")}
    installed_at = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            installed_at.append(os.stat(folder).st_mtime_ns)  # An installation moves it.
    return dict(_versions(frozenset((names - set(sys.stdlib_module_names)) | set(ALWAYS)), tuple(installed_at)))


@functools.lru_cache(maxsize=1)
def _versions(names: frozenset[str], _installed_at: tuple[int, ...]) -> dict[str, str]:
    # Kept until a module is imported or a package installed: a look takes 7 ms, and each detached launch takes one.
    found = {}
    for name in sorted(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            found[name] = importlib.metadata.version(name)
    return found


# --------------------------------------------------------------------------------------------------------------------
# The git commit of a folder, read without git, and the changes since, found by a git process during the run.


WHILE_RUNNING = 30.0
"""Time limit of git in seconds, while the run goes on."""
AT_THE_END = 1.0
"""Seconds from its start for which the end of a run waits for git."""
HASH = re.compile(r"[0-9a-f]{40,64}")
MAX_REFS = 100_000_000
"""Characters of a file of git's that are read."""


class GitChanges:
    """The difference between the working tree of a repository and its commit; the constructor starts git.

    `poll` must be called until it returns that git has ended, so that no process is left behind.
    """

    def __init__(self, repository: str) -> None:
        self._started = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when git is over
        self._process: subprocess.Popen[bytes] | None = None
        if git := shutil.which("git"):
            # A repository that was copied may name programs to run: as file system monitor, and to show a kind of file.
            words = [git, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", repository]
            words += ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"]
            ours = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.DEVNULL}
            with contextlib.suppress(OSError):
                # A session of its own: an interrupt in a terminal is not for git.
                self._process = subprocess.Popen(words, start_new_session=True, **ours)  # type: ignore[call-overload]

    def poll(self, *, wait: bool) -> tuple[bool, str | None]:
        """Return True once git has ended, and the difference: None if git failed or took too long."""
        if self._process is None:
            self._output.close()
            return True, None
        age = time.monotonic() - self._started
        try:
            code = self._process.wait(max(0.0, AT_THE_END - age) if wait else 0)
        except subprocess.TimeoutExpired:
            if not wait and age < WHILE_RUNNING:
                return False, None
            self._process.kill()
            code = self._process.wait()
        with self._output as output:
            output.seek(0)
            return True, output.read().decode("utf-8", "replace") if code == 0 else None


def git_commit(folder: Path) -> dict[str, str]:
    """Return commit and branch of the repository around a folder; empty if there is none. Starts no process."""
    for parent in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            git = parent / ".git"
            if git.is_file():  # A worktree or submodule: `gitdir: <path>`.
                return _head((parent / _text_of(git).partition(":")[2].strip()).resolve()) | {"repository": str(parent)}
            if git.is_dir():
                return _head(git) | {"repository": str(parent)}
    return {}


def _head(git: Path) -> dict[str, str]:
    text = _text_of(git / "HEAD").strip()
    if not text.startswith("ref:"):
        return {"commit": text} if HASH.fullmatch(text) else {}
    ref = text.partition(":")[2].strip()
    branch = {"branch": ref.removeprefix("refs/heads/")}
    shared = git
    with contextlib.suppress(OSError):
        shared = (git / _text_of(git / "commondir").strip()).resolve()
    for home in (git, shared):
        with contextlib.suppress(OSError):
            if HASH.fullmatch(commit := _text_of(home / ref).strip()):
                return {"commit": commit, **branch}
    with contextlib.suppress(OSError):
        for line in _text_of(shared / "packed-refs").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref and HASH.fullmatch(commit):
                return {"commit": commit, **branch}
    return branch


def _text_of(path: Path) -> str:
    """Return the text of an ordinary file; of another user's /tmp/.git it may be a pipe, and name any file."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no ordinary file", str(path))
    with path.open(encoding="utf-8") as file:
        return file.read(MAX_REFS)
