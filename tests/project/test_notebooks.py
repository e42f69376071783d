"""Tutorials: their committed form, and a run from top to bottom in a real kernel."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import psutil
import pytest
from nbclient.exceptions import CellExecutionError

from tests.support.kernels import ROOT, no_loop_left

if TYPE_CHECKING:
    from collections.abc import Iterator

client: Any = importlib.import_module("notebooks.demo").StreamingClient
"""Runs a notebook in this interpreter's kernel."""

NOTEBOOKS = [*sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ROOT / "notebooks" / "hosted_check.ipynb"]
"""The tutorials, and the check of a hosted machine; `gpu_check.ipynb` always installs a wheel."""
MARK = "NOTEBOOK_LAUNCHER_TEST_NOTEBOOK"
"""Environment variable that all processes of a notebook inherit, with a value of its own."""
MACHINE_PATHS = re.compile(rf"/home/\w|/root/|/Users/\w|/tmp/|{re.escape(str(Path.home()))}|{re.escape(str(ROOT))}")
LAST_LINE = 'assert names == ["notebook_launcher.processes.forkserver"]'

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_meant_to_raise(cell: Any) -> bool:
    return "raises-exception" in cell.metadata.get("tags", [])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What runs all notebooks in one kernel; imports and the fork server are there from the second notebook on."""
    folder, mark = tmp_path_factory.mktemp("kernel"), uuid.uuid4().hex
    empty = nbformat.v4.new_notebook()
    resources = {"metadata": {"path": str(ROOT / "notebooks")}, "sockets": str(folder)}
    running = client(empty, timeout=200, resources=resources)
    running.env = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "IPYTHONDIR": str(folder),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with no_loop_left():
        yield running
        execute(running, empty, cleanup_kc=True)
    assert psutil.wait_procs(processes_with(mark), timeout=5)[1] == []


@pytest.fixture
def lasting(request: pytest.FixtureRequest) -> None:
    """Start the kernel before a test of a notebook, after which the check for leaks ends what the test has started."""
    if "reader" in request.fixturenames and (reader := request.getfixturevalue("reader")).km is None:
        execute(reader, nbformat.v4.new_notebook())


def execute(reader: Any, notebook: Any, *, cleanup_kc: bool = False) -> Any:
    """Run a notebook and return it with its outputs. The next one finds no variable of it."""
    reader.nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f"), *notebook.cells])
    try:
        reader.execute(env=reader.env, cleanup_kc=cleanup_kc)
    except BaseException:
        reader._cleanup_kernel()  # The next notebook gets a new kernel.
        raise
    return notebook


def processes_with(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited the mark, even if their parents have changed."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


@every_notebook
def test_notebook_holds_no_traces_of_a_run(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell for cell in code_cells(notebook) if cell.outputs or cell.execution_count is not None] == []
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
    assert MACHINE_PATHS.findall("\n".join(cell.source for cell in notebook.cells)) == []


@every_notebook
def test_notebook_begins_with_summary_and_ends_with_leak_check(path: Path) -> None:
    notebook = read(path)
    first, (last_text, last) = notebook.cells[0], notebook.cells[-2:]
    assert first.source.startswith("# ")
    assert re.findall(r"\*\*(.+?)\*\*:", first.source) == ["What you will see", "How long", "Hardware"]
    assert last_text.source.startswith("## Nothing is left running\n")
    assert LAST_LINE in last.source.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)  # test_demo.py runs the first
def test_notebook_runs_from_top_to_bottom_and_leaves_no_process(path: Path, reader: Any) -> None:
    # pytest would print all stacks too early on a busy machine; the limit above prints them too.
    faulthandler.cancel_dump_traceback_later()
    cells = code_cells(execute(reader, read(path)))
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(counts[0], counts[0] + len(cells)))
    raised = [any(output.output_type == "error" for output in cell.outputs) for cell in cells]
    assert raised == [is_meant_to_raise(cell) for cell in cells]
    kernel = psutil.Process(reader.km.provisioner.pid)
    strays = {*processes_with(reader.env[MARK])} - {kernel, *kernel.children(recursive=True)}
    assert psutil.wait_procs(strays, timeout=5)[1] == []


@pytest.mark.slow
def test_notebook_with_failing_assertion_raises(reader: Any) -> None:
    sources = ["import sys\nprint(sys.executable)", "assert 1 > 2"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with pytest.raises(CellExecutionError, match="assert 1 > 2"):
        execute(reader, notebook)
    assert notebook.cells[0].outputs[0].text.strip() == sys.executable
