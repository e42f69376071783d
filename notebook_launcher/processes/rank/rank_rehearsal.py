"""The preparation of a spare rank, which has time until its launch arrives.

A forked process pays for each page of memory that it shares and changes, and running a function of Python changes its
page, because references are counted there. After the rehearsal the pages of a rank's code are its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import time

from notebook_launcher import travel
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import boot
from notebook_launcher.processes.notebook import frontend
from notebook_launcher.processes.rank import cores_and_gpu, cuda_work, rank_process
from notebook_launcher.processes.rank.inbox import Inbox
from notebook_launcher.processes.rank.rank_start import RankStart
from notebook_launcher.processes.rank.rendezvous import Rendezvous, torchrun_environment
from notebook_launcher.processes.rank.user_function import call_function

__all__ = ["rehearse"]


def rehearse(rank: int, kind: messages.Setup, rendezvous: Rendezvous) -> None:
    """Take a start and a call of a function that does nothing, and send its value, all within this process."""
    kernel, ours = channel_pair()
    with contextlib.closing(kernel), contextlib.closing(Channel(ours)) as channel:
        _rehearse_start(rank, kind, kernel, channel)
        _rehearse_call(rank, rendezvous, kernel, channel)


def _rehearse_start(rank: int, kind: messages.Setup, supervisor: Channel, channel: Channel) -> None:
    start = RankStart(rank=rank, setup=kind, channel_fd=-1, stdout_fd=-1, stderr_fd=-1, board_fd=-1)
    supervisor.send(start, [supervisor.fileno()] * 4)
    received = channel.receive()
    assert received is not None
    start, fds = received
    start = dataclasses.replace(start, channel_fd=fds[0])
    for fd in fds:
        os.close(fd)
    boot.enter_folder(start.setup)
    importlib.invalidate_caches()
    os.environ.update(torchrun_environment(start.setup, rank))
    if kind.use_gpu:
        cores_and_gpu.start_driver()
    travel.begin_random(travel.read_random_states(), None, rank, use_gpu=False)
    cores_and_gpu.set_threads(start.setup.threads_per_process)


def _rehearse_call(rank: int, rendezvous: Rendezvous, kernel: Channel, channel: Channel) -> None:
    with contextlib.closing(travel.pack_call(travel.FunctionCall(_do_nothing, (), {}))) as parcel:
        kernel.send(messages.RunCall(call_id=0, generation=0), [parcel.fileno()])
    received = Inbox(rank, channel, _do_nothing).receive()
    assert received is not None
    match received:
        case messages.RunCall() as call, (fd,):
            function_call, _ = travel.unpack_call(fd)
            value = call_function(*function_call[:3])
            cuda_work.finish()
            frontend.flush_figures()
            rank_process.mend_output()
            fd = travel.pack_value(value)
            channel.send(
                messages.Returned(
                    call_id=call.call_id, time=time.monotonic(), peak_rss=0, group=rendezvous.state(), unsent=""
                ),
                [fd],
            )
            os.close(fd)


def _do_nothing(*_: object) -> None:
    """Stand for the user's function."""
