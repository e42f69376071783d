"""Docstrings begin with a verb or a noun: a question word makes a reader wait for the subject."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = "What|How|Where|Who|Whose|Whether"
QUESTION = re.compile(rf'"""(?:{WORDS})\b|^\s+\w+: (?:{WORDS})\b', re.MULTILINE)


def _questions(source: str) -> list[str]:
    return [match.group().strip() for match in QUESTION.finditer(source)]


@pytest.mark.parametrize("folder", ["notebook_launcher", "widgets", "tests", "benchmarks"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = {
        f"{path.relative_to(ROOT)}: {question}"
        for path in ROOT.glob(f"{folder}/**/*.py")
        for question in _questions(path.read_text())
    }
    assert not found


@pytest.mark.parametrize("beginning", ["What it does.", "Whether it runs."])
def test_questions_are_found(beginning):
    quotes = '"' * 3
    assert _questions(f"{quotes}{beginning}{quotes}")
    assert _questions(f"    Args:\n        x: {beginning}\n")
    assert not _questions(f"{quotes}Return it.{quotes}")
