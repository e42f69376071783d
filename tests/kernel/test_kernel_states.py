"""A launch works whatever the kernel did before, and leaves the kernel as it was.

One kernel for the whole module, which therefore remembers all that the tests before did to it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.support.first_cell import DEFINITIONS, FORKED, START_METHODS
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel


KERNEL_CODE = DEFINITIONS
KERNEL_FILES: dict[str, str] = {}


def test_ipythons_exit_and_quit_end_the_rank(kernel: Kernel) -> None:
    outcome = kernel.execute(
        """
        def leave():
            print("before")
            exit()
            print("after")
        list(notebook_launch(leave, 2))
        """
    )
    assert outcome.result == "[None, None]", outcome.traceback
    assert ("before" in outcome.stdout, "after" in outcome.stdout) == (True, False)
    outcome = kernel.execute("notebook_launch(lambda: quit(3), 1)")
    assert (outcome.error or "").startswith("RankFailedError: rank 0 of 1 called sys.exit(3)")


def test_namespace_of_a_module_can_be_returned(kernel: Kernel, tmp_path: Path) -> None:
    """It holds the builtins, and with them what connects a rank with the cell."""
    script = tmp_path / "script.py"
    script.write_text("import threading\nvalue = 3\n")
    arguments = f"1, args=({str(script)!r},)"
    outcome = kernel.execute(f"import runpy; notebook_launch(runpy.run_path, {arguments})[0]['value']")
    assert outcome.result == "3", outcome.traceback
    script.write_text("import threading\nlock = threading.Lock()\n")
    outcome = kernel.execute(f"notebook_launch(runpy.run_path, {arguments})[0]")
    assert "the return value cannot travel: `result['lock']` is a _thread.lock" in (outcome.error or "")
    outcome = kernel.execute("notebook_launch(lambda: globals(), 1)[0]['__name__']")
    assert outcome.result == "'__main__'", outcome.traceback


@pytest.mark.parametrize("start_method", FORKED)
def test_ranks_have_their_threads_also_after_parallel_operations_in_the_kernel(
    kernel: Kernel, start_method: str
) -> None:
    """GNU OpenMP's pool and autograd's threads do not survive a fork; a fork of the kernel would hang in them.

    The threads are torch's, those of NumPy's OpenBLAS, and those of libraries that are loaded later.
    """
    outcome = run_cell(
        kernel,
        f"""
        def work():
            model = torch.nn.Linear(512, 512)
            model(torch.randn(2048, 512)).sum().backward()
            return bool(model.weight.grad.any())
        def threads():
            import ctypes
            core = getattr(np, "_core", None) or np.core
            openblas = ctypes.CDLL(core._multiarray_umath.__file__)
            get = getattr(openblas, "scipy_openblas_get_num_threads64_", None) or openblas.openblas_get_num_threads64_
            return work(), total(), torch.get_num_threads(), get(), os.environ["OMP_NUM_THREADS"]
        work()
        found = [notebook_launch(threads, 2, start_method={start_method!r}, **options)[1]
                 for options in (dict(), dict(threads_per_process=3))]
        found, max(1, len(os.sched_getaffinity(0)) // 2)
        """,
    )
    found, share = ast.literal_eval(outcome.result or "")
    # The kernel has run a parallel operation, after which its forks cannot run any.
    expected = [1, 1] if start_method == "fork" else [share, 3]
    assert [seen[:4] for seen in found] == [(True, 2.0, number, number) for number in expected]
    assert start_method == "fork" or [seen[4] for seen in found] == [str(share), "3"]
    said = "this kernel has run parallel operations, so a fork of it can run none" in outcome.stdout
    assert said == (start_method == "fork")


def test_launch_works_beside_a_process_group_of_the_kernel(kernel: Kernel) -> None:
    results, kernels = evaluate(
        kernel,
        """
        def own():
            dist.init_process_group("gloo")
            return total()
        def guarded():
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            return total()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group([0])
        results = [list(notebook_launch(f, 2, start_method="fork")) for f in (total, own, guarded)]
        results.append(list(notebook_launch(own, 2, start_method="fork", backend=None)))
        one = torch.ones(1)
        dist.all_reduce(one)
        dist.all_reduce(one, group=group)
        kernels = (one.item(), dist.get_world_size())
        dist.destroy_process_group()
        del group
        results, kernels
        """,
    )
    assert results == [[2.0, 2.0]] * 4
    assert kernels == (1.0, 1)


# The process: environment, folders, signals, threads.


def test_ranks_get_the_kernels_present_environment_and_the_variables_of_env(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    results, program, is_set = evaluate(
        kernel,
        f"""
        was = os.getcwd()
        os.chdir({str(tmp_path)!r})
        sys.path.insert(0, ".")
        def surroundings():
            import beside, linecache, subprocess
            child = subprocess.run(["sh", "-c", "echo $MINE"], capture_output=True, text=True).stdout
            variables = os.environ["COLOUR"], child, os.environ["OMP_NUM_THREADS"]
            # Code without a file, of which the launcher's start is one, has no source.
            return os.getcwd(), variables, beside.VALUE, sys.argv, linecache.getline("<string>", 1)
        results, options = [], dict(env={{"MINE": "ours", "OMP_NUM_THREADS": "5"}})
        for method, os.environ["COLOUR"] in zip({START_METHODS!r}, ("red", "blue", "green")):
            results += notebook_launch(surroundings, 1, start_method=method, **options)
        os.chdir(was)
        del os.environ["COLOUR"], sys.path[0]
        results, sys.argv[:1], "MINE" in os.environ
        """,
    )
    colours = ("red", "blue", "green")
    assert results == [(str(tmp_path), (colour, "ours\n", "5"), 5, program, "") for colour in colours]
    assert not is_set


def test_folder_added_by_dots_stays_behind_the_notebooks_own(kernel: Kernel, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    for folder in (tmp_path, notebook):
        (folder / "in_both.py").write_text(f"PLACE = {folder.name!r}\n")
    (tmp_path / "helper_above.py").touch()
    place = evaluate(
        kernel,
        f"""
        was = os.getcwd()
        os.chdir({str(notebook)!r})
        sys.path.append("..")
        import helper_above
        def place():
            import in_both
            return in_both.PLACE
        found = notebook_launch(place, 1, output="none")[0]
        os.chdir(was)
        del sys.path[-1], sys.modules["helper_above"]
        found
        """,
    )
    assert place == "notebook"


def test_deleted_working_directory_is_refused_and_does_no_lasting_harm(kernel: Kernel, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    outcome = kernel.execute(
        f"""
        was = os.getcwd()
        os.chdir({str(gone)!r})
        Path.cwd().rmdir()
        try:
            notebook_launch(total, 2)
        finally:
            os.chdir(was)
        """
    )
    assert (outcome.error or "").startswith("ConfigError: the kernel's working directory was deleted")
    assert evaluate(kernel, "list(notebook_launch(total, 2))") == [2.0, 2.0]


def test_launch_works_with_warnings_as_errors(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        """
        import gc
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for method in ("forkserver", "fork"):
                assert list(notebook_launch(total, 2, start_method=method)) == [2.0, 2.0]
            with Session(2) as session:
                session.run(total)
            run = launch(total, 2)
            run.result()
            del run, session
            gc.collect()
        """,
    )
    assert "Warning" not in outcome.stderr


# Where and how often the launch is called.


def test_threads_can_launch_at_once(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        """
        results = []
        def scaled(factor):
            print(f"factor {factor}")
            return factor * total()
        def start(factor, method):
            results.append(list(notebook_launch(scaled, 2, args=(factor,), start_method=method)))
        for factors, method in (([1], "forkserver"), ([2, 3], "forkserver"), ([4, 5], "fork")):
            threads = [threading.Thread(target=start, args=(factor, method)) for factor in factors]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        sorted(results)
        """,
    )
    assert outcome.result == str([[2.0 * factor] * 2 for factor in range(1, 6)])
    for factor in range(1, 6):
        assert f"factor {factor}\n" in outcome.stdout


def test_launch_inside_a_rank_is_refused(kernel: Kernel) -> None:
    refused = evaluate(
        kernel,
        f"""
        def nest():
            import notebook_launcher
            calls = {{"notebook_launch": (total, 2), "launch": (total, 2), "Session": (2,), "prewarm": ()}}
            refused = []
            for name, arguments in calls.items():
                try:
                    getattr(notebook_launcher, name)(*arguments)
                except CallOrderError as error:
                    refused.append(str(error).startswith(f"{{name}} was called inside rank"))
            return refused
        [list(notebook_launch(nest, 2, start_method=method)) for method in {list(FORKED)!r}]
        """,
    )
    assert refused == [[[True] * 4] * 2] * len(FORKED)


def test_runs_can_be_awaited(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
        async def both():
            first, second = launch(total, 2), launch(total, 1)
            return [list(await first), list(await second)]
        [list(await launch(total, 2)), list(notebook_launch(total, 2)), *await both()]
        """,
    )
    assert results == [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [1.0]]


# Ways to start.


def test_fork_shares_objects_that_cannot_travel(module_kernel: Kernel) -> None:
    """The kernel opens a file."""
    outcome = run_cell(
        module_kernel,
        """
        lock, numbers = threading.Lock(), (number for number in range(3))
        file = open("numbers.txt", "w+")
        file.write("one")
        file.flush()
        def use():
            with lock:
                return next(numbers), os.pread(file.fileno(), 10, 0)
        print(list(notebook_launch(use, 2, start_method="fork")), next(numbers))
        try:
            notebook_launch(use, 2)
        except CaptureError as error:
            print(error)
        file.close()
        """,
    )
    assert "[(0, b'one'), (0, b'one')] 0\n" in outcome.stdout
    assert "the function use captures `lock`, a _thread.lock, which cannot travel" in outcome.stdout


# Options of a launch: each changes something that can be seen.


@pytest.mark.parametrize("output", ["all", "rank0"])
def test_options_output_and_display_take_effect(kernel: Kernel, output: str) -> None:
    outcome = run_cell(
        kernel,
        f"""
        from IPython.display import HTML
        def show():
            print("printed by", dist.get_rank())
            display(HTML(f"<b>shown by {{dist.get_rank()}}</b>"))
        notebook_launch(show, 2, output={output!r}, display={output!r}, monitor=False);
        """,
    )
    ranks = {"all": [0, 1], "rank0": [0]}[output]
    assert [rank for rank in range(2) if f"printed by {rank}\n" in outcome.stdout] == ranks
    shown = sorted(display["data"]["text/html"] for display in outcome.displays)
    assert shown == [f"<b>shown by {rank}</b>" for rank in ranks]
