"""What processes tell each other."""

from __future__ import annotations

from typing import Any

from notebook_launcher.training import operations
from notebook_launcher.training.data.metrics import gather_for_metrics

__all__ = ["CollectiveMethods"]


class CollectiveMethods:
    """Collectives on tensors, and on lists, tuples, dictionaries and dataclasses of tensors."""

    gradient_state: Any

    def gather(self, tensor: Any) -> Any:
        """Return all ranks' tensors, one after the other along dimension 0, on every rank."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Gather what was computed of the active loader's batch, each sample of the data set once.

        Args:
            input_data: Tensors with a row for each sample, also nested; or objects.
            use_gather_object: Whether `input_data` is a list of objects, to be gathered into one list.

        Returns:
            The same structure. Rows of samples that were only there to even ranks out are left out. What has
            no row for each sample, such as a mean loss, is gathered as it is.
        """
        loader = self.gradient_state.active_dataloader
        return gather_for_metrics(input_data, loader, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the `"sum"`, `"mean"` or `"max"` over ranks, times `scale`, on every rank."""
        return operations.reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(
        self,
        tensor: Any,
        dim: int = 0,
        pad_index: int = 0,
        pad_first: bool = False,  # noqa: FBT001, FBT002 - Accelerate's signature
    ) -> Any:
        """Pad dimension `dim` to the longest of all ranks with `pad_index`, so that `gather` can be called."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return one rank's tensors on every rank."""
        return operations.broadcast(tensor, from_process=from_process)
