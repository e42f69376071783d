"""`python -m notebook_launcher`: the same program as `notebook-launcher`."""

from __future__ import annotations

import sys

from notebook_launcher.command_line.program import main

if __name__ == "__main__":
    sys.exit(main())
