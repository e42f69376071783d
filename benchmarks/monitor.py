"""Measure the cost of the live monitor: `python benchmarks/monitor.py`.

A real kernel runs the cells, and this program stands in for the page: it sends "hello" and counts the messages. The
messages of the last launch are then replayed, at their original speed, to the real page in a headless Chromium.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from support.measurements import Measurements, say
from support.process import settle
from support.program import parse, publish
from support.report import megabytes, table

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.kernels import Kernel
from tests.support.monitor_page import open_tab

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tests.support.kernels import Outcome

REPEATS, QUICK_REPEATS = 12, 2
SECONDS = 6.0
"""Seconds of a launch; the first two are not counted."""
NUM_LAUNCHES = 40
NUM_STEPS = 100_000
LIMIT = 0.01
"""Largest cost of the monitor, as a share of a step."""

CELLS = """
import time
from notebook_launcher import *
def train(seconds):
    import torch
    torch.set_num_threads(1)
    weights, begin = torch.randn(220, 220), time.monotonic()
    step, counted, since = 0, 0, None
    while (now := time.monotonic()) < begin + seconds:
        if since is None and now > begin + 2:
            counted, since, busy = step, now, time.process_time()
        for _ in range(3):
            weights = torch.nn.functional.normalize(weights @ weights)
        report(step=step, loss=1 / (step + 1), lr=1e-3)
        step += 1
    return [(now - since) / (step - counted), (time.process_time() - busy) / (step - counted)]
def fast(steps):
    for step in track(range(steps)):
        report(step=step, loss=1 / (step + 1))
def nothing(): pass
def launches(count):
    took = {"auto": [], False: []}
    for at in range(2 * count):
        monitor = ("auto", False)[at % 2]
        begin = time.perf_counter()
        notebook_launch(nothing, 2, monitor=monitor)
        took[monitor].append(time.perf_counter() - begin)
        time.sleep(0.03)
    return list(took.values())
prewarm(); notebook_launch(nothing, 2)
from notebook_launcher.widgets import Monitor
"""


class Page:
    """Runs cells in a kernel and counts the messages of a monitor."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._process = psutil.Process(kernel.pid)
        self.played: list[tuple[float, Any]] = []
        """Seconds and content of each message of the last monitor."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Page]:
        """Open a page of a kernel that has launched once and is idle."""
        with Kernel() as kernel:
            page = cls(kernel)
            page.value_of(f"import json{CELLS}value = 0")
            page.settle()
            yield page

    def settle(self) -> None:
        """Wait until the kernel and its fork server are idle."""
        settle(lambda: [self._process, *self._process.children(recursive=True)])

    def value_of(self, code: str, limit: float = 120) -> Any:
        """Run a cell and return its variable `value`."""
        cell = self._kernel.start(f"{code}\nprint('value', json.dumps(value))", allow_stdin=True)
        says_hello = False
        while not (outcome := self._kernel.outcome(cell)).done:
            opened = [content for content in outcome.of("comm_open") if "_esm" in content["data"]["state"]]
            if opened and not says_hello:
                says_hello = True
                self._kernel.send_comm(opened[0]["comm_id"], {"method": "custom", "content": {"type": "hello"}})
            self._kernel.wait(cell, limit, until=functools.partial(_has_news, len(outcome.messages)))
        if outcome.error:
            raise RuntimeError(outcome.traceback)
        self.sent = [message for message in outcome.messages if message["msg_type"] == "comm_msg"]
        return json.loads(outcome.stdout.rpartition("value ")[2])

    @property
    def seconds(self) -> float:
        """Processor time of the kernel so far."""
        times = self._process.cpu_times()
        return times.user + times.system

    @property
    def memory(self) -> int:
        """Resident memory of the kernel."""
        return int(self._process.memory_info().rss)


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__ or "")
    publish("monitor", "What the live monitor costs", options, measure_everything(options))


def measure_everything(options: argparse.Namespace) -> Iterator[str]:
    """Measure in one kernel, and yield the tables."""
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    found = Measurements(repeats, None)
    with Page.opened() as page:
        measure_steps(page, found)
        yield step_table(found)
        for took, monitor in zip(page.value_of(f"value = launches({NUM_LAUNCHES})"), ("auto", "False"), strict=True):
            found.samples["launch", monitor] = took
        yield launch_table(found)
    yield browser_table(page.played)
    measure_memory(found)
    yield memory_table(found)


def measure_steps(page: Page, found: Measurements) -> None:
    """Launch with and without a monitor, in turns."""
    for turn in range(2 * found.repeats):
        monitor = (turn + turn // 2) % 2 == 0  # Each of the two comes first equally often.
        say(f"turn {turn + 1} of {2 * found.repeats}: {'with' if monitor else 'without'}")
        before = page.seconds
        code = f"value = list(notebook_launch(train, 2, args=({SECONDS},), output='none', monitor={monitor}))"
        steps = page.value_of(code)
        found.add((page.seconds - before) / SECONDS, "kernel", monitor)
        found.add(statistics.mean(step for step, _ in steps), "step", monitor)
        found.add(statistics.mean(busy for _, busy in steps), "busy", monitor)
        if monitor:
            times = [message["header"]["date"].timestamp() for message in page.sent]
            contents = [message["content"]["data"]["content"] for message in page.sent]
            page.played = [(at - times[0], content) for at, content in zip(times, contents, strict=True)]
            found.add((len(times) - 1) / (times[-1] - times[0]), "rate")
            found.add(sum(len(json.dumps(content)) for content in contents[1:]) / (times[-1] - times[0]), "bytes")
        page.settle()


def step_table(found: Measurements) -> str:
    """Return the table of a step's time with the monitor and without."""
    with_it, without = found.samples["step", True], found.samples["step", False]
    costs = [one / other - 1 for one, other in zip(with_it, without, strict=True)]
    rows = [
        ["a step, µs", *(_spread(found.samples["step", monitor], 1e6) for monitor in (True, False))],
        ["of it processor time, µs", *(_spread(found.samples["busy", monitor], 1e6) for monitor in (True, False))],
        [
            "the kernel's processor time, % of a core",
            *(_spread(found.samples["kernel", on], 100) for on in (True, False)),
        ],
    ]
    cost = statistics.median(costs)
    held = "yes" if cost < LIMIT else "**no**"
    return (
        f"## A training loop of 1 ms steps\n\n2 ranks, each reporting two metrics a step; {found.repeats} launches of "
        f"{SECONDS:g} s with the monitor and as many without, in turns; medians (quartiles).\n\n"
        + table(["", "with", "without"], rows)
        + "\n"
        + table(
            ["promise", "measured", "held"],
            [["the monitor adds less than 1 % to a step", f"{_spread(costs, 100)} %", held]],
        )
        + f"\nSent to the page: {_spread(found.samples['rate',], 1)} messages a second, "
        f"{_spread(found.samples['bytes',], 1e-3)} kB a second.\n"
    )


def launch_table(found: Measurements) -> str:
    """Return the table of launches that end before a monitor would be shown."""
    rows = [[f"monitor={name}", _spread(found.samples["launch", name], 1e3)] for name in ("auto", "False")]
    return f"## A warm launch\n\n2 ranks, {NUM_LAUNCHES} of each in turns.\n\n" + table(["", "ms"], rows)


def browser_table(played: list[tuple[float, Any]]) -> str:
    """Replay the messages to a page; return the table of the work of the browser's main thread."""
    title = "## The page\n\n"
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return title + "Not measured: playwright is not installed.\n"
    if chromium is None:
        return title + "Not measured: chromium is not installed.\n"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with contextlib.closing(opened), open_tab(opened.new_page()) as tab:
            session = tab.page.context.new_cdp_session(tab.page)
            session.send("Performance.enable")

            def look() -> dict[str, float]:
                return {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}

            before, begin = look(), time.monotonic()
            for at, content in played:
                tab.page.wait_for_timeout(max(0.0, 1e3 * (begin + at - time.monotonic())))
                tab.page.evaluate("message => model.fire('msg:custom', message, [])", content)
            tab.settle()
            after, seconds = look(), time.monotonic() - begin
    rows = [
        [name, f"{1e3 * (after[metric] - before[metric]) / seconds:.1f}"]
        for name, metric in (
            ("all tasks", "TaskDuration"),
            ("of it scripts", "ScriptDuration"),
            ("layout", "LayoutDuration"),
            ("style", "RecalcStyleDuration"),
        )
    ]
    return (
        title
        + f"{len(played)} messages in {seconds:.1f} s, replayed to the page in a headless Chromium without a GPU.\n\n"
        + table(["the page's main thread", "ms a second"], rows)
    )


def measure_memory(found: Measurements) -> None:
    """Launch a run of many steps with the monitor and without, each in its own kernel."""
    for monitor in (False, True):
        with Page.opened() as page:
            before, begin = page.memory, time.monotonic()
            code = f"run = launch(fast, args=({NUM_STEPS},), num_processes=1, output='none', monitor={monitor})"
            page.value_of(f"{code}; value = run.wait()")
            found.add(page.memory - before, "memory", monitor)
            found.add(time.monotonic() - begin, "seconds", monitor)


def memory_table(found: Measurements) -> str:
    """Return the table of the kernel's growth."""
    rows = [
        [name, megabytes(found.samples["memory", monitor][0]), f"{found.samples['seconds', monitor][0]:.1f}"]
        for name, monitor in (("without", False), ("with", True))
    ]
    return (
        f"## Memory of the kernel after {NUM_STEPS:,} reported steps\n\nOne rank that only reports, while its "
        "run is kept; `run.metrics` holds every value.\n\n" + table(["", "MB more", "seconds"], rows)
    )


def _has_news(num_messages: int, outcome: Outcome) -> bool:
    return outcome.done or len(outcome.messages) > num_messages


def _spread(values: list[float], scale: float) -> str:
    low, middle, high = (scale * value for value in statistics.quantiles(values, n=4)) if len(values) > 1 else (0, 0, 0)
    return f"{middle:,.3g} ({low:,.3g}-{high:,.3g})"


if __name__ == "__main__":
    main()
