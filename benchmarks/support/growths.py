"""The measurements of `growth.py`: each function returns the figures of one size."""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "accumulation",
    "call",
    "launch",
    "monitor",
    "output",
    "parameters",
    "printed",
    "reports",
    "rows",
    "runs_listed",
]

TURNS = 7
BATCHES = 2000


def launch(ranks: int) -> dict[str, float]:
    """Return the milliseconds of a warm launch of a function that does nothing, and of torch's own means."""
    from notebook_launcher import notebook_launch

    def start() -> None:
        notebook_launch(_nothing, ranks, output="none", runs_folder=None, threads_per_process=1)

    def by_hand() -> None:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(_join, (ranks, f"file://{folder}/store"), ranks, start_method="fork")

    start()
    ours = _median(start)
    from torch.multiprocessing.spawn import start_processes

    by_hand()
    theirs = _median(by_hand)
    return {"ms": 1e3 * ours, "by hand ms": 1e3 * theirs, "ours / by hand": ours / theirs}


def call(ranks: int) -> dict[str, float]:
    """Return the milliseconds of a session's call."""
    from notebook_launcher import Session

    with Session(ranks, output="none", runs_folder=None, threads_per_process=1) as session:
        session.run(_nothing)
        return {"ms": 1e3 * _median(lambda: session.run(_nothing), 5 * TURNS)}


def output(ranks: int) -> dict[str, float]:
    """Return the milliseconds of a session's call in which each rank prints 1,000 lines."""
    from notebook_launcher import Session

    with Session(ranks, output="none", runs_folder=None, threads_per_process=1) as session:
        session.run(_print, args=(10,))
        return {"ms": 1e3 * _median(lambda: session.run(_print, args=(1000,)))}


def monitor(ranks: int) -> dict[str, float]:
    """Return the processor time of the monitor's messages, of a run in which each rank trains, prints and reports.

    Milliseconds for the first message, microseconds for a later one, in which each rank has something new.
    """
    from notebook_launcher import launch
    from notebook_launcher.widgets.monitor.feed import Feed

    run = launch(_train, ranks, output="none", runs_folder=None, threads_per_process=1, monitor=False)
    feed, later = Feed(run), []
    feed.reset()
    while not run.wait(0.25):
        begin = time.thread_time()  # the ranks have the cores
        feed.update()
        later.append(time.thread_time() - begin)
    return {"first ms": 1e3 * _median(lambda: Feed(run).reset()), "later us": 1e6 * statistics.median(later)}


def accumulation(ranks: int) -> dict[str, float]:
    """Return the processor time of a micro-batch of rank 0: by hand, and what an Accelerator adds; in microseconds.

    Rank 0 has a core to itself: ranks that share it would push its code out of the core's caches.
    """
    from notebook_launcher import notebook_launch

    def compare() -> dict[str, list[float]]:
        from support.overhead_rank import measure_lists

        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:1] if os.environ["RANK"] == "0" else cores[1:])
        return measure_lists(4, TURNS)

    options: dict[str, Any] = {"output": "none", "runs_folder": None, "threads_per_process": 1}
    by_name = notebook_launch(compare, ranks, **options)[0]
    added = [ours - hand for ours, hand in zip(by_name["ours"], by_name["hand"], strict=True)]
    return {"by hand us": statistics.median(by_name["hand"]), "added us": max(1.0, statistics.median(added))}


def printed(lines: int) -> dict[str, float]:
    """Return the milliseconds of a run that prints, and what the kernel's memory grew by, in megabytes."""
    return _in_run(_print, lines, output="none")


def reports(steps: int) -> dict[str, float]:
    """Return the milliseconds of a run that reports, the kernel's memory and the folder, in megabytes."""
    return _in_run(_report, steps, output="none")


def rows(count: int) -> dict[str, float]:
    """Return the first batch of a shuffled loader in milliseconds, a later one in microseconds, and megabytes."""
    import torch
    from torch.utils.data import DataLoader

    from notebook_launcher import Accelerator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data: Any = _Rows(count)
    loader: Any = Accelerator(cpu=True).prepare(DataLoader(data, 32, shuffle=True))
    before, begin = _peak(), time.perf_counter()
    batches = iter(loader)
    next(batches)
    first, begin, read = time.perf_counter() - begin, time.perf_counter(), 0
    for _ in batches:
        read += 1
        if read == BATCHES:
            break
    each = (time.perf_counter() - begin) / read if read else first
    return {"first ms": 1e3 * first, "batch us": 1e6 * each, "MB": max(1.0, _peak() - before)}


def parameters(tensors: int) -> dict[str, float]:
    """Return the microseconds of a step of a model of that many tensors: by hand, and with an Accelerator."""
    import torch

    from notebook_launcher import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, max_grad_norm=1.0)
    models = [torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(tensors)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True) for model in models]
    model, optimizer = accelerator.prepare(models[1], optimizers[1])

    def by_hand() -> None:
        for _ in range(2):
            (torch.cat(list(models[0])).sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()

    def prepared() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(torch.cat(list(model)).sum())
                optimizer.step()
                optimizer.zero_grad()

    turns = [(_seconds(by_hand), _seconds(prepared)) for _ in range(TURNS)][1:]  # the first makes gradients
    return {
        "by hand us": 1e6 * statistics.median(hand for hand, _ in turns),
        "ours us": 1e6 * statistics.median(ours for _, ours in turns),
        "ours / by hand": statistics.median(ours / hand for hand, ours in turns),
    }


def runs_listed(count: int) -> dict[str, float]:
    """Return the milliseconds of `runs()` over that many folders, ten for each second."""
    from notebook_launcher import runs
    from notebook_launcher.history.encoding import encode_snapshot
    from notebook_launcher.history.schema import RunSnapshot

    with tempfile.TemporaryDirectory() as home:
        for number in range(count):
            second = number // 10
            folder = Path(home) / f"20260101-00{second // 60 % 60:02d}{second % 60:02d}-train-{number:06x}"
            folder.mkdir()
            run = RunSnapshot(
                id=folder.name, name="train", state="done", started=float(number), seconds=1.0, num_processes=2,
                summary="", seed=0,
            )  # fmt: skip
            (folder / "summary.json").write_text(json.dumps(encode_snapshot(run)), encoding="ascii")
        return {"ms": 1e3 * _median(lambda: repr(runs(home)))}


class _Rows:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _nothing() -> None:
    pass


def _join(rank: int, ranks: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store, world_size=ranks, rank=rank)
    dist.barrier()  # A rank that leaves sooner would break the connections that others still make.
    dist.destroy_process_group()


def _train() -> None:
    import torch

    from notebook_launcher import report
    from notebook_launcher.training.accelerator import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    plain = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    end = time.monotonic() + 5.0
    step = 0
    while accelerator.gather(torch.tensor(float(time.monotonic() < end))).min():
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        print(f"step {step}")
        report(step=step, loss=1.0 / step)


def _print(lines: int) -> None:
    for number in range(lines):
        print(f"line {number} of a rank that prints")


def _report(steps: int) -> None:
    from notebook_launcher import report

    for step in range(steps):
        report(step=step, loss=1.0 / (step + 1))


def _in_run(fn: Callable[[int], None], size: int, **options: Any) -> dict[str, float]:
    from notebook_launcher import notebook_launch

    with tempfile.TemporaryDirectory() as home:
        notebook_launch(_nothing, 1, runs_folder=home, **options)
        before, begin = _peak(), time.perf_counter()
        notebook_launch(fn, 1, args=(size,), runs_folder=home, **options)
        seconds = time.perf_counter() - begin
        folder = sum(path.stat().st_size for path in Path(home).rglob("*") if path.is_file())
    return {"ms": 1e3 * seconds, "kernel MB": max(1.0, _peak() - before), "folder MB": max(1.0, folder / 1e6)}


def _median(function: Callable[[], object], turns: int = TURNS) -> float:
    return statistics.median(_seconds(function) for _ in range(turns))


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _peak() -> float:
    """Return the most memory that this process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(name: str, size: int) -> dict[str, float]:
    """Call one of the functions above by its name."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, float] = globals()[name](size)
    return figures
