"""Torch's further parts, other libraries and the standard library work in ranks as in a process of one's own."""

from __future__ import annotations

import importlib.util
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.linear_cell import DEFINITIONS
from tests.support.warm_kernels import evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel

DATA_MODULE = """
from torch.utils.data import Dataset

def square(x):
    return x * x

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        return at * at
"""

KERNEL_CODE = DEFINITIONS
KERNEL_FILES = {"data.py": DATA_MODULE}


def test_model_may_outlive_its_group(kernel: Kernel) -> None:
    """As the `main` of most scripts leaves it; one in ten hung."""
    outcome = kernel.execute(
        """
        def main():
            dist.init_process_group("gloo")
            model = torch.nn.parallel.DistributedDataParallel(linear())
            model(torch.ones(1, 1)).mean().backward()
            dist.barrier()
            dist.destroy_process_group()
        with Session(2, output="none") as session:
            for _ in range(40):
                session.run(main)
        """
    )
    assert outcome.error is None, outcome.traceback


def test_rank_gets_the_command_line_without_the_kernels_options(kernel: Kernel) -> None:
    ours, program, users = evaluate(
        kernel,
        """
        def command_line():
            return sys.argv
        ours, program = notebook_launch(command_line, 1)[0], sys.argv[0]
        before, sys.argv = sys.argv, ["train.py", "--lr", "0.1"]
        users = notebook_launch(command_line, 1)[0]
        sys.argv = before
        ours, program, users
        """,
    )
    # Not what the kernel itself was given, and a path: scripts look for files beside it.
    assert ours == [program]
    assert users == ["train.py", "--lr", "0.1"]


def test_loaders_pools_and_the_standard_library_work_in_ranks(kernel: Kernel) -> None:
    loaded, pooled, used = zip(
        *evaluate(
            kernel,
            """
        class Cubes(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, at):
                return at ** 3
        def load():
            import data
            sums = []
            for dataset in (data.Squares(), Cubes()):
                for persistent in (False, True):
                    loader = torch.utils.data.DataLoader(
                        dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
                    sums += [sum(int(batch.sum()) for batch in loader) for _ in range(2)]
            return sums
        def increment(x):
            return x + 1
        def pools():
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
            import data
            with multiprocessing.Pool(2) as pool:
                numbers = pool.map(increment, [1, 2])
            with ProcessPoolExecutor(2) as pool:
                numbers += pool.map(data.square, numbers)
            with ThreadPoolExecutor(2) as pool:
                numbers += pool.map(increment, numbers)
            left = multiprocessing.Pool(1)  # Nobody closes it.
            return numbers + left.map(increment, [0])
        def use():
            import asyncio, faulthandler, signal, subprocess, tempfile
            async def talk():
                process = await asyncio.create_subprocess_exec("echo", "async", stdout=subprocess.PIPE)
                return (await process.communicate())[0]
            talked = asyncio.run(talk())
            caught = []
            for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda number, _frame: caught.append(signal.Signals(number).name))
                signal.raise_signal(signum)
            echoed = subprocess.run(["echo", "echo"], capture_output=True).stdout
            empty = subprocess.run(["cat"], capture_output=True).stdout  # Standard input is at its end.
            child = subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)"], capture_output=True).stdout
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.enable(file)
                faulthandler.dump_traceback(file)
                file.seek(0)
                dumped = "in use" in file.read()
            return talked, caught, echoed, empty, child, dumped
        list(notebook_launch(lambda: (load(), pools(), use()), 2))
        """,
        ),
        strict=True,
    )
    assert loaded == ([140] * 4 + [36] * 4,) * 2
    assert pooled == ([2, 3, 4, 9, 3, 4, 5, 10, 1],) * 2
    caught = ["SIGUSR1", "SIGTERM", "SIGINT"]
    assert used == ((b"async\n", caught, b"echo\n", b"", b"['-c']\n", True),) * 2


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.slow
def test_torch_compile_works_in_ranks(kernel: Kernel, tmp_path: Path) -> None:
    results = evaluate(
        kernel,
        f"""
        def compiled():
            import torch._inductor.config
            torch._inductor.config.cpp_cache_precompile_headers = False  # They would take longer than the function.
            function = torch.compile(lambda x: (2 * x).relu() + 1)
            return function(torch.full((100,), float(dist.get_rank() + 1))).sum().item()
        list(notebook_launch(compiled, 1, env={{"TORCHINDUCTOR_CACHE_DIR": {str(tmp_path)!r}}}))
        """,
    )
    assert results == [300.0]


def test_what_logging_warnings_bars_children_and_late_threads_print_arrives(kernel: Kernel) -> None:
    outcome = kernel.execute(
        """
        def talk():
            import atexit, importlib.util, logging, subprocess, threading, warnings
            from tqdm import tqdm
            from tqdm.auto import trange
            logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
            logging.info("logged")
            warnings.warn("careful")
            subprocess.run(["echo", "from a child"])
            for _ in tqdm(range(3), desc="plain"):
                pass
            for _ in trange(4, desc="auto"):
                pass
            if importlib.util.find_spec("rich"):
                import rich, rich.progress
                rich.print("[bold]from rich[/bold]", sum(rich.progress.track(range(3))))
            def work():
                time.sleep(0.1)  # By now the function has returned.
                print("late words")
            threading.Thread(target=work).start()
            atexit.register(print, "at exit")
            return "returned"
        notebook_launch(talk, 2)[0]
        """
    )
    assert outcome.error is None, outcome.traceback
    assert outcome.result == "'returned'"
    assert "INFO logged\n" in outcome.stderr
    assert "UserWarning: careful\n" in outcome.stderr
    assert "] from a child\n" in outcome.stdout
    for rank in range(2):
        # Bars that are equal to the microsecond are one line of both ranks.
        assert re.search(rf"\[(rank {rank}|ranks 0,1)\] plain: 100%", outcome.stdout)
    assert "3/3" in outcome.stdout
    if importlib.util.find_spec("rich") is not None:
        assert "from rich" in outcome.stdout + "".join(str(display["data"]) for display in outcome.displays)
    # Lines of several ranks that arrive together are shown as one.
    assert re.search(r"^\[ranks? [01,]+\] late words$", outcome.stdout, re.MULTILINE)
    assert re.search(r"^\[ranks? [01,]+\] at exit$", outcome.stdout, re.MULTILINE)
