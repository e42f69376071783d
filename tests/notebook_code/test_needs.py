"""Needs of a function: the literals of its constants, and values that cannot be written."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher.errors import ConfigError
from notebook_launcher.notebook_code import Needs, literal_of

HOLDS_ITSELF: list[object] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


class Level(int):
    """A number of a class of the user's."""


LITERALS = [1, -2.5, -0.0, "a'b", [1, (2,)], {"a": {1}}, {1: [{2}]}, None, True, b"x", set(), (1 + 2j)]
WITHOUT = [
    float("nan"), float("inf"), complex(-0.0, 1), (10**5000,), "x" * 3000, object(), [torch.ones(1)], HOLDS_ITSELF,
    Level(1),
]  # fmt: skip


@pytest.mark.parametrize("value", LITERALS)
def test_literals_are_read_back_as_they_were(value):
    text = literal_of(value)
    assert text is not None
    assert eval(text) == value
    assert repr(eval(text)) == repr(value)


@pytest.mark.parametrize("value", WITHOUT)
def test_values_without_a_literal_have_none(value):
    assert literal_of(value) is None


def test_class_that_is_gone_is_named():
    needs = Needs({})
    gone = type("Gone", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="thing cannot be exported"):
        needs.add("thing", gone())
