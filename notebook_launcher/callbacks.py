"""Callbacks for the trainers of transformers and Lightning, which report to the run and carry out its requests.

    from notebook_launcher.callbacks import TransformersCallback, LightningCallback

In a launch, each trainer that the function makes gets one by itself (`processes/rank/frameworks.py`); the classes are
needed to give or to remove one by hand. A callback reports what the trainer logs, from rank 0, and carries out
`run.set`, `run.pause`, `run.save`, `run.stop` and `run.profile` after the same update of all ranks. Unless it is asked,
it changes nothing. Outside a run it does nothing.

This module imports neither library: an object gets the library's own class as a further base when it is made.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import numbers
import os
import sys
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from notebook_launcher.context import SAVING, activity, current, notify
from notebook_launcher.messaging import messages
from notebook_launcher.reporting import progress, send_values
from notebook_launcher.training.requests import Safepoint, Steering, make_fence
from notebook_launcher.wording import WHOLE_RUN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from notebook_launcher.settings.changes import Wanted

VARIABLE = "NOTEBOOK_LAUNCHER_CALLBACKS"
"""The environment variable that keeps launches from adding callbacks, if its value is `off`."""
TELL_INTERVAL = 0.2
"""Seconds between two records of the present settings: an eye follows no more."""
SPEEDS = ("_runtime", "_per_second", "total_flos")
"""Ends of the names of what transformers logs about its speed, once for each training and evaluation."""
CLIPPING_STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy")
"""Lightning's strategies that clip by a norm which is set during the training."""


LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
"""The names of one package; a program has imported one of them, or both."""


@dataclasses.dataclass(eq=False)
class _Clipping:
    """Clipping by a norm that is an attribute of a trainer, or of its arguments."""

    owner: Any
    name: str
    off: float | None
    """The attribute's value for no clipping."""

    @property
    def max_grad_norm(self) -> float | None:
        """The norm; None: gradients are not clipped."""
        return getattr(self.owner, self.name) or None

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        setattr(self.owner, self.name, self.off if norm is None else norm)


class _TrainerSettings(Steering):
    """The settings of a trainer that a run changes: its learning rate, and its clipping if it clips by a norm.

    Its accumulation stays: the trainer has counted the updates of the whole training by it.
    """

    def __init__(self, optimizers: Iterable[Any], schedulers: Iterable[Any], clipping: _Clipping | None) -> None:
        trainer: Any = SimpleNamespace(
            optimizers=[SimpleNamespace(optimizer=optimizer) for optimizer in optimizers],
            schedulers=[SimpleNamespace(scheduler=scheduler) for scheduler in schedulers],
            max_grad_norm=None,
            has_open_window=False,
            num_steps=1,
        )
        self._missing = (
            {"gradient_accumulation_steps"} if clipping else {"gradient_accumulation_steps", "max_grad_norm"}
        )
        clips: Any = clipping or trainer
        super().__init__(trainer, clips, trainer)

    def settings(self) -> dict[str, float | None]:
        """Return the values of the settings by name."""
        return {name: value for name, value in super().settings().items() if name not in self._missing}

    def change(self, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Any, Any]]:
        """Change settings of the trainer and of the user; return the values before and after, by name."""
        return super().change({name: value for name, value in wanted.items() if name not in self._missing})


class _TrainerSafepoint(Safepoint):
    """The safepoint of all trainers of a call, one after another, so that its updates are counted on."""

    saves_later = False
    """As `_Callback._saves_later`."""

    def _carry_out(self, change: messages.Change, steering: Steering) -> None:
        super()._carry_out(change, steering)
        if change.action == "save" and self.saves_later:
            notify("the checkpoint will be written when the run goes on: run.resume()")


class _Callback:
    """What the callbacks of both libraries share."""

    _public: type | None = None
    """The class without the library's own, by which an object is pickled; None in that class."""
    _name = ""
    """The trainer, as in `TrainerMade`."""
    _saves_later = False
    """True if the trainer itself writes a checkpoint, once the callback has returned."""
    _safepoint: _TrainerSafepoint | None = None
    """Carries requests out; None outside a training, and where this trainer takes none."""
    _settings: _TrainerSettings | None = None
    _told: dict[str, float | None] | None = None
    """The settings that the kernel knows."""
    _tell_at = -math.inf
    """The moment, by the monotonic clock, after which the kernel may be told again."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        """Make an object that is a callback of the library, too."""
        made: Any = cls  # mypy finds that classes have no hash.
        return super().__new__(made if cls._public is not None else _with_base(made, cls._find_base()))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._public, ()  # A copy begins anew.

    @classmethod
    def _find_base(cls) -> type:
        raise NotImplementedError

    def _begin(self, settings: _TrainerSettings, device: torch.device, num_processes: int, step: int) -> None:
        """Take requests from now on, if all ranks train together, and no Accelerator of ours takes them."""
        context = current()
        self._safepoint = None
        if context is None or context.pid != os.getpid() or num_processes != context.num_processes:
            return
        safepoint: Any = context.safepoint
        if safepoint is None:
            safepoint = _TrainerSafepoint(context, make_fence(device, num_processes))
            safepoint.num_updates = step  # Not 0 after a resume.
        if isinstance(safepoint, _TrainerSafepoint):
            safepoint.connect(settings, self._save_update)
            safepoint.saves_later = self._saves_later
            self._safepoint, self._settings = safepoint, settings
            self._tell()

    def _count_update(self) -> None:
        if self._safepoint is not None:
            self._safepoint.count(updated=True)

    def _end_update(self) -> None:
        if (safepoint := self._safepoint) is not None:
            if safepoint.is_due:
                safepoint.act()
            self._tell()

    def _tell(self) -> None:
        """Tell the kernel the present settings, which the monitor shows."""
        context, now = current(), time.monotonic()
        if context is None or context.rank or self._settings is None or now < self._tell_at:
            return
        self._tell_at, settings = now + TELL_INTERVAL, self._settings.settings()
        if settings != self._told:
            self._told = settings
            context.send(messages.TrainerMade(name=self._name, answers=True, settings=settings))

    def _save_update(self, update: int) -> str:
        raise NotImplementedError


def _report(values: Mapping[str, Any], step: int) -> None:
    """Report the numbers among the values, from rank 0, which may stop at no other moment than its peers."""
    context = current()
    if context is None or context.rank or context.pid != os.getpid():
        return
    found = {
        name: value
        for name, value in values.items()
        if isinstance(value, numbers.Real) or getattr(value, "numel", lambda: 0)() == 1
    }
    if found:
        send_values(found, step=step)


class TransformersCallback(_Callback):
    """Reports what a `Trainer` of transformers logs, and carries out what the run asks for.

    In a launch each `Trainer` gets one by itself, unless it has one: `callbacks=[TransformersCallback()]`.
    """

    _name = "transformers' Trainer"
    _saves_later = True
    _saves = False
    """True while a checkpoint that the run has asked for is not written."""

    @classmethod
    def _find_base(cls) -> type:
        return importlib.import_module("transformers.trainer_callback").TrainerCallback  # type: ignore[no-any-return]

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> Any:
        """Offer the settings of this training."""
        self._saves = False
        # Accelerate's wrapper has the same groups, but the scheduler knows the optimizer in it.
        optimizer = getattr(lr_scheduler, "optimizer", None) or optimizer
        clipping = None if getattr(args, "deepspeed", None) else _Clipping(args, "max_grad_norm", 0.0)
        settings = _TrainerSettings([optimizer], [lr_scheduler], clipping)
        self._begin(settings, args.device, args.world_size, state.global_step)
        return control

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Do what the run asks for after this update."""
        self._count_update()
        self._end_update()
        progress(state.global_step, state.max_steps if state.max_steps > 0 else None, WHOLE_RUN)
        control.should_save = control.should_save or self._saves
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Name the checkpoint that the run has asked for."""
        if self._saves:
            self._saves = False
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            notify(f"saved {folder}, after update {state.global_step}")
        return control

    def on_log(self, _args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
        """Report what the trainer logs, at its step."""
        curves = {name: value for name, value in (logs or {}).items() if name != "epoch" and not name.endswith(SPEEDS)}
        _report(curves, state.global_step)
        return control

    def _save_update(self, update: int) -> str:  # noqa: ARG002 - an Accelerator names its folder by it
        self._saves = True
        return ""


class LightningCallback(_Callback):
    """Reports what a `Trainer` of Lightning logs, and carries out what the run asks for.

    In a launch each `Trainer` gets one by itself, unless it has one: `callbacks=[LightningCallback()]`.
    """

    _name = "Lightning's Trainer"
    _trainer: Any = None
    _step = 0
    """The trainer's `global_step` after the last batch."""
    _num_updates = 0
    """Batches after which it was larger than before: with two optimizers it grows by two."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, ...]] = {}
        """By name: what the trainer had logged when it was reported last, its step and its number."""

    @classmethod
    def _find_base(cls) -> type:
        package = next((name for name in LIGHTNINGS if name in sys.modules), LIGHTNINGS[-1])
        return importlib.import_module(f"{package}.callbacks").Callback  # type: ignore[no-any-return]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Offer the settings of this training."""
        self._trainer = weakref.proxy(trainer)
        self._step = self._num_updates = trainer.global_step
        clips = pl_module.automatic_optimization and type(trainer.strategy).__name__ in CLIPPING_STRATEGIES
        clips = clips and "value" not in str(trainer.gradient_clip_algorithm).lower()
        clipping = _Clipping(trainer, "gradient_clip_val", None) if clips else None
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        settings = _TrainerSettings(trainer.optimizers, schedulers, clipping)
        self._begin(settings, trainer.strategy.root_device, trainer.world_size, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, index: int, *_: Any) -> None:
        """Do what the run asks for, and report, if the batch has ended an update."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._num_updates += 1
            self._count_update()  # Before its first curves tell the user that there are updates.
            if trainer.log_every_n_steps and self._num_updates % trainer.log_every_n_steps == 0:
                self._report_logged(trainer)
            self._end_update()
        batches = trainer.num_training_batches
        progress(index + 1, int(batches) if math.isfinite(batches) else None, f"epoch {trainer.current_epoch}")

    def on_train_epoch_start(self, trainer: Any, _module: Any) -> None:
        """Report the means of the epoch before, which are known now."""
        self._report_logged(trainer)

    # After each of these, the trainer has logged.
    on_train_end = on_validation_end = on_test_end = on_train_epoch_start

    def _report_logged(self, trainer: Any) -> None:
        """Report what was logged since the last time; on all ranks, because they compute the means together."""
        if trainer.sanity_checking:
            return
        news, step = {}, trainer.global_step
        for name, value in trainer.logged_metrics.items():
            known, *point = self._seen.get(name, (None,))
            if value is not known and value.numel() == 1:  # What is old stays the same tensor, but not the reverse.
                self._seen[name] = (value, step, value.item())
                if point != [step, value.item()]:
                    news[name] = value
        _report(news, step)

    def _save_update(self, update: int) -> str:
        trainer = self._trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        path = os.path.join(folder or os.path.join(trainer.default_root_dir, "checkpoints"), f"update_{update}.ckpt")
        with activity(SAVING):
            trainer.save_checkpoint(path)
        return path


@functools.cache
def _with_base(public: type, base: type) -> type:
    """Return the class of the callbacks that derive from a library's class, too."""
    own = {"__module__": public.__module__, "__doc__": public.__doc__, "_public": public}
    return type(public.__name__, (public, base), own)


def attach(trainer: Any, num_processes: int) -> tuple[bool, bool]:
    """Give a trainer the callback of its library, unless it has one, or the environment switches this off.

    Return True if it has got one now, and True if its callback takes requests, because all ranks train together.

    Args:
        trainer: A `Trainer` of transformers or Lightning.
        num_processes: Number of ranks.
    """
    is_lightning = not hasattr(trainer, "callback_handler")
    callbacks = trainer.callbacks if is_lightning else trainer.callback_handler.callbacks
    is_new = not any(isinstance(callback, _Callback) for callback in callbacks)
    if is_new:
        if os.environ.get(VARIABLE, "").strip().lower() == "off":
            return False, False
        # The last of transformers', since the first decides by itself whether to save; before Lightning's checkpoints.
        callbacks.insert(
            0 if is_lightning else len(callbacks), (LightningCallback if is_lightning else TransformersCallback)()
        )
    return is_new, (trainer if is_lightning else trainer.args).world_size == num_processes
