"""Notices of ranks that died in a stop and were restarted."""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import Session, report
from tests.support.run_state import tree_of

if TYPE_CHECKING:
    import pytest


def test_notice_after_a_stop_with_nccl_names_what_would_have_kept_the_memory(capfd: pytest.CaptureFixture[str]) -> None:
    def hold() -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        report(begun=1)
        time.sleep(60)

    with Session(1) as session:
        session.run(int)
        tree: Any = tree_of(session)
        tree.setup = dataclasses.replace(
            tree.setup, backend="nccl"
        )  # The rank has gloo's group; the kernel's words are tried.
        run = session.launch(hold)
        while not run.metrics:
            assert not run.wait(0.01), run.exception()
        run.stop()
    assert "With NCCL a stop ends each rank that waits for its GPU" in capfd.readouterr().out
