"""Launches while the fork server does its chores: none waits for them, and nothing is left of who served meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from notebook_launcher.processes import forkserver
from tests.support.kernels import PATIENCE, ROOT, Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

# Runs at the start of each interpreter. In the fork server, the import of torch's compiler waits for the test.
SITE = """
import sys
if "forkserver" in sys.orig_argv[-1]:
    import importlib.abc, os
    server = os.getpid()
    class Gate(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "torch._dynamo" and os.getpid() == server:
                import socket
                with socket.create_connection(("127.0.0.1", {port})) as gate:
                    gate.recv(1)
    sys.meta_path.insert(0, Gate())
"""
DEFINITIONS = """
import os, sys, time
from notebook_launcher import *
from notebook_launcher.messaging import messages
from notebook_launcher.engines.fork_server_handle import fork_server

def ready():
    import torch.distributed as dist
    dist.barrier()

def is_prepared():
    ready()
    return "notebook_launcher.training.accelerator" in sys.modules

def again():
    return notebook_launch(is_prepared, 2, output="none")

def knows():
    is_known = "snowballstemmer" in sys.modules
    import snowballstemmer
    return is_known

def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return True

def wait_until_prepared():
    "Launch one after another, so that one comes at the moment of the change; each must be served."
    return next(number for number in range(1000) if all(again()))
"""


class Chores:
    """The chores of a kernel's fork servers, each held up where it imports torch's compiler."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until the chores have begun, and hold them up inside this block."""
        gate, _ = self._listener.accept()
        with gate:
            yield

    def begin(self, within: float) -> bool:
        """Return True if the chores begin within these seconds."""
        return bool(select.select([self._listener], [], [], within)[0])

    def forget(self) -> None:
        """Forget the chores of servers that are gone."""
        while self.begin(within=0):
            self._listener.accept()[0].close()


@pytest.fixture(scope="module")
def chores() -> Iterator[Chores]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Chores(listener)


@pytest.fixture(scope="module")
def folder(chores: Chores, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE.format(port=chores._listener.getsockname()[1]))
    return folder


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with Kernel() as kernel:
        run(kernel, f"{DEFINITIONS}os.environ['PYTHONPATH'] = {str(folder)!r}")
        yield kernel


def run(kernel: Kernel, code: str) -> str:
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    return outcome.result or ""


def servers(kernel: Kernel) -> list[psutil.Process]:
    """Return the fork server and, if there is one, its deputy: they share a session."""
    found = psutil.process_iter(["ppid", "cmdline"])  # The kernel may run git for the record of a run, too.
    mine = (process for process in found if process.info["ppid"] == kernel.pid)
    (server,) = (process for process in mine if "forkserver" in " ".join(process.info["cmdline"] or ()))
    return [server, *(child for child in server.children() if os.getsid(child.pid) == server.pid)]


def ends(process: psutil.Process) -> bool:
    """Wait until the process has ended, even if nobody reaps it."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE)[0])
    finally:
        os.close(fd)


def test_launches_during_the_chores_and_at_their_end_are_served_at_once(
    kernel: Kernel, chores: Chores, tmp_path: Path
) -> None:
    """A run that began before them ends during them, and ranks that were started during them outlive them."""
    path = str(tmp_path / "go")
    run(kernel, f"earlier = launch(until, 2, args=({path!r},))")
    with chores.held():
        server, deputy = servers(kernel)[0], servers(kernel)[-1]
        Path(path).touch()
        assert run(kernel, "list(earlier.result())") == "[True, True]"
        assert run(kernel, "[*again(), *again()]") == "[False, False, False, False]"
        run(kernel, "session = Session(2).__enter__(); session.run(ready)")
    run(kernel, "wait_until_prepared()")
    assert servers(kernel) == [server, deputy]
    run(kernel, "session.run(ready)")
    run(kernel, "session.close()")
    assert ends(deputy)
    assert servers(kernel) == [server]


def test_deputy_takes_the_place_of_a_server_killed_at_its_chores(kernel: Kernel, chores: Chores) -> None:
    run(kernel, "fork_server().stop()")
    chores.forget()
    run(kernel, "again()")
    with chores.held():
        server, deputy = servers(kernel)
        run(kernel, "session = Session(2).__enter__(); session.run(ready)")
        server.kill()
        assert ends(server)
        run(kernel, "again()")
        assert deputy.is_running()
        assert psutil.Process(kernel.pid).children() == []
        run(kernel, "session.run(ready)")
        run(kernel, "session.close()")
    run(kernel, "fork_server().stop()")
    assert ends(deputy)


def test_ranks_of_each_kind_inherit_what_the_kernel_has_imported(kernel: Kernel) -> None:
    """The first launch after the import waits for it."""
    run(kernel, "fork_server().stop(); again(); import snowballstemmer")
    assert run(kernel, "[*notebook_launch(knows, 2, output='none')]") == "[True, True]"
    in_session = "with Session(2, output='none') as session: found = [*session.run(knows)]"
    assert run(kernel, f"{in_session}\nfound") == "[True, True]"
    assert run(kernel, "[*launch(knows, 2, output='none', detached=True).result()]") == "[True, True]"


@pytest.mark.slow
def test_ranks_of_agents_inherit_what_the_kernel_has_imported(kernel: Kernel) -> None:
    launching = "while not all(notebook_launch(knows, 1, engine=engine, output='none')): pass"
    run(kernel, f"import snowballstemmer\nwith Commands([[]]) as engine:\n    {launching}")


def test_image_of_reloaded_packages_is_made_anew_without_them(kernel: Kernel) -> None:
    run(kernel, "import importlib, snowballstemmer; importlib.reload(snowballstemmer)")
    assert run(kernel, "[*notebook_launch(knows, 1, output='none')]") == "[False]"


LEAVING = {
    "good": "",
    "connects": "import socket; kept = socket.socket()",
    "spawns": "import subprocess; kept = subprocess.Popen(['sleep', '1000'])",
    "handles": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "dies": "import os; os._exit(3)",
    "shadows": "import rich",
    "fails": "raise ValueError('no')",
    "warns": "import warnings; warnings.warn('shown by the kernel', FutureWarning, stacklevel=1)",
    "last": "import atexit; atexit.register(lambda: print('the rank ends'))",
}


def test_imports_that_a_fork_cannot_inherit_are_left_to_the_ranks_by_name(
    kernel: Kernel, tmp_path: Path, folder: Path
) -> None:
    for name, text in LEAVING.items():
        (tmp_path / f"{name}.py").write_text(text)
    run(kernel, f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}; fork_server().stop()")
    told = f"messages.Imports(names={tuple(LEAVING)!r}, local={{'rich': '/here/rich.py'}}, environ={{}})"
    run(kernel, f"fork_server().tell({told})")
    run(kernel, "has = lambda: 'last' in sys.modules")
    run(kernel, "while not all(notebook_launch(has, 1, output='none')): pass")
    left_out = eval(run(kernel, "fork_server().image().left_out"))
    outcome = kernel.execute("print(*notebook_launch(lambda: 'good' in sys.modules and has(), 2))")
    run(kernel, f"os.environ['PYTHONPATH'] = {str(folder)!r}")
    errors = run(kernel, "os.pread(fork_server()._errors, 10_000, 0)")
    run(kernel, "fork_server().stop()")
    assert errors == "b''"
    assert left_out == {
        "connects": "its import opens a connection",
        "spawns": "its import starts a process",
        "handles": "its import handles a signal",
        "threads": "its import starts a thread",
        "dies": "its import ended the process, or took too long",
        "shadows": "it imports rich, which is /here/rich.py for the kernel",
        "fails": "its import fails here: ValueError: no",
    }
    assert "True True" in outcome.stdout
    assert "the rank ends" in outcome.stdout


def test_chores_of_a_script_begin_after_its_second_launch(folder: Path, chores: Chores) -> None:
    program = """
import sys
from notebook_launcher import notebook_launch
for _ in sys.stdin:
    notebook_launch(print, 2, output="none")
    print("done", flush=True)
"""
    chores.forget()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        for begins, within in ((False, 5 * forkserver.CHORES_AFTER), (True, PATIENCE)):
            print(file=script.stdin, flush=True)
            assert script.stdout.readline() == "done\n"
            assert chores.begin(within) == begins
        script.stdin.close()


def test_chores_begin_after_prewarm_and_a_killed_kernel_takes_the_server_with_it(
    kernel: Kernel, chores: Chores
) -> None:
    run(kernel, "fork_server().stop()")
    chores.forget()
    run(kernel, "prewarm()")
    with chores.held():
        both = servers(kernel)
        kernel.kill()
        assert [ends(process) for process in both] == [True, True]
