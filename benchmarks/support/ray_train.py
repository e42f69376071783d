"""Ray Train as a contender, in a process of its own: `python ray_train.py ADDRESS`.

For each line of its standard input it trains a function once on 4 workers, and answers by a line of JSON: the seconds
of `fit()` and those of an all-reduce of 16 MB in it, or the reason why there are none. The first answer is to no line:
it comes when the process is connected.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_WORKERS = 4
FIT_LIMIT = 120.0
"""Longest time of an answer, in seconds."""


def reduce_gradients(config: dict[str, Any]) -> None:
    """Write the seconds of an all-reduce of 16 MB to a file."""
    import torch.distributed as dist

    sys.path.insert(0, config["folder"])  # A worker of Ray has another path than the program that trains.
    all_reduce = importlib.import_module("all_reduce")
    seconds = all_reduce.reduce_gradients()
    if dist.get_rank() == 0:
        Path(config["file"]).write_text(str(seconds))


def fit(folder: str, *, reduces: bool) -> dict[str, float]:
    """Train once; return the seconds."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    file = Path(folder, "seconds")
    trainer = TorchTrainer(
        reduce_gradients if reduces else do_nothing,
        train_loop_config={"file": str(file), "folder": str(Path(__file__).resolve().parent)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(storage_path=folder),
    )
    began = time.perf_counter()
    trainer.fit()
    took = {"fit": time.perf_counter() - began}
    return {**took, "reduce": float(file.read_text())} if reduces else took


def do_nothing(config: dict[str, Any]) -> None:
    """Return, so that the launch alone takes time."""


def main() -> None:
    """Serve the measuring program."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(work: Any) -> None:
        try:
            found = work()
        except Exception as error:  # the reason is the contender's row
            found = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")

    answer(connect)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            answer(functools.partial(fit, folder, reduces=line.strip() == "reduce"))


def connect() -> dict[str, float]:
    """Connect to the cluster."""
    import ray
    import ray.train.torch

    # gloo looks up the address of the host's name, which may be one at which no peer answers.
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": variables})
    return {}


if __name__ == "__main__":
    main()
