"""The vocabulary names files that exist; decisions have numbers of their own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = ROOT / "docs" / "vocabulary.md"
ROW = re.compile(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
FILE = re.compile(r"`([\w./]+)`")
FOLDERS = ("notebook_launcher", "widgets", "tests")


def test_files_of_the_terms_exist():
    places = ROW.findall(VOCABULARY.read_text(encoding="utf-8"))
    names = {name.rstrip("/") for place in places for name in FILE.findall(place)}
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
