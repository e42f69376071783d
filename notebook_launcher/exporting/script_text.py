"""The text of an exported script, and of a job for Slurm."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import changed_options
from notebook_launcher.settings.training_settings import PRECISION_VARIABLE, STEPS_VARIABLE, TrainingSettings
from notebook_launcher.wording.secret_text import is_secret

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.notebook_code.needs import Needs

__all__ = ["MARK", "job_text", "launch_words", "run_options", "script_text", "secret_variables", "torchrun_words"]

MARK = "# Written by notebook_launcher.export."
REQUIRE = """\
for _name in {names!r}:  # Secrets, whose values are not written here.
    if _name not in os.environ:
        sys.exit(f"set the variable {{_name}} before you start this script: its value is a secret")
"""
LOAD = """\
with open(Path(__file__).with_name({name!r}), "rb") as _file:
    _VALUES = pickle.load(_file)
"""
MAIN = '''\
def _call_in_ranks():
    """Do what the launcher does in each rank before the call, and call {function}."""
    import random

    import torch
    import torch.distributed as dist

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    seed = {seed}
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads({threads})
{begin}
    {function}({arguments})
{end}

if __name__ == "__main__":
    _call_in_ranks()
'''
GPU = "    torch.cuda.set_device(local_rank % torch.cuda.device_count())\n"
GROUP = """\
    if not dist.is_initialized():  # It is, under `notebook-launcher launch`.
        alone = {{}} if "RANK" in os.environ else {{"store": dist.HashStore(), "rank": 0, "world_size": 1}}
        dist.init_process_group({backend!r}, **alone)
"""
LEAVE = """\
    if dist.is_initialized():
        dist.destroy_process_group()
"""
ADOPT = """\
    from notebook_launcher.context import adopt

    adopt({settings})
"""
ALIKE = """\
    from notebook_launcher.context import RandomStage, enter_random_stage, newest_seeding

    enter_random_stage(RandomStage(torch.initial_seed(), seeding=newest_seeding()))
"""
IN_SCRIPT = {
    *(
        "num_processes",
        "nodes",
        "processes_per_node",
        "devices",
        "backend",
        "seed",
        "setup",
        "rank_seeds",
        "threads_per_process",
        "env",
    ),
    *(field.name for field in dataclasses.fields(TrainingSettings)),
}
"""Options that the script carries out itself, or that are among the words of every command."""
BY_VARIABLE = ("mixed_precision", "gradient_accumulation_steps")
"""Settings for training that Accelerate's variables carry; only this package's Accelerator adopts the others."""


def script_text(needs: Needs, plan: Plan, *, function: str, arguments: str, values: str, command: str) -> str:
    """Return the script.

    Args:
        needs: Requirements of the function.
        plan: The launch.
        function: Name of the function.
        arguments: Arguments of the call, as code.
        values: Name of the file of values.
        command: Command that runs the script.
    """
    imports = ["import os", "import sys", *(["import pickle", "from pathlib import Path"] if needs.values else [])]
    begin = (GPU if plan.use_gpu else "") + ("" if plan.backend is None else GROUP.format(backend=plan.backend))
    begin += _adopted(plan)
    definitions = "\n\n".join(needs.definitions.values())
    uses_package = "notebook_launcher" in "\n".join((definitions, *needs.imports))
    if plan.config.rank_seeds is None and plan.num_processes > 1 and uses_package:
        begin += ALIKE
    main = MAIN.format(
        function=function,
        seed=f"({plan.seed} + rank) % 2**32" if plan.config.rank_seeds == "apart" else plan.seed,
        threads=plan.threads_per_process,
        begin=begin.rstrip("\n"),
        arguments=arguments,
        end="" if plan.backend is None else LEAVE,
    )
    parts = [
        f"{MARK}\n# {command}\n",
        "\n".join(sorted(imports)) + "\n",
        _set_variables(plan),
        "\n".join(sorted(needs.imports)) + "\n",
        "\n".join(f"{name} = {text}" for name, text in needs.constants.items()),
        *_in_order(definitions, _loaded(needs, values), values_last=needs.values_need_definitions),
        "\n" + main,
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part.strip())


def _in_order(definitions: str, loaded: str, *, values_last: bool) -> list[str]:
    return ["\n" + definitions, "\n" + loaded] if values_last else [loaded, "\n" + definitions]


def _loaded(needs: Needs, file: str) -> str:
    if not needs.values:
        return ""
    lines = [f"{name} = _VALUES[{name!r}]" for name in needs.values if name.isidentifier()]
    return LOAD.format(name=file) + "\n".join(lines)


def _set_variables(plan: Plan) -> str:
    """Return the lines that set the variables, and that ask for those whose values are secrets."""
    secret = secret_variables(plan)
    lines = [f"os.environ.setdefault({n!r}, {text!r})" for n, text in _variables(plan).items() if n not in secret]
    return "\n".join([*lines, REQUIRE.format(names=secret)] if secret else lines)


def secret_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of variables that whoever runs the script has to set, because their values are secrets."""
    return tuple(name for name, value in plan.config.env.items() if is_secret(name, value))


def _variables(plan: Plan) -> dict[str, str]:
    config = plan.config
    given = {PRECISION_VARIABLE: config.mixed_precision, STEPS_VARIABLE: config.gradient_accumulation_steps}
    chosen = {name: str(value) for name, value in given.items() if value is not None}
    if not plan.use_gpu:
        chosen["ACCELERATE_USE_CPU"] = "true"
    elif isinstance(config.devices, tuple):
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.devices))
    return {**chosen, **config.env}


def _adopted(plan: Plan) -> str:
    settings = plan.config.training_settings()
    given = {
        field.name: value
        for field in dataclasses.fields(settings)
        if field.name not in BY_VARIABLE and (value := getattr(settings, field.name)) is not None
    }
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ADOPT.format(settings=named) if given else ""


def torchrun_words(plan: Plan, script: Path) -> list[str]:
    """Return the command that runs the script under torchrun."""
    restarts = [f"--max-restarts={plan.config.max_restarts}"] if plan.config.max_restarts else []
    return ["torchrun", "--standalone", f"--nproc-per-node={plan.num_processes}", *restarts, script.name]


def launch_words(plan: Plan, script: Path) -> list[str]:
    """Return the command that runs the script under `notebook-launcher launch`, with the options that are the run's."""
    words = ["notebook-launcher", "launch", "-n", str(plan.num_processes), *([] if plan.use_gpu else ["--cpu"])]
    for name, value in run_options(plan).items():
        if name == "tags":
            words += [word for tag in value for word in ("--tag", tag)]
        elif name != "debug":  # There, as for Accelerate, --debug compares shapes.
            words += [f"--{name}"] if value is True else [f"--{name}", "none" if value is None else str(value)]
    return [*words, script.name]


def run_options(plan: Plan) -> dict[str, Any]:
    """Return the given options that belong to the run, so that the script cannot hold them."""
    return {name: value for name, value in changed_options(plan.config).items() if name not in IN_SCRIPT}


def job_text(plan: Plan, script: Path, options: Mapping[str, Any]) -> str:
    """Return a job for Slurm; `options` are sbatch's, by name with `_` or `-`, and win over those chosen here."""
    chosen: dict[str, Any] = {
        "job-name": script.stem,
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": plan.num_processes * plan.threads_per_process,
        **({"gpus-per-node": plan.num_processes} if plan.use_gpu else {}),
        "output": "%x-%j.log",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    if plan.config.timeout is not None and "time" not in chosen:
        chosen["time"] = max(1, -(-int(plan.config.timeout) // 60))  # in minutes
    lines = [f"#SBATCH --{name}" + ("" if value is True else f"={value}") for name, value in chosen.items()]
    words = [sys.executable, "-m", "torch.distributed.run", *torchrun_words(plan, script)[1:]]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            MARK,
            "set -e",
            f"cd {shlex.quote(str(script.parent))}",
            f"exec {shlex.join(words)}",
            "",
        ]
    )
