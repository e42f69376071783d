"""The widgets' scripts under TypeScript's checker, which infers most of their types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from notebook_launcher.widgets.assets import STATIC

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


@needs_typescript
def test_wrong_type_in_a_script_is_found(tmp_path):
    script = (STATIC / "monitor/units.js").read_text(encoding="utf-8")
    (tmp_path / "units.js").write_text(f"{script}\nplainLin('');\n", encoding="utf-8")
    config = CONFIG.read_text(encoding="utf-8").replace("../../widgets/static/**/*", "*.js")
    (tmp_path / "tsconfig.json").write_text(config, encoding="utf-8")
    assert "Cannot find name 'plainLin'" in check(tmp_path)
