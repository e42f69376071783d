"""Questions of ranks that wait for their answers when an interrupt arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.questions import Question, Questions
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.messaging.messages import InputRequest

if TYPE_CHECKING:
    import pytest


def test_questions_that_wait_at_an_interrupt_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    over: Latch[None] = Latch()
    questions = Questions(over)
    for rank in range(2):
        questions.put(Question(rank, InputRequest(prompt=f"[rank {rank}] name? ", password=False, number=1), 0))
    asked: list[str] = []

    def interrupt(prompt: str) -> str:
        asked.append(prompt)
        raise KeyboardInterrupt

    looks: list[None] = []

    def end_at_third_look() -> float:
        looks.append(None)
        if len(looks) == 3:
            over.set(None)
        return 0.001

    monkeypatch.setattr("builtins.input", interrupt)
    stops: list[bool] = []
    assert questions.answer_all(lambda: None, lambda _: None, stops.append, end_at_third_look)
    assert asked == ["[rank 0] name? "]
    assert stops == [False]
