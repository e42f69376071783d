"""Scripts and style sheets joined from modules: all are there. That they load, each test of tests/page sees."""

from __future__ import annotations

import pytest

from notebook_launcher.widgets.assets import STATIC, join_modules

MONITOR = STATIC / "monitor"


@pytest.mark.parametrize("kind", ["js", "css"])
def test_every_module_of_the_monitor_is_joined(kind):
    joined = join_modules(MONITOR / f"main.{kind}")
    joined += join_modules(STATIC / "compared.js") if kind == "js" else ""
    for path in MONITOR.glob(f"*.{kind}"):
        longest = max(path.read_text(encoding="utf-8").splitlines(), key=len)
        assert longest.removeprefix("export ") in joined, path.name
