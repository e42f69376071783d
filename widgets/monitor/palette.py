"""The palettes of `colours` as variables of a style sheet."""

from __future__ import annotations

import dataclasses

from notebook_launcher.colours import DARK, LIGHT, SERIES, Palette
from notebook_launcher.widgets.assets import STATIC, join_modules


def monitor_css() -> str:
    """Return the style sheet of the monitor and of its plots."""
    return join_modules(STATIC / "monitor/main.css") + palette_css()


def palette_css() -> str:
    """Return the rules that give the monitor its colours on a light and on a dark page."""
    lines = "".join(f"--nbl-rank-{number}: {colour};" for number, colour in enumerate(SERIES))
    dark = f'.nbl-monitor[data-theme="dark"] {{{_variables(DARK)}}}'
    return f".nbl-monitor {{{lines}{_variables(LIGHT)}}}\n{dark}\n"


def _variables(palette: Palette) -> str:
    colours = dataclasses.asdict(palette).items()
    return "".join(f"--nbl-{name.replace('_', '-')}: {colour};" for name, colour in colours)
