"""Tests for large tensors of ranks, which lie in huge pages unless the user says otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def test_large_tensors_of_ranks_lie_in_huge_pages_unless_the_user_switches_them_off() -> None:
    for pages, variable in notebook_launch(megabytes_in_huge_pages, 2, devices="cpu"):
        assert pages >= 56
        assert variable == "1"
    assert [*notebook_launch(megabytes_in_huge_pages, 2, devices="cpu", env={VARIABLE: "0"})] == [(0, "0")] * 2
