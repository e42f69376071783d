"""Run the first tutorial in a real Jupyter kernel and compare its weights with the documented one.

Shows the output of the notebook while it runs, then the table; exits with 1 if the notebook fails or if a printed
weight differs from 2.04000.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

NOTEBOOK = Path(__file__).with_name("01_gradient_accumulation.ipynb")
HEADER = ["processes", "accumulation", "with", "without", "documented"]
DOCUMENTED = "2.04000"
NUM_COMBINATIONS = 9
CELL_TIMEOUT = 120


class StreamingClient(NotebookClient):
    """Runs a notebook in this interpreter's kernel and passes on what it prints."""

    def create_kernel_manager(self) -> AsyncKernelManager:
        """Return a manager for the kernel of the interpreter that runs this program."""
        # Without folders to search, the only kernel left is this interpreter's own.
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
        # Sockets in our own folder instead of open ports, about which the kernel would warn.
        sockets = f"{self.resources['sockets']}/kernel"
        self.km = AsyncKernelManager(kernel_spec_manager=specs, transport="ipc", ip=sockets)
        return self.km

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Handle one message of the kernel, as nbclient does, and show it if it is output."""
        if msg["msg_type"] == "stream" and "table" not in cell.metadata.get("tags", []):
            print("    " + msg["content"]["text"].rstrip("\n").replace("\n", "\n    "), flush=True)
        return super().process_message(msg, cell, cell_index)


def announce(cell: Any, **_: object) -> None:
    """Print the heading of a markdown cell."""
    if cell.cell_type == "markdown":
        print(cell.source.splitlines()[0].lstrip("# "), flush=True)


def run() -> Any:
    """Execute the notebook and return it with its outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:
        client = StreamingClient(
            notebook,
            timeout=CELL_TIMEOUT,
            resources={"metadata": {"path": str(NOTEBOOK.parent)}, "sockets": sockets},
            on_cell_start=announce,
        )
        return client.execute()


def table(notebook: Any) -> list[list[str]]:
    """Return the rows that the cell tagged `table` printed, its header first."""
    (cell,) = [cell for cell in notebook.cells if "table" in cell.metadata.get("tags", [])]
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return [line.split() for line in text.splitlines()]


def main() -> int:
    """Run, print the table, return the exit code."""
    began = time.monotonic()
    try:
        header, *rows = table(run())
    except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
        print(f"{NOTEBOOK.name} failed:\n{error}", file=sys.stderr)
        return 1
    print()
    for row in [HEADER, *rows]:
        print("  ".join(word.rjust(len(name)) for word, name in zip(row, HEADER, strict=True)))
    wrong = [row for row in rows if row[2:] != [DOCUMENTED] * 3]
    if header != HEADER or len(rows) != NUM_COMBINATIONS or wrong:
        print(f"\nNot {NUM_COMBINATIONS} rows of {DOCUMENTED}: {wrong or rows}", file=sys.stderr)
        return 1
    print(f"\n{len(rows)} combinations, every weight {DOCUMENTED}, in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
