"""Docstrings and terms begin with a verb or a noun: a question word makes a reader wait for the subject.

Words that leave open what is meant have a ceiling, which may only fall.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = "What|How|Where|Who|Whose|Whether"
QUESTION = re.compile(rf'"""(?:{WORDS})\b|^\s+\w+: (?:{WORDS})\b', re.MULTILINE)
CELL = re.compile(rf"^\| [^|]+ \| (?:{WORDS})\b", re.MULTILINE | re.IGNORECASE)
NAME = re.compile(r"def (test_\w*(?:_says|_said|_tells|_told|_whoever|_anew)\w*)")
CEILINGS = {
    "go on": (r"\bgo(?:es|ing|ne)? on\b", 5),
    "say, tell": (r"\b(?:says?|said|tells?|told)\b", 60),
    "those of, that of": (r"\b(?:those|that) of\b", 3),
    "another one": (r"\banother one\b", 4),
    "nobody, whoever": (r"\b(?:nobody|somebody|whoever)\b", 5),
    "likewise": (r"\blikewise\b", 0),
    "return whether": (r"\breturn whether\b", 0),
    "also if, also after": (r"\balso (?:if|after)\b", 0),
}
"""By pattern: the number of its matches in the package and the widgets that a change may not exceed."""


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


def test_meanings_of_the_vocabulary_begin_with_a_verb_or_a_noun():
    assert CELL.findall("| share | What an agent holds. | `ray_nodes.py` |")
    assert not CELL.findall((ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8"))


def test_names_of_tests_state_an_outcome():
    assert not [name for path in ROOT.glob("tests/**/test_*.py") for name in NAME.findall(path.read_text())]


@pytest.mark.parametrize("words", CEILINGS)
def test_words_without_a_subject_do_not_spread(words):
    pattern, ceiling = CEILINGS[words]
    matches = re.compile(pattern, re.IGNORECASE)
    sources = [
        path.read_text() for folder in ("notebook_launcher", "widgets") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert sum(len(matches.findall(source)) for source in sources) <= ceiling
