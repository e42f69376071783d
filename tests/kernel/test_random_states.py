"""Random numbers in ranks: they begin as the kernel's, alike on all ranks, and part at `prepare`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.first_cell import DEFINITIONS
from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel

KERNEL_CODE = f"""{DEFINITIONS}
from torch.utils.data import DataLoader, TensorDataset, random_split
%load_ext notebook_launcher
from notebook_launcher import Accelerator, Commands, Session, launch, notebook_launch, open_run, report, set_seed

def numbers():
    return torch.rand(1).item(), float(np.random.rand()), random.random()

def draw():
    rows = list(range(20))
    return random_split(rows, [16, 4])[1].indices, np.random.permutation(9).tolist(), random.sample(rows, 4), *numbers()

def state():
    gauss = np.random.get_state()[2:]
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), gauss

def restore(kept):
    random.setstate(kept[0])
    torch.set_rng_state(torch.tensor(kept[1], dtype=torch.uint8))
    np.random.set_state(("MT19937", kept[2], *kept[3]))

def expected():
    "Return the draws of this process, which stays as it is."
    kept = state()
    try:
        return draw()
    finally:
        restore(kept)

def stages():
    "Numbers before and after `prepare`, and after the next Accelerator was made."
    first, accelerator = numbers(), Accelerator()
    made = numbers()
    accelerator.prepare(torch.nn.Linear(1, 1))
    apart = numbers()
    Accelerator()
    return first, made, apart, numbers()

ENDED = dict(devices="cpu", output="none", monitor=False)
"""


def test_ranks_begin_with_the_kernels_states_and_leave_them(kernel: Kernel) -> None:
    seen, before, after = evaluate(
        kernel,
        """
        torch.manual_seed(42); np.random.seed(1); random.seed(2)
        np.random.randn(3), random.gauss(0, 1), torch.rand(5)  # a normal number is kept for the next draw
        before, wanted = state(), expected()
        methods = ("forkserver", "forkserver", "fork", "fork")
        launches = [list(notebook_launch(draw, 2, start_method=method, **ENDED)) for method in methods]
        [launched == [wanted] * 2 for launched in launches], before, state()
        """,
    )
    assert seen == [True] * 4
    assert before == after


def test_same_seed_repeats_every_random_number(kernel: Kernel) -> None:
    first, second, is_unchanged = evaluate(
        kernel,
        """
        before = state()
        first, second = (list(notebook_launch(numbers, 2, seed=7, **ENDED)) for _ in range(2))
        first, second, state() == before
        """,
    )
    assert first == second == first[:1] * 2
    assert len(set(first[0])) == 3
    assert is_unchanged


def test_session_engine_detached_run_and_restart_begin_as_a_launch(kernel: Kernel, tmp_path: object) -> None:
    seen = evaluate(
        kernel,
        f"""
        def dies_once():
            drawn = draw()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os._exit(3)
            return drawn
        wanted, folder = expected(), dict(runs_folder={str(tmp_path)!r})
        with Session(2, **ENDED) as session:
            in_session, later = list(session.run(draw)), list(session.run(draw))
        with Commands([[], ["env"]]) as engine:
            on_nodes = list(notebook_launch(draw, 2, engine=engine, **ENDED))
        detached = list(launch(draw, 2, detached=True, **ENDED, **folder).result())
        restarted = list(notebook_launch(dies_once, 2, max_restarts=1, **ENDED))
        [drawn == [wanted] * 2 for drawn in (in_session, on_nodes, detached, restarted)], later[0] == later[1] != wanted
        """,
    )
    assert seen == ([True] * 4, True)


def test_code_before_the_function_may_seed_and_the_kernel_goes_on_after_it(kernel: Kernel) -> None:
    run_cell(kernel, "%%everywhere\nimport torch\ntorch.manual_seed(5)")
    seen = evaluate(
        kernel,
        """
        torch.manual_seed(6)
        before = torch.rand(1).item()
        begun = list(notebook_launch(numbers, 2, **ENDED))
        seeded = list(notebook_launch(numbers, 2, setup="import torch; torch.manual_seed(6)", **ENDED))
        begun == [numbers()] * 2, [rank[0] == before for rank in seeded]
        """,
    )
    assert seen == (True, [True, True])


def test_ranks_draw_apart_from_prepare_on_and_alike_for_another_accelerator(kernel: Kernel) -> None:
    both, again, seeded, alike, *apart = evaluate(
        kernel,
        """
        def seeds():
            torch.manual_seed(7)
            parted = stages()
            set_seed(torch.initial_seed())  # the same once more
            return parted + stages()
        def launched(function, **options):
            return list(zip(*notebook_launch(function, 2, **ENDED, **options)))
        ways = [{}, {}, {"rank_seeds": "alike"}, {"rank_seeds": "apart"}, {"rank_seeds": "apart"}]
        both, again, *others = (launched(stages, **options) for options in ways)
        [both, again, launched(seeds), *others]
        """,
    )
    assert both == again
    first, made, parted, joined = both
    for equal in (first, made, joined):
        assert equal[0] == equal[1]
    for of_rank_0, of_rank_1 in zip(*parted, strict=True):  # torch, NumPy, random
        assert of_rank_0 != of_rank_1
    assert len({*first, *made, *parted, *joined}) == 5
    # A seed that the function gives stays.
    assert [one[0] == one[1] for one in seeded] == [True] * 8
    assert [one[0] == one[1] for one in alike] == [True] * 4
    assert apart[0] == apart[1]
    assert [one[0] == one[1] for one in apart[0]] == [False] * 4


def test_function_that_seeds_with_the_kernels_seed_keeps_it_in_each_call(kernel: Kernel) -> None:
    first, second = evaluate(
        kernel,
        """
        def seeded():
            torch.manual_seed(8)
            Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))
            return torch.rand(1).item()
        torch.manual_seed(8)
        with Session(2, **ENDED) as session:
            found = [list(session.run(seeded)) for _ in range(2)]
        found
        """,
    )
    assert first == second
    assert first[0] == first[1]


def test_validation_rows_of_a_random_split_are_trained_on_by_no_rank(kernel: Kernel) -> None:
    leaked = evaluate(
        kernel,
        """
        def train():
            accelerator = Accelerator()
            train, valid = random_split(TensorDataset(torch.arange(20.0)[:, None]), [16, 4])
            train, valid = accelerator.prepare(DataLoader(train, 2, shuffle=True), DataLoader(valid, 2))
            trained, held = ([x for batch, in loader for x in accelerator.gather_for_metrics(batch)[:, 0].tolist()]
                             for loader in (train, valid))
            return sorted(trained + held)
        with Session(2, **ENDED, seed=1) as session:  # its second call splits anew
            runs = [session.run(train)[0] for _ in range(2)]
        runs
        """,
    )
    assert leaked == [[float(number) for number in range(20)]] * 2


def test_first_line_shows_what_the_ranks_begin_with_and_the_folder_keeps_it(kernel: Kernel, tmp_path: object) -> None:
    shown = run_cell(
        kernel,
        f"""
        def reports():
            report(loss=1.0)  # so that the run leaves a folder
            return draw()
        for number in (3, None):
            torch.manual_seed(42)
            run = launch(reports, 2, devices="cpu", seed=number, monitor=False, runs_folder={str(tmp_path)!r})
            first = list(run.result())
            print(run.seed, open_run(run.id, {str(tmp_path)!r}).seed)
            torch.rand(3), np.random.rand(), random.random()
            try:
                open_run(run.id, {str(tmp_path)!r}).restore_random_states()
            except LookupError as error:
                print(str(error).partition(". ")[2])
            else:
                print(list(notebook_launch(draw, 2, **ENDED)) == first == [expected()] * 2)
        """,
    ).stdout
    lines = [line.rpartition("found, ")[2] for line in shown.splitlines() if "done in" not in line]
    assert lines == [
        "seed 3",
        "3 3",
        "Pass seed=3.",
        "random state of the kernel (seed 42)",
        "None None",
        "True",
    ]


WITHOUT_TORCH = """
import random, socket, sys
from notebook_launcher import Session, notebook_launch

def draw():
    import numpy as np, random, torch
    return torch.rand(1).item(), float(np.random.rand()), random.random()

def rank():
    import os
    return int(os.environ["RANK"])

if __name__ == "__main__":
    socket.setdefaulttimeout(5)
    launches, options = [], dict(devices="cpu", output="none", monitor=False)
    for seed in (1, 1, 2):
        random.seed(seed)
        launches.append(list(notebook_launch(draw, 2, **options)))
    print([one[0] == one[1] for one in launches], [one == launches[0] for one in launches])
    with Session(2, **options) as session:
        ranks = [*session.run(rank), *notebook_launch(rank, 1, start_method="fork", backend=None, **options)]
    print(ranks, {"torch", "numpy"} & set(sys.modules))
"""


def test_kernel_needs_no_torch_for_ranks_that_draw_alike_and_may_have_a_default_timeout_for_sockets(
    tmp_path: Path,
) -> None:
    """Python's state seeds the generators that the kernel has not imported."""
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_TORCH)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True, True] [True, True, False]\n[0, 1, 0] set()\n", done.stderr
