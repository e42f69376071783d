"""A node that cannot hold its ranks."""

from __future__ import annotations

import pytest

from notebook_launcher import Commands, notebook_launch
from notebook_launcher.errors import ResourceError
from tests.engines.calls import QUIET, sum_up


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
