"""The only module of the archive that asks for a view: a list of runs shows itself as a table to filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.archive.listing import RunList


def show_table(runs: RunList) -> bool:
    """Show the runs as a widget in the present cell; return False where no front end may draw it."""
    try:
        from notebook_launcher.widgets.runs import runs_table
    except ImportError:  # An installation whose widgets cannot be imported has the table as HTML.
        return False
    return runs_table.show(runs)
