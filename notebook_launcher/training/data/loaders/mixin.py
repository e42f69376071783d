"""The state that a loader shows while it is iterated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.training.data.active_loaders import ActiveLoaders
    from notebook_launcher.training.data.rounds import Round

__all__ = ["DataLoaderStateMixin"]

OF_THE_LOOP = ("end_of_dataloader", "remainder", "current_full_rows", "current_round", "current_rows",
               "iteration_token", "num_drawn", "repeat_is_known")  # fmt: skip


class DataLoaderStateMixin:
    """The state that a loader shows while it is iterated.

    Attributes:
        end_of_dataloader: True while the current batch is the last; False outside a loop.
        remainder: Number of samples of the last round that are not repetitions; -1 if that is unknown before it
            comes, or with `drop_last`.
        current_full_rows: Samples of a full batch of one rank, as the loop began; None if unknown, or outside a loop.
        current_round: The current batches of all ranks, counted; None if unknown.
        current_rows: Rows of this rank's batch, if the data set makes batches ready (`batch_size=None`): other ranks
            cannot know them. None for all other batches, which their samplers count.
        counts_otherwise: Warning that the rows of batches vary while their samples do not; empty without a reason.
        iteration_token: An object of the present loop, another one for each loop; None outside a loop.
        num_drawn: Batches that the loop has drawn so far.
        repeat_is_known: True if a backward or `gather_for_metrics` has left out a batch that a rank got again.
        active_loaders: Loaders that are being iterated; the loader is among them while it is iterated.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    current_full_rows: int | None = None
    current_round: Round | None = None
    current_rows: int | None = None
    counts_otherwise: str = ""
    iteration_token: object | None = None
    num_drawn: int = 0
    repeat_is_known: bool = False
    active_loaders: ActiveLoaders

    @property
    def gradient_state(self) -> Any:
        """The `GradientState` of the Accelerator that prepared this loader; None without."""
        return self.active_loaders.owner

    def reset(self) -> None:
        """Forget the current batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.current_full_rows = None
        self.current_round = None
        self.current_rows = None
        self.iteration_token = None

    def loop_state(self) -> dict[str, Any]:
        """Return the attributes that belong to the present loop."""
        return {name: getattr(self, name) for name in OF_THE_LOOP}

    def begin(self) -> None:
        """Become the active loader."""
        self.reset()
        self.repeat_is_known = False
        self.num_drawn = 0
        self.iteration_token = object()
        self.active_loaders.begin(self)

    def note_repeat(self) -> None:
        """Note that a backward or `gather_for_metrics` leaves out a batch of this loop that a rank got again."""
        self.repeat_is_known = True

    def end(self) -> None:
        """Stop being the active loader."""
        self.active_loaders.end(self)
