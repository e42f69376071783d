"""A channel whose receiver has no file descriptor left."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.kernels import ROOT

PROGRAM = """
import os
import resource

from notebook_launcher.messaging.channel import PACKET_LIMIT, Channel, channel_pair

def receive_with_room_for(number):
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for _ in range(number):
        os.close(taken.pop())
    try:
        return theirs.receive()
    finally:
        for fd in taken:
            os.close(fd)

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
ours, other = channel_pair()
theirs = Channel(other)
before = len(os.listdir("/proc/self/fd"))
ours.send("small", [0, 0])
print(receive_with_room_for(1))
ours.send(bytes(PACKET_LIMIT))
print(receive_with_room_for(0))
ours.send("later", [0])
record, fds = theirs.receive()
print(record, len(fds))
os.close(fds[0])
print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_record_without_room_for_its_descriptors_arrives_without_any() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "('small', [])",
        "(Unreadable(reason='this process has no file descriptor left to receive it'), [])",
        "later 1",
        "0",
    ]
