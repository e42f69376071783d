"""Options of a launch: each changes something that can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.first_cell import DEFINITIONS, FORKED, START_METHODS
from tests.support.warm_kernels import evaluate

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = DEFINITIONS


def test_options_num_processes_and_backend_take_effect(kernel: Kernel) -> None:
    seen = evaluate(
        kernel,
        """
        def look():
            return os.environ["WORLD_SIZE"], dist.is_initialized() and dist.get_backend()
        [notebook_launch(look, *num, **options)[-1] for num, options in [
            ((), {}), ((3,), {}), ((1,), dict(backend="gloo")), ((1,), dict(backend=None))]]
        """,
    )
    cores = evaluate(kernel, "len(os.sched_getaffinity(0))")
    assert seen == [(str(min(4, cores)), "gloo"), ("3", "gloo"), ("1", "gloo"), ("1", False)]


@pytest.mark.parametrize("start_method", FORKED)
def test_option_threads_per_process_takes_effect(kernel: Kernel, start_method: str) -> None:
    """Torch's threads, those of NumPy's OpenBLAS, and those of libraries that are loaded later."""
    cores = evaluate(kernel, "len(os.sched_getaffinity(0))")
    seen = evaluate(
        kernel,
        f"""
        def threads():
            import ctypes
            core = getattr(np, "_core", None) or np.core
            openblas = ctypes.CDLL(core._multiarray_umath.__file__)
            get = getattr(openblas, "scipy_openblas_get_num_threads64_", None) or openblas.openblas_get_num_threads64_
            return torch.get_num_threads(), get(), os.environ["OMP_NUM_THREADS"]
        method = {start_method!r}
        torch.nn.Linear(512, 512)(torch.randn(2048, 512))
        [notebook_launch(threads, 2, start_method=method)[1],
         notebook_launch(threads, 2, start_method=method, threads_per_process=3)[1]]
        """,
    )
    share = max(1, cores // 2)
    # The kernel has run a parallel operation, after which its forks cannot run any.
    expected = [(1, 1), (1, 1)] if start_method == "fork" else [(share, share), (3, 3)]
    assert [(torch, openblas) for torch, openblas, _ in seen] == expected
    if start_method != "fork":
        assert [variable for *_, variable in seen] == [str(share), "3"]


DRAW = """
        def draw():
            return random.random(), float(np.random.rand()), torch.rand(1).item()
        def state():
            return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
"""


def test_same_seed_repeats_every_random_number(kernel: Kernel) -> None:
    first, second, kernels = evaluate(
        kernel,
        f"""
        {DRAW}
        before = state()
        first, second = (list(notebook_launch(draw, 2, seed=7)) for _ in range(2))
        first, second, state() == before
        """,
    )
    assert first == second == first[:1] * 2
    assert len(set(first[0])) == 3
    assert kernels


def test_env_reaches_the_ranks_alone(kernel: Kernel) -> None:
    seen = evaluate(
        kernel,
        f"""
        def look():
            import subprocess
            child = subprocess.run(["sh", "-c", "echo $COLOUR"], capture_output=True, text=True).stdout
            return os.environ["COLOUR"], child, os.environ["OMP_NUM_THREADS"]
        options = dict(env={{"COLOUR": "red", "OMP_NUM_THREADS": "5"}})
        results = [notebook_launch(look, 1, start_method=method, **options)[0] for method in {START_METHODS!r}]
        results, "COLOUR" in os.environ
        """,
    )
    assert seen == ([("red", "red\n", "5")] * 3, False)


@pytest.mark.parametrize("output", ["all", "rank0"])
def test_options_output_and_display_take_effect(kernel: Kernel, output: str) -> None:
    outcome = kernel.execute(
        f"""
        from IPython.display import HTML
        def show():
            print("printed by", dist.get_rank())
            display(HTML(f"<b>shown by {{dist.get_rank()}}</b>"))
        notebook_launch(show, 2, output={output!r}, display={output!r}, monitor=False);
        """
    )
    assert outcome.error is None, outcome.traceback
    ranks = {"all": [0, 1], "rank0": [0]}[output]
    assert [rank for rank in range(2) if f"printed by {rank}\n" in outcome.stdout] == ranks
    shown = sorted(display["data"]["text/html"] for display in outcome.displays)
    assert shown == [f"<b>shown by {rank}</b>" for rank in ranks]


def test_options_by_name_win_over_a_config(kernel: Kernel) -> None:
    results = evaluate(
        kernel,
        """
        config = LaunchConfig(num_processes=2, env={"COLOUR": "red"}, seed=1, output="none")
        def look():
            return os.environ["COLOUR"]
        with contextlib.closing(Session(config=config)) as session:
            in_session = list(session.run(look))
        results = notebook_launch(look, 1, config=config, env={"COLOUR": "blue"})
        list(results), results.seed, in_session
        """,
    )
    assert results == (["blue"], 1, ["red", "red"])
