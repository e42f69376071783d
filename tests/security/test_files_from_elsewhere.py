"""Checkpoints, runs, repositories and tables from elsewhere that lead out of a folder, never end, or hold code."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from notebook_launcher import CheckpointError, ConfigError, LaunchConfig, open_run
from notebook_launcher.command_line.program import main
from notebook_launcher.drawing.reported import without_formulas
from notebook_launcher.kernel.calls.origin import GitChanges, git_commit
from notebook_launcher.training.checkpoints.folders import (
    MANIFEST,
    METADATA,
    MOVES,
    FileDigest,
    check_file,
    read_manifest,
    settle,
)
from notebook_launcher.training.checkpoints.models import read_index, read_weights
from notebook_launcher.training.checkpoints.objects import read_object
from notebook_launcher.training.checkpoints.shard_reader import ShardReader
from notebook_launcher.training.checkpoints.sharded import read_outline
from tests.security.evil import Evil
from tests.support.toy_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def names_in_manifest(folder: Path, name: str) -> None:
    values = {"num_processes": 1, "objects": {}, "format": 1, "files": {name: {"bytes": 1, "sha256": "0"}}}
    (folder / MANIFEST).write_text(json.dumps(values))
    read_manifest(folder)


def names_in_index(folder: Path, name: str) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"weight": name}}))
    read_index(path)


def names_of_shards(folder: Path, name: str) -> None:
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = name
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    ShardReader(folder).read_metadata()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ".."])
@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (names_in_manifest, CheckpointError),
        (names_in_index, CheckpointError),
        (names_of_shards, pickle.UnpicklingError),
    ],
)
def test_checkpoint_names_no_file_outside_its_folder(
    names: Callable[[Path, str], None], kind: type[Exception], name: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match="is outside the folder"):
        names(tmp_path, name)


READERS: dict[str, Callable[[Path], object]] = {
    MANIFEST: lambda path: read_manifest(path.parent),
    METADATA: lambda path: read_outline(path.parent, "model"),
    "model.safetensors": lambda path: read_weights(torch.nn.Linear(1, 1), [path]),
    "model.safetensors.index.json": read_index,
    "optimizer.bin": read_object,
    "anything": lambda path: check_file(path.parent, path.name, FileDigest(0, "")),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_file_that_never_ends_is_refused(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match="no ordinary file"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["../x", "{outside}/x", "out/x", ".."])
@pytest.mark.parametrize("part", ["files", "stale"])
def test_unfinished_save_moves_nothing_out_of_its_folder(part: str, name: str, tmp_path: Path) -> None:
    target, ready, outside = tmp_path / "save", tmp_path / ".save.ready-00", tmp_path / "outside"
    for folder in (target, ready, outside):
        folder.mkdir()
    (outside / "x").write_text("mine")
    for folder in (target, ready):
        (folder / "out").symlink_to(outside)
    (ready / "model.bin").write_text("theirs")
    moves = {"files": ["model.bin"], "stale": []}
    moves[part] = [name.format(outside=outside), *moves[part]]
    (ready / MOVES).write_text(json.dumps(moves))
    with pytest.raises(CheckpointError, match=r"\.moves\.json is damaged: .* is outside the folder"):
        settle(target)
    assert (outside / "x").read_text() == "mine"
    assert [path.name for path in target.iterdir()] == ["out"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_runs_no_code(tmp_path: Path) -> None:
    mark, path = tmp_path / "their code ran", tmp_path / "optimizer.bin"
    torch.save({"state": Evil(mark)}, path)
    with pytest.raises(CheckpointError, match="constructing it can run any code"):
        read_object(path)
    with pytest.raises(CheckpointError, match="constructing it can run any code"):
        read_weights(torch.nn.Linear(1, 1), [path])
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match="constructing that could run any code"):
        read_outline(tmp_path, "model")
    assert not mark.exists()


def test_run_from_elsewhere_is_plain_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, 123456, name="\x1b]0;theirs\x07", error="\x1b[2J")
    (folder / "rank-0.log").write_text("\x1b]52;c;dGhlaXJz\x07words\n")
    (folder / "edits.json").write_text(json.dumps({"notes": "\x1b[2Jnotes"}))
    (folder / "config.json").write_text(json.dumps({"env": {"LD_PRELOAD": "./theirs.so", "NCCL_DEBUG": "WARN"}}))
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    (folder / "picture-0.svg").write_bytes(drawing)
    listed = {"rank": 0, "step": 1, "time": 1.0, "name": "weights", "file": "picture-0.svg"}
    (folder / "pictures.jsonl").write_text(json.dumps(listed) + "\n")
    for words in (["show", str(folder), "--logs", "0"], ["edit", str(folder), "--tags", "mine"], ["list"]):
        assert main(["runs", *words, "--folder", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert said
        assert "\x1b" not in said
    run = open_run(folder)
    assert run.config.env == {"NCCL_DEBUG": "WARN"}
    (picture,) = run.pictures
    assert picture._repr_mimebundle_()["text/html"].startswith("<img ")
    assert base64.b64encode(drawing).decode() in picture._repr_mimebundle_()["text/html"]
    assert "<script" not in str(picture._repr_mimebundle_()) + run._repr_html_()


def test_settings_file_sets_no_variable_that_loads_code(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    config = LaunchConfig(num_processes=1, devices="cpu", env={"LD_PRELOAD": "./theirs.so", "MY_FLAG": "1"})
    config.to_yaml(path)
    assert "Not written, because they load code: LD_PRELOAD." in path.read_text()
    assert LaunchConfig.from_yaml(path).env == {"MY_FLAG": "1"}
    path.write_text(path.read_text().replace('"MY_FLAG"', '"LD_PRELOAD"'))
    with pytest.raises(ConfigError, match="env sets LD_PRELOAD, which loads code"):
        LaunchConfig.from_yaml(path)


@pytest.mark.parametrize("head", ["a pipe", "ref: ../mine", "ref: {mine}", "key", "\xff"])
def test_repository_of_others_shows_no_file_and_stops_no_launch(head: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    mine = tmp_path / "mine"
    mine.write_text("-----BEGIN KEY-----")
    path = tmp_path / ".git" / "HEAD"
    os.mkfifo(path) if head == "a pipe" else path.write_bytes(head.format(mine=mine).encode("latin-1"))
    assert "commit" not in git_commit(tmp_path / "project")


def test_difference_to_the_commit_runs_no_program_of_the_repository(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    file, mark = tmp_path / "a.txt", tmp_path.with_name(f"{tmp_path.name}-ran")
    git("init")
    file.write_text("1\n")
    (tmp_path / ".gitattributes").write_text("*.txt diff=theirs\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    for name in ("diff.theirs.textconv", "core.fsmonitor", "diff.external"):
        git("config", name, f"touch {mark}; cat")
    file.write_text("2\n")
    mark.unlink(missing_ok=True)
    changes = GitChanges(str(tmp_path))
    over = False
    while not over:
        over, patch = changes.poll(wait=False)
    assert patch is not None
    assert "+2" in patch
    assert not mark.exists()


def test_downloaded_table_has_no_formulas() -> None:
    table = b'name,=1+1\n"=HYPERLINK(""http://x"")",-1.5\n+2e3,@SUM(A1)\n-x,"\tx"\nplain,a=b\n'
    expected = b'name,\'=1+1\n"\'=HYPERLINK(""http://x"")",-1.5\n+2e3,\'@SUM(A1)\n\'-x,\'\tx\nplain,a=b\n'
    assert without_formulas(table) == expected
    assert without_formulas(b"a;=1+1,b\n") == b'"a;=1+1","b"\n'
