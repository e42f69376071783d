"""The page of measured figures: it is what the reports say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_written_from_the_reports():
    spec = importlib.util.spec_from_file_location("performance_page", ROOT / "benchmarks/support/performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert module.PAGE.read_text(encoding="utf-8") == page, "run python benchmarks/support/performance.py"
    runs = re.findall(
        r"^One run of `python benchmarks/\w+\.py.*date \d{4}-\d\d-\d\d .*commit [0-9a-f]{7}", page, re.MULTILINE
    )
    assert len(runs) == page.count("\n## ")
