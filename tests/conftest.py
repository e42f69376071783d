"""Fixtures of all tests: kernels, the check for leaks, interrupts, and a place of their own for run folders."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.history.run_folders import VARIABLE
from tests.everything import ALONE
from tests.support.kernels import no_loop_left
from tests.support.leaks import lasting, leave_nothing_behind, marked_session  # noqa: F401 - fixtures
from tests.support.warm_kernels import run_cell, unchanged, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Kernel


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the files in `ALONE`; parallel workers share all others."""
    for item in items:
        if item.path.stem.removeprefix("test_") in ALONE:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True, scope="session")
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each parallel worker a folder for temporary files: the check for leaks reads all of it."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
            patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the runs of the tests, and of the kernels that they start, out of the user's folder of runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("runs")))
        yield


@pytest.fixture(autouse=True, scope="session")
def light_collections() -> Iterator[None]:
    """Freeze all imported objects, so that the collections that tests ask for skip them: 0.2 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Let SIGINT raise, here and in child processes, also if the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for runs, which everything started from here uses."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def kernel_code(request: pytest.FixtureRequest) -> str:
    """The cell that a file's kernel runs first: the file's `KERNEL_CODE`."""
    return getattr(request.module, "KERNEL_CODE", "")


@pytest.fixture(scope="module")
def kernel_cwd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The working directory of a file's kernel: a new folder with the file's `KERNEL_FILES`; None: the tests' own."""
    files = getattr(request.module, "KERNEL_FILES", None)
    if files is None:
        return None
    folder = tmp_path_factory.mktemp("notebook")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def module_kernel(kernel_code: str, kernel_cwd: Path | None) -> Iterator[Kernel]:
    """A warm kernel for all tests of a file."""
    with warm_kernel(cwd=kernel_cwd) as kernel:
        run_cell(kernel, kernel_code)
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """The file's kernel, which the test must leave as it was."""
    with unchanged(module_kernel):
        yield module_kernel


@pytest.fixture(name="no_loop_left")
def closed_loop() -> Iterator[None]:
    """Close the event loop that jupyter_client makes and keeps."""
    with no_loop_left():
        yield
