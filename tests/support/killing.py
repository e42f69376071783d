"""Processes that are killed while they save: before each of their calls to the file system in turn, by an audit hook.

    def program(folder):
        ...
        return survey(begin, save, load, Path(folder))

    with interpreter() as run:
        check(run(program, tmp_path / "parent" / "folder"), at_least=20)

The programs run in an interpreter of their own: it has no threads, which the processes that it forks would miss. An
audit hook stays for as long as its process, and is added in these alone. All programs of a file share the interpreter,
because the import of torch takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
CALLS = frozenset(
    {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.scandir", "os.listdir"}
    | {"ctypes.dlsym", "fcntl.flock"}
)
NEVER = 10**6
"""Number of a call that no save comes to."""
ANSWER = "the answer: "
"""Begin of the line with which the interpreter answers; other lines are from what the program calls."""


@contextlib.contextmanager
def interpreter() -> Iterator[Callable[..., dict[str, Any]]]:
    """Start an interpreter; give the function that calls a test file's program in it, with texts, for its result."""
    command = [sys.executable, "-u", "-m", __name__]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def run(program: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            words = [program.__module__, program.__name__, *map(str, arguments)]
            print(json.dumps(words), file=process.stdin, flush=True)
            said: list[str] = []
            while (line := process.stdout.readline()) and not line.startswith(ANSWER):
                said.append(line)
            assert line, "".join(said)
            result: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            assert "error" not in result, "".join([*said, result["error"]])
            return result

        yield run


def answer_all() -> None:
    """Call the programs that standard input names, one in each line, until it ends."""
    for line in sys.stdin:
        module, name, *arguments = json.loads(line)
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
        except Exception:  # the test shows it
            result = {"error": traceback.format_exc()}
        print(ANSWER + json.dumps(result))


def check(result: dict[str, Any], *, at_least: int) -> None:
    """The old save was whole until one moment, and the new one from then on."""
    assert result["calls"] >= at_least
    turn = result["found"].index("new")
    assert set(result["found"][:turn]) == {"old"}
    assert set(result["found"][turn:]) == {"new"}


def die_before(number: int) -> None:
    """Kill this process before its call of that number to the file system."""
    left = [number]

    def hook(event: str, _arguments: object) -> None:
        if event in CALLS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def start_killed(number: int, prepare: Callable[[], Callable[[], object]]) -> int:
    """Do work in a process that is killed before its call of that number, and return the process.

    Args:
        number: Number of the call.
        prepare: Called in that process before calls are counted; returns the work.
    """
    child = os.fork()
    if child == 0:
        status = 1
        gc.disable()  # A collection would write to all pages that the process shares with its parent.
        try:
            work = prepare()
            die_before(number)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def were_killed(children: Iterable[int]) -> bool:
    """Wait for processes, and return True if any was killed; the others may fail then, as a consequence."""
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(ends) or -signal.SIGKILL in ends, ends
    return any(ends)


def survey(
    begin: Callable[[], object], save: Callable[[int], bool], load: Callable[[], str], folder: Path, every: int = 1
) -> dict[str, Any]:
    """Kill a save at every n-th call; return what was found after each, and how many calls there were.

    Args:
        begin: Saves the old state, if there is one; its folder is copied for each of the saves that are killed.
        save: Saves the new state in processes that are killed before a call of a number; returns True if one was.
        load: Returns the state that is in the folder, `old` or `new`.
        folder: The folder of the save.
        every: The n.
    """
    found: list[str] = []
    kept = folder.parents[1] / "kept"
    begin()
    if folder.exists():
        shutil.copytree(folder, kept)
    number = 0
    while True:
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        if kept.exists():
            shutil.copytree(kept, folder)
        was_killed = save(number)
        found.append(load())
        assert not save(NEVER)
        assert load() == "new", number
        assert [path.name for path in folder.parent.iterdir()] == [folder.name], number
        assert {path.name for path in folder.glob(".*")} <= {".metadata"}, number
        if not was_killed:
            return {"found": found, "calls": number}
        number += every


if __name__ == "__main__":
    answer_all()
