"""The widgets' scripts under TypeScript's checker, which infers most of their types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TSC = Path(sys.prefix) / "node_modules/.bin/tsc"
CONFIG = Path(__file__).with_name("tsconfig.json")

needs_typescript = pytest.mark.skipif(
    not TSC.exists(), reason="TypeScript is not installed: `make test` installs it if npm is there"
)


def check(config: Path) -> str:
    """Return the complaints of TypeScript's checker."""
    return subprocess.run([TSC, "--project", config], capture_output=True, text=True, check=False).stdout


@needs_typescript
def test_scripts_of_the_widgets_have_no_type_errors():
    assert check(CONFIG) == ""
