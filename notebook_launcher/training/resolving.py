"""Settings of an Accelerator, resolved: an argument wins, then the launch, then Accelerate's variables."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher import context
from notebook_launcher.settings.option_checks import NUMBERS, check_option_number, whole_number
from notebook_launcher.settings.training_settings import STEPS_VARIABLE, precision_of, read_precision, steps_of
from notebook_launcher.training.parallelism.zero import apply_deepspeed
from notebook_launcher.training.plugins import (
    EXACT,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    check_instance,
    check_switch,
)
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from notebook_launcher.settings.training_settings import SettingName
    from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin
    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.mesh import ParallelismConfig
    from notebook_launcher.training.parallelism.zero import ZeroSettings
    from notebook_launcher.training.plugins import Rules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an Accelerator: as its arguments give them, then resolved; parts get them whole."""

    rules: Rules = EXACT
    """The differences from Accelerate."""
    mixed_precision: str | None = None
    """Precision of the forward; None: not resolved yet."""
    accumulation: GradientAccumulationPlugin = dataclasses.field(default_factory=GradientAccumulationPlugin)
    max_grad_norm: float | None = None
    check_ranks: bool | None = None
    """True if ranks compare their weights; None: not resolved yet."""
    loaders: DataLoaderConfiguration = dataclasses.field(default_factory=DataLoaderConfiguration)
    device_placement: bool = True
    """True if models and batches are moved to the device, unless a call sets another value."""
    rng_types: list[str] = dataclasses.field(default_factory=lambda: ["generator"])
    """Generators that are made equal on all ranks at the start of each epoch."""
    step_scheduler_with_optimizer: bool = True
    """True if a scheduler advances once for each update; False: with each of its own steps."""
    dynamo_backend: str | None = None
    """The backend by which models are compiled; None and `"no"`: they are not."""
    project: ProjectConfiguration = dataclasses.field(default_factory=ProjectConfiguration)
    ddp: DistributedDataParallelKwargs = dataclasses.field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs | None = None
    autocast: AutocastKwargs = dataclasses.field(default_factory=AutocastKwargs)
    group: InitProcessGroupKwargs = dataclasses.field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs | None = None
    deepspeed_plugin: DeepSpeedPlugin | None = None
    zero: ZeroSettings | None = None
    """DeepSpeed's settings in torch's terms."""
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    shard: int | None = None
    """The launch's number of ranks that share a model out, unless the code has sizes."""
    conflicts: tuple[str, ...] = ()
    """Settings in which the code and the launch differ, in words."""


def resolve(given: Settings, *, resolve_precision: Callable[[str | None, list[str]], str]) -> Settings:
    """Resolve all settings of an Accelerator, as far as they need no process group.

    Args:
        given: The settings as the arguments give them.
        resolve_precision: Function of this module, or its replacement in a subclass of the Accelerator.

    Raises:
        ValueError: A setting is invalid, or two of them differ.
        TypeError: A switch is not True or False.
    """
    check_switch("device_placement", given.device_placement)
    check_switch("step_scheduler_with_optimizer", given.step_scheduler_with_optimizer)
    conflicts: list[str] = []
    given = apply_deepspeed(dataclasses.replace(given, ddp=_resolve_hook(given.ddp, conflicts)))
    num_steps = given.accumulation.num_steps
    return dataclasses.replace(  # The report names conflicts in the order of these fields.
        given,
        mixed_precision=resolve_precision(given.mixed_precision, conflicts),
        accumulation=dataclasses.replace(given.accumulation, num_steps=_num_steps(num_steps, given.rules, conflicts)),
        max_grad_norm=_resolve_max_grad_norm(given.max_grad_norm, conflicts),
        check_ranks=_resolve_check(given.check_ranks, given.rules, conflicts),
        dynamo_backend=resolve_backend(given.dynamo_backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND")),
        scaler=given.scaler or GradScalerKwargs(),
        shard=_resolve_shard(given.parallelism_config, conflicts),
        conflicts=tuple(conflicts),
    )


def resolve_backend(given: Any) -> str | None:
    """Return a backend of `torch.compile` as torch names it; raise ValueError if it is unknown.

    Accelerate's settings have the names in capitals.
    """
    if given is None:
        return None
    name = str(getattr(given, "value", given))
    if name.lower() == "no":
        return "no"
    import torch

    known = torch._dynamo.list_backends(None)  # noqa: SLF001 - `torch.compiler.list_backends` leaves "eager" out
    found = next((backend for backend in (name, name.lower()) if backend in known), None)
    if found is None:
        raise ValueError(
            f"dynamo_backend={given!r} is no backend of torch.compile. It can be 'no', "
            f"{', '.join(map(repr, known))}, or one that torch._dynamo.register_backend was given."
        )
    return found


def resolve_precision(argument: Any, conflicts: list[str]) -> str:
    """Return the precision; raise ValueError if it is unknown."""
    given = None if argument is None else read_precision("mixed_precision", argument)
    return precision_of(_choose("mixed_precision", given, conflicts), os.environ)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError if the device cannot compute in it, and warn where it only emulates it."""
    import torch

    if precision != "bf16" or device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    if not torch.cuda.is_bf16_supported():
        raise ValueError(f"mixed_precision='bf16': {name} cannot compute in bf16. Use 'fp16' or 'no'.")
    # GPUs before Ampere, such as T4 and V100, for which torch accepts bf16 nevertheless.
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        warn_user(
            f"mixed_precision='bf16': {name} has no bf16 arithmetic and emulates it, slower than fp32. "
            "mixed_precision='fp16' is faster there: its tensor cores compute in fp16."
        )


def given_accumulation(num_steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return the settings of accumulation that the code gives, as one plugin; its `num_steps` is None if not given.

    The launch and the environment are left out here and added by `resolve`, because between the two
    calls DeepSpeed's settings are compared with the number that the code gives, and may give one themselves.

    Raises:
        ValueError: The argument and the plugin both give a number of steps.
        TypeError: The plugin is another object.
    """
    check_instance(
        "gradient_accumulation_plugin",
        plugin,
        GradientAccumulationPlugin,
        "GradientAccumulationPlugin(num_steps=4), or gradient_accumulation_steps=4",
    )
    if num_steps is not None:
        num_steps = whole_number("gradient_accumulation_steps", num_steps)
    if plugin is not None and num_steps is not None and num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin={plugin!r} were both given. "
            "Pass num_steps in the plugin alone."
        )
    given = plugin or GradientAccumulationPlugin()
    return dataclasses.replace(given, num_steps=num_steps if given.num_steps is None else given.num_steps)


def _num_steps(given: int | None, rules: Rules, conflicts: list[str]) -> int:
    if rules.environment_wins and STEPS_VARIABLE in os.environ:
        return steps_of(None, os.environ)
    return steps_of(_choose("gradient_accumulation_steps", given, conflicts), os.environ)


def _resolve_max_grad_norm(argument: float | None, conflicts: list[str]) -> float | None:
    """Return the norm that gradients are clipped to before each update, or None."""
    given = None if argument is None else check_option_number("max_grad_norm", argument, NUMBERS["max_grad_norm"])
    chosen = _choose("max_grad_norm", given, conflicts)
    return None if chosen is None else float(chosen)


def _resolve_hook(handler: DistributedDataParallelKwargs, conflicts: list[str]) -> DistributedDataParallelKwargs:
    """Return the arguments of DDP, with the launch's communication hook if the code names none."""
    launched = context.setting("comm_hook")
    if launched is None or launched == "no":
        return handler
    if handler.comm_hook != DDPCommunicationHookType.NO:
        _compare("comm_hook", str(handler.comm_hook), conflicts)
        return handler
    return dataclasses.replace(handler, comm_hook=DDPCommunicationHookType(launched))


def _resolve_check(argument: bool | None, rules: Rules, conflicts: list[str]) -> bool:
    """Return True if ranks compare their weights; the default is the same as for the other guards."""
    check_switch("check_ranks", argument, or_none=True)
    chosen = _choose("check_ranks", None if argument is None else bool(argument), conflicts)
    return rules.guards if chosen is None else bool(chosen)


def resolve_loaders(config: DataLoaderConfiguration | None, **shortcuts: Any) -> DataLoaderConfiguration:
    """Return the configuration with the shortcuts in it; raise ValueError if the two differ."""
    check_instance("dataloader_config", config, DataLoaderConfiguration, "DataLoaderConfiguration(split_batches=True)")
    given = {name: value for name, value in shortcuts.items() if value is not None}
    if config is None:
        return DataLoaderConfiguration(**given)
    for name, value in given.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={value!r} and dataloader_config with {name}={getattr(config, name)!r} were both given. "
                "Pass one."
            )
    return config


def resolve_project(
    config: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the configuration of the project's folders, with the folder that was given alone."""
    check_instance("project_config", config, ProjectConfiguration, "ProjectConfiguration(project_dir='runs')")
    project = config or ProjectConfiguration(project_dir=None if directory is None else os.fspath(directory))
    if directory is not None and project.project_dir is None:
        project.set_directories(directory)
    return project


def _resolve_shard(config: Any, conflicts: list[str]) -> int | None:
    """Return the launch's number of ranks that share a model out; sizes in the code win."""
    launched = context.setting("shard")
    if getattr(config, "total_size", 1) == 1:
        return None if launched is None else int(launched)
    _compare("shard", config.dp_shard_size, conflicts)
    return None


def resolve_rng_types(argument: Iterable[Any] | None) -> list[str]:
    """Return the names of generators as a list; raise ValueError for an unknown one."""
    known = RNGType.list()
    names = ["generator"] if argument is None else [argument] if isinstance(argument, str) else list(argument)
    for name in names:
        if str(name) not in known:
            raise ValueError(f"rng_types={argument!r}: {name!r} is unknown. It can hold {', '.join(map(repr, known))}.")
    return [str(name) for name in names]


def _choose(name: SettingName, given: Any, conflicts: list[str]) -> Any:
    """Return what the code gives, or else the launch."""
    if given is None:
        return context.setting(name)
    _compare(name, given, conflicts)
    return given


def _compare(name: SettingName, chosen: Any, conflicts: list[str]) -> None:
    launched = context.setting(name)
    if launched is not None and launched != chosen:
        conflicts.append(f"{name}={chosen!r} in the code, {launched!r} in the launch")
