"""The decisions in which this package and Hugging Face Accelerate differ, one field for each.

`EXACT` is what `notebook_launcher` does, `ACCELERATE` what Accelerate 1.15 does and `notebook_launcher.compat`
keeps. There is one implementation, which reads these fields where the two differ.
"""

from __future__ import annotations

import dataclasses

__all__ = ["ACCELERATE", "EXACT", "Rules"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The decisions; the text of each field is the meaning of True."""

    nominal_divisor: bool
    """`backward` divides by `gradient_accumulation_steps`, also in a window that was cut short."""
    shared_window: bool
    """All models share one count of micro-batches; False: each set of models has its own windows."""
    keep_abandoned: bool
    """If a `break` or an exception leaves a window, its gradients stay and are added to the next window's."""
    scheduler_per_process: bool
    """A scheduler advances `num_processes` times for each update."""
    zero_grad_drops_window: bool
    """`zero_grad` before the last backward of a window drops what the window has gathered."""
    clip_inside_window: bool
    """`clip_grad_norm_` clips at every call; False: only where the window ends."""
    guards: bool
    """Misuse that makes ranks diverge is an error."""
    parts_ranks: bool
    """Ranks draw random numbers of their own from the first `prepare` on; False: the same to the end."""
    sync_leaf_tensors: bool
    """Leaf tensors that are handed to `prepare` are synchronised like a model's parameters."""
    environment_wins: bool
    """`ACCELERATE_GRADIENT_ACCUMULATION_STEPS` wins over the argument."""
    fp16_on_cpu: bool
    """`mixed_precision="fp16"` on a CPU computes in fp16 with a scaler; False: in full precision."""
    weigh_uneven: bool
    """Ranks that have run out of batches continue with weight zero; False: they stop, and the others may hang."""
    keeps_shares: bool
    """A loader with a `DistributedSampler` keeps its sampler, so that its share is shared out again; False: all samples
    are shared out."""
    follows_draws: bool
    """The active loader is the one that has drawn a batch last, and loaders that are iterated side by side end
    together; False: the active loader is the one whose iteration began last, and it alone says whether its data end."""
    loaders_resume: bool
    """After `load_state` a loader continues where it was saved; False: only with `use_stateful_dataloader`."""
    newest_is_shared: bool
    """`PartialState()` and its siblings show the newest Accelerator."""
    skip_missing_trackers: bool
    """A tracker of `log_with` whose client is not installed is left out, with a warning; False: an error."""


EXACT = Rules(
    nominal_divisor=False,
    shared_window=False,
    keep_abandoned=False,
    scheduler_per_process=False,
    zero_grad_drops_window=False,
    clip_inside_window=False,
    guards=True,
    parts_ranks=True,
    sync_leaf_tensors=True,
    environment_wins=False,
    fp16_on_cpu=True,
    weigh_uneven=True,
    keeps_shares=False,
    follows_draws=True,
    loaders_resume=True,
    newest_is_shared=False,
    skip_missing_trackers=False,
)

ACCELERATE = Rules(
    nominal_divisor=True,
    shared_window=True,
    keep_abandoned=True,
    scheduler_per_process=True,
    zero_grad_drops_window=True,
    clip_inside_window=True,
    guards=False,
    parts_ranks=False,
    sync_leaf_tensors=False,
    environment_wins=True,
    fp16_on_cpu=False,
    weigh_uneven=False,
    keeps_shares=True,
    follows_draws=False,
    loaders_resume=False,
    newest_is_shared=True,
    skip_missing_trackers=True,
)
