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
from tests.support.warm_kernels import FIRST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
DEFINITIONS = (
    FIRST
    + """
from notebook_launcher.engines.fork_server_handle import fork_server
fork_server().stop()

def is_prepared():
    ready()
    return "notebook_launcher.training.accelerator" in sys.modules

def again():
    return notebook_launch(is_prepared, 2, output="none")

def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return True

def wait_until_prepared():
    "Launch one after another, so that one comes at the moment of the change; each must be served."
    return next(number for number in range(1000) if all(again()))
"""
)


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
        """Return True if the chores begin within these seconds; they go on at once."""
        has_begun = bool(select.select([self._listener], [], [], within)[0])
        if has_begun:
            with self.held():
                pass
        return has_begun

    def forget(self) -> None:
        """Forget the chores of servers that are gone."""
        self._listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
        self._listener.settimeout(PATIENCE)


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


@pytest.fixture(autouse=True)
def cold(kernel: Kernel, chores: Chores) -> None:
    """Have a new fork server for each test."""
    run(kernel, "fork_server().stop()")
    chores.forget()


def run(kernel: Kernel, code: str) -> str:
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    return outcome.result or ""


def servers(kernel: Kernel) -> list[psutil.Process]:
    """Return the fork server and, if there is one, its deputy: they share a session."""
    (server,) = psutil.Process(kernel.pid).children()
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


def test_launches_during_the_chores_and_at_their_end_are_served_at_once(kernel: Kernel, chores: Chores) -> None:
    assert run(kernel, "[*again()]") == "[False, False]"
    with chores.held():
        server, deputy = servers(kernel)
        assert run(kernel, "[*again(), *again()]") == "[False, False, False, False]"
    run(kernel, "wait_until_prepared()")
    assert ends(deputy)
    assert servers(kernel)[0] == server


def test_run_that_ends_during_the_chores_does_not_wait_for_them(kernel: Kernel, chores: Chores, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    run(kernel, f"run = launch(until, 2, args=({path!r},))")
    with chores.held():
        Path(path).touch()
        assert run(kernel, "list(run.result())") == "[True, True]"


def test_ranks_that_were_started_during_the_chores_outlive_them(kernel: Kernel, chores: Chores) -> None:
    run(kernel, "again()")
    with chores.held():
        server, deputy = servers(kernel)
        run(kernel, "session = Session(2).__enter__(); session.run(ready)")
    run(kernel, "wait_until_prepared()")
    assert servers(kernel) == [server, deputy]
    run(kernel, "session.run(ready)")
    run(kernel, "session.close()")
    assert ends(deputy)


def test_deputy_takes_the_place_of_a_server_killed_at_its_chores(kernel: Kernel, chores: Chores) -> None:
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


def test_killed_kernel_takes_a_server_at_its_chores_with_it(folder: Path, chores: Chores) -> None:
    with Kernel() as kernel:
        run(kernel, f"{DEFINITIONS}os.environ['PYTHONPATH'] = {str(folder)!r}")
        run(kernel, "again()")
        with chores.held():
            both = servers(kernel)
            kernel.kill()
            assert [ends(process) for process in both] == [True, True]


SCRIPT = """
import sys
from notebook_launcher import notebook_launch, prewarm
for word in sys.stdin:
    prewarm() if word == "prewarm\\n" else notebook_launch(print, 2, output="none")
    print("done", flush=True)
"""


@pytest.fixture
def do_in_script(folder: Path) -> Iterator[Callable[[str], None]]:
    """Have a script without IPython launch, or prewarm, and wait until it has."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        requests, answers = script.stdin, script.stdout
        assert requests is not None
        assert answers is not None

        def do(word: str) -> None:
            print(word, file=requests, flush=True)
            assert answers.readline() == "done\n"

        yield do
        requests.close()


def test_chores_of_a_script_begin_after_its_second_launch(do_in_script: Callable[[str], None], chores: Chores) -> None:
    do_in_script("launch")
    assert not chores.begin(within=5 * forkserver.CHORES_AFTER)
    do_in_script("launch")
    assert chores.begin(within=PATIENCE)


def test_chores_of_a_script_begin_after_prewarm(do_in_script: Callable[[str], None], chores: Chores) -> None:
    do_in_script("prewarm")
    assert chores.begin(within=PATIENCE)


IMPORTS = f"""
{FIRST}
import sys
from sklearn.experimental import enable_iterative_imputer
from notebook_launcher import Commands
from notebook_launcher.engines.fork_server_handle import fork_server

def knows():
    import sklearn.impute
    return "IterativeImputer" in vars(sklearn.impute)

def repeat(launch):
    "Launch until the ranks know it."
    while not all(found := [*launch()]):
        pass
    return found
"""


@pytest.fixture(scope="module")
def importing_kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        run(kernel, IMPORTS)
        yield kernel


def test_first_launch_waits_for_the_imports_that_it_needs(importing_kernel: Kernel) -> None:
    assert run(importing_kernel, "[*notebook_launch(knows, 2, output='none')]") == "[True, True]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "with Session(2, output='none') as session: found = [*session.run(knows)]",
        "found = [*launch(knows, 2, output='none', detached=True).result()]",
        "with Commands([[], []]) as e: found = repeat(lambda: notebook_launch(knows, 2, engine=e, output='none'))",
    ],
    ids=["session", "detached", "agents"],
)
def test_ranks_of_each_kind_inherit_what_an_import_has_registered(importing_kernel: Kernel, code: str) -> None:
    assert run(importing_kernel, f"{code}\nfound") == "[True, True]"


def test_image_of_reloaded_packages_is_made_anew_without_them(importing_kernel: Kernel) -> None:
    run(
        importing_kernel, "notebook_launch(knows, 2, output='none'); import importlib, joblib; importlib.reload(joblib)"
    )
    assert run(importing_kernel, "[*notebook_launch(lambda: 'joblib' in sys.modules, 1, output='none')]") == "[False]"


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


def test_imports_that_a_fork_cannot_inherit_are_left_to_the_ranks_by_name(tmp_path: Path) -> None:
    for name, text in LEAVING.items():
        (tmp_path / f"{name}.py").write_text(text)
    with Kernel() as kernel:
        run(kernel, f"{FIRST}\nimport os, sys, time; os.environ['PYTHONPATH'] = {str(tmp_path)!r}")
        run(kernel, "from notebook_launcher.engines.fork_server_handle import fork_server; fork_server().stop()")
        run(kernel, "from notebook_launcher.messaging import messages")
        told = f"messages.Imports(names={tuple(LEAVING)!r}, local={{'rich': '/here/rich.py'}}, environ={{}})"
        run(kernel, f"fork_server().tell({told})")
        run(kernel, "has = lambda: 'last' in sys.modules")
        run(kernel, "while not all(notebook_launch(has, 1, output='none')): pass")
        left_out = eval(run(kernel, "fork_server().image().left_out"))
        outcome = kernel.execute("print(*notebook_launch(lambda: 'good' in sys.modules and has(), 2))")
        assert run(kernel, "os.pread(fork_server()._errors, 10_000, 0)") == "b''"
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
