"""One check in a process of its own: `python -m notebook_launcher.gpu_check.check_process NAME GPUS SHARES FILE`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from notebook_launcher.gpu_check.catalogue import find_check
from notebook_launcher.gpu_check.check_kind import Hardware, Skipped
from notebook_launcher.machine.allocation import SHARING_VARIABLE

__all__ = ["main"]


def main(name: str, hardware: Hardware, file: Path) -> None:
    """Run a check, and write its state and reason into a file."""
    if hardware.shares:
        os.environ[SHARING_VARIABLE] = "1"
    try:
        state, reason = "PASS", find_check(name).run(hardware) or ""
    except Skipped as skipped:
        state, reason = "SKIP", str(skipped)
    except Exception as error:  # whatever fails is the outcome
        state, reason = "FAIL", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    file.write_text(json.dumps([state, reason]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Hardware(int(sys.argv[2]), shares=sys.argv[3] == "True"), Path(sys.argv[4]))
