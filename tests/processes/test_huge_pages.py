"""Tests for large tensors of ranks, which lie in huge pages unless the user says otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import pytest
import torch

from notebook_launcher import notebook_launch

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE = "THP_MEM_ALLOC_ENABLE"

pytestmark = pytest.mark.skipif(
    not SWITCH.exists() or "[madvise]" not in SWITCH.read_text(),
    reason="this system gives huge pages to every program or to none",
)


def megabytes_in_huge_pages() -> tuple[int, str]:
    before = huge_megabytes()
    tensor = torch.ones(16 * 2**20)  # 64 MB
    return huge_megabytes() - before + 0 * len(tensor), os.environ[VARIABLE]


def huge_megabytes() -> int:
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) // 1024


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_large_tensor_of_a_rank_lies_in_huge_pages(method: Literal["forkserver", "spawn"]) -> None:
    for pages, variable in notebook_launch(megabytes_in_huge_pages, 2, start_method=method, devices="cpu"):
        assert pages >= 56
        assert variable == "1"


def test_user_can_switch_huge_pages_of_tensors_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {VARIABLE: "0"}
    assert [*notebook_launch(megabytes_in_huge_pages, 2, devices="cpu", env=off)] == [(0, "0")] * 2
    monkeypatch.setenv(VARIABLE, "0")
    assert [*notebook_launch(megabytes_in_huge_pages, 2, devices="cpu")] == [(0, "0")] * 2
