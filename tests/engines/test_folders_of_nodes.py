"""A node that lacks the notebook's folder: its modules are sent along, and checkpoints are refused with a way out."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from notebook_launcher import Accelerator, Commands, launch, notebook_launch
from notebook_launcher.engines.cluster import cluster_tree
from notebook_launcher.training.checkpoints.folders import CheckpointError
from tests.engines.options import QUIET

if TYPE_CHECKING:
    from collections.abc import Iterator

BESIDE = """
class Batch:
    def __init__(self, size):
        self.size = size

def make(size):
    import another_of_mine
    return Batch(another_of_mine.double(size))
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kernel's folder, with two modules of the user's."""
    if os.geteuid() != 0:
        pytest.skip("hiding a folder from a node needs root")
    folder, before = tmp_path_factory.mktemp("notebook"), Path.cwd()
    (folder / "beside_the_notebook.py").write_text(BESIDE)
    (folder / "another_of_mine.py").write_text("def double(x):\n    return 2 * x\n")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    yield folder
    os.chdir(before)
    sys.path.remove(str(folder))
    for name in ("beside_the_notebook", "another_of_mine"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def engine(notebook: Path) -> Iterator[Commands]:
    """Two nodes, the second of which sees an empty folder in place of the kernel's."""
    hidden = f'mount -t tmpfs none "{notebook}" && exec "$@"'
    with Commands([[], ["unshare", "--mount", "bash", "-c", hidden, "bash"]]) as engine:
        engine.look()
        yield engine


def test_modules_of_the_notebooks_folder_are_sent_along(engine: Commands, notebook: Path) -> None:
    beside = importlib.import_module("beside_the_notebook")
    importlib.import_module("another_of_mine")
    assert [node.has_folder for node in engine.look()] == [True, False]
    assert not list(notebook.glob(".notebook-launcher-*"))
    run = launch(beside.make, 2, args=(3,), engine=engine, **QUIET)
    assert [(type(batch), batch.size) for batch in run.result()] == [(beside.Batch, 6)] * 2
    assert "without this folder (save checkpoints to a shared folder" in run.snapshot().summary


def save(folder: str) -> None:
    accelerator = Accelerator(project_dir=folder)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(Path(folder) / "saved")


@pytest.mark.slow
def test_checkpoint_that_a_node_cannot_reach_is_refused_with_a_way_out(engine: Commands, notebook: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not on the disks of .*, where rank 1 is\. Choose a folder that all"):
        notebook_launch(save, 2, args=(str(notebook),), engine=engine, **QUIET)
    assert not list(notebook.glob("*saved*"))


def test_folder_that_takes_no_mark_counts_as_shared(tmp_path: Path) -> None:
    with cluster_tree.mark(tmp_path / "nowhere") as path:
        assert path is None
    with cluster_tree.mark(tmp_path) as path:
        assert path is not None
        assert Path(path).exists()
    assert not Path(path).exists()
