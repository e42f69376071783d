"""Place of a process among its peers, and calls that only some of them make."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from notebook_launcher import notebook_launch
from notebook_launcher.errors import ConfigError
from notebook_launcher.training.plugins import DistributedType
from notebook_launcher.training.process.environment import read_place
from notebook_launcher.training.process.process_state import ProcessState, split

TORCHRUN = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip


def test_single_process_is_every_process(capsys):
    state = ProcessState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.distributed_type is DistributedType.NO
    assert (state.device, state.backend) == (torch.device("cpu"), None)
    assert state.is_main_process and state.is_local_main_process and state.is_last_process  # noqa: PT018
    assert (state.initialized, state.use_distributed) == (True, False)
    state.print("hello", end="!")
    assert capsys.readouterr().out == "hello!"
    state.wait_for_everyone()
    state.destroy_process_group()
    with state.main_process_first(), state.local_main_process_first():
        assert not dist.is_initialized()
    decorators = [state.on_main_process, state.on_local_main_process, state.on_last_process]
    decorators.append(state.on_process(process_index=2))  # There is none: the only process is every one.
    assert [decorate(lambda: 1)() for decorate in decorators] == [1] * 4
    inputs = object()
    with state.split_between_processes(inputs) as mine:
        assert mine is inputs


@pytest.mark.parametrize(("changes", "place"), [
    ({}, (2, 4, 1, 2)),
    ({"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, (2, 4, 2, None)),
    ({"WORLD_SIZE": ""}, None),
    ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 1, 2)),
    ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": ""}, None),
    ({"WORLD_SIZE": "1", "MASTER_PORT": ""}, None),
])  # fmt: skip
def test_place_is_read_from_torchrun_s_variables(changes, place):
    found = read_place(TORCHRUN | changes)
    assert (found and (found.rank, found.num_processes, found.local_rank, found.num_local)) == place


@pytest.mark.parametrize(("changes", "message"), [
    ({"MASTER_PORT": ""}, r"WORLD_SIZE=4 makes .* part of 4, but MASTER_PORT is not set\."),
    ({"RANK": "", "MASTER_ADDR": ""}, r"but RANK and MASTER_ADDR are not set\. notebook_launch"),
    ({"RANK": "4"}, r"RANK=4 with WORLD_SIZE=4: it must be 0 to 3\."),
    ({"RANK": "first"}, r"RANK='first' must be a whole number"),
])  # fmt: skip
def test_variables_that_cannot_work_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_place(TORCHRUN | changes)


@pytest.mark.parametrize(("length", "num_processes", "shares", "padded"), [
    (5, 2, [[0, 1, 2], [3, 4]], [[0, 1, 2], [3, 4, 4]]),
    (4, 2, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    (2, 3, [[0], [1], []], [[0], [1], [1]]),
    (7, 3, [[0, 1, 2], [3, 4], [5, 6]], [[0, 1, 2], [3, 4, 6], [5, 6, 6]]),
    (0, 2, [[], []], [[], []]),
])  # fmt: skip
def test_shares_follow_each_other_and_are_padded_with_the_last_item(length, num_processes, shares, padded):
    makes: list[Any] = [list, tuple, deque, torch.tensor, np.array, pd.Series]
    for make, (pad, expected) in itertools.product(makes, [(False, shares), (True, padded)]):
        inputs = make(list(range(length)))
        found = [split(inputs, rank, num_processes, pad=pad) for rank in range(num_processes)]
        assert [list(share) for share in found] == expected
        assert {type(share) for share in found} <= {type(inputs), list}


class Rows:
    """As much of a `datasets.Dataset` as is used."""

    column_names = ("n",)

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: list[int]) -> Rows:
        return Rows([self.rows[at] for at in indices])


def test_mapping_is_split_value_by_value_and_a_data_set_selects_its_rows():
    inputs = {"prompts": ["a", "b", "c"], "deep": {"x": torch.arange(3), "frame": pd.DataFrame({"n": [1, 2, 3]})}}
    share = split(inputs, 1, 2, pad=True)
    assert share["prompts"] == ["c", "c"]
    assert share["deep"]["x"].tolist() == [2, 2]
    assert share["deep"]["frame"]["n"].tolist() == [3, 3]
    assert inputs["prompts"] == ["a", "b", "c"]
    assert split({}, 0, 2) == {}
    assert split(Rows([1, 2, 3]), 1, 2, pad=True).rows == [3, 3]


def test_rank_adopts_the_group_that_is_up(ranks):
    def look():
        group = dist.group.WORLD
        state = ProcessState()
        assert dist.group.WORLD is group
        flags = state.is_main_process, state.is_local_main_process, state.is_last_process, state.use_distributed
        return state.process_index, state.local_process_index, flags, repr(state)

    text = (
        "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\nNum processes: 3\nProcess index: {0}\n"
        "Local process index: {0}\nDevice: cpu\n"
    )
    assert list(ranks.run(3, look)) == [
        (rank, rank, (rank == 0, rank == 0, rank == 2, True), text.format(rank)) for rank in range(3)
    ]


def test_rank_without_a_group_joins_the_others():
    def join():
        assert not dist.is_initialized()
        state = ProcessState(timeout=timedelta(seconds=20))
        total = torch.ones(1)
        dist.all_reduce(total)
        state.destroy_process_group()
        return state.num_processes, total.item(), dist.is_initialized()

    assert list(notebook_launch(join, 2, backend=None, output="none")) == [(2, 2.0, False)] * 2


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="gloo of torch 2.6 keeps a group's first timeout")
def test_timeout_holds_for_the_group_that_is_up():
    def wait():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pytest's filters do not reach the ranks.
            state = ProcessState(timeout=timedelta(seconds=0.2))
        store = dist.distributed_c10d._get_default_store()
        if state.is_main_process:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                state.wait_for_everyone()
            store.set("told", "")
        else:
            # A rank that returned would close its connections, which is another error for its peer.
            store.wait(["told"], timedelta(seconds=60))

    notebook_launch(wait, 2, output="none")


def test_decorator_chooses_the_rank_that_runs_the_function(ranks):
    def work(value):
        """Double."""
        return 2 * value

    def call():
        state = ProcessState()
        functions = [
            state.on_main_process(work),
            state.on_main_process()(work),
            state.on_local_main_process(work),
            state.on_last_process(work),
            state.on_process(work, process_index=1),
            state.on_process(process_index=1)(work),
            state.on_local_process(work, local_process_index=1),
            state.on_process(work, process_index=7),
        ]
        assert {(function.__name__, function.__doc__) for function in functions} == {("work", "Double.")}
        return [function(1) for function in functions]

    assert list(ranks.run(3, call)) == [
        [2, 2, 2, None, None, None, None, None],
        [None, None, None, None, 2, 2, 2, None],
        [None, None, None, 2, None, None, None, None],
    ]


def test_only_the_first_process_prints(capfd):
    results = notebook_launch(lambda: ProcessState().print("hello", ProcessState().process_index), 2)
    assert len(results) == 2
    assert [line for line in capfd.readouterr().out.splitlines() if "hello" in line] == ["[rank 0] hello 0"]


@pytest.mark.parametrize("fails", [False, True])
def test_first_process_goes_first_and_its_error_lets_the_others_in(ranks, tmp_path, fails):
    def enter():
        state, found = ProcessState(), []
        with contextlib.suppress(ValueError), state.main_process_first():
            found += [path.name for path in tmp_path.iterdir()]
            (tmp_path / str(state.process_index)).touch()
            if fails and state.is_main_process:
                int("boom")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), found

    (total, found), *others = ranks.run(3, enter)
    assert (total, found) == (3.0, [])
    assert all("0" in found for _, found in others)
