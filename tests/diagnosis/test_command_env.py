"""`notebook-launcher env` and `doctor()`: a real launch, a real fork, a pretended driver, and each verdict's cause."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from notebook_launcher import Diagnosis, Finding, doctor
from notebook_launcher.command_line.program import main
from notebook_launcher.diagnosis import doctor as trial
from notebook_launcher.diagnosis import facts
from notebook_launcher.diagnosis.finding import NAME_WIDTH
from notebook_launcher.errors import ConfigError
from tests.support.compiled_libraries import NVML, compile_library, needs_compiler
from tests.support.kernels import ROOT
from tests.support.programs import type_command

# A matrix product starts threads that a fork of the process does not have.
USED_KERNEL = """
import sys, torch
torch.set_num_threads(2)
torch.ones(1500, 1500) @ torch.ones(1500, 1500)
torch.ones(1 << 20).add_(1)
from notebook_launcher import doctor
print(doctor(launch=False).to_json())
"""


def test_diagnosis_ends_with_a_real_launch():
    told = json.loads(doctor().to_json())
    launch = {finding["name"]: finding for finding in told["findings"] if finding["area"] == trial.AREA}
    assert list(launch) == [
        "start",
        "all_reduce of 1 MB",
        "all_reduce of 16 MB",
        "all_reduce of 64 MB",
        "loader workers",
        "stop",
    ]
    assert {finding["verdict"] for finding in launch.values()} == {"good"}
    assert "gloo" in launch["start"]["fact"]
    assert launch["all_reduce of 64 MB"]["fact"].endswith("B/s")


def test_fork_of_a_process_that_used_threads_is_tried_and_reported():
    done = subprocess.run(
        [sys.executable, "-c", USED_KERNEL], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    (fork,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["name"] == "fork"]
    assert fork["verdict"] == "warning"
    assert "cannot run parallel operations" in fork["fact"]
    assert 'start_method="fork"' in fork["advice"]


@needs_compiler
def test_gpus_are_reported_with_users_and_the_way_between_them(tmp_path):
    env = {"LD_LIBRARY_PATH": str(compile_library(tmp_path, "libnvidia-ml.so.1", NVML)), "PRETEND_USED": "1"}

    def diagnose(**more: str) -> tuple[int, dict[str, dict[str, str]]]:
        done = type_command("env", "--json", "--no-launch", cwd=tmp_path, env={**env, **more})
        found = json.loads(done.stdout)["findings"]
        return done.returncode, {finding["name"]: finding for finding in found if finding["area"] == "GPUs"}

    _, told = diagnose()
    assert told["driver"]["fact"] == "535.183.01"
    assert re.fullmatch("Pretend, 7[0-9] GB free of 80 GB", told["GPU 0"]["fact"])
    assert told["GPU 1"]["fact"].startswith("Pretend, 1 GB free of 80 GB; used by 1 (")
    assert told["GPU 1"]["advice"].startswith("end process 1, or choose other GPUs")
    assert told["GPU 0 to 1"]["fact"].startswith("on different NUMA nodes; no peer access")
    assert 'env={"NCCL_P2P_DISABLE": "1"}' in told["GPU 0 to 1"]["advice"]
    assert "start" not in told
    status, told_again = diagnose(PRETEND_UNLOADED="1")
    assert told_again["start"]["fact"].endswith("as it will at each launch: persistence mode is off")
    assert told_again["start"]["advice"].startswith("sudo nvidia-smi -pm 1")
    if "GPUs" in told:  # This torch is built without CUDA, so the pretended GPUs are of no use.
        assert (status, told["GPUs"]["verdict"]) == (1, "problem")


def test_cuda_in_this_process_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "CUDA_FILE", os.path.realpath(tmp_path / "uvm"))
    with (tmp_path / "uvm").open("w"):
        found = facts.cuda_finding()
    assert (found.verdict, found.fact) == ("warning", "started in this process, by a cell or an import")
    assert facts.cuda_finding().verdict == "fact"


def test_limits_have_a_verdict_by_what_is_left(tmp_path, monkeypatch):
    assert facts.open_files(100_000, 100_000).verdict == "fact"
    assert facts.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).fact == "unlimited"
    few = facts.open_files(len(list(Path("/proc/self/fd").iterdir())) + 40, 4096)
    assert (few.verdict, few.advice) == ("warning", "ulimit -n 4096 in the shell that starts Jupyter")
    assert facts.open_files(20, 4096).verdict == "problem"
    assert facts.shared_memory(str(tmp_path / "none")).verdict == "problem"
    monkeypatch.setattr(facts, "SMALL_SHM", 1 << 62)
    assert "--shm-size" in facts.shared_memory(str(tmp_path)).advice


def test_failed_launch_is_a_problem_with_the_error():
    found = trial.failure_finding(ConfigError("num_processes=2 is too many"))
    assert (found.verdict, found.fact) == ("problem", "ConfigError: num_processes=2 is too many")
    assert "env --json" in found.advice
    assert "inside a rank" in trial.failure_finding(ValueError("boom")).advice


def test_diagnosis_reads_alike_as_text_and_in_a_notebook(capsys):
    diagnosis = doctor(launch=False)
    assert {finding.area for finding in diagnosis.findings} >= {"software", "limits", "names", "this process"}
    for finding in diagnosis.findings:
        assert finding.name in str(diagnosis)
        assert bool(finding.advice) == (finding.verdict in ("warning", "problem"))
    assert diagnosis._repr_html_().count("<table") == len({finding.area for finding in diagnosis.findings})
    bad = Diagnosis((Finding(area="a", name="<x>", fact="1 < 2", verdict="problem", advice="type & run"),))
    assert not bad
    assert str(bad).splitlines() == ["a", f"  ✗ {'<x>':<{NAME_WIDTH}} 1 < 2", "      -> type & run", "1 problem"]
    assert "&lt;x&gt;" in bad._repr_html_()
    assert main(["env", "--no-launch"]) == int(not diagnosis.ok)
    assert "software" in capsys.readouterr().out
