"""A gradient whose exchange is under way: any use of its values finishes the exchange first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PendingGradient"]

RESCALINGS = {"_foreach_mul_.Scalar", "_foreach_mul_.Tensor", "_foreach_mul_.ScalarList"}
"""Operators by which a window's correction multiplies gradients; the first two may wait for the exchange."""


class BucketUnderWay(Protocol):
    """The part of `pending_buckets.PendingBucket` that is used here."""

    @property
    def is_finished(self) -> bool:
        """True once the gradients are there."""
        ...

    def finish(self) -> None:
        """Wait for the exchange, and make the updates that wait for it."""
        ...

    def rescale(self, gradient: torch.Tensor, multiply: Callable[[torch.Tensor], object]) -> None:
        """Note the correction of a gradient, to be made after the exchange."""
        ...


class PendingGradient(torch.Tensor):
    """Takes the place of `parameter.grad` while the ranks exchange it.

    The memory of the gradient holds numbers that are being added up. An operator that gets this tensor waits for the
    exchange, and works on the gradient itself. Multiplication by one factor, which corrects windows that were not full,
    is noted and done after the exchange.

    Args:
        gradient: The memory of the gradient.
        bucket: The bucket that it is exchanged in.
        number: Number of the exchange; no two exchanges of a model have the same.
    """

    gradient: torch.Tensor
    bucket: BucketUnderWay
    number: int
    # So that torch's functions reach `__torch_dispatch__` without a detour.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 - as in torch

    def __new__(cls, gradient: torch.Tensor, *_: object) -> PendingGradient:  # noqa: D102 - the class has its arguments
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch documents it
            cls, gradient.size(), strides=gradient.stride(), dtype=gradient.dtype, device=gradient.device
        )
        return made

    def __init__(self, gradient: torch.Tensor, bucket: BucketUnderWay, number: int) -> None:
        self.gradient, self.bucket, self.number = gradient, bucket, number

    @property
    def _version(self) -> int:  # type: ignore[override]
        """A number that no version of a gradient has, and that differs between exchanges."""
        return -2 - self.number

    def finished(self) -> torch.Tensor:
        """Return the gradient, after its exchange."""
        self.bucket.finish()
        return self.gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if str(func).removeprefix("aten.") in RESCALINGS and not kwargs and _postpone(func, *args):
            return None
        args, kwargs = tree_map_only(cls, cls.finished, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.finished())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = self.finished().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.finished().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the gradient as an array, after its exchange."""
        return self.finished().numpy(force=force)

    def data_ptr(self) -> int:
        """Return the address of the gradient, after its exchange."""
        return self.finished().data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory of the gradient, after its exchange."""
        return self.finished().untyped_storage()

    def tolist(self) -> Any:
        """Return the gradient as numbers, after its exchange."""
        return self.finished().tolist()


def _postpone(func: Any, gradients: list[torch.Tensor], factor: Any) -> bool:
    """Multiply gradients by a factor, those under way after their exchange; return False for what is unusual."""
    if isinstance(factor, list | tuple | PendingGradient):
        return False
    ready = []
    for gradient in gradients:
        if isinstance(gradient, PendingGradient) and not gradient.bucket.is_finished:
            gradient.bucket.rescale(gradient.gradient, lambda one: func([one], factor))
        else:
            ready.append(gradient.gradient if isinstance(gradient, PendingGradient) else gradient)
    if ready:
        func(ready, factor)
    return True
