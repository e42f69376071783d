"""The values of a cell on ranks, as the notebook shows them: equal ones once, others by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.units import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.kernel.cell import Sink
    from notebook_launcher.travel.rank_function import CellOutput

__all__ = ["show_values"]

PLAIN = "text/plain"


def show_values(sink: Sink, outputs: Mapping[int, CellOutput], *, num_ranks: int, rich_rank: int | None) -> None:
    """Show the values of a cell's last expression.

    Args:
        sink: The cell.
        outputs: By rank: the value; ranks without a value are left out.
        num_ranks: Number of ranks that ran the cell.
        rich_rank: The rank whose value is shown as HTML or as a picture, if it has such a form; None: none is.
    """
    groups: dict[str, list[int]] = {}
    for rank, output in sorted(outputs.items()):
        if PLAIN in output.data or output.data:
            groups.setdefault(str(output.data.get(PLAIN, "")), []).append(rank)
    for text, ranks in groups.items():
        head = f"[{'all' if len(ranks) == num_ranks > 1 else _short_list(ranks)}] "
        shown = outputs[rich_rank] if rich_rank in ranks else None
        if shown is not None and shown.data.keys() - {PLAIN}:
            if head:
                sink.text("stdout", f"{head.rstrip()}\n")
            sink.display(shown.data, shown.metadata)
        else:
            sink.text("stdout", head + text.replace("\n", "\n" + " " * len(head)) + "\n")
    sink.flush()


def _short_list(ranks: list[int]) -> str:
    """Return `0,2` or `1-3`."""
    return rank_list(ranks).partition(" ")[2].replace(", ", ",")
