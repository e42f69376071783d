"""One check in a process of its own: `python -m notebook_launcher.gpu_check.check_process NAME NUM_GPUS FILE`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from notebook_launcher.gpu_check.catalogue import find_check
from notebook_launcher.gpu_check.check_kind import Hardware, Skipped

__all__ = ["main"]


def main(name: str, num_gpus: int, file: Path) -> None:
    """Run a check, and write its state and reason into a file."""
    try:
        state, reason = "PASS", find_check(name).run(Hardware(num_gpus)) or ""
    except Skipped as skipped:
        state, reason = "SKIP", str(skipped)
    except Exception as error:  # noqa: BLE001 - whatever fails is the outcome
        state, reason = "FAIL", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    file.write_text(json.dumps([state, reason]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
