"""Wheel and source distribution: every package, the widgets under their import name, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import notebook_launcher

tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"notebook_launcher": ROOT / "notebook_launcher", "notebook_launcher.widgets": ROOT / "widgets"}

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".cache", "__pycache__", "*.egg-info", "build", "dist", "_build"),
    *(".*_cache", ".hypothesis", "*_logs"),
)
"""Files of a used checkout that belong to no release, as in .gitignore."""

# The hooks of the build backend in a fresh process, as pip calls them, but without an isolated environment.
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
WHERE = "import sys; sys.path[:0] = sys.argv[1:]; import notebook_launcher.widgets as w; print(w.__file__)"


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution from a copy of the checkout, and unpack it."""
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=LEFT_OUT)
    # By tar: extractall() of Python 3.11.2 knows no filter=, and that of 3.12 warns without one.
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", _build("sdist", checkout, folder), "-C", folder / "unpacked"], check=True)
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from what the source distribution holds."""
    return _build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


def _build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-c", BUILD.format(kind=kind), str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


def _where_the_widgets_are(*paths: Path) -> Path:
    # -S: neither site-packages nor an editable install of this checkout takes part.
    command = [sys.executable, "-I", "-S", "-c", WHERE, *map(str, paths)]
    return Path(subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip())


def test_pyproject_lists_every_package(project):
    found = {
        ".".join([name, *path.relative_to(folder).parent.parts])
        for name, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_wheel_holds_every_file_and_no_more(wheel):
    expected = {
        f"{name.replace('.', '/')}/{path.relative_to(folder)}"
        for name, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_sdist_holds_every_file_of_the_folders_and_what_a_developer_needs(sdist):
    held = {path.relative_to(sdist) for path in sdist.rglob("*")}
    for folder in ("benchmarks", "docs", "notebooks", "tests"):
        expected = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {path for path in expected if not LEFT_OUT("", list(path.parts))} - held == set()
    needed = ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "constraints-tests.txt")
    assert set(map(Path, needed)) - held == set()


def test_version_of_the_wheel_is_that_of_the_package(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"\nVersion: {notebook_launcher.__version__}\n" in text


def test_uninstalled_checkout_finds_widgets():
    assert _where_the_widgets_are(ROOT) == ROOT / "widgets/__init__.py"


def test_installed_package_has_its_widgets_and_ignores_a_foreign_folder_of_that_name(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert _where_the_widgets_are(tmp_path) == tmp_path / "notebook_launcher/widgets/__init__.py"
    (tmp_path / "widgets").mkdir()
    (tmp_path / "widgets/__init__.py").touch()
    assert _where_the_widgets_are(tmp_path) == tmp_path / "notebook_launcher/widgets/__init__.py"


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "installed"])
def test_import_of_accelerates_launcher_names_the_replacements(wheel, tmp_path, installed):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from notebook_launcher import notebook_launcher"
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path if installed else ROOT)]
    error = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False).stderr.splitlines()[-1]
    assert "ImportError: notebook_launcher is the name of the package." in error
    assert "`notebook_launch(fn, 2, args=(...))`" in error
    assert "`from notebook_launcher.compat import notebook_launcher`" in error


def test_every_requirement_has_a_pin_that_it_allows(project):
    files = (ROOT / "constraints.txt", ROOT / "constraints-tests.txt")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "-c "))]
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, lines)}
    extras = project["project"]["optional-dependencies"].values()
    wanted = [
        requirement
        for requirement in map(Requirement, sum(extras, start=project["project"]["dependencies"]))
        if requirement.name != "notebook-launcher"
    ]
    assert [r.name for r in wanted if canonicalize_name(r.name) not in pins] == []
    versions = {r: next(iter(pins[canonicalize_name(r.name)])).version for r in wanted}
    assert [str(r) for r, version in versions.items() if version not in r.specifier] == []
