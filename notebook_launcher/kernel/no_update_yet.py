"""Words for a request that only an Accelerator carries out, in a run that has none at work yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from notebook_launcher.messaging.messages import TrainerMade

OTHERS: dict[str, tuple[str, str]] = {
    "Hugging Face's Accelerator": (
        "write accelerator.save_state(folder) in the loop",
        "write `from notebook_launcher.compat import Accelerator` in the function, which keeps its numbers",
    ),
    "transformers' Trainer": (
        'write TrainingArguments(save_strategy="steps", save_steps=100)',
        "change it in a TrainerCallback; or call run.stop(), and go on with trainer.train(resume_from_checkpoint=True)",
    ),
    "Lightning's Trainer": (
        "write Trainer(callbacks=[ModelCheckpoint(every_n_train_steps=100)])",
        'change it in a Callback; or call run.stop(), and go on with trainer.fit(model, ckpt_path="last")',
    ),
    "Lightning's Fabric": (
        "write fabric.save(path, state) in the loop",
        "change it in the loop; or call run.stop(), and go on from a file of fabric.save(path, state)",
    ),
}
"""By the trainer of another library: how it saves, and what works in the place of `run.set` and `run.pause`."""


def no_update_yet(
    consequence: str, advice: str, trainer: TrainerMade | None = None, asks: Literal["save", "change", ""] = ""
) -> str:
    """Return why the request cannot be carried out.

    Args:
        consequence: Clause that names what cannot be done, such as `it cannot be saved`.
        advice: Another way, or when to try again, as the end of a sentence.
        trainer: The trainer of another library that the function has made; None: there is none.
        asks: What was asked for, for advice about that trainer; empty: none is given.
    """
    if trainer is not None and trainer.answers:
        return f"{trainer.name} has made no update in this run yet, so {consequence}. Try again after the first one."
    if trainer is not None:
        instead = ""
        if trainer.name in OTHERS and asks:
            instead = f" Instead, {OTHERS[trainer.name][asks == 'change']}."
        return (
            f"no Accelerator of notebook_launcher has made an update in this run, so {consequence}: {trainer.name} "
            f"makes the updates here, and it takes no requests from the notebook.{instead} run.stop(), run.stacks() "
            "and run.sample(seconds) work with any function."
        )
    return (
        f"no Accelerator has made an update in this run yet, so {consequence}. Prepare the model and the optimizer "
        "before the loop, `accelerator = Accelerator()` and `model, optimizer = accelerator.prepare(model, "
        f"optimizer)`, write `accelerator.backward(loss)` for `loss.backward()` in it, {advice}."
    )
