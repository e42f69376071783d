"""Number of samples that one optimizer update sees, as a formula."""

from __future__ import annotations

import dataclasses

__all__ = ["EffectiveBatch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveBatch:
    """Number of samples that one optimizer update sees."""

    micro_batch: int | None
    accumulation: int | None
    processes: int | None

    @property
    def total(self) -> int | None:
        """Samples of one update on all ranks; None if a factor is unknown."""
        if self.micro_batch is None or self.accumulation is None or self.processes is None:
            return None
        return self.micro_batch * self.accumulation * self.processes

    @property
    def factors(self) -> dict[str, int | None]:
        """Factors of the product, by name."""
        return {"micro-batch": self.micro_batch, "accumulation": self.accumulation, "processes": self.processes}

    def __str__(self) -> str:
        product = " × ".join(f"{name} {_or_unknown(value)}" for name, value in self.factors.items())  # noqa: RUF001
        return f"{product} = {_or_unknown(self.total)}"


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
