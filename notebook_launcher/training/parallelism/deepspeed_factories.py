"""Optimizers and schedulers in a DeepSpeed file, which are refused with the line that creates them in the function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.parallelism.deepspeed_keys import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["refuse_factories"]

OPTIMIZERS = {"adagrad": "Adagrad", "adam": "AdamW", "adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}
"""DeepSpeed's types, each with torch's. DeepSpeed's Adam decays weights as AdamW, unless `adam_w_mode` is false."""
ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum")
SCHEDULERS = {
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=..., total_steps=...)",
    "WarmupCosineLR": "transformers.get_cosine_schedule_with_warmup(optimizer, {warmup}, {total})",
    "WarmupDecayLR": "transformers.get_linear_schedule_with_warmup(optimizer, {warmup}, {total})",
    "WarmupLR": "transformers.get_constant_schedule_with_warmup(optimizer, {warmup})",
}


def refuse_factories(config: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that have DeepSpeed create the optimizer or the scheduler."""
    for section, line in (("optimizer", _optimizer), ("scheduler", _scheduler)):
        asked = config.get(section)
        if asked:
            settings = asked if isinstance(asked, dict) else {"type": asked}
            raise ValueError(
                f"DeepSpeed's {section} of type {settings.get('type')!r} is not created from the settings. Remove it "
                f"there, write it in the function, and prepare it: {section} = {line(settings)}"
            )


def _optimizer(section: Mapping[str, Any]) -> str:
    kind, params = str(section.get("type", "AdamW")).lower(), _params(section)
    name = "Adam" if kind == "adam" and params.get("adam_w_mode") is False else OPTIMIZERS.get(kind, "AdamW")
    given = "".join(f", {key}={params[key]!r}" for key in ARGUMENTS if params.get(key) not in (None, AUTO))
    return f"torch.optim.{name}(model.parameters(){given})"


def _scheduler(section: Mapping[str, Any]) -> str:
    params = _params(section)
    steps = {"warmup": params.get("warmup_num_steps"), "total": params.get("total_num_steps")}
    line = SCHEDULERS.get(str(section.get("type")), "torch.optim.lr_scheduler.LambdaLR(optimizer, ...)")
    return line.format(**{name: "..." if value in (None, AUTO) else value for name, value in steps.items()})


def _params(section: Mapping[str, Any]) -> Mapping[str, Any]:
    params = section.get("params")
    return params if isinstance(params, dict) else {}
