"""Random number generators: seeding, the same state on all ranks, states kept and restored."""

# ruff: noqa: NPY002 - the legacy generator is the one that is seeded

from __future__ import annotations

import io
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from notebook_launcher import notebook_launch
from notebook_launcher.training import random as seeding


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random_sample()), torch.rand(()).item()


def test_seeds_are_those_of_pythons_numpys_and_torchs_own():
    for seed in (7, 8, 7):
        seeding.set_seed(seed)
        assert draw() == (
            random.Random(seed).random(),
            np.random.RandomState(seed).random(),
            torch.rand((), generator=torch.Generator().manual_seed(seed)).item(),
        )


@pytest.mark.parametrize("seed", [-1, 2**40, np.int64(3), True])
def test_seed_may_be_any_whole_number_that_torch_takes_and_another_changes_no_generator(seed):
    seeding.set_seed(seed)
    assert torch.initial_seed() == int(seed) % 2**64
    expected = draw()
    seeding.set_seed(seed)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        seeding.set_seed(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"from -2\*\*63 to 2\*\*64 - 1"):
        seeding.set_seed(2**64)
    assert draw() == expected


def test_deterministic_asks_torch_and_cublas_for_deterministic_algorithms():
    """In a rank, too, where torch has initialised CUDA to choose the device; here it only says so."""

    def ask():
        found = []
        for chosen in (False, True):
            torch.use_deterministic_algorithms(mode=False)
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_initialized", lambda chosen=chosen: chosen)
                seeding.set_seed(1, deterministic=True)
            found.append((torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]))
        return found

    assert notebook_launch(ask, 1, output="none")[0] == [(True, ":4096:8")] * 2


def test_device_specific_seeds_differ_by_rank(ranks):
    def seeds() -> tuple[int, int]:
        seeding.set_seed(40)
        common = torch.initial_seed()
        seeding.set_seed(40, device_specific=True)
        return common, torch.initial_seed()

    assert list(ranks.run(2, seeds)) == [(40, 40), (40, 41)]


@pytest.mark.parametrize("rng_type", ["torch", "generator"])
def test_synchronised_ranks_draw_what_rank_0_would_have_drawn(ranks, rng_type):
    def synchronise() -> tuple[float, float]:
        rank = torch.distributed.get_rank()
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(rank)
        seeding.synchronize_rng_states([rng_type], generator=generator)
        return torch.rand(()).item(), torch.rand((), generator=generator).item()

    (torch_0, generator_0), (torch_1, generator_1) = ranks.run(2, synchronise)
    assert (torch_0 == torch_1) is (rng_type == "torch")
    assert (generator_0 == generator_1) is (rng_type == "generator")
    assert torch_0 == torch.rand((), generator=torch.Generator().manual_seed(0)).item() == generator_0


def test_captured_states_survive_a_file_and_bring_back_the_numbers():
    random.gauss(0, 1)  # leaves half a pair behind, in Python's generator
    np.random.standard_normal()  # and in NumPy's
    file = io.BytesIO()
    torch.save(seeding.capture_rng_states(), file)
    expected = draw(), random.gauss(0, 1), np.random.standard_normal()
    draw()
    file.seek(0)
    seeding.restore_rng_states(torch.load(file, weights_only=True))
    assert (draw(), random.gauss(0, 1), np.random.standard_normal()) == expected


def test_states_in_accelerates_form_are_restored():
    theirs: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    expected = draw()
    seeding.restore_rng_states(theirs)
    assert draw() == expected


def test_derived_state_depends_on_the_state_and_the_rank_alone():
    seeding.set_seed(3)
    states = seeding.capture_rng_states()

    def first_numbers(rank: int) -> tuple[float, float, float]:
        seeding.restore_rng_states(seeding.derive_rng_states(states, rank))
        return draw()

    expected = draw()
    seeding.derive_rng_states(states, 1)
    following = draw()
    numbers = [first_numbers(rank) for rank in (1, 2, 1)]
    assert numbers[0] == numbers[2]
    assert len({expected, *numbers}) == 3
    seeding.restore_rng_states(states)
    assert (draw(), draw()) == (expected, following), "deriving a state moves no generator"
