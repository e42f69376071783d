"""The tables that static pictures and the monitor's page share: complete, distinct, JSON."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest

from notebook_launcher.drawing.legend import LIMITS, PHASES, RANK_STATES, RUN_STATES, legend_item
from notebook_launcher.drawing.tables import state_html
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


def test_static_table_shows_a_state_that_it_does_not_know_behind_the_general_sign():
    assert "▶ of tomorrow" in state_html("of tomorrow")


def test_legend_is_json_without_numbers_that_are_not_finite():
    item = legend_item()
    assert json.loads(json.dumps(item, allow_nan=False)).keys() == {
        "phases",
        "run_states",
        "rank_states",
        "limits",
    }
    assert all(math.isfinite(limit) and limit > 0 for limit in item["limits"].values())
    assert item["limits"]["lanes"] == LIMITS.lanes


def test_legend_is_small_beside_the_run_that_it_is_sent_with():
    assert len(json.dumps(legend_item())) < 5000
