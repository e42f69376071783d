"""Measure what a thousand ranks cost the kernel: `python benchmarks/scale.py [seconds] [ranks ...]`.

The ranks do not exist. A process beside the kernel (`swarm.py`) speaks for the agents of 125 machines with 8 ranks
each, over real links, and its ranks train at four updates a second. The kernel's part is real: links, records, output,
the run's folder, snapshots, the page's messages, a stop, stacks, the death of a rank. Each number of ranks has a kernel
of its own. What this program does to measure is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
from support.report import machine, table
from support.swarm import DYING

from notebook_launcher import launch
from notebook_launcher.engines.cluster.command_engines import CommandEngine
from notebook_launcher.widgets.monitor.feed import Feed
from notebook_launcher.widgets.monitor.monitor import interval_after

if TYPE_CHECKING:
    from notebook_launcher import Run
    from notebook_launcher.engines.cluster.connections import Greeting

RANKS_PER_NODE = 8
SIZES = (10, 100, 1000)
SECONDS = 20.0
LOOK_EVERY = 0.02
RUNGS = [None, "ask", "interrupt", "terminate", "kill"]
GOALS = {"share of a core": "0.25", "memory, MB": "300", "delay, 99 %, s": "1", "stop, rungs of the ladder": "2"}


class Connection:
    """The two descriptors of one agent of the swarm."""

    origin = "The agent is made up."

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd

    def why(self) -> str:
        """Return nothing."""
        return ""

    def last_words(self) -> str:
        """Return nothing."""
        return ""

    def end(self, patience: float) -> None:
        """Do nothing: the swarm ends with its links."""


SWARMS: dict[int, list[Connection]] = {}
"""By number of nodes: the connections of a swarm that nobody has taken."""


@dataclasses.dataclass(frozen=True)
class SwarmNodes:
    """The key of a swarm."""

    num_nodes: int
    network: ClassVar[str | None] = None
    patience: ClassVar[float] = 60.0
    keep: ClassVar[float | None] = None

    def connect(self, number: int) -> Connection:
        """Return the connection of an agent; the first call starts the swarm."""
        if number == 0:
            SWARMS[self.num_nodes] = _start_swarm(self.num_nodes)
        return SWARMS[self.num_nodes][number]

    def check(self, number: int, greeting: Greeting) -> None:
        """Take any agent."""


def _start_swarm(num_nodes: int) -> list[Connection]:
    pipes = [(os.pipe(), os.pipe()) for _ in range(num_nodes)]
    theirs = [fd for (_, to_us), (from_us, _) in pipes for fd in (from_us, to_us)]
    program = [sys.executable, str(Path(__file__).parent / "support/swarm.py"), *map(str, theirs)]
    subprocess.Popen(program, pass_fds=theirs, cwd="/")
    for fd in theirs:
        os.close(fd)
    return [Connection(our_r, our_w) for (our_r, _), (_, our_w) in pipes]


@dataclasses.dataclass(frozen=True)
class Swarm(CommandEngine):
    """Machines that are made up."""

    num_nodes: int

    @property
    def _key(self) -> Any:
        return SwarmNodes(self.num_nodes)


def train() -> None:
    """Stand for a function; no rank calls it."""


def main() -> None:
    """Measure each number of ranks in a process of its own, and print a table."""
    words = sys.argv[1:]
    if words[:1] == ["--measure"]:
        print(json.dumps(measure(int(words[1]), float(words[2]))))
        return
    seconds = float(words[0]) if words else SECONDS
    sizes = [int(word) for word in words[1:]] or SIZES
    found = [in_a_process(size, seconds) for size in sizes]
    rows = [[name, *(f"{figures[name]:,.4g}" for figures in found), GOALS.get(name, "")] for name in found[0]]
    say(machine())
    say(table(["ranks", *(f"{size:,}" for size in sizes), "goal"], rows))


def in_a_process(ranks: int, seconds: float) -> dict[str, float]:
    """Return the figures of one number of ranks, measured in a fresh process."""
    program = [sys.executable, __file__, "--measure", str(ranks), str(seconds)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Return the figures of one number of ranks."""
    before = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOTEBOOK_LAUNCHER_RUNS"] = folder
        engine = Swarm(-(-ranks // RANKS_PER_NODE))
        options: dict[str, Any] = {"engine": engine, "monitor": False, "output": "all", "threads_per_process": 1}
        began = time.monotonic()
        run = launch(train, ranks, **options)
        while sum(point.step == 2 for point in run.metrics) < ranks:
            time.sleep(0.01)
        figures = {"until all train, s": time.monotonic() - began}
        figures |= watch(run, ranks, seconds)
        figures |= serve_page(run, seconds / 2)
        figures["snapshot, ms"] = 1e3 * median_seconds(run.snapshot)
        figures["stacks, ms"] = 1e3 * median_seconds(run.stacks, 3)
        figures["memory, MB"] = psutil.Process().memory_info().rss / 1e6
        figures["of it before the launch, MB"] = before / 1e6
        began = time.monotonic()
        rung = run.stop()
        figures["stop, s"] = time.monotonic() - began
        figures["stop, rungs of the ladder"] = RUNGS.index(rung)
        stopped: Any = run.exception()
        results = stopped.results
        figures["folder, MB"] = sum(path.stat().st_size for path in results.folder.rglob("*")) / 1e6
        figures["death until the error, s"] = time_death(ranks, options)
        engine.close()
    return figures


def watch(run: Run, ranks: int, seconds: float) -> dict[str, float]:
    """Return the share of a core and the delay of records while nobody looks."""
    launched = time.monotonic() - run.snapshot().seconds
    _, position = run.metrics_since(0)
    delays: list[float] = []
    cpu, own, began = time.process_time(), time.thread_time(), time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        new, position = run.metrics_since(position)
        delays += [now - launched - point.time for point in new]
        time.sleep(LOOK_EVERY)
    took = time.monotonic() - began
    share = (time.process_time() - cpu - (time.thread_time() - own)) / took
    return {
        "updates a second": len(delays) / took,
        "share of a core": share,
        "of it for a rank, 1e-6": 1e6 * share / ranks,
        "delay, median, s": statistics.median(delays),
        "delay, 99 %, s": statistics.quantiles(delays, n=100)[-1],
    }


def serve_page(run: Run, seconds: float) -> dict[str, float]:
    """Return what the messages to a page cost beside that."""
    feed = Feed(run)
    sizes = [len(json.dumps(feed.reset()))]
    own, began, longest = time.thread_time(), time.monotonic(), 0.0
    while (now := time.monotonic()) < began + seconds:
        spent = time.thread_time()
        message = feed.update()
        longest = max(longest, time.monotonic() - now)
        sizes.append(len(json.dumps(message)))
        time.sleep(interval_after(time.thread_time() - spent))
    took = time.monotonic() - began
    return {
        "page, share of a core": (time.thread_time() - own) / took,
        "page, kB a second": sum(sizes[1:]) / took / 1e3,
        "page, first message, kB": sizes[0] / 1e3,
        "page, longest message, s": longest,
    }


def time_death(ranks: int, options: dict[str, Any]) -> float:
    """Return the seconds from the death of a rank until the run has failed with its name."""
    dying = ranks // 2
    run = launch(train, ranks, env={DYING: str(dying)}, **options)
    run.wait()
    now = time.monotonic()
    error: Any = run.exception()
    assert error.rank == dying, error
    return now - float(error.failures[0].time)


def median_seconds(work: Any, repeats: int = 9) -> float:
    """Return the median of the seconds that work takes."""
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        work()
        times.append(time.monotonic() - began)
        time.sleep(0.1)
    return statistics.median(times)


def say(text: str) -> None:
    """Print a part of the result."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
