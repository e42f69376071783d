"""Folders of runs with any damage: readings end in the run's data or in one kind of error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher import ConfigError, ReturnValueError, RunFolderError, attach, open_run
from tests.security.recorded import READINGS

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 10**30, -(10**30), 1e308, "NaN", "", "\ud800", "<script>", [], {}, [[]], {"a": {}}, "9" * 5000]
)


@pytest.fixture(scope="module")
def files(recorded_folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in recorded_folder.iterdir()}
    expected = """config.json edits.json ending.pickle environment.json function.py log-order.txt metrics.jsonl
        output.pickle pictures.jsonl rank-0.log summary.json picture-99.csv value-0.parcel value-1.parcel"""
    assert found.keys() >= set(expected.split())
    assert {Path(name).suffix for name in found if name.startswith("picture-")} == {".svg", ".png", ".csv"}
    return found


@pytest.fixture(scope="module")
def folder(recorded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / recorded_folder.name


def write(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def read_all(folder: Path) -> list[str]:
    """Return the readings that ended in an error of ours; another error fails the test."""
    refused = []
    for name, reading in READINGS.items():
        try:
            reading(open_run(folder))
        except (RunFolderError, ReturnValueError, ConfigError):  # noqa: PERF203
            refused.append(name)
    return refused


def replaced_in(data: Any, at: int, new: Any) -> Any:
    """Return JSON data with one of its values replaced."""
    places: list[tuple[Any, Any]] = []

    def visit(inside: Any) -> None:
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                visit(inside[key])

    visit(data)
    inside, key = places[at % len(places)]
    inside[key] = new
    return data


def damage(data: bytes, how: str, at: int, new: Any) -> bytes:
    at %= max(1, len(data))
    match how:
        case "cut":
            return data[:at]
        case "flip":
            return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :] if data else b"x"
        case "insert":
            return data[:at] + repr(new).encode("utf-8", "replace") + data[at:]
        case "nest":
            return b"[" * 100_000
    lines = data.splitlines()
    try:
        place = at % len(lines)
        lines[place] = json.dumps(replaced_in(json.loads(lines[place]), at, new)).encode()
    except (ValueError, IndexError, ZeroDivisionError):
        return json.dumps(new).encode()
    return b"\n".join(lines) + b"\n"


def test_file_with_holes_that_is_longer_than_any_is_refused(files: dict[str, bytes], folder: Path) -> None:
    write(folder, files)
    assert read_all(folder) == []
    for name in ("rank-0.log", "metrics.jsonl", "pictures.jsonl", "function.py", "summary.json", "value-0.parcel"):
        write(folder, files)
        os.truncate(folder / name, 1 << 40)
        assert read_all(folder) or name == "value-0.parcel"
        assert attach(folder, show=False).result(30)[1]["name"] == "fine"
    write(folder, {**files, "pictures.jsonl": files["pictures.jsonl"] * 100_000})
    assert "pictures" in read_all(folder)


def test_damaged_file_gives_one_kind_of_error(files: dict[str, bytes], folder: Path) -> None:
    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)
    @given(
        name=st.sampled_from(sorted(files)),
        how=st.sampled_from(["cut", "flip", "insert", "nest", "json", "json", "json"]),
        at=st.integers(0, 10**6),
        new=ODD,
    )
    def check(name: str, how: str, at: int, new: Any) -> None:
        write(folder, {**files, name: damage(files[name], how, at, new)})
        read_all(folder)

    check()
