"""Scripts and style sheets of the widgets' pages, joined from the modules in `static/`.

anywidget takes one script and one style sheet for each widget, as text. The modules that they consist of are joined
here when a widget's class is made, so neither developing nor installing needs a bundler.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from notebook_launcher.colours import DARK, LIGHT, SERIES, Palette

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(r'^(?:import \{[^}]*\} from|@import) "\./([\w./]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:class|const|function) )", re.MULTILINE)


def join_modules(entry: Path) -> str:
    """Return a script or a style sheet with the files that it imports, each once and before the files that need it.

    Scripts import names from files beside or below them (`import { h } from "./elements.js";`), style sheets whole
    files (`@import "./theme.css";`). The joined text has one scope, so top-level names of the scripts must differ. It
    exports what `entry` exports.
    """
    joined: dict[Path, str] = {}
    _join(entry, joined)
    *modules, last = joined.values()
    return "\n".join([*(_EXPORT.sub("", module) for module in modules), last])


def _join(path: Path, joined: dict[Path, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for name in _IMPORT.findall(text):
        if path.parent / name not in joined:
            _join(path.parent / name, joined)
    joined[path] = _IMPORT.sub("", text)


def monitor_css() -> str:
    """Return the style sheet of the monitor and of its plots, with its colours on a light and on a dark page."""
    ranks = "".join(f"--nbl-rank-{number}: {colour};" for number, colour in enumerate(SERIES))
    light, dark = _variables(LIGHT), _variables(DARK)
    rules = f'.nbl-monitor {{{ranks}{light}}}\n.nbl-monitor[data-theme="dark"] {{{dark}}}\n'
    return join_modules(STATIC / "monitor/main.css") + rules


def _variables(palette: Palette) -> str:
    colours = dataclasses.asdict(palette).items()
    return "".join(f"--nbl-{name.replace('_', '-')}: {colour};" for name, colour in colours)
