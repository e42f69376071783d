"""The values of a cell on ranks, as the notebook shows them: equal ones once, others by rank."""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.drawing.rank_tabs import rank_tabs
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.kernel.comms.rank_panels import RankPanels
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.travel.rank_function import CellOutput

__all__ = ["show_tabs", "show_values"]

PLAIN = "text/plain"


def show_values(
    sink: Sink, outputs: Mapping[int, CellOutput], *, num_ranks: int, rich_rank: int | Literal["all"] | None
) -> None:
    """Show the values of a cell's last expression.

    Args:
        sink: The cell, with all earlier output sent.
        outputs: By rank: the value; ranks without a value are left out.
        num_ranks: Number of ranks that ran the cell.
        rich_rank: The rank whose value is shown as HTML or as a picture, if it has such a form; None: none is.
    """
    rich = outputs.get(rich_rank) if isinstance(rich_rank, int) else None
    if rich is not None and not rich.is_rich:
        rich = None
    # Without rich values all is text, which the cell's own thread may print.
    write = sink.print if rich is None else functools.partial(sink.text, "stdout")
    for text, ranks in _alike(outputs).items():
        head = f"[{'all' if len(ranks) == num_ranks > 1 else _short_list(ranks)}]"
        if rich is not None and rich_rank in ranks:
            write(f"{head}\n")
            sink.display(rich.data, rich.metadata)
        else:
            write(f"{head} " + text.replace("\n", "\n" + " " * (len(head) + 1)) + "\n")
        if len({outputs[rank].fingerprint for rank in ranks}) > 1:
            write(" " * (len(head) + 1) + "(the texts are equal, the contents differ)\n")
    sink.close()


def show_tabs(
    sink: Sink, panels: RankPanels, outputs: Mapping[int, CellOutput], ranks: Sequence[int]
) -> Mapping[int, CellOutput]:
    """Show rich output and rich values of all ranks in tabs; return the outputs that are left to show as text."""
    is_rich = any(output.is_rich for output in outputs.values())
    bundles: dict[int, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        value = [outputs[rank].data] if is_rich and rank in outputs else []
        if parts := [*panels.of(rank), *value]:
            bundles[rank] = parts
    if not bundles:
        return outputs
    plain = [f"[{rank}] {part.get(PLAIN, '')}" for rank, parts in bundles.items() for part in parts]
    sink.html(rank_tabs(bundles, f"ranks-{secrets.token_hex(4)}"), "\n".join(plain))
    return {} if is_rich else outputs


def _alike(outputs: Mapping[int, CellOutput]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, output in sorted(outputs.items()):
        if output.data:  # A value that displays itself leaves no data.
            groups.setdefault(str(output.data.get(PLAIN, "")), []).append(rank)
    return groups


def _short_list(ranks: list[int]) -> str:
    """Return `0,2` or `1-3`."""
    return rank_list(ranks).partition(" ")[2].replace(", ", ",")
