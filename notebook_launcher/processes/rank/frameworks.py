"""Changes to other libraries that start processes or process groups, or train by settings of their own.

`torch.multiprocessing.spawn` is refused. A group that Accelerate and Lightning Fabric find gets their `timeout=`;
Accelerate's barrier names no GPU that is missing. Settings of the launch that a trainer does not take are named as soon
as it is made; trainers of transformers and Lightning get a callback (`callbacks.py`). Accelerate's state begins anew
with the first Accelerator of a session's call. A version without the functions replaced here is left as it is.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.context import call_id, current, notify
from notebook_launcher.errors import CallOrderError
from notebook_launcher.messaging import messages
from notebook_launcher.torch_lines import set_group_timeout
from notebook_launcher.travel.afterimport import after_import

if TYPE_CHECKING:
    import types
    from collections.abc import Callable


def patch_when_imported() -> None:
    """Make the changes, once the libraries are imported, in a rank or in a process from which ranks are forked."""
    fabric = {f"{package}.utilities.distributed": _patch_fabric for package in ("lightning_fabric", "lightning.fabric")}
    after_import({"accelerate.state": _patch_accelerate, "torch.multiprocessing": _patch_spawn, **fabric})
    own = _OwnSettings()
    makers = {
        "accelerate.accelerator": ("Accelerator", _ACCELERATE),
        "transformers.trainer": ("Trainer", _TRANSFORMERS),
        "pytorch_lightning.trainer.trainer": ("Trainer", _LIGHTNING),
        "lightning.pytorch.trainer.trainer": ("Trainer", _LIGHTNING),
        "lightning_fabric.fabric": ("Fabric", _FABRIC),
        "lightning.fabric.fabric": ("Fabric", _FABRIC),
    }
    after_import({name: functools.partial(own.watch, *maker) for name, maker in makers.items()})


def _patch_spawn(module: types.ModuleType) -> None:
    for name in ("spawn", "start_processes"):
        function = _refusal(f"torch.multiprocessing.{name}", getattr(module, name))
        setattr(module, name, function)
        # `torch.multiprocessing.spawn` is a function, which hides the module of the same name.
        setattr(sys.modules["torch.multiprocessing.spawn"], name, function)


def _refusal(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that raises `CallOrderError` in a rank, and calls the function in other processes."""

    @functools.wraps(function)
    def start(fn: Any, *args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is None or context.pid != os.getpid():
            return function(fn, *args, **kwargs)
        own = getattr(fn, "__name__", "fn")
        if str(getattr(fn, "__module__", "")).startswith(("pytorch_lightning.", "lightning.", "lightning_fabric.")):
            raise CallOrderError(
                f"Lightning began to start processes in rank {context.rank}, which the launch has started: a strategy "
                'such as strategy="ddp_notebook" or "ddp_spawn" does. Write strategy="ddp" in the function.'
            )
        raise CallOrderError(
            f"{name} was called in rank {context.rank}: the processes that it would start are up, started by the "
            f"launch. Call {own}(rank, ...) here, with the rank from torch.distributed.get_rank(); or launch {own} "
            "itself."
        )

    return start


def _patch_accelerate(module: types.ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    if state is not None:
        state.__init__ = _with_timeout(state.__init__)
        if hasattr(state, "wait_for_everyone"):
            state.wait_for_everyone = with_existing_device(state.wait_for_everyone)


def with_existing_device(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return Accelerate's barrier, which names a GPU by the rank's number, or a plain one where that GPU is missing."""

    @functools.wraps(wait)
    def wait_for_everyone(self: Any) -> None:
        import torch

        if torch.distributed.is_initialized() and self.local_process_index >= torch.cuda.device_count():
            torch.distributed.barrier()
        else:
            wait(self)

    return wait_for_everyone


def _patch_fabric(module: types.ModuleType) -> None:
    connect: Callable[..., Any] | None = getattr(module, "_init_dist_connection", None)
    if connect is None:
        return
    replacement = _with_timeout(connect)
    # The strategies have imported the function by its name, and a fork of the kernel may have inherited them.
    for name, other in list(sys.modules.items()):
        if "lightning" in name and vars(other).get("_init_dist_connection") is connect:
            vars(other)["_init_dist_connection"] = replacement


def _with_timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which makes a group or finds one, so that a group that it finds gets its `timeout=`, too."""

    @functools.wraps(function)
    def connect(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import distributed_c10d as c10d

        found = c10d.GroupMember.WORLD
        result = function(*args, **kwargs)
        timeout = kwargs.get("timeout")
        if found is not None and found is c10d.GroupMember.WORLD and isinstance(timeout, dt.timedelta):
            with contextlib.suppress(AttributeError):
                set_group_timeout(timeout)
        return result

    return connect


class _Maker(NamedTuple):
    """A class of another library that trains by settings of its own."""

    name: str
    uses: Callable[[Any], dict[str, Any]]
    """Returns what an object of it uses, by the names of the launch's settings."""
    write: str
    """The call that takes the settings below, with `{}` for them; empty: they are statements."""
    words: dict[str, str]
    """By the launch's setting: how the same is written there, with `{}` for the value."""


def _lightning_precision(trainer: Any) -> str:
    bits = str(trainer.precision).partition("-")[0]
    return {"16": "fp16", "32": "no"}.get(bits, bits)


_ACCELERATE = _Maker(
    "Hugging Face's Accelerator",
    lambda made: {
        "mixed_precision": made.mixed_precision,
        "gradient_accumulation_steps": made.gradient_accumulation_steps,
    },
    "",
    {
        "mixed_precision": "Accelerator(mixed_precision={})",
        "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps={})",
        "max_grad_norm": "accelerator.clip_grad_norm_(model.parameters(), {}) before each step",
        "shard": "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())",
    },
)
_TRANSFORMERS = _Maker(
    "transformers' Trainer",
    lambda made: {
        "mixed_precision": made.accelerator.mixed_precision,
        "gradient_accumulation_steps": made.args.gradient_accumulation_steps,
        "max_grad_norm": made.args.max_grad_norm,
    },
    "TrainingArguments({})",
    {
        "mixed_precision": "{bare}=True",
        "gradient_accumulation_steps": "gradient_accumulation_steps={}",
        "max_grad_norm": "max_grad_norm={}",
        "shard": 'fsdp="full_shard"',
    },
)
_LIGHTNING = _Maker(
    "Lightning's Trainer",
    lambda made: {
        "mixed_precision": _lightning_precision(made),
        "gradient_accumulation_steps": made.accumulate_grad_batches,
        "max_grad_norm": made.gradient_clip_val,
    },
    "Trainer({})",
    {
        "mixed_precision": 'precision="{bits}-mixed"',
        "gradient_accumulation_steps": "accumulate_grad_batches={}",
        "max_grad_norm": "gradient_clip_val={}",
        "shard": 'strategy="fsdp"',
    },
)
_FABRIC = _Maker(
    "Lightning's Fabric",
    lambda made: {"mixed_precision": _lightning_precision(made._precision)},
    "",
    {
        "mixed_precision": 'Fabric(precision="{bits}-mixed")',
        "gradient_accumulation_steps": "fabric.no_backward_sync(model, enabled=...) in the loop",
        "max_grad_norm": "fabric.clip_gradients(model, optimizer, max_norm={})",
        "shard": 'Fabric(strategy="fsdp")',
    },
)


_WITH_CALLBACK = (_TRANSFORMERS, _LIGHTNING)
"""Those whose trainers get a callback of ours."""


class _OwnSettings:
    """Compares the launch's settings with those of other libraries' trainers when these are made."""

    def __init__(self) -> None:
        self._depth = 0
        """Number of trainers that are being made: transformers' Trainer makes an Accelerator."""
        self._told: set[str] = set()
        """Lines that this rank has written."""
        self._call: int | None = None
        """The last call that made an Accelerator of Hugging Face's."""
        self._device: Any = None
        """The device in the state that this Accelerator has made."""

    def watch(self, name: str, maker: _Maker, module: types.ModuleType) -> None:
        """Compare settings whenever an object of the module's class is made."""
        kind = getattr(module, name, None)
        if kind is None:
            return
        init = kind.__init__

        @functools.wraps(init)
        def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if maker is _ACCELERATE:
                self._renew_state()
            self._depth += 1
            try:
                init(trainer, *args, **kwargs)
            finally:
                self._depth -= 1
            if maker is _ACCELERATE and (state := sys.modules.get("accelerate.state")) is not None:
                self._call, self._device = call_id(), state.PartialState._shared_state.get("device")
            if not self._depth:
                # Another version of the library may have other attributes.
                with contextlib.suppress(Exception):
                    self._compare(maker, trainer)

        kind.__init__ = made

    def _compare(self, maker: _Maker, trainer: Any) -> None:
        """Write a line about settings of the launch that have no effect."""
        context = current()
        if context is None or context.pid != os.getpid():
            return
        context.settings_are_read = True
        answers = maker in _WITH_CALLBACK and self._attach(maker, trainer, context.num_processes)
        if context.rank == 0:
            context.send(messages.TrainerMade(name=maker.name, answers=answers))
        uses = maker.uses(trainer)
        unused = {name: value for name, value in context.settings.asked_for().items() if uses.get(name) != value}
        words = [
            maker.words[name].format(repr(value), bare=value, bits=str(value).removeprefix("fp"))
            for name, value in unused.items()
            if name in maker.words
        ]
        advice = ", ".join(words)
        given = ", ".join(f"{name}={value!r}" for name, value in unused.items())
        line = f"{given} had no effect: {maker.name} has its own settings."
        if words:
            line += f" Write {maker.write.format(advice) if maker.write else advice}"
        if unused:
            self._tell(line)

    def _attach(self, maker: _Maker, trainer: Any, num_processes: int) -> bool:
        from notebook_launcher import callbacks

        is_new, answers = callbacks.attach(trainer, num_processes)
        if is_new:
            line = f"{maker.name} got a callback: its curves are in run.metrics"
            line += ", and run.set(lr=...), run.pause() and run.save() work" if answers else ""
            self._tell(f'{line}. os.environ["{callbacks.VARIABLE}"] = "off" leaves it out.')
        return answers

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            notify(line)

    def _renew_state(self) -> None:
        """Let the first Accelerator of a call make its state anew; Accelerators of earlier calls keep theirs."""
        state = sys.modules.get("accelerate.state")
        if state is None or self._call in (None, call_id()):
            return
        names = ["AcceleratorState", "GradientState"]
        if state.PartialState._shared_state.get("device") is self._device:  # Not made anew by this call.
            names.append("PartialState")
        for name in names:
            kind = getattr(state, name)
            kind._shared_state = type(kind._shared_state)()
