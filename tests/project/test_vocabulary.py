"""The vocabulary names each term once, with a file that exists; decisions have numbers of their own."""

from __future__ import annotations

import collections
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = ROOT / "docs" / "vocabulary.md"
ROW = re.compile(r"^\| (?P<terms>[^|]+) \| [^|]+ \| (?P<place>[^|]+) \|$", re.MULTILINE)
FILE = re.compile(r"`([\w./]+)`")
FOLDERS = ("notebook_launcher", "widgets", "tests")
# Terms of two neighbouring rooms, told apart by the heading of their table.
TWICE = {
    "client",
    "command",
    "kernel",
    "outcome",
    "page",
    "rank",
    "update",
}


def rows() -> list[tuple[str, str]]:
    found = [(row["terms"].strip(), row["place"]) for row in ROW.finditer(VOCABULARY.read_text(encoding="utf-8"))]
    return [row for row in found if row[0] != "term"]


def test_each_term_has_one_row():
    counts = collections.Counter(term for terms, _ in rows() for term in terms.split(", "))
    assert {term for term, count in counts.items() if count > 1} <= TWICE
    assert max(counts.values()) <= 2


def test_files_of_the_terms_exist():
    names = {name.rstrip("/") for _, place in rows() for name in FILE.findall(place)}
    named = {name for name in names if "/" in name or name.endswith((".py", ".js"))}
    assert len(named) > 80
    paths = {f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    there = {path.removesuffix(suffix) for path in paths for suffix in ("", ".py", ".js")}
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in there)}


def test_decisions_have_numbers_of_their_own():
    numbers = [path.name[:4] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")]
    assert sorted(numbers) == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. ")
