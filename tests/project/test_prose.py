"""Docstrings and terms begin with a verb or a noun: a question word makes a reader wait for the subject.

Words that leave open what is meant are not used. The docstring of a class describes its constructor.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = "What|How|Where|Who|Whose|Whether|Which|When|Why"
QUESTION = re.compile(rf'"""(?:{WORDS})\b|^\s+\w+: (?:{WORDS})\b', re.MULTILINE)
CELL = re.compile(rf"^\| [^|]+ \| (?:{WORDS})\b", re.MULTILINE | re.IGNORECASE)
NAME = re.compile(r"def (test_\w*(?:_says|_said|_tells|_told|_whoever|_anew)\w*)")
UNCLEAR = (
    r"\blikewise\b",
    r"\breturn whether\b",
    r"\balso (?:if|after)\b",
    r"\bgets? to\b",
    r'"""Seconds (?:that|for which) [^"]*\bgets?\b',
    r"\bthat of\b",
    r"\bby which these\b",
    r"\bas `\w+` says\b",
    r"\bfrom which on\b",
)
"""Words that leave open what they refer to, and turns that take a second reading: "seconds that X gets to Y"."""


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


def test_arguments_of_constructors_are_described_by_the_class():
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("notebook_launcher", "widgets")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and ast.get_docstring(node)
    }
    assert not found


@pytest.mark.parametrize("beginning", ["What it does.", "Whether it runs."])
def test_questions_are_found(beginning):
    quotes = '"' * 3
    assert _questions(f"{quotes}{beginning}{quotes}")
    assert _questions(f"    Args:\n        x: {beginning}\n")
    assert not _questions(f"{quotes}Return it.{quotes}")


def test_meanings_of_the_vocabulary_begin_with_a_verb_or_a_noun():
    assert CELL.findall("| share | What an agent holds. | `ray_nodes.py` |")
    assert not CELL.findall((ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8"))


def test_names_of_tests_state_an_outcome():
    assert not [name for path in ROOT.glob("tests/**/test_*.py") for name in NAME.findall(path.read_text())]


@pytest.mark.parametrize("words", UNCLEAR)
def test_words_that_leave_their_subject_open_are_not_used(words):
    found = {
        str(path.relative_to(ROOT))
        for folder in ("notebook_launcher", "widgets", "benchmarks")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if re.search(words, path.read_text(), re.IGNORECASE)
    }
    assert not found
