"""Views over runs: what they show comes from frozen snapshots and can be had without them as text.

    from notebook_launcher.widgets import ConfigPanel, Monitor, compare

The folder lies at the top of the repository and is imported as `notebook_launcher.widgets`. The rest of the package
imports from the folder late, inside functions, and where there is something to show: a run that lasts
(`kernel/views.py`), widgets of ranks (`kernel/comms/rank_comms.py`), a list of runs (`archive/listing.py`), and two
commands of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.facade import LazyNames

if TYPE_CHECKING:
    from notebook_launcher.widgets.monitor.monitor import Monitor as Monitor
    from notebook_launcher.widgets.panel.panel import ConfigPanel as ConfigPanel
    from notebook_launcher.widgets.runs.comparison import compare as compare

_NAMES = LazyNames(__name__)  # imported late: ipywidgets and anywidget take 0.1 s each

__all__ = sorted(_NAMES.homes)  # noqa: PLE0605 - named once, above
__getattr__, __dir__ = _NAMES.find, _NAMES.listed
