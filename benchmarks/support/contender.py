"""A contender in a process of its own: reads commands from one pipe, and writes answers to another.

The functions that ranks run are here too. Where they are launched, this file is `__main__`, as a notebook's cell
is, so launchers that pickle must pickle the functions by value. Launchers that start fresh interpreters import
this file.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

GB = 1 << 30
NUM_PARTS = 16
"""Number of tensors in a returned state."""


# The functions that ranks run.


def trivial() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def build_bert(folder: str) -> None:
    """Build a tiny model of transformers."""
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64))
    note(folder, **memory_of("self"))


def fit_table(folder: str) -> None:
    """Fit scikit-learn's model to a table of pandas."""
    import pandas as pd
    from sklearn.linear_model import LinearRegression

    frame = pd.DataFrame({"x": range(100), "y": range(100)})
    LinearRegression().fit(frame[["x"]], frame["y"])
    note(folder, **memory_of("self"))


LIBRARIES = {"transformers": build_bert, "pandas + scikit-learn": fit_table}


def prove(folder: str) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    note(folder, sum=int(total))


def started(folder: str, data: Any) -> None:
    now = time.monotonic()
    note(folder, started=now, ends=0.0 if data is None else float(data[0] + data[-1]))


def hold(folder: str, data: Any) -> None:
    import torch.distributed as dist

    if data is not None:
        float(data.sum())
    dist.barrier()
    note(folder, **memory_of("self"))
    dist.barrier()


def make_state(folder: str) -> Any:
    import torch
    import torch.distributed as dist

    if dist.get_rank() != 0:
        return None
    state = {f"layer{part}": torch.full((GB // NUM_PARTS // 4,), float(part)) for part in range(NUM_PARTS)}
    note(folder, made=time.monotonic())
    return state


def die(folder: str) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        note(folder, died=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def fail(folder: str) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        note(folder, died=time.monotonic())
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def idle(folder: str) -> None:
    note(folder, pid=os.getpid())
    time.sleep(120)


def look(folder: str) -> None:
    note(folder, pid=os.getpid())


def note(folder: str, **values: Any) -> None:
    """Write a rank's values to a file, completely or not at all; some launchers return no values."""
    path = Path(folder, f"{os.getpid()}")
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path.with_suffix(".json"))


def memory_of(pid: int | str) -> dict[str, int]:
    """Return a process's proportional and private memory in bytes."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
    return {"pss": sizes["Pss"], "private": sizes["Private_Dirty"] + sizes["Private_Clean"]}


# The commands of a contender.


class Tasks:
    """Commands of a contender, one method each; the return value is sent back."""

    def __init__(self, make_way: Any, num_ranks: int) -> None:
        self._make_way = make_way
        self._num_ranks = num_ranks
        self._way: Any = None
        self._folder = os.environ["BENCHMARK_FOLDER"]

    @property
    def way(self) -> Any:
        if self._way is None:
            self._way = self._make_way(self._num_ranks)
        return self._way

    def prompt(self) -> dict[str, Any]:
        """Be a process with a prompt, as a kernel is: a person there is likely to launch again."""
        sys.ps1 = ">>> "
        return {}

    def cold(self) -> dict[str, Any]:
        """Time the first call of a fresh interpreter, imports included."""
        return self.trivial()

    def trivial(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.way.call(trivial)
        return {"seconds": time.perf_counter() - begin}

    def load(self, kind: str) -> dict[str, Any]:
        """Time the imports of a cell and the first use here, as in a notebook that tries its function."""
        begin = time.perf_counter()
        LIBRARIES[kind](self._folder)
        return {"seconds": time.perf_counter() - begin}

    def library(self, kind: str) -> dict[str, Any]:
        """Time a call of a function that uses what the caller has imported; return the memory of a rank, too."""
        self._clear()
        begin = time.perf_counter()
        self.way.call(LIBRARIES[kind], self._folder)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "private": max(noted["private"] for noted in self._read())}

    def row(self, count: int) -> dict[str, Any]:
        """Time calls one right after the other, as in a loop of a cell."""
        times = sorted(self.trivial()["seconds"] for _ in range(count))
        return {"seconds": times[count // 2]}

    def prepare(self) -> dict[str, Any]:
        """Make one call that checks the number of ranks and their process group."""
        if getattr(self.way, "bare", False):
            self.way.call(trivial)
            missing = [name for name in self.way.modules if name not in sys.modules]
            if missing:
                raise RuntimeError(f"not a valid reference: {', '.join(missing)} is not imported")
            return {"private": memory_of("self")["private"]}
        sums = [seen["sum"] for seen in self._noted(prove)]
        if sums != [self._num_ranks] * self._num_ranks:
            raise RuntimeError(f"the group of {self._num_ranks} ranks is not up: an all-reduce of ones gave {sums}")
        return {}

    def copy(self) -> dict[str, Any]:
        """Time one memory copy of 1 GB, into new memory, as a launcher copies data, and into used memory.

        The first copy is not timed: it would include the time in which a virtual machine takes memory from its
        host. Later measurements would not include that time, and would look faster than a copy.
        """
        import numpy as np

        source = np.ones(GB // 4, np.float32)
        source.copy()
        begin = time.perf_counter()
        target = source.copy()
        new = time.perf_counter() - begin
        begin = time.perf_counter()
        np.copyto(target, source)
        used = time.perf_counter() - begin
        return {"new": new, "used": used, "tensor": self._copy_tensor()}

    def _copy_tensor(self) -> float:
        """Time the copy of a tensor: it takes more than twice as long, because only NumPy asks for huge pages."""
        import torch

        source = torch.ones(GB // 4)
        source.clone()
        begin = time.perf_counter()
        source.clone()
        return time.perf_counter() - begin

    def capture(self, kind: str) -> dict[str, Any]:
        data = self._make_data(kind)
        begin = time.monotonic()
        seen = self._noted(started, data)
        return {"seconds": max(noted["started"] for noted in seen) - begin}

    def capture_memory(self, kind: str) -> dict[str, Any]:
        seen = self._noted(hold, self._make_data(kind))
        return {key: sum(noted[key] for noted in seen) for key in ("pss", "private")}

    def _make_data(self, kind: str) -> Any:
        gc.collect()
        if kind == "array":
            import numpy as np

            return np.ones(GB // 4, np.float32)
        if kind == "tensor":
            import torch

            return torch.ones(GB // 4)
        return None

    def returned(self) -> dict[str, Any]:
        import torch

        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        self._clear()
        state = self.way.call_for_result(make_state, self._folder)
        seconds = time.monotonic() - self._read()[0]["made"]
        total = sum(float(torch.mean(part)) for part in state.values())
        if total != sum(range(NUM_PARTS)):
            raise RuntimeError(f"the result differs from the returned value: {total}")
        return {"seconds": seconds, "peak": _status("VmHWM") - before}

    def death(self, how: str) -> dict[str, Any]:
        self._clear()
        try:
            self.way.call({"die": die, "fail": fail}[how], self._folder)
        except Exception as error:  # any exception is the answer
            seconds = time.monotonic() - self._read()[0]["died"]
            lines = [line for line in str(error).splitlines() if any(map(str.isalpha, line))]
            return {"seconds": seconds, "error": type(error).__name__, "message": lines[0] if lines else ""}
        raise RuntimeError("the call ended without an exception")

    def idle(self) -> dict[str, Any]:
        """Launch a function that does not end; the files of its ranks are the answer."""
        self.way.call(idle, self._folder)
        return {}

    def look(self) -> dict[str, Any]:
        """Return the process numbers of ranks that stay alive between calls."""
        return {"pids": [noted["pid"] for noted in self._noted(look)]}

    def folder(self) -> dict[str, Any]:
        self._clear()
        return {"folder": self._folder}

    def close(self) -> dict[str, Any]:
        if self._way is not None:
            self._way.close()
        return {}

    def _noted(self, fn: Any, *data: Any) -> list[dict[str, Any]]:
        self._clear()
        folder = self._folder
        if data and getattr(self.way, "takes_closures", False):
            (captured,) = data
            self.way.call(lambda: fn(folder, captured))
        else:
            self.way.call(fn, folder, *data)
        seen = self._read()
        if len(seen) != self._num_ranks:
            raise RuntimeError(f"{len(seen)} of {self._num_ranks} ranks ran {fn.__name__}")
        return seen

    def _clear(self) -> None:
        for path in Path(self._folder).iterdir():
            path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in Path(self._folder).glob("*.json")]


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(key)


def main(name: str, num_ranks: int, commands_fd: int, answers_fd: int) -> None:
    from support import ways

    tasks = Tasks(ways.WAYS[name], num_ranks)
    with open(commands_fd, encoding="utf-8") as commands, open(answers_fd, "w", encoding="utf-8") as answers:
        for line in commands:
            command, *args = json.loads(line)
            try:
                answer = getattr(tasks, command)(*args)
            except BaseException as error:  # it becomes a row of the table
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(arg) for arg in sys.argv[2:5]))
