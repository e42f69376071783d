"""The two layouts of a checkpoint of sharded models: each tensor whole in one file, or each rank's parts in its own.

The layouts have Accelerate's names, `FULL_STATE_DICT` and `SHARDED_STATE_DICT`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.checkpoints.layouts.sharded import leaves
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording.choices import unknown
from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.training.process.process_state import ProcessState

__all__ = ["check_layout", "choose_sharded"]

WHOLE, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
LARGEST_WHOLE = 10 * 10**9
"""Bytes of sharded tensors that are written whole by default. All of them pass through rank 0."""


def check_layout(state_dict_type: str | None, *, on_each_node: bool) -> None:
    """Raise ValueError for a layout that does not exist, or that cannot be written to a folder of each machine."""
    if state_dict_type not in (None, WHOLE, SHARDED):
        raise ValueError(unknown("state_dict_type", state_dict_type, (WHOLE, SHARDED), more=" or None"))
    if state_dict_type == SHARDED and on_each_node:
        raise ValueError(
            f"state_dict_type={SHARDED!r} needs one folder for all machines, and save_on_each_node=True gives each its "
            f"own. Save to a shared disk with save_on_each_node=False, or pass state_dict_type={WHOLE!r}."
        )


def choose_sharded(
    states: Iterable[Any], state_dict_type: str | None, process: ProcessState, *, on_each_node: bool
) -> bool:
    """Return True if tensors that are spread over ranks are written in parts; the same on all ranks.

    Args:
        states: States of models and optimizers.
        state_dict_type: The layout that was asked for; None: by size.
        process: This process among its peers; rank 0 chooses the layout of a large model.
        on_each_node: True if each machine has a folder of its own.
    """
    spread = [leaf for state in states for leaf in leaves(state) if is_spread(leaf)]
    if state_dict_type is not None:
        return state_dict_type == SHARDED and bool(spread)
    total = sum(tensor.numel() * tensor.element_size() for tensor in spread)
    if total <= LARGEST_WHOLE or on_each_node:
        return False
    if process.is_main_process:
        warn_user(
            f"save_state writes {format_bytes(total)} of sharded tensors in the sharded layout, a file for each rank; "
            f"load_state reads it with any number of ranks. For one file: state_dict_type={WHOLE!r}."
        )
    return True
