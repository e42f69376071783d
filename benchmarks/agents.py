"""Ten faults in a notebook that an agent drives through jupyter-mcp-server, and what the agent gets to read.

    python -m venv agents && agents/bin/pip install jupyter-mcp-server==2.2.4
    python benchmarks/agents.py --server agents/bin/jupyter-mcp-server

By hand, because the server is no part of the tests' environment, and takes packages of its own. The Jupyter server and
its kernels run in the environment of this program. What comes back is printed. A fault is understood if the words
that name it, its place and the next step are there, in less than 45,000 characters.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "agents"
LIMIT = 45_000
RESTART = "restart"

FIRST = """
from notebook_launcher import *
import os, time
def train(steps=200, nap=0.05, bad=None):
    import os, time
    for step in track(range(steps)):
        report(step=step, loss=float('nan') if bad is not None and step >= bad else 1 / (step + 1))
        time.sleep(nap)
    print('trained')
    return steps
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the cells in which an agent meets it, and what it must be able to read in the end."""

    name: str
    cells: tuple[str, ...]
    """Each a cell, or RESTART."""
    words: tuple[str, ...]
    """Regular expressions of what the cells' output must have."""
    timeout: int = 60
    """Seconds that the tool gives each cell."""


FAULTS = (
    Fault(
        "error",
        (
            (
                "def evaluate():\n"
                "    import os, torch.distributed as dist\n"
                "    if os.environ['RANK'] == '1':\n"
                "        raise ValueError('batch 2 is empty')\n"
                "    dist.barrier()\n"
                "notebook_launch(evaluate, 2)"
            ),
        ),
        ("rank 1 of 2 failed first", r"line 4, in evaluate", "ValueError: batch 2 is empty", "detached=True"),
    ),
    Fault(
        "hang",
        (
            (
                "def uneven():\n"
                "    import os, time, torch.distributed as dist\n"
                "    if os.environ['RANK'] == '0': time.sleep(600)\n"
                "    dist.barrier()\n"
                "run = launch(uneven, 2, detached=True, hang_notice=1)"
            ),
            "run.wait(4); print(run.report())",
            "run.stop(); print(run.report())",
        ),
        (r"waiting: rank 1 has waited .* in barrier \(Cell In", "rank 0 is", r"run\.stacks\(\)", "stopped"),
    ),
    Fault(
        "flood",
        ("notebook_launch(lambda: print(*range(300_000), sep='\\n'), 2)",),
        (r"lines? of ranks? .*left out here", r"logs\(rank\) has all", "299999"),
    ),
    Fault(
        "long run",
        ("run = launch(train, 2, detached=True)", "run.wait(3); print(run.report())", "run.stop()"),
        ("train on 2 ranks: running", r"progress: .*/200.*left", "loss: last", r"run\.stop\(\)"),
    ),
    Fault(
        "NaN",
        ("run = launch(train, 2, kwargs=dict(steps=9, nap=0, bad=5)); run.wait(30); print(run.report())",),
        ("loss: last NaN at step 8", "NOT FINITE, the first at step 5"),
    ),
    Fault(
        "wrong argument",
        ("notebook_launch(train, 2, mixed_precison='bf16')", "notebook_launch(train, 2, kwargs={'step': 3})"),
        (r"mixed_precison=", "mixed_precision", r"step", "train"),
    ),
    Fault(
        "out of memory",
        (
            (
                "def greedy():\n"
                "    import os, resource, torch\n"
                "    if os.environ['RANK'] == '1':\n"
                "        used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
                "        resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)\n"
                "    return torch.ones(100_000_000 if os.environ['RANK'] == '1' else 1).sum().item()\n"
                "notebook_launch(greedy, 2)"
            ),
        ),
        ("rank 1 of 2 failed", "memory", "line 6, in greedy"),
    ),
    Fault(
        "killed rank",
        ("def die():\n    import os\n    os.kill(os.getpid(), 9 * int(os.environ['RANK']))\nnotebook_launch(die, 2)",),
        ("rank 1", "SIGKILL"),
    ),
    Fault(
        "interrupt by the tool's time limit",
        (
            "notebook_launch(train, 2, kwargs={'steps': 2000})",
            "notebook_launch(train, 2, args=(1,))",
            "print(runs()[1].report())",
        ),
        (
            r"TIMEOUT|KeyboardInterrupt",
            r"train was stopped by an interrupt after",
            "detached=True",
            "stopped on request",
        ),
        timeout=6,
    ),
    Fault(
        "restart",
        (
            "run = launch(train, 2, detached=True)",
            RESTART,
            "from notebook_launcher import attach\nrun = attach(show=False); run.wait(2); print(run.report())",
            "run.stop()",
        ),
        ("train on 2 ranks: running", "loss: last"),
    ),
)


@contextlib.contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """Run a Jupyter server; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NOTEBOOK_LAUNCHER_RUNS": str(folder / "kept")}
    options = [f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"]
    command = [sys.executable, "-m", "jupyter", "server", "--no-browser", "--allow-root", *options]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api?token={TOKEN}") as answer:
                answer.read()
                break
            time.sleep(0.1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


class Agent:
    """A client of jupyter-mcp-server: JSON-RPC in lines, over its standard input and output."""

    def __init__(self, server: str, address: str, log: Path) -> None:
        options = ["--transport", "stdio", "--jupyter-url", address, "--jupyter-token", TOKEN]
        self._numbers = itertools.count(1)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [server, "start", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        told = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "faults", "version": "1"}}
        self._ask("initialize", told)
        self._send({"method": "notifications/initialized"})

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def call(self, tool: str, **arguments: Any) -> str:
        """Call a tool and return the text that it answers."""
        answer = self._ask("tools/call", {"name": tool, "arguments": arguments})
        return "\n".join(part.get("text", f"[{part['type']}]") for part in answer["content"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer.get("id") == number:
                result: dict[str, Any] = answer.get("result") or {"content": [{"type": "text", "text": str(answer)}]}
                return result
        raise SystemExit("jupyter-mcp-server has ended")


def drive(agent: Agent, chosen: str) -> int:
    """Meet each fault; return the number of faults that are not understood."""
    misses = 0
    print(agent.call("use_notebook", notebook_name="n", notebook_path="n.ipynb", mode="create"))
    for fault in FAULTS:
        if chosen not in fault.name:
            continue
        began, texts = time.monotonic(), []
        agent.call("execute_code", code=FIRST, timeout=60)
        for cell in fault.cells:
            if cell == RESTART:
                texts.append(agent.call("restart_notebook", notebook_name="n"))
            else:
                texts.append(agent.call("execute_code", code=cell, timeout=fault.timeout))
            print(f"\n=== {fault.name}\n{cell}\n--- {len(texts[-1]):,} characters\n{texts[-1][:6000]}")
        read = "\n".join(texts)
        missing = [words for words in fault.words if not re.search(words, read)]
        missing += [f"{len(read):,} characters"] if len(read) > LIMIT else []
        misses += bool(missing)
        verdict = f"NOT UNDERSTOOD, without {missing}" if missing else "understood"
        print(f"*** {fault.name}: {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    return misses


def main() -> int:
    """Meet all faults, or those whose name has a text."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--server", default="jupyter-mcp-server", help="the program jupyter-mcp-server")
    parser.add_argument("--only", default="", help="a part of the names of the faults")
    options = parser.parse_args()
    if shutil.which(options.server) is None:
        print(f"{options.server} is not installed: see the head of this file")
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with jupyter(folder) as address, Agent(options.server, address, folder / "mcp.log") as agent:
            return drive(agent, options.only)


if __name__ == "__main__":
    sys.exit(main())
