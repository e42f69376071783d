"""Commands of a developer: the tests that `make check` chooses, and the page that describes commands and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS_OF_FILES = (ROOT, ROOT / "notebook_launcher", ROOT / "notebook_launcher/training/accumulation")
"""Folders that a path in `CONTRIBUTING.md` may start from."""
ACCELERATOR_TESTS = (ROOT / "tests/training").glob("test_accelerator_*.py")
DATA_TESTS = (ROOT / "tests/training/data").rglob("test_*.py")


def chosen(file: str) -> tuple[set[str], set[str]]:
    side_by_side, alone = changed.choose([Path(file)])
    return {path.relative_to(ROOT / "tests").as_posix() for path in side_by_side}, {path.name for path in alone}


def names_in(folder: str) -> set[str]:
    return {path.name for path in (ROOT / "tests" / folder).glob("test_*.py")}


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("notebook_launcher/kernel/inspection/stacks.py", {"kernel"}),
        ("notebook_launcher/engines/process_tree.py", {"engines", "processes"}),
        (
            "notebook_launcher/training/data/rows.py",
            {path.relative_to(ROOT / "tests").as_posix() for path in DATA_TESTS},
        ),
        ("notebook_launcher/training/plugins.py", {f"training/{path.name}" for path in ACCELERATOR_TESTS}),
        ("notebook_launcher/config.py", {"foundations", "settings"}),
        ("notebook_launcher/settings/changes.py", {"foundations", "settings"}),
        ("notebook_launcher/notebook_code.py", {"notebook_code"}),
        ("widgets/static/monitor/plot.js", {"page", "widgets"}),
        ("docs/index.md", {"project"}),
        ("pyproject.toml", {"project"}),
        ("tests/support/leaks.py", {"project"}),
        ("benchmarks/launch.py", set()),
    ],
)
def test_check_chooses_the_folder_of_a_changed_package(file, folders):
    assert chosen(file)[0] == folders


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("notebook_launcher/kernel/failures/post_mortem.py", names_in("kernel/failures")),
        ("notebook_launcher/kernel/inspection/stacks.py", names_in("kernel/inspection")),
        ("notebook_launcher/kernel/plan.py", {"test_plan.py"}),
        ("notebook_launcher/processes/rank/rank.py", names_in("processes/rank")),
        ("README.md", {"test_readme.py"}),
    ],
)
def test_check_chooses_alone_tests_that_share_a_word_with_a_changed_file_or_its_room(file, tests):
    assert chosen(file)[1] == tests


def test_check_chooses_a_changed_test_itself_and_no_deleted_one():
    assert chosen("tests/kernel/run/test_stop.py") == ({"kernel/run/test_stop.py"}, {"test_stop.py"})
    assert chosen("tests/kernel/test_deleted.py") == (set(), set())


def test_every_package_has_a_folder_of_tests():
    packages = [path.parent.name for path in (ROOT / "notebook_launcher").glob("*/__init__.py")]
    folders = {name: changed.folders_for(Path("notebook_launcher", name, "x.py")) for name in packages}
    assert [name for name in packages if ROOT / "tests" / name not in folders[name]] == []
    assert [folder for found in folders.values() for folder in found if not folder.is_dir()] == []


def test_contributing_names_targets_of_the_makefile():
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)`", CONTRIBUTING)) <= set(targets)


def test_contributing_names_files_that_exist():
    names = re.findall(r"`([\w./]+(?:\.(?:md|py|toml|txt)|/))`", CONTRIBUTING)
    assert len(names) > 20
    assert [name for name in names if not any((folder / name).exists() for folder in FOLDERS_OF_FILES)] == []
