"""Needs of a function: the literals of its constants, and values that cannot be written."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher.errors import ConfigError
from notebook_launcher.notebook_code.needs import Needs, literal_of


@pytest.mark.parametrize("value", [1, -2.5, "a'b", [1, (2,)], {"a": {1}}, None, True, b"x", set(), (1 + 2j)])
def test_literals_are_read_back_as_they_were(value):
    text = literal_of(value)
    assert text is not None
    assert eval(text) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), [torch.ones(1)], "x" * 3000])
def test_values_without_a_literal_have_none(value):
    assert literal_of(value) is None


def test_class_that_is_gone_is_named():
    needs = Needs({})
    gone = type("Gone", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="thing cannot be exported"):
        needs.add("thing", gone())
