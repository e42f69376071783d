"""Errors of a machine that cannot hold the ranks, with the advice that fits what is used up."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_launcher import Commands, notebook_launch
from notebook_launcher.engines import process_tree
from notebook_launcher.engines.process_tree import ProcessTree
from notebook_launcher.errors import ResourceError
from tests.engines.calls import sum_up
from tests.engines.options import QUIET

ADVICE = {
    errno.EMFILE: "6 descriptors for each rank while it starts, and `ulimit -n` shows the limit: use fewer ranks, or",
    errno.ENFILE: "`ulimit -n` shows the limit",
    errno.EAGAIN: "The limit on processes may be reached (`ulimit -u`, or the container's pids limit). Use fewer ranks",
    errno.ENOSPC: "Use fewer ranks, or free what is used up; doctor() shows the limits of this machine.",
}


def refusing(number: int) -> Any:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", ADVICE)
def test_refused_start_of_ranks_names_them_and_the_limit(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for name in ("_drop", "close"):
        monkeypatch.setattr(ProcessTree, name, lambda *_: None)
    monkeypatch.setattr(ProcessTree, "_open", refusing(number))
    monkeypatch.setattr(process_tree, "RankPipes", refusing(number))
    setup: Any = SimpleNamespace(num_processes=4)
    tree: Any = object.__new__(ProcessTree)
    with pytest.raises(ResourceError) as caught:
        tree.__init__(setup, refusing(number))
    assert f"cannot start 4 ranks: {os.strerror(number)}. " in str(caught.value)
    assert ADVICE[number] in str(caught.value)
    tree._pipes = {}
    with pytest.raises(ResourceError) as caught:
        tree.replace(2)
    assert f"cannot restart rank 2 of 4, whose process has ended: {os.strerror(number)}. " in str(caught.value)
    assert ADVICE[number] in str(caught.value)


def test_node_that_cannot_hold_its_ranks_is_named_with_the_reason_once() -> None:
    """The ranks of the other node, which has room, end, and the next launch has both nodes."""
    expected = (
        r"\[Errno 24\] rank 8 of 16 \(.*\) could not be started: Too many open files\. "
        r"A launch needs 6 descriptors for each rank while it starts, and `ulimit -n` shows the limit: "
        r"use fewer ranks, or raise it on that machine\."
    )
    with Commands([[], ["bash", "-c", 'ulimit -n 45; exec "$@"', "bash"]]) as engine:
        with pytest.raises(ResourceError, match=f"^{expected}$"):
            notebook_launch(sum_up, 16, engine=engine, **QUIET)
        assert list(notebook_launch(sum_up, 2, engine=engine, **QUIET)) == [2.0, 2.0]
