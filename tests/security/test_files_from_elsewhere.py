"""Checkpoints and tables from elsewhere: names that leave their folder, and cells that a spreadsheet carries out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import CheckpointError
from notebook_launcher.drawing.reported import without_formulas
from notebook_launcher.training.checkpoints.folders.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ".."])
def test_manifest_names_no_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    values = {"num_processes": 1, "objects": {}, "format": 1, "files": {name: {"bytes": 1, "sha256": "0"}}}
    (tmp_path / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"checkpoint_manifest.json is damaged: .* is outside the folder"):
        read_manifest(tmp_path)


def test_downloaded_table_has_no_formulas() -> None:
    table = b'name,=1+1\n"=HYPERLINK(""http://x"")",-1.5\n+2e3,@SUM(A1)\n-x,"\tx"\nplain,a=b\n'
    expected = b'name,\'=1+1\n"\'=HYPERLINK(""http://x"")",-1.5\n+2e3,\'@SUM(A1)\n\'-x,\'\tx\nplain,a=b\n'
    assert without_formulas(table) == expected
