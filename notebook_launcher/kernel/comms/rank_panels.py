"""Tables and figures of the ranks of a cell: of one rank as they come, or of all ranks in tabs at the end."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.errors import ConfigError
from notebook_launcher.messaging import messages
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.config import LaunchConfig

__all__ = ["RankPanels", "shown_rank"]


def shown_rank(display: int | str | None, running: Sequence[int], config: LaunchConfig) -> int | Literal["all"] | None:
    """Return the rank whose tables and figures are shown, `"all"`, or None for no rank.

    Args:
        display: The choice for this cell; None: the session's, which is the first rank unless `config` names another.
        running: The ranks that run the cell.
        config: The session's options.

    Raises:
        ConfigError: The choice is not a rank that runs the cell.
    """
    if display is None:
        return {"all": "all", "none": None}.get(config.display, running[0])
    if display == "all":
        return "all"
    if not str(display).isdigit() or int(display) not in running:
        raise ConfigError(
            f"display={display!r} names no rank that runs the cell: {rank_list(running)}. Write a rank, or 'all'."
        )
    return int(display)


class RankPanels:
    """Takes the rich output of a cell's ranks.

    Args:
        shown: The rank whose output goes to the cell as it comes; `"all"`: every rank's is kept; None: none is shown.
    """

    def __init__(self, shown: int | Literal["all"] | None) -> None:
        self._shown = shown
        self._bundles: defaultdict[int, list[messages.Display]] = defaultdict(list)

    def take(self, rank: int, record: messages.Display | messages.ClearOutput) -> bool:
        """Take a rank's record; return False if the cell is to show it now."""
        if self._shown != "all":
            return rank != self._shown
        bundles = self._bundles[rank]
        if isinstance(record, messages.ClearOutput):
            bundles.clear()
        elif record.update:
            shown = record.transient.get("display_id")
            bundles[:] = [record if bundle.transient.get("display_id") == shown else bundle for bundle in bundles]
        else:
            bundles.append(record)
        return True

    @property
    def widget_ranks(self) -> tuple[int, ...]:
        """The rank whose widgets the cell shows; none in tabs, which hold pictures and text."""
        return (self._shown,) if isinstance(self._shown, int) else ()

    def of(self, rank: int) -> list[Mapping[str, Any]]:
        """Return what a rank has shown, as bundles by MIME type."""
        return [record.data for record in self._bundles.get(rank, ())]
