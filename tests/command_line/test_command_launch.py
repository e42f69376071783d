"""`notebook-launcher launch` in real processes: scripts, modules, failures, stops, and words that cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import LaunchConfig, runs
from notebook_launcher.command_line.launch_command import (
    OTHER_NAMES,
    given_options,
    sharding_env,
)
from notebook_launcher.command_line.program import COMMANDS, main, make_parser
from notebook_launcher.history.run_folders import VARIABLE
from tests.support.programs import end, read_until, surroundings, type_command, type_in_terminal

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """\
import json, os, pickle, sys
import torch, torch.distributed as dist

class Point:
    x = 1

def main():
    dist.init_process_group("gloo")     # as a script for torchrun does; the group is up already
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    here = sys.modules["__main__"]
    facts = {
        "total": total.item(),
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "spec": __spec__ and __spec__.name,
        "package": __package__,
        "pickled": type(pickle.loads(pickle.dumps(Point()))) is here.Point,
        "precision": os.environ.get("ACCELERATE_MIXED_PRECISION"),
        "word": os.environ.get("WORD"),
        "debug": os.environ.get("ACCELERATE_DEBUG_MODE"),
        "fsdp": [os.environ.get(name) for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS")],
    }
    print(json.dumps(facts) if dist.get_rank() == 0 else "rank 1 is here")

if __name__ == "__main__":
    main()
    dist.destroy_process_group()
"""
LOOP = """\
import time, os
from notebook_launcher import track
for step in track(range(100_000), description="walking"):
    time.sleep(0.01)
"""
SETTINGS = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
num_processes: 4
mixed_precision: bf16
use_cpu: true
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    return folder / "train.py"


def test_script_runs_as_the_main_program_of_each_rank(script, home, tmp_path):
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    ours = ["--config_file", "settings.yaml", "--num-processes", 2, "--env", "WORD=a=b", "--debug"]
    ours += ["--fsdp_offload_params", "False"]
    theirs = ["--main_process_port", 29501, "--rdzv_backend=static"]
    done = type_command("launch", *ours, *theirs, script, "--lr", "0.1", "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[rank 1] rank 1 is here\n" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("[rank 0] {"))
    assert json.loads(line.removeprefix("[rank 0] ")) == {
        "total": 3.0,
        "argv": [str(script), "--lr", "0.1", "--cpu"],
        "path": str(script.parent),
        "file": str(script),
        "spec": None,
        "package": None,
        "pickled": True,
        "precision": "bf16",
        "word": "a=b",
        "debug": "true",
        "fsdp": ["true", "2", "false"],
    }
    assert "settings of settings.yaml: devices=cpu, mixed_precision=bf16" in done.stderr
    assert "ignored: --main_process_port 29501 (the launcher binds a port of its own" in done.stderr
    assert "ignored: --rdzv_backend static (ranks of one machine meet" in done.stderr
    (run,) = runs(home)
    assert (run.name, run.state, run.config.num_processes) == ("train.py", "done", 2)


def test_console_script_runs_a_module_of_the_working_directory_and_returns_its_exit_status(tmp_path):
    # Its own folder is the first on the path, as pip writes it; that of `python -m` is the working directory.
    program, package = tmp_path / "bin/notebook-launcher", tmp_path / "here/package"
    program.parent.mkdir()
    program.write_text("import sys\nfrom notebook_launcher.command_line.program import main\nsys.exit(main())\n")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(f"{PROGRAM}    import sys\n    sys.exit(7)\n")
    words = [sys.executable, str(program), "launch", "-n", "2", "--cpu", "-m", "package", "--lr", "0.1"]
    done = subprocess.run(
        words, cwd=package.parent, env=surroundings(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("[rank 0] {"))
    facts = json.loads(line.removeprefix("[rank 0] "))
    assert facts["argv"] == [str(package / "__main__.py"), "--lr", "0.1"]
    assert (facts["spec"], facts["package"]) == ("package.__main__", "package")
    assert facts["path"] == str(package.parent)
    assert "sys.exit(7)" in done.stderr


def test_exception_of_one_rank_is_shown_once_with_the_lines_of_the_script(tmp_path):
    (tmp_path / "__main__.py").write_text(
        "import os\nprint(__file__)\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\n"
    )
    done = type_command("launch", "-n", 2, "--backend", "none", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert f"[ranks 0,1] {tmp_path}/__main__.py" in done.stdout
    assert done.stderr.count("Traceback") == 1
    assert f'File "{tmp_path}/__main__.py", line 4, in <module>' in done.stderr
    assert done.stderr.count("  File ") == 1, "frames of the launcher or of runpy are shown"
    assert "rank 1 of 2 failed first" in done.stderr


def test_terminal_shows_progress_and_its_interrupt_ends_the_run(home, tmp_path):
    (tmp_path / "walk.py").write_text(LOOP)
    env = {VARIABLE: str(home), "COLUMNS": "100"}
    pid, terminal = type_in_terminal("launch", "-n", 2, "--cpu", "walk.py", cwd=tmp_path, env=env)
    try:
        shown = read_until(terminal, b"left")
        assert b"walk.py: walking" in shown
        os.write(terminal, b"\x03")
        shown += read_until(terminal, b"stopped after")
    finally:
        status = end(pid, terminal)
    assert status == 128 + signal.SIGINT
    (run,) = runs(home)
    assert run.state == "stopped"


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (
            {"use_deepspeed": True, "zero_stage": "3", "offload_param_device": "cpu", "zero3_init_flag": "True"},
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            },
        ),
        (
            {"use_parallelism_config": True, "parallelism_config_dp_shard_size": "2"},
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        ),
        (
            {"use_fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "Block"},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
        ),
        ({"use_fsdp": False}, {}),
    ],
)
def test_options_about_sharding_are_the_variables_of_accelerate(words, env):
    assert sharding_env(words, {}) == env


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use_fsdp", "--use_deepspeed", "x.py"], "--use_fsdp and --use_deepspeed exclude each other."),
        (["--fsdp_version", "2", "x.py"], "--fsdp_version 2 has no effect without --use_fsdp: write both."),
        (["--mixed_precison", "no", "x.py"], "unknown option --mixed_precison. Did you mean --mixed_precision?"),
        (["-n", "x.py"], "-n x.py: type a number."),
        (["--devices", "a,b", "."], "--devices a,b: type indices of GPUs such as 0,1, or all, or cpu."),
        (["-n", "2", "--num_processes", "1", "."], "-n 2 and --num_processes 1 are the same option. Leave one of them"),
        (["--detached", "--no-detached", "."], "not allowed with argument --detached"),
        (["-n", "2"], "SCRIPT is missing: type `notebook-launcher launch [OPTIONS] SCRIPT [ARGUMENTS]`."),
        (["-n"], "-n/--num_processes: expected one argument. `notebook-launcher launch --help`"),
        (["--use_cpu", "--devices", "0", "."], "--cpu and --devices 0 exclude each other"),
        (["--log_with", "wandb", "x.py"], "--log_with: it belongs to the script: `Accelerator(log_with=..., project_"),
        (["--nnodes", "2", "x.py"], "--num_machines 2: a launch from here takes one machine"),
        (["--env", "NAME", "x.py"], "--env NAME: write --env NAME=VALUE."),
        (["no.py"], "/no.py. No Python file is in this folder."),
        (["json"], "To run a module by its name, write -m before it."),
        (["--multi_gpu", "x.py"], "--multi_gpu: "),
    ],
)
def test_words_that_cannot_work_are_refused_before_anything_starts(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["launch", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("notebook-launcher launch: ")
    assert message in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tain.py"], "/tain.py. Did you mean train.py?"),
        (["."], "so Python cannot run it. Name a file in it, such as"),
        (["-m", "train.py"], "-m train.py: this is a file. Leave -m out, or name the module: -m train"),
        (["-m", "trian"], "or among the installed packages. Did you mean train?"),
    ],
)
def test_error_of_a_missing_script_suggests_similar_names(words, message, tmp_path, monkeypatch, capsys):
    for name in ("train.py", "evaluate.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--no_config_file", *words]) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_launch_as_they_were_typed():
    words = ["-n", "2", "-n", "2", "--timeout", "none", "--nodes", "1", "--tags", "a,b", "--tag", "c d"]
    options = make_parser().parse_args(["launch", *words, "x.py", "-n", "3"])
    assert given_options(options) == {"num_processes": 2, "timeout": None, "nodes": 1, "tags": ["a", "b", "c d"]}
    assert options.words == ["-n", "3"]


def test_settings_file_that_cannot_be_launched_names_the_way_around(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = tmp_path / "accelerate/default_config.yaml"
    file.parent.mkdir()
    file.write_text("distributed_type: XLA\n")
    assert main(["launch", "x.py"]) == 2
    assert "it is for a TPU" in (shown := capsys.readouterr().err)
    assert "--no_config_file launches without it." in shown
    assert main(["launch", "--no_config_file", str(tmp_path / "x.py")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_every_field_of_a_launch_is_an_option_in_both_spellings():
    parser = make_parser()
    for field in LaunchConfig.__dataclass_fields__.keys() - {"engine", "setup"}:
        for name in {field, field.replace("_", "-"), *OTHER_NAMES.get(field, ())}:
            flag = field == "check_ranks"
            words = ["launch", f"--{name}", *([] if flag else ["1"]), "x.py"]
            assert getattr(parser.parse_args(words), field) in ("1", ["1"], True)


def test_help_of_each_command_explains_it(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command.name, "--help"])
        assert len(capsys.readouterr().out.split()) > 30
