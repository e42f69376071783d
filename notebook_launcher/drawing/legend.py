"""The legend of a run: words, letters, colours and limits of its static pictures and of the monitor's page.

Neither has a table of its own: `legend_item` is what the page receives with each `reset` message.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.colours import BAD, GOOD, SERIES
from notebook_launcher.history.schema import MAX_SPANS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLook:
    """Appearance of a phase. Letter, colour, and pattern or height: each alone identifies the phase."""

    letter: str
    word: str
    colour: str
    pattern: str = ""
    """SVG path that the static picture draws over each 6 x 6 pixels; empty for a plain phase."""
    height: float = 1.0
    """Part of the lane in the static picture."""
    room: float = 46.0
    """Pixels of the phase's column in the static picture's table of shares."""


_BLUE, _ORANGE, _GREEN, _PINK, _, _GREY = SERIES
PHASES: dict[str, PhaseLook] = {
    "data": PhaseLook(letter="D", word="data", colour=_ORANGE, pattern="M1.5 1.5h1.5v1.5h-1.5zM4.5 4.5h1.5v1.5h-1.5z"),
    "forward": PhaseLook(letter="F", word="forward", colour=_BLUE, room=58.0),
    "backward": PhaseLook(letter="B", word="backward", colour=_PINK, pattern="M-1 4L4 -1M2 7L7 2", room=66.0),
    "sync": PhaseLook(letter="S", word="sync", colour=_GREY, pattern="M0 3h6", height=0.5),
    "step": PhaseLook(letter="O", word="optimizer", colour=_GREEN, pattern="M3 0v6", room=66.0),
}
"""In the order of a micro-batch."""

Tone = Literal["quiet", "live", "good", "warn", "bad"]
Shape = Literal["ring", "disc", "hourglass", "square", "check", "cross", "dash", "arrow", "diamond"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateLook:
    """Appearance of a state of a run or of a rank. Each shape and each sign has the meaning of the colour."""

    word: str
    """Word on the page; static tables show the state's own name."""
    tone: Tone
    """Class of colour on the page, whose style sheet knows the ground."""
    shape: Shape
    """Icon on the page."""
    sign: str = "▶"
    """Character in static tables."""
    colour: str = ""
    """Colour in static tables; empty for the text's own."""
    is_over: bool = False
    """True if a rank in this state has ended."""


RUN_STATES: dict[str, StateLook] = {
    "starting": StateLook(word="starting", tone="quiet", shape="ring", sign="…"),
    "running": StateLook(word="running", tone="live", shape="disc"),
    "waiting": StateLook(word="waiting", tone="warn", shape="hourglass"),
    "paused": StateLook(word="paused", tone="warn", shape="hourglass", sign="‖"),
    "stopping": StateLook(word="stopping", tone="warn", shape="square", sign="■"),
    "done": StateLook(word="done", tone="good", shape="check", sign="✓", colour=GOOD, is_over=True),
    "failed": StateLook(word="failed", tone="bad", shape="cross", sign="✗", colour=BAD, is_over=True),
    "stopped": StateLook(word="stopped", tone="quiet", shape="square", sign="■", is_over=True),
    "lost": StateLook(word="lost", tone="warn", shape="dash", sign="?", colour=BAD, is_over=True),
}

RANK_STATES: dict[str, StateLook] = {
    "starting": RUN_STATES["starting"],
    "running": StateLook(word="training", tone="live", shape="disc"),
    "waiting": StateLook(word="waiting in a collective", tone="warn", shape="hourglass"),
    "saving": StateLook(word="saving", tone="live", shape="arrow"),
    "asking": StateLook(word="waiting for input", tone="warn", shape="diamond"),
    "returned": RUN_STATES["done"],
    "failed": RUN_STATES["failed"],
    "stopped": RUN_STATES["stopped"],
    "unknown": StateLook(word="unknown", tone="quiet", shape="dash"),
}


RANK_COLUMNS = (
    {"title": "Step", "name": "step"},
    {
        "title": "Samples/s, all ranks",
        "name": "samples_per_second",
        "is_optional": True,
        "hint": "The rate of all ranks together, as each rank counted it over the last few seconds",
    },
    {"title": "Memory", "name": "memory", "hint": "Resident memory now; for a rank that has ended, its peak"},
    {"title": "GPU memory", "name": "gpu_memory", "is_optional": True},
    {"title": "GPU", "name": "gpu_utilization", "is_optional": True, "hint": "Utilisation"},
)
"""Columns of numbers in the page's table of ranks; an optional one is shown if a rank has such a number."""
ACTIONS = {
    "stop": ("Stop after this step", "Each rank finishes its step, then the run ends"),
    "interrupt": ("Interrupt", "Stop every rank now, wherever it is"),
    "stacks": ("Dump stacks", "Show what every rank is executing now"),
    "save": ("Save now", "All ranks save a checkpoint after the same update"),
    "pause": ("Pause", "Hold all ranks after the same update"),
    "resume": ("Resume", "Continue training on all ranks"),
}
"""The page's buttons: their words and tooltips."""
MEASURES = (
    {
        "kind": "sample",
        "label": "Sample",
        "unit": "seconds",
        "amount": 5,
        "max": 60,
        "title": "Sample the stacks of all ranks, and show where their time goes",
    },
    {
        "kind": "profile",
        "label": "Profile",
        "unit": "updates",
        "amount": 3,
        "max": 100,
        "title": "Profile the next updates of rank 0 with torch.profiler",
    },
)
"""Where the time goes: what the page can ask for, with an amount to begin with and the largest one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of each kind that the page keeps or shows."""

    plots: int = 12
    """Plots that are drawn at once; further ones on demand."""
    separate_ranks: int = 4
    """Ranks that are drawn as lines of their own; with more, the mean is drawn unless the user chooses otherwise."""
    unsearched_metrics: int = 6
    """Metrics that are shown without a field to search them."""
    tooltip_rows: int = 8
    spans: int = MAX_SPANS
    """Spans that are kept of a rank's timeline."""
    pictures: int = 50
    """Pictures that are kept of a name and rank."""
    lanes: int = 64
    """Ranks that a timeline shows."""
    lines: int = 5000
    """Lines that are kept of a rank's log, and of all logs together."""
    line_characters: int = 10_000
    shown_lines: int = 500
    """Lines that a log shows, the last ones."""
    notices: int = 20
    silent_seconds: int = 10
    """Seconds without a message after which the kernel counts as not responding: a live run sends one a second."""


LIMITS = Limits()


def legend_item() -> dict[str, Any]:
    """Return the item LEGEND: these tables as JSON."""
    return {
        "phases": {name: {"letter": p.letter, "word": p.word, "colour": p.colour} for name, p in PHASES.items()},
        "run_states": _state_records(RUN_STATES),
        "rank_states": _state_records(RANK_STATES),
        "limits": dataclasses.asdict(LIMITS),
        "rank_columns": RANK_COLUMNS,
        "actions": ACTIONS,
        "measures": MEASURES,
    }


def _state_records(looks: Mapping[str, StateLook]) -> dict[str, dict[str, Any]]:
    return {
        state: {"word": look.word, "tone": look.tone, "shape": look.shape, "is_over": look.is_over}
        for state, look in looks.items()
    }
