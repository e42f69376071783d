"""The palettes of `colours` as variables of a style sheet."""

from __future__ import annotations

import dataclasses

from notebook_launcher.colours import DARK, LIGHT, Palette
from notebook_launcher.widgets.assets import STATIC, join_modules


def monitor_css() -> str:
    """Return the style sheet of the monitor and of its plots."""
    return join_modules(STATIC / "monitor/main.css") + palette_css()


def palette_css() -> str:
    """Return the rules that give the monitor its colours on a light and on a dark page."""
    return f'.nbl-monitor {{{_variables(LIGHT)}}}\n.nbl-monitor[data-theme="dark"] {{{_variables(DARK)}}}\n'


def _variables(palette: Palette) -> str:
    single = {name.replace("_", "-"): value for name, value in dataclasses.asdict(palette).items() if name != "ranks"}
    ranks = {f"rank-{number}": colour for number, colour in enumerate(palette.ranks)}
    return " ".join(f"--nbl-{name}: {colour};" for name, colour in (single | ranks).items())
