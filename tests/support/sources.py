"""Functions and classes of a test file, as the source of a cell for a kernel.

    def train():
        return os.getpid()

    KERNEL_CODE = cell_of(train)

The kernel resolves the names in them: a warm kernel has imported `ctypes`, `os`, `signal`, `sys`, `time` and the names
of `notebook_launcher`, and everything else is imported inside a function. A test file that imports these other modules
itself keeps its cells as text: to a linter, the imports inside its functions would be superfluous.
"""

from __future__ import annotations

import inspect
from typing import Any


def cell_of(*definitions: Any) -> str:
    """Return the source of functions and classes, one after the other."""
    return "\n\n".join(inspect.getsource(definition) for definition in definitions)
