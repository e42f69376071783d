"""Scripts and style sheets joined from modules: order, names, exports."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from notebook_launcher.widgets.assets import STATIC, join_modules

MONITOR = STATIC / "monitor"


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return join_modules(folder / "main.js")


def test_imported_module_is_joined_once_and_before_its_importers(tmp_path):
    joined = write(
        tmp_path,
        main='import { a } from "./a.js";\nimport { b } from "./b.js";\n\nexport default { a, b };\n',
        a='import { b } from "./b.js";\n\nexport const a = b;\n',
        b="export const b = 1;\n",
    )
    assert [line for line in joined.splitlines() if line] == [
        "const b = 1;",
        "const a = b;",
        "export default { a, b };",
    ]


def test_joined_script_of_the_monitor_exports_only_the_widget():
    exports = re.findall(r"^(?:import|export)\b.*", join_modules(MONITOR / "main.js"), re.MULTILINE)
    assert exports == ["export default { initialize, render };"]


def test_top_level_names_of_the_monitor_differ_between_its_modules():
    script = join_modules(MONITOR / "main.js")
    names = Counter(re.findall(r"^(?:class|const|function) (\w+)", script, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []
    assert {"Plot", "RunData", "MonitorView"} <= set(names)


@pytest.mark.parametrize("kind", ["js", "css"])
def test_every_module_of_the_monitor_is_joined(kind):
    joined = join_modules(MONITOR / f"main.{kind}")
    joined += join_modules(STATIC / "compared.js") if kind == "js" else ""
    for path in MONITOR.glob(f"*.{kind}"):
        longest = max(path.read_text(encoding="utf-8").splitlines(), key=len)
        assert longest.removeprefix("export ") in joined, path.name
