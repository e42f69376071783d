"""Checkpoints and tables from elsewhere: names that leave their folder, and cells that a spreadsheet carries out."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from notebook_launcher import CheckpointError
from notebook_launcher.drawing.reported import without_formulas
from notebook_launcher.training.checkpoints.folders import MANIFEST, METADATA, read_manifest
from notebook_launcher.training.checkpoints.models import read_index
from notebook_launcher.training.checkpoints.sharded import ShardReader

if TYPE_CHECKING:
    from pathlib import Path


OUTSIDE = pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ".."])


@OUTSIDE
def test_manifest_names_no_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    values = {"num_processes": 1, "objects": {}, "format": 1, "files": {name: {"bytes": 1, "sha256": "0"}}}
    (tmp_path / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"checkpoint_manifest.json is damaged: .* is outside the folder"):
        read_manifest(tmp_path)


@OUTSIDE
def test_index_names_no_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match=r"is damaged: .* is outside the folder"):
        read_index(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@OUTSIDE
def test_shards_lie_in_their_folder(name: str, tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = name
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="is outside the folder"):
        ShardReader(tmp_path).read_metadata()


def test_downloaded_table_has_no_formulas() -> None:
    table = b'name,=1+1\n"=HYPERLINK(""http://x"")",-1.5\n+2e3,@SUM(A1)\n-x,"\tx"\nplain,a=b\n'
    expected = b'name,\'=1+1\n"\'=HYPERLINK(""http://x"")",-1.5\n+2e3,\'@SUM(A1)\n\'-x,\'\tx\nplain,a=b\n'
    assert without_formulas(table) == expected
