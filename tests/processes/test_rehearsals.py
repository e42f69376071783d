"""Tests for what spare ranks and their supervisor do before their launch arrives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.kernels import ROOT

PREPARE = """
import os, random, signal, sys, threading
import psutil, torch
from notebook_launcher.config import LaunchConfig
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine.devices import Machine
from notebook_launcher.processes.rank import rank_rehearsal
from notebook_launcher.processes import spare_ranks, supervisor_rehearsal

machine = Machine(num_cores=2, gpus=(), why_no_gpu="")
plan = make_plan(LaunchConfig(num_processes=2, devices="cpu"), machine)
kind = spare_ranks.kind_of_launch(plan.setup(many_calls=False))
main = sys.modules["__main__"]

def left():
    process = psutil.Process()
    return process.num_fds(), process.children(), threading.active_count(), os.getcwd(), signal.set_wakeup_fd(-1)
"""

RANK = """
rendezvous = rank_rehearsal.Rendezvous(1, kind)
rank_rehearsal.rehearse(1, kind, rendezvous)
before, names = left(), {*vars(main)}
for _ in range(3):
    rank_rehearsal.rehearse(1, kind, rendezvous)
assert left() == before, (left(), before)
assert sys.modules["__main__"] is main and {*vars(main)} == names | {"before", "names", "_"}
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
"""

SUPERVISOR = """
class Spare:
    kind, store, waiting = kind, object(), set()

spare_rank = os.fork()
if spare_rank == 0:
    signal.pause()
Spare.waiting = {spare_rank}
supervisor_rehearsal.rehearse(Spare)
before = left()
for _ in range(3):
    supervisor_rehearsal.rehearse(Spare)
assert left() == before, (left(), before)
assert [process.pid for process in before[1]] == [spare_rank]
os.kill(spare_rank, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(spare_rank, 0)[1]) == -signal.SIGKILL
"""

NO_PROCESS = """
import resource
class Spare:
    kind, store, waiting = kind, object(), set()

supervisor_rehearsal.rehearse(Spare)  # Imports what it needs, from folders that only root may read, perhaps.
os.setuid(65534)  # The limit does not bind root.
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
supervisor_rehearsal.rehearse(Spare)
assert left()[1] == []
"""


@pytest.mark.parametrize("rehearsal", [RANK, SUPERVISOR, NO_PROCESS], ids=["rank", "supervisor", "no process"])
def test_rehearsal_leaves_nothing_behind(rehearsal: str) -> None:
    # In a process of its own: a rehearsal seeds its process and sets variables.
    subprocess.run([sys.executable, "-c", PREPARE + rehearsal], check=True, cwd=ROOT)
