"""Files of the package are told from others, also where a link leads to its folder."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from notebook_launcher import tracebacks
from notebook_launcher.tracebacks import PACKAGE_FOLDER, is_ours

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_of_the_package_is_ours_and_its_neighbours_are_not() -> None:
    assert is_ours(tracebacks.is_ours.__code__.co_filename)
    assert not is_ours(f"{PACKAGE_FOLDER}_of_another/module.py")
    assert not is_ours(__file__)


def test_package_behind_a_link_knows_its_own_frames(tmp_path: Path) -> None:
    (tmp_path / "notebook_launcher").symlink_to(PACKAGE_FOLDER)
    code = (
        "from notebook_launcher.tracebacks import PACKAGE_FOLDER, is_ours\n"
        "print(PACKAGE_FOLDER, is_ours(is_ours.__code__.co_filename))"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True, capture_output=True)
    assert found.stdout.decode().split() == [f"{tmp_path}/notebook_launcher", "True"]
