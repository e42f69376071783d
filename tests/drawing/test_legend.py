"""The tables that static pictures and the monitor's page share: complete, distinct, JSON."""

from __future__ import annotations

from typing import get_args

import pytest

from notebook_launcher.drawing.legend import PHASES, RANK_STATES, RUN_STATES
from notebook_launcher.history.schema import RankState, RunState
from notebook_launcher.training.recording.phases import Phase


def test_every_phase_that_training_measures_has_a_look():
    assert tuple(PHASES) == get_args(Phase)


@pytest.mark.parametrize(("looks", "states"), [(RUN_STATES, RunState), (RANK_STATES, RankState)])
def test_every_state_has_a_look(looks, states):
    assert set(looks) == set(get_args(states))


@pytest.mark.parametrize("looks", [RUN_STATES, RANK_STATES])
def test_states_differ_in_word_or_shape(looks):
    assert len({(look.word, look.shape) for look in looks.values()}) == len(looks)
