"""The crash table: where a rank dies x how it dies -> what the cell gets, and nothing left.

Rank 1 is the one that dies; its peers wait in a barrier, which is where the wrong one is usually blamed.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import notebook_launch
from notebook_launcher.kernel.inspection.hangs import SIZES_DIFFER
from tests.support.warm_kernels import takes_less_than

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel


def rank():
    return int(os.environ.get("RANK", "-1"))


def die(how):
    print("last words", flush=True)
    match how:
        case "exception":
            raise ValueError("boom")
        case "sys.exit":
            sys.exit(3)
        case "sys.exit of a text":
            sys.exit("please give a file")
        case "os._exit":
            os._exit(4)
        case "segfault":
            ctypes.string_at(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


class Arriving:
    def __init__(self, how):
        self.how = how

    def __setstate__(self, state):
        if rank() == 1:
            die(state["how"])


class Returning:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        die(self.how)


class Loaded:
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 4

    def __getitem__(self, at):
        if rank() == 1:
            die(self.how)
        return at


def meet():
    import torch.distributed as dist

    dist.barrier()


def arriving(how, thing):
    meet()


def function(how, _):
    if rank() == 1:
        die(how)
    meet()


def collective(how, _):
    import threading

    if rank() == 1:
        # Dies while it is itself inside the barrier that all ranks but the last have entered.
        killer = threading.Timer(0.2, die, [how])
        killer.daemon = True
        killer.start()
    if int(os.environ["WORLD_SIZE"]) - 1 == rank() != 1:
        time.sleep(60)
    if rank() == 1 == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(60)
    meet()


def returning(how, _):
    return Returning(how) if rank() == 1 else meet()


def loader(how, _):
    from torch.utils.data import DataLoader

    data: Any = Loaded(how)
    list(DataLoader(data, num_workers=1))
    meet()


def exiting(how, _):
    import atexit

    meet()
    if rank() == 1:
        atexit.register(die, how)
    return rank()


def table(where, how, num=2, **options):
    # Made here, so that its state does the evil on arrival.
    notebook_launch(globals()[where], num, args=(how, Arriving(how) if where == "arriving" else None), **options)


# The fork server imports more once it has been idle for 0.2 s; until then the cores are shared with that.
PREPARED = """
def is_prepared():
    return "notebook_launcher.training.accelerator" in sys.modules
while not notebook_launch(is_prepared, 1, output="none")[0]:
    time.sleep(0.3)
"""

DEFINED: tuple[Any, ...] = (rank, die, Arriving, Returning, Loaded, meet, arriving, function, collective, returning)
DEFINED += (loader, exiting, table)
# A warm kernel has imported `ctypes`, `os`, `signal`, `sys`, `time` and the names of `notebook_launcher`.
KERNEL_CODE = "\n\n".join(map(inspect.getsource, DEFINED)) + PREPARED


KILLED = "RankFailedError: rank 1 of 2 was killed by "
LOADER = "RuntimeError: DataLoader worker (pid"
TABLE = {
    ("arriving", "exception"): "ValueError: boom",
    ("arriving", "SIGKILL"): KILLED + "SIGKILL(-9)",
    ("function", "exception"): "ValueError: boom",
    ("function", "sys.exit"): "RankFailedError: rank 1 of 2 called sys.exit(3)",
    ("function", "sys.exit of a text"): "RankFailedError: rank 1 of 2 called sys.exit('please give a file')",
    ("function", "os._exit"): "RankFailedError: rank 1 of 2 exited with code 4 before it returned",
    ("function", "segfault"): KILLED + "SIGSEGV(-11) in C code",
    ("function", "SIGKILL"): KILLED + "SIGKILL(-9)",
    ("collective", "os._exit"): "RankFailedError: rank 1 of 2 exited with code 4 before it returned",
    ("collective", "SIGKILL"): KILLED + "SIGKILL(-9)",
    ("returning", "SIGKILL"): KILLED + "SIGKILL(-9)",
    ("loader", "exception"): "ValueError: Caught ValueError in DataLoader worker process 0.",
    ("loader", "SIGKILL"): LOADER,
    ("exiting", "os._exit"): "RankFailedError: rank 1 of 2 exited with code 4 after it had returned",
    ("exiting", "segfault"): KILLED + "SIGSEGV(-11) after it had returned",
    ("exiting", "SIGKILL"): KILLED + "SIGKILL(-9) after it had returned",
}


@pytest.mark.parametrize(("where", "how"), TABLE)
def test_cell_gets_the_true_culprit(kernel: Kernel, where: str, how: str) -> None:
    def attempt() -> float:
        began = time.monotonic()
        outcome = kernel.execute(f"table({where!r}, {how!r})")
        seconds = time.monotonic() - began
        assert outcome.error is not None
        assert outcome.error.startswith(TABLE[where, how]), outcome.error
        assert kernel.execute("import sys; print(sys.last_value.rank)").stdout == "1\n"
        assert "last words" in outcome.stdout
        match where, how:
            case "function", "exception":
                assert "rank 1 of 2 failed first; rank 0 failed as a consequence." in outcome.traceback
                assert 'raise ValueError("boom")' in outcome.traceback
                assert "Cell In[" in outcome.traceback
                assert "in die" in outcome.traceback
                assert "notebook_launcher/processes" not in outcome.traceback
            case "function", "os._exit":
                assert "Its last output:\n    last words" in outcome.error
            case "exiting", "segfault":
                assert "after it had returned: in die, Cell In[" in outcome.error
                assert "ctypes.string_at(0). The values are in the exception's `results`." in outcome.error
        return seconds

    # A loader hears of a dead worker by SIGCHLD. Python overlooks a signal that comes just before a wait begins, and
    # the loader looks for itself every 5 s only.
    assert takes_less_than(2, attempt)


@pytest.mark.parametrize(
    ("where", "how"),
    [("function", "exception"), ("collective", "SIGKILL")],
)
def test_culprit_of_four_ranks_is_found(kernel: Kernel, where: str, how: str) -> None:
    outcome = kernel.execute(f"table({where!r}, {how!r}, 4)")
    assert outcome.error is not None
    assert outcome.error.startswith(TABLE[where, how].replace("of 2", "of 4")), outcome.error
    victims = kernel.execute("print([f.victim for f in sys.last_value.failures][0], len(sys.last_value.failures))")
    assert victims.stdout == "False 4\n"


@pytest.mark.parametrize(
    ("where", "how"),
    [("function", "stuck"), ("function", "stubborn"), ("loader", "stubborn")],
)
def test_stuck_rank_is_ended_after_the_timeout(kernel: Kernel, where: str, how: str) -> None:
    def attempt() -> float:
        began = time.monotonic()
        outcome = kernel.execute(f"table({where!r}, {how!r}, timeout=1)")
        seconds = time.monotonic() - began
        assert outcome.error is not None
        assert outcome.error.startswith("RunTimeoutError: the run was stopped: it had not ended after timeout=1 s.")
        assert "time.sleep(60)" in outcome.error or "loader" in outcome.error
        return seconds

    assert takes_less_than(1 + 3, attempt)


@pytest.mark.parametrize("how", ["exception", "sys.exit"])
def test_exception_in_an_exit_handler_is_shown_and_not_a_failure(kernel: Kernel, how: str) -> None:
    outcome = kernel.execute(f"table('exiting', {how!r})")
    assert outcome.error is None
    assert ("ValueError: boom" if how == "exception" else "SystemExit: 3") in outcome.stderr


@pytest.mark.parametrize("culprit", [0, 1])
def test_exception_counts_though_its_rank_is_killed_while_it_exits(culprit: int) -> None:
    def raise_and_linger() -> None:
        import atexit
        import time

        import torch.distributed as dist

        atexit.register(time.sleep, 60)
        if dist.get_rank() == culprit:
            raise ZeroDivisionError("the true cause")
        dist.barrier()

    with pytest.raises(ZeroDivisionError, match="the true cause") as caught:
        notebook_launch(raise_and_linger, 2, output="none")
    assert caught.value.rank == culprit  # type: ignore[attr-defined]


def test_rank_stuck_at_exit_is_killed_and_the_results_are_kept(kernel: Kernel) -> None:
    outcome = kernel.execute("print(list(notebook_launch(exiting, 2, args=('stuck', None))))")
    assert outcome.error is None
    assert (
        "rank 1 was killed: 5 s after it returned it was still running exit handlers or threads. Finish such work"
        in outcome.stderr
    )
    assert outcome.stdout.endswith("[0, 1]\n")


def test_partial_results_are_on_the_exception(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def half():\n"
        "    if rank() == 1:\n"
        "        time.sleep(0.5)\n"
        "        raise KeyError('late')\n"
        "    return {'rank': rank()}\n"
        "try:\n"
        "    notebook_launch(half, 2)\n"
        "except KeyError as error:\n"
        "    print(error.rank, error.results.returned, [f.summary for f in error.failures])\n"
    )
    assert outcome.stdout.endswith("1 {0: {'rank': 0}} [\"KeyError: 'late'\"]\n")


def test_crash_names_the_users_line_and_shows_the_last_words_before_the_dump(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def crash():\n"
        "    print('epoch 3', flush=True)\n"
        "    print('step 17', end='', file=sys.stderr, flush=True)\n"
        "    ctypes.string_at(0)\n"
        "notebook_launch(crash, 1, output='none')\n"
    )
    message, place, *output = (outcome.error or "").replace(", in crash, ", "\n").split("\n")
    assert message == "RankFailedError: rank 0 of 1 was killed by SIGSEGV(-11) in C code"
    assert place.endswith("line 4: ctypes.string_at(0)")
    assert place.startswith("Cell In[")
    assert output[0] == "Its last output:"
    assert sorted(output[1:]) == ["    epoch 3", "    step 17"]  # Two streams, so in either order.


def test_crash_outside_of_python_is_where_the_main_thread_was(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def mismatch():\n"
        "    import torch, torch.distributed as dist\n"
        "    dist.all_reduce(torch.ones(1 + 1000 * rank()))\n"  # A thread of gloo's ends the process.
        "notebook_launch(mismatch, 2, output='none')\n"
    )
    message, _, output = (outcome.error or "").partition("\nIts last output:\n")
    assert "was killed by SIGABRT(-6) in C code, in mismatch, Cell In[" in message
    place, _, advice = message.partition("\n")
    assert place.endswith("line 3: dist.all_reduce(torch.ones(1 + 1000 * rank()))")
    assert advice.startswith("Pass check_collectives=True to have the first collective named that does not match")
    assert SIZES_DIFFER.search(output)
    assert "File " not in output


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a real memory limit, which a process may enter."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory").is_dir()
    group = (root / "memory" if version_1 else root) / "notebook-launcher-test"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(200 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_out_of_memory_kill_is_recognised(kernel: Kernel, group: Path) -> None:
    outcome = kernel.execute(
        "def hungry():\n"
        "    import numpy, torch.distributed as dist\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        open({os.fspath(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "        keep = [numpy.ones(1 << 24) for _ in range(100)]\n"
        "    dist.barrier()\n"
        "notebook_launch(hungry, 2)"
    )
    assert (outcome.error or "").startswith(KILLED + "SIGKILL(-9), out of memory: it had")
