"""What a launch says about training, as the ranks see it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from notebook_launcher import LaunchConfig, Session, context, notebook_launch

CHOSEN: dict[str, Any] = {
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.5,
    "comm_hook": "fp16",
}


def seen() -> Any:
    from notebook_launcher import context

    rank = context.current()
    return None if rank is None else rank.settings


def seen_by_hugging_face() -> tuple[str, int]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    return accelerator.mixed_precision, accelerator.gradient_accumulation_steps


@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_every_rank_sees_every_setting(start_method: str) -> None:
    results = notebook_launch(seen, 2, output="none", start_method=start_method, **CHOSEN)
    assert list(results) == [LaunchConfig(**CHOSEN).training_settings()] * 2
    assert {name: getattr(results[0], name) for name in CHOSEN} == CHOSEN


def test_a_session_has_its_own() -> None:
    with Session(2, output="none", comm_hook="bf16") as session:
        for settings in (session.run(seen)[0], session.run(seen)[1]):
            assert (settings.comm_hook, settings.asked) == ("bf16", {"comm_hook"})


@pytest.mark.parametrize("options", [{}, *({name: value} for name, value in CHOSEN.items()), CHOSEN])
def test_what_was_asked_for_is_told_from_defaults(options: dict[str, Any]) -> None:
    settings = LaunchConfig(**options).training_settings()
    assert settings.asked == set(options)
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_default_that_is_written_out_was_not_asked_for() -> None:
    assert LaunchConfig(mixed_precision="no", max_grad_norm=None).training_settings().asked == frozenset()


def test_there_are_none_without_a_launcher() -> None:
    assert seen() is None
    assert context.current() is None


@pytest.mark.parametrize(("options", "expected"), [(CHOSEN, ("bf16", 3)), ({}, ("no", 1))], ids=["chosen", "default"])
def test_hugging_faces_accelerator_adopts_precision_and_accumulation(
    options: dict[str, Any], expected: tuple[str, int]
) -> None:
    results = notebook_launch(seen_by_hugging_face, 2, output="none", **options)
    assert list(results) == [expected] * 2
