"""What can only be tried on GPUs, beside the checks of `notebook-launcher check`: `make gpu-check` runs both.

Each test is a process of its own. `GPU_TESTS=cpu` runs their CPU forms, which show that the tests themselves work;
`GPU_TESTS=share` lets ranks share a GPU by NCCL 2.30 or newer.
"""

from __future__ import annotations

import os
import sys

import pytest

from notebook_launcher.gpu_check.check_program import count_gpus, main, run_one
from notebook_launcher.gpu_check.checks import Check, Hardware
from tests.gpu import late_ranks, launches, several_ranks, trainings

CHECKS = (*launches.CHECKS, *trainings.CHECKS, *several_ranks.CHECKS, *late_ranks.CHECKS)
HOW = os.environ.get("GPU_TESTS")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_gpus(check: Check) -> None:
    hardware = Hardware(0 if HOW == "cpu" else count_gpus(), shares=HOW == "share")
    if not hardware.num_gpus and HOW != "cpu":
        pytest.skip("there is no GPU that launches can use")
    outcome = run_one(check, hardware, (sys.executable, "-m", "tests.gpu.test_gpu"))
    if outcome.state == "SKIP":
        pytest.skip(outcome.reason)
    assert outcome.state == "PASS", f"{outcome.reason}\n{outcome.output}"


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
