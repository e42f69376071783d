"""A message that its reader does not know is a fault of this package: each reader names itself and the message."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import InternalError, Session, context, notebook_launch
from notebook_launcher.engines.cluster.agent import Agent
from notebook_launcher.engines.engine import FromRank, Output, RankLost
from notebook_launcher.engines.process_tree import ProcessTree
from notebook_launcher.kernel.run.thread import RunLoop
from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import forkserver, supervisor
from tests.support.run_state import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_PROCESS = 2**31 - 1


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Return two ends of a channel; an unknown message is under way to the second one."""
    ours, theirs = channel_pair()
    with theirs:
        ours.send("hello")
        yield ours, Channel(theirs)
        ours.close()


def test_supervisor_refuses_an_unknown_message(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="the supervisor got an unknown message: 'hello'"):
        supervisor.Supervisor(ends[1])._on_message()


def test_fork_server_refuses_an_unknown_message(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="the fork server got an unknown message: 'hello'"):
        forkserver._Server(ends[1], NO_PROCESS)._on_message()


def test_kernel_refuses_an_unknown_message_of_a_supervisor(ends: tuple[Channel, Channel]) -> None:
    tree: Any = object.__new__(ProcessTree)  # The constructor starts processes.
    tree._channel = ends[1]
    with pytest.raises(TypeError, match="the kernel got an unknown message from the supervisor: 'hello'"):
        tree._on_supervisor()


def send_hello() -> None:
    rank = context.current()
    assert rank is not None
    rank.send("hello")


def test_kernel_refuses_an_unknown_message_of_a_rank() -> None:
    message = "the run's thread failed: TypeError: the kernel got an unknown message from rank 0: 'hello'"
    with pytest.raises(InternalError, match=message):
        notebook_launch(send_hello, 1, devices="cpu", output="none")


def test_descriptors_of_events_after_an_unknown_message_are_closed() -> None:
    loop: Any = object.__new__(RunLoop)  # The constructor wants a run.
    loop._data = None
    fds = os.pipe()
    with pytest.raises(TypeError, match="the kernel got an unknown message from rank 0: 'hello'"):
        loop._handle_all(
            [FromRank(0, "hello", []), FromRank(0, "later", [fds[0]]), FromRank(0, "last", [fds[1]])], None
        )
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_agent_refuses_an_unknown_message_for_its_ranks() -> None:
    link: Any = None
    tree: Any = None
    with pytest.raises(TypeError, match="the agent got an unknown message: 'hello'"):
        Agent(link)._obey_for_tree("hello", tree)


def test_rank_ends_at_an_unknown_message() -> None:
    with Session(1, devices="cpu") as session:
        tree: Any = tree_of(session)
        tree.send(0, "hello")
        happened: list[Any] = []
        while not any(isinstance(event, RankLost) for event in happened):
            happened += tree.events(None)
    written = b"".join(event.data for event in happened if isinstance(event, Output))
    assert b"TypeError: rank 0 got an unknown message: 'hello'" in written
