"""Measure ranks on two nodes beside ranks on one machine: `python benchmarks/cluster.py`.

The nodes are on this machine, so the figures are what the agents and their links cost, and not what a network does. In
turns: 4 ranks on one machine; 2 ranks on each of two agents, started by commands or by Ray; two torchruns that are
started as the agents are, by the same commands; and Ray Train. The program starts and ends a Ray cluster of two nodes.
Ratios are those of medians, to launches on one machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import all_reduce
from support.measurements import Measurements, say
from support.program import parse, publish
from support.promises import promise
from support.ray_train_process import RayTrain
from support.report import table

from notebook_launcher import Commands, Ray, Session, notebook_launch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

OPTIONS: dict[str, Any] = {
    "devices": "cpu", "output": "none", "monitor": False, "runs_folder": None, "threads_per_process": 1,
}  # fmt: skip
REPEATS, QUICK_REPEATS = 15, 3
NUM_AGENT_STARTS, NUM_REDUCES, NUM_FITS = 3, 3, 2
"""Repeats of what takes seconds; a `fit()` takes half a minute where the machine is busy."""
LABELS = {
    "one machine": "4 ranks on one machine",
    "commands": "2 + 2 ranks, `Commands([[], []])`",
    "ray": "2 + 2 ranks, `Ray()`",
    "ray train": "Ray Train: `fit()`, 4 workers, no results",
    "torchrun": "two torchruns, 2 + 2 ranks",
}
MEASURED = ("agents up", "warm launch", "session call", "all-reduce")
NO_RAY = "ray is not installed: pip install 'notebook-launcher[ray]'"


def rank() -> str:
    """Return what is at hand, so that the launch alone takes time."""
    return os.environ["RANK"]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def torchruns() -> float:
    """Run the all-reduce by a torchrun on each node; return its seconds."""
    with tempfile.TemporaryDirectory() as store:
        options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=bench"]
        options += [f"--rdzv-endpoint=127.0.0.1:{29000 + os.getpid() % 2000}", "--local-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, all_reduce.__file__]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": store}
        nodes = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2)
        ]
        shown = "".join(node.communicate()[0] for node in nodes)
    return float(shown.partition("seconds ")[2].split()[0])


def main() -> None:
    """Measure, print and write the report."""
    # Ray's 15 would make its ranks wait for whatever else is busy.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own name
    warnings.filterwarnings("ignore", message="This Ray cluster asks for no token")
    options = parse(__doc__ or "", contenders=tuple(LABELS))
    publish("cluster", "Ranks on two nodes", options, measure_everything(options))


def measure_everything(options: argparse.Namespace) -> Iterator[str]:
    """Measure in turns, and yield the tables."""
    found = Measurements(options.repeats or (QUICK_REPEATS if options.quick else REPEATS), options.only)
    with contextlib.ExitStack() as stack:
        address = start_ray(found, stack)
        engines: dict[str, Commands | Ray] = {"commands": Commands([[], []])}
        if address is not None:
            engines["ray"] = Ray(address)
        engines = {who: engine for who, engine in engines.items() if who in found.chosen([who])}
        train = start_ray_train(found, stack, address)
        for who, engine in engines.items():
            measure_agent_starts(found, who, engine)
        places = {"one machine": OPTIONS}
        for who, engine in engines.items():
            places[who] = {**OPTIONS, "engine": stack.enter_context(engine)}
        measure_launches(found, places, train)
        measure_sessions(found, places, train)
    yield report(found)
    yield promises(found)


def start_ray(found: Measurements, stack: contextlib.ExitStack) -> str | None:
    """Start a Ray cluster of two nodes until the stack ends, and return its address; None: there is none."""
    if not found.chosen(["ray", "ray train"]):
        return None
    reason = NO_RAY
    if importlib.util.find_spec("ray") is not None:
        from tests.support.ray_clusters import ray_cluster

        try:
            return stack.enter_context(ray_cluster()).address
        except AssertionError as error:
            reason = str(error)
    for who in ("ray", "ray train"):
        found.reasons["warm launch", who] = reason
    return None


def start_ray_train(found: Measurements, stack: contextlib.ExitStack, address: str | None) -> RayTrain | None:
    """Connect Ray Train to the cluster until the stack ends; None: there is none."""
    if address is None or not found.chosen(["ray train"]):
        return None
    with found.guarded("warm launch", "ray train"):
        train = RayTrain(address)
        stack.callback(train.close)
        return train
    return None


def measure_agent_starts(found: Measurements, who: str, engine: Commands | Ray) -> None:
    """Measure the first launch of an engine."""
    first = functools.partial(notebook_launch, rank, 4, engine=engine, **OPTIONS)
    for _ in range(NUM_AGENT_STARTS):
        with engine:
            found.add(seconds_of(first), "agents up", who)


def measure_launches(found: Measurements, places: dict[str, dict[str, Any]], train: RayTrain | None) -> None:
    """Measure launches after the first one."""
    for options in places.values():
        notebook_launch(rank, 4, **options)
    for turn in range(found.repeats):
        say(f"launches, turn {turn + 1} of {found.repeats}")
        for who, options in places.items():
            found.add(seconds_of(functools.partial(notebook_launch, rank, 4, **options)), "warm launch", who)
        if train is not None and turn < NUM_FITS:
            measure_fit(found, train)


def measure_fit(found: Measurements, train: RayTrain) -> None:
    """Measure Ray Train's `fit()`, or note the reason why it fails."""
    with found.guarded("warm launch", "ray train"):
        if ("warm launch", "ray train") not in found.reasons:
            found.add(train.fit()["fit"], "warm launch", "ray train")


def measure_sessions(found: Measurements, places: dict[str, dict[str, Any]], train: RayTrain | None) -> None:
    """Measure calls of sessions, and what their ranks reduce."""
    with contextlib.ExitStack() as stack:
        sessions = {who: stack.enter_context(Session(4, **options)) for who, options in places.items()}
        for session in sessions.values():
            session.run(rank)
        for _ in range(found.repeats):
            for who, session in sessions.items():
                found.add(seconds_of(functools.partial(session.run, rank)), "session call", who)
        for turn in range(max(NUM_REDUCES, found.repeats // 3)):
            say(f"all-reduces, turn {turn + 1}")
            for who, session in sessions.items():
                found.add(session.run(all_reduce.reduce_gradients)[0], "all-reduce", who)
            if found.chosen(["torchrun"]):
                found.add(torchruns(), "all-reduce", "torchrun")
            if train is not None and turn < NUM_FITS and ("warm launch", "ray train") not in found.reasons:
                with found.guarded("all-reduce", "ray train"):
                    found.add(train.fit(reduces=True)["reduce"], "all-reduce", "ray train")


def report(found: Measurements) -> str:
    """Return the table of all contenders."""
    rows = [[LABELS[who], *(found.cell(what, who) for what in MEASURED)] for who in found.chosen(list(LABELS))]
    note = (
        f"Milliseconds: median (quartiles), of {found.repeats} turns. *Agents up*: the first launch of an engine, with "
        "the start of its two agents; a Ray cluster runs already. *All-reduce*: of 16 MB, on 4 ranks. A launch and a "
        "call return the values of all ranks."
    )
    return f"## 4 ranks\n\n{note}\n\n" + table(["", *MEASURED], rows)


def promises(found: Measurements) -> str:
    """Return the goals with what was measured."""
    here = found.median("session call", "one machine") or 0.0
    rows = []
    for who, ratio, more in (("commands", 1.1, 0.005), ("ray", 1.3, 0.015)):
        name = {"commands": "commands", "ray": "Ray"}[who]
        launch, call = found.median("warm launch", who), found.median("session call", who)
        text = f"warm launch over {name}: <= {ratio:g} x one machine"
        rows.append(promise(text, launch, ratio, found.median("warm launch", "one machine")))
        text = f"session call over {name}: at most {1e3 * more:g} ms more than on one machine"
        rows.append(promise(text, None if call is None else call - here, more, None))
        text = f"all-reduce over {name}: as torchrun's (<= 1.1 x)"
        rows.append(promise(text, found.median("all-reduce", who), 1.1, found.median("all-reduce", "torchrun")))
    return "## Promises\n\nMedians.\n\n" + table(["promise", "measured", "held"], rows)


if __name__ == "__main__":
    main()
