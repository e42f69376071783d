"""Words for a request that only an Accelerator carries out, in a run that has none at work yet."""

from __future__ import annotations

__all__ = ["no_update_yet"]


def no_update_yet(consequence: str, advice: str) -> str:
    """Return why the request cannot be carried out.

    Args:
        consequence: Clause that names what cannot be done, such as `it cannot be saved`.
        advice: Another way, or when to try again, as the end of a sentence.
    """
    return (
        f"no Accelerator has made an update in this run yet, so {consequence}. Prepare the model and the optimizer "
        f"with Accelerator().prepare(...), {advice}."
    )
