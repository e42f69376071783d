"""Links and channels: records over descriptors, and descriptors beside them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.messaging.links import Link, LinkError, SilentError
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


LARGE = b"x" * 300_000
"""More than a pipe holds."""


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Both ends of a link: the second one receives what the first one sends."""
    read_fd, write_fd = os.pipe()
    with contextlib.ExitStack() as stack:
        sender, receiver = Link(-1, write_fd), Link(read_fd, -1)
        stack.callback(sender.close)
        stack.callback(receiver.close)
        yield sender, receiver


def test_lines_and_records_arrive_in_their_order_in_parts_or_together_until_the_end(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    os.write(sender._write_fd, b"half")
    with pytest.raises(SilentError, match=r"no message arrived for 0\.01 s"):
        receiver.read_line(0.01)
    os.write(sender._write_fd, b" a line\n")
    thread = threading.Thread(target=sender.send, args=("before", LARGE, {"after": 2}))
    thread.start()
    assert receiver.read_line() == b"half a line\n"
    assert [receiver.receive() for _ in range(3)] == ["before", LARGE, {"after": 2}]
    thread.join()
    sender.close_sending()
    with pytest.raises(LinkError, match="the link has ended"):
        receiver.receive()
    receiver.close()
    with pytest.raises(LinkError, match="descriptor"):
        receiver.receive()


def test_stream_without_records_is_refused(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    os.write(sender._write_fd, (2**62).to_bytes(8, "little"))
    with pytest.raises(LinkError, match="what arrives are no messages: one would have 4611686018427387904 bytes"):
        receiver.receive()


# Descriptors beside the records of a channel.


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
