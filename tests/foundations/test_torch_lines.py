"""Lines that torch writes for its own developers are kept off the output, and no others."""

from __future__ import annotations

import os

import pytest
import torch

from notebook_launcher.torch_lines import without_gloo_lines, without_profiler_lines

CONNECTED = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


def test_other_lines_on_standard_error_during_a_profilers_start_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with without_profiler_lines():
        os.write(2, b"before\nUSDT:2026-11-24 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n")
        os.write(2, b"WARNING: CUPTI is not there\nno end")
    assert capfd.readouterr().err == "before\nWARNING: CUPTI is not there\nno end"


@pytest.mark.parametrize(
    ("version", "expected"), [("2.8.0+cu128", "[Gloo] else\nend"), ("2.11.0", f"{CONNECTED}[Gloo] else\nend")]
)
def test_lines_of_gloo_are_held_back_where_torch_has_them(
    version: str, expected: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ValueError, match="passed on"), without_gloo_lines():
        os.write(1, f"{CONNECTED}[Gloo] else\nend".encode())
        raise ValueError("passed on")
    assert capfd.readouterr().out == expected
