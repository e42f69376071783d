"""The records that configure an Accelerator, by Accelerate's names and defaults."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.wording import did_you_mean, type_of, unknown

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable


UNEVEN = ("weigh", "stop", "error", "leave")


def check_uneven(uneven: str | None, *, or_none: bool = False) -> None:
    """Raise ValueError if `uneven` is none of its choices, which `DataLoaderConfiguration.uneven` explains."""
    if uneven not in UNEVEN and not (or_none and uneven is None):
        raise ValueError(unknown("uneven", uneven, UNEVEN, more=" or None" if or_none else ""))


class TextEnum(str, enum.Enum):
    """An enumeration whose members equal their text."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values."""
        return [str(member.value) for member in cls]


class DistributedType(TextEnum):
    """The way in which processes work together: `NO`, `MULTI_CPU`, `MULTI_GPU`, or `FSDP` where models are sharded.

    The other members never occur: Accelerate has them, for code that compares with them.
    """

    __str__ = enum.Enum.__str__  # `DistributedType.MULTI_CPU`, as Accelerate prints it

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(TextEnum):
    """Precision of the forward pass: `"no"`, `"fp16"` or `"bf16"`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(TextEnum):
    """A random number generator that ranks can share (`synchronize_rng_states`)."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class LoggerType(TextEnum):
    """A name for `log_with`: of one tracker, or `"all"` for every tracker that is known."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class DDPCommunicationHookType(TextEnum):
    """Compression of gradients for their reduction (torch.distributed.algorithms.ddp_comm_hooks)."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class KwargsHandler:
    """Base of the records that hold arguments, of torch's classes for instance."""

    def __post_init__(self) -> None:
        if dataclasses.is_dataclass(self):
            check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclasses.dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation."""

    num_steps: int | None = None
    """Micro-batches per update; None: the launch's number, or 1."""
    adjust_scheduler: bool = True
    """Accepted and without effect, as in Accelerate 1.15: a scheduler counts updates."""
    sync_with_dataloader: bool = True
    """End a window where its loader ends; False: windows continue into the next epoch."""
    sync_each_batch: bool | None = None
    """Synchronise gradients in every micro-batch: more traffic, less memory when sharded.
    None: sharded models (FSDP) are, others are not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            self.num_steps = whole_number("num_steps", self.num_steps)


@dataclasses.dataclass
class DataLoaderConfiguration:
    """Settings of prepared loaders: each rank's part of the data."""

    split_batches: bool = False
    """Give each rank a slice of every batch; False: every `num_processes`-th batch."""
    dispatch_batches: bool | None = None
    """Let rank 0 read, and send the others their slices; None: for iterable data sets.

    With False every rank reads an iterable data set, and keeps its share. Of a Hugging Face `datasets` stream with at
    least as many shards as ranks, every rank reads its own shards only.
    """
    even_batches: bool = True
    """Fill the last round with samples from the start of the epoch, so that all ranks get equally many."""
    use_seedable_sampler: bool = False
    """Draw an order that depends on the seed and the epoch alone."""
    data_seed: int | None = None
    """The seed of that order; None: drawn from torch's generator."""
    non_blocking: bool = False
    """Copy each batch to the GPU while the one before is computed on (with pinned memory)."""
    use_stateful_dataloader: bool = False
    """Accepted; prepared loaders of map-style data always know their position."""
    uneven: str | None = None
    """Behaviour of a rank that runs out of batches before others do, with `even_batches=False`:
    `"weigh"` repeats a batch with weight zero, `"stop"` ends the loop on all ranks together, `"error"`
    refuses before the loop, `"leave"` ends it on that rank alone (others may wait for ever). None: `"weigh"`."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_uneven(self.uneven, or_none=True)


@dataclasses.dataclass
class ProjectConfiguration:
    """Folders of a project: checkpoints and logs."""

    project_dir: str | None = None
    logging_dir: str | None = None
    """None: `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Let `save_state()` write `project_dir/checkpoints/checkpoint_<iteration>`, counting up."""
    total_limit: int | None = None
    """Number of automatically named checkpoints to keep; None: all."""
    iteration: int = 0
    """The number of the next one."""
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self.set_directories(self.project_dir)
        if self.total_limit is not None:
            self.total_limit = whole_number("total_limit", self.total_limit)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the folder of the logs where none was chosen."""
        if project_dir is not None:
            self.project_dir = os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclasses.dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = 25
    """MiB of gradients that are reduced together; None becomes torch's size, 25."""
    find_unused_parameters: bool = False
    check_reduction: bool = False
    """Accepted and without effect, as in torch."""
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """`"fp16"` or `"bf16"` around a PowerSGD hook."""
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `PowerSGDState`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel` by name."""
        own = ("comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in super().to_dict().items() if name not in own}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is None:
            self.bucket_cap_mb = 25
        self.comm_hook = _hook("comm_hook", self.comm_hook)
        self.comm_wrapper = _hook("comm_wrapper", self.comm_wrapper)


def _hook(name: str, value: Any) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        raise ValueError(unknown(name, value, DDPCommunicationHookType.list())) from None


@dataclasses.dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclasses.dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; used only where no group is up yet."""

    backend: str | None = None
    init_method: str | None = None
    timeout: dt.timedelta | None = None


@dataclasses.dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`."""

    activities: list[str] | None = None
    """`"cpu"`, `"cuda"`; None: all that the machine has."""
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """Folder in which each rank writes `profile_<rank>.json`; None: nothing is written."""


def pick_handlers(handlers: Iterable[Any] | None, known: tuple[type, ...]) -> dict[type, Any]:
    """Return the handlers by type; raise ValueError for an unknown handler, or two of one type."""
    found: dict[type, Any] = {}
    for handler in handlers or ():
        kind = next((kind for kind in known if isinstance(handler, kind)), None)
        if kind is None:
            raise ValueError(f"kwargs_handlers holds {handler!r}, which is unknown. {_advice(handler, known)}")
        if kind in found:
            raise ValueError(f"kwargs_handlers holds two {kind.__name__}. Pass one.")
        found[kind] = handler
    return found


def _advice(handler: Any, known: tuple[type, ...]) -> str:
    """Return what to pass for a handler that is none of the known ones."""
    if handler in known:
        return f"Pass an object of the class: {handler.__name__}()."
    names = [kind.__name__ for kind in known]
    if type(handler).__name__ in names:
        return f"It is from {type(handler).__module__}; import {type(handler).__name__} from notebook_launcher."
    return f"It can hold {', '.join(names)}."


# --------------------------------------------------------------------------------------------------------------------
# Checks of the arguments of an Accelerator and of its records, by their types.


def check_instance(name: str, value: Any, kind: type, write: str) -> None:
    """Raise TypeError unless a value is None or of a class of this package.

    Args:
        name: The argument's name.
        value: Its value.
        kind: The class.
        write: A value to pass instead, as code.
    """
    if value is None or isinstance(value, kind):
        return
    if type(value).__name__ == kind.__name__:
        raise TypeError(
            f"{name}={value!r} is the {kind.__name__} of {type(value).__module__}. Import {kind.__name__} from "
            "notebook_launcher."
        )
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    raise TypeError(f"{name}={value!r} is not {article} {kind.__name__}. Pass {write}.")


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword that is not known, with the nearest one.

    Args:
        call: What was called, as code: `save_state()`.
        given: The keywords that were given besides those of the signature.
        known: All keywords, those of the signature included.
    """
    known = list(known)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"It takes {', '.join(known)}."
            raise TypeError(f"{call} has no argument {name}=. {hint}")


def check_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """Raise TypeError unless a value is True or False, which NumPy's and 1 and 0 are as well."""
    if (value is None and or_none) or (not isinstance(value, float) and value in (True, False)):
        return
    end = "True or False, or None" if or_none else "True or False"
    raise TypeError(f"{name}={value!r} is {type_of(value)}; it must be {end}.")


def check_limit(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless a value is a number that gradients can be clipped to.

    A negative one would turn the gradients around.
    """
    if type(value) is float and value >= 0.0:  # in every micro-batch
        return
    check_number(name, value)
    if value < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more; to clip nothing, leave the call out.")


def check_fields(record: Any) -> None:
    """Raise TypeError or ValueError if a field of a dataclass is not of its type, which may be bool, int or float."""
    for field in dataclasses.fields(record):
        kind, _, rest = str(field.type).partition(" | ")
        value = getattr(record, field.name)
        if kind == "bool":
            check_switch(field.name, value, or_none=rest == "None")
        elif value is None and rest == "None":
            continue
        elif kind == "int":
            whole_number(field.name, value, minimum=-sys.maxsize)
        elif kind == "float":
            check_number(field.name, value)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a number, or holds one, as a tensor of one element does."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise TypeError(f"{name}={value!r} is {type_of(value)}; it must be a number.")


# --------------------------------------------------------------------------------------------------------------------
# The decisions in which this package and Hugging Face Accelerate differ, one field for each.
#
# `EXACT` is what `notebook_launcher` does, `ACCELERATE` what Accelerate 1.15 does and `notebook_launcher.compat`
# keeps. There is one implementation, which reads these fields where the two differ.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The decisions as this package makes them; the text of each field is the meaning of True."""

    nominal_divisor: bool = False
    """`backward` divides by `gradient_accumulation_steps`, also in a window that was cut short."""
    shared_window: bool = False
    """All models share one count of micro-batches; False: each set of models has its own windows."""
    keep_abandoned: bool = False
    """If a `break` or an exception leaves a window, its gradients stay and are added to the next window's."""
    scheduler_per_process: bool = False
    """A scheduler advances `num_processes` times for each update."""
    zero_grad_drops_window: bool = False
    """`zero_grad` before the last backward of a window drops what the window has gathered."""
    clip_inside_window: bool = False
    """`clip_grad_norm_` clips at every call; False: only where the window ends."""
    guards: bool = True
    """Misuse that makes ranks diverge is an error."""
    parts_ranks: bool = True
    """Ranks draw random numbers of their own from the first `prepare` on; False: the same to the end."""
    sync_leaf_tensors: bool = True
    """Leaf tensors that are handed to `prepare` are synchronised like a model's parameters."""
    environment_wins: bool = False
    """`ACCELERATE_GRADIENT_ACCUMULATION_STEPS` wins over the argument."""
    fp16_on_cpu: bool = True
    """`mixed_precision="fp16"` on a CPU computes in fp16 with a scaler; False: in full precision."""
    weigh_uneven: bool = True
    """Ranks that have run out of batches continue with weight zero; False: they stop, and the others may hang."""
    keeps_shares: bool = False
    """A loader with a `DistributedSampler` keeps its sampler, so that its share is shared out again; False: all samples
    are shared out."""
    follows_draws: bool = True
    """The active loader is the one that has drawn a batch last, and loaders that are iterated side by side end
    together; False: the active loader is the one whose iteration began last, and it alone says whether its data end."""
    loaders_resume: bool = True
    """After `load_state` a loader continues where it was saved; False: only with `use_stateful_dataloader`."""
    newest_is_shared: bool = False
    """`PartialState()` and its siblings show the newest Accelerator."""
    skip_missing_trackers: bool = False
    """A tracker of `log_with` whose client is not installed is left out, with a warning; False: an error."""


EXACT = Rules()
ACCELERATE = Rules(**{field.name: not field.default for field in dataclasses.fields(Rules)})
