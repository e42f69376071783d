"""The debugger in the rank that failed: `session.debug()`, `%debug`, `notebook_launch(..., debug=True)`."""

from __future__ import annotations

import os
import pty
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import end, read_until, surroundings
from tests.support.warm_kernels import run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = """
def rank():
    return int(os.environ["RANK"])

def scale(batch):
    factor = 10
    if rank() == 1:
        raise ValueError("bad batch")
    return batch * factor

def train():
    import torch, torch.distributed as dist
    weights = torch.zeros(1000, 1000)
    scale(7)
    dist.barrier()

def die():
    import torch.distributed as dist
    if rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

def in_thread():
    global reason
    try:
        session.debug()
    except CallOrderError as error:
        reason = str(error)

def pid():
    return os.getpid()
"""


@pytest.fixture
def session(module_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, with an open session in which `train` has failed."""
    failed = module_kernel.execute("session = Session(2, output='none')\nsession.run(train)")
    assert failed.error == "ValueError: bad batch"
    yield module_kernel
    run_cell(module_kernel, "session.close()")


def answered(kernel: Kernel, code: str, *commands: str) -> tuple[Outcome, list[str]]:
    """Run a cell, type commands at the prompts of its debugger, and return the prompts, too."""
    prompts: list[str] = []
    left = iter(commands)

    def answer(prompt: str, _is_password: bool) -> str:  # as a kernel calls it
        prompts.append(prompt)
        return next(left)

    return kernel.execute(code, answer_input=answer), prompts


def test_debug_opens_the_frames_of_the_culprit(session: Kernel) -> None:
    failed = session.execute("session.run(train)")
    assert failed.error == "ValueError: bad batch"
    assert "session.debug() opens a debugger where rank 1 failed. Its frames hold 4 MB of tensors" in failed.traceback
    outcome, prompts = answered(
        session, "session.debug()", "p factor", "up", "p weights.shape", "list", "p dist.get_rank()", "q"
    )
    assert outcome.error is None, outcome.traceback
    assert prompts == ["(rank 1 pdb) "] * 6
    assert outcome.stdout.startswith("> Cell In[")
    assert "10\n" in outcome.stdout
    assert "torch.Size([1000, 1000])" in outcome.stdout
    assert "    scale(7)" in outcome.stdout
    assert outcome.stdout.rstrip().endswith("1"), outcome.stdout
    waited, _ = answered(
        session, "session.debug(0)", "p dist.is_initialized(), dist.get_world_size()", "dist.barrier()", "q"
    )
    assert "(True, 2)" in waited.stdout
    assert "Connection closed by peer" in waited.stdout, waited.stdout
    assert session.execute("print(session.run(pid)[:] != [])").stdout == "True\n"


def test_debug_magic_opens_the_rank_of_the_last_exception_and_a_rank_that_dies_there_is_started_again(
    session: Kernel,
) -> None:
    outcome, prompts = answered(session, "%debug", "p batch", "q")
    assert prompts == ["(rank 1 pdb) "] * 2
    assert "7\n" in outcome.stdout
    died, _ = answered(session, "session.debug()", "import os; os._exit(3)")
    assert "rank 1 died in the debugger" in str(died.error)
    assert session.execute("print(len(session.run(pid)))").stdout == "2\n"


@pytest.mark.parametrize("call", [
    "notebook_launch(train, 2, output='none')",
    "notebook_launch(train, 2, outptu='none')",  # An error before any rank starts.
])  # fmt: skip
def test_debug_magic_after_a_single_launch_opens_the_cell(module_kernel: Kernel, call: str) -> None:
    failed = module_kernel.execute(f"from notebook_launcher import launch\nattempt = 7\n{call}")
    assert failed.error is not None
    outcome, prompts = answered(module_kernel, "%debug", "p attempt", "where", "q")
    assert outcome.error is None, outcome.traceback
    assert prompts == ["ipdb> "] * 3
    assert "7\n" in outcome.stdout
    assert call in re.sub(r"\x1b\[[0-9;]*m", "", outcome.stdout)
    assert "notebook_launcher/" not in outcome.stdout


REFUSALS = {
    "session.debug(7)": "there is no rank 7: this session has 2 ranks, 0 to 1",
    "session.debug(True)": "there is no rank True",
    "with Session(2) as other: other.debug()": "this session has had no run yet",
    "import threading; threading.Thread(target=in_thread).start()": None,
    "session.forget(); session.debug()": "has released the frames of the last run",
    "session.run(pid); session.debug()": "the last run, pid, has returned on every rank: no rank is to blame",
    "session.debug(1)": "rank 1 returned: there is nothing to look into",
    "session.run(die)": "RankFailedError",
    "session.debug() ": "rank 1 died, and its frames with it: there is nothing to look into. Frames are kept by rank 0",
    "waiting = session.launch(time.sleep, args=(60,)); session.debug()  ": "session.debug() works once the run is over",
    "waiting.stop(); session.debug()": "the last run, sleep, was stopped: no rank is to blame",
}
"""By cell, in this order: the words of the error."""


def test_debug_gives_the_reason_why_it_cannot_open(session: Kernel) -> None:
    for code, words in REFUSALS.items():
        outcome, prompts = answered(session, code)
        assert (words or "") in (outcome.error or ""), (code, outcome.traceback)
        assert not prompts
    assert session.execute("print(reason)").stdout.startswith("session.debug() opens a debugger, whose prompt must be")


def test_debugger_is_refused_where_no_answer_is_possible(session: Kernel) -> None:
    for code in ("session.debug()", "notebook_launch(train, 2, debug=True)"):
        outcome = session.execute(code)
        assert "prompt must be answered: this front end cannot ask for input (nbclient" in (outcome.error or "")


def test_debug_option_asks_before_the_peers_are_stopped(session: Kernel) -> None:
    code = "notebook_launch(train, 2, debug=True, timeout=1, output='none')"
    # The prompt stays open for longer than the run's timeout, which the debugger pauses.
    commands = ["import time; time.sleep(1.1)", "p factor", "import os; os.environ['WORLD_SIZE']", "q"]
    outcome, prompts = answered(session, code, *commands)
    assert prompts == ["(rank 1 pdb) "] * 4
    assert "rank 1 failed: ValueError: bad batch. The other ranks stay as they are; q ends the run." in outcome.stdout
    assert "10\n" in outcome.stdout
    assert outcome.error == "ValueError: bad batch"
    assert "rank 0 failed as a consequence" in outcome.traceback


def test_interrupt_at_the_prompt_of_the_option_names_the_failure(session: Kernel) -> None:
    def interrupt(_prompt: str, _password: bool) -> str:  # as a kernel calls it
        session.interrupt()
        return "p 1"

    outcome = session.execute("notebook_launch(train, 2, debug=True)", answer_input=interrupt)
    assert outcome.error == "KeyboardInterrupt: train was stopped; rank 1 had failed before: ValueError: bad batch"
    assert "ValueError: bad batch" in outcome.traceback
    assert "KeyboardInterrupt: train was stopped; rank 1 had failed before" in outcome.traceback
    assert "not in it" not in outcome.stdout
    assert "cmdloop" not in outcome.stdout


def test_debug_magic_opens_the_rank_in_the_ipython_of_a_terminal(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        environment = {**surroundings(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
        os.execve(sys.executable, [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner"], environment)
    cell = "%%ranks\nfactor = 7\n1 / 0"
    for prompt, line in [
        (b"In [1]: ", "%load_ext notebook_launcher"),
        (b"In [2]: ", "%ranks 2 devices=cpu"),
        (b"In [3]: ", f"get_ipython().run_cell({cell!r}) and None"),
        (b"In [4]: ", "%debug"),
        (b" pdb) ", "p factor * 2"),
    ]:
        read_until(terminal, prompt)
        os.write(terminal, f"{line}\n".encode())
    read_until(terminal, b"14")
    os.write(terminal, b"q\n")
    read_until(terminal, b"In [5]: ")
    os.write(terminal, b"exit\n")
    assert end(pid, terminal) == 0
