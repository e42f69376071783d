"""Options of a launch: one frozen record, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import warnings
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.errors import ConfigError
from notebook_launcher.settings import accelerate_yaml, option_checks
from notebook_launcher.settings.option_checks import CHOICES, NUMBERS
from notebook_launcher.settings.training_settings import TrainingSettings, check_environment, check_no_contradiction
from notebook_launcher.wording import bounded, hidden, one_line, type_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from notebook_launcher.engines.engine import Engine
    from notebook_launcher.settings.accelerate_yaml import AccelerateFile
    from notebook_launcher.settings.option_checks import (
        Backend,
        CommHook,
        Precision,
        PreemptionSignal,
        RankSeeds,
        ResumePoint,
        ShownRanks,
        StartMethod,
    )

MAX_ERROR = 1_000
"""Characters of an error about a settings file, whose values may be long."""
_OWN_RENDEZVOUS = "The launcher binds a port of its own, so none of Accelerate's settings for it are needed."
HINTS = {
    "function": "It is called fn here.",
    **dict.fromkeys(("use_port", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"), _OWN_RENDEZVOUS),
    **dict.fromkeys(("num_nodes", "num_machines", "nnodes"), f"It is called nodes here. {option_checks.HOW}"),
    "nproc_per_node": "It is called processes_per_node here.",
    "node_rank": option_checks.HOW,
    **dict.fromkeys(("world_size", "nprocs", "num_gpus", "n_gpus", "gpus"), "It is called num_processes here."),
    "accumulate_grad_batches": "It is called gradient_accumulation_steps here.",
    "gradient_clip_val": "It is called max_grad_norm here.",
    "precision": "It is called mixed_precision here.",
    "accelerator": "devices='cpu' or devices=[0, 1] chooses the hardware.",
    "strategy": "Models are trained by DistributedDataParallel, or sharded with shard=2.",
    "dynamo_backend": "Pass it to the Accelerator: Accelerator(dynamo_backend='inductor').",
}
"""Words for options that people know from other launchers, or that only some calls take."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Options of a launch. A value that cannot work raises `ConfigError`; its `field` names the option."""

    num_processes: int | None = None
    """Number of ranks. None: one for each chosen GPU; without GPUs, the number of cores, but at most 4; without GPUs on
    several machines, one for each."""
    nodes: int | None = None
    """Number of machines that get ranks: the first ones of the engine. None: all of them."""
    processes_per_node: int | None = None
    """Number of ranks on each machine. None: `num_processes`, spread evenly."""
    devices: tuple[int, ...] | str | None = None
    """GPUs, by their index among the visible ones. `"cpu"`: none of them. None: all of them."""
    backend: Backend | None = "auto"
    """Backend of the default process group. `"auto"`: NCCL if every rank has its own GPU, else gloo. None: the
    launcher starts no group, and the function makes its own."""
    mixed_precision: Precision | None = None
    """Precision that an `Accelerator()` made in a rank adopts: `"no"`, `"fp16"` or `"bf16"`. None: the value of the
    environment variable `ACCELERATE_MIXED_PRECISION`, else `"no"`."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer update that an `Accelerator()` made in a rank adopts. None: the value of the
    environment variable `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, else 1."""
    max_grad_norm: float | None = None
    """Norm to which an `Accelerator()` made in a rank clips the gradients of each update. None: no clipping."""
    comm_hook: CommHook | None = None
    """Compression of the gradients that an `Accelerator()` made in a rank sends to the other ranks: `"no"`,
    `"fp16"`, `"bf16"`, `"power_sgd"` or `"batched_power_sgd"`. None: `"no"`."""
    check_ranks: bool | None = None
    """Comparison of the weights between ranks. True: an `Accelerator()` made in a rank compares them at updates 1, 2,
    4, 8 and so on, and raises an error if they differ. False: it does not. None: True for this package's
    `Accelerator`, False for the `Accelerator` of `notebook_launcher.compat`."""
    shard: int | None = None
    """Number of ranks that divide each model among themselves: its parameters, gradients and optimizer state (FSDP2).
    An `Accelerator()` made in a rank does this when it prepares the model. With more ranks, each group of this size
    has a replica. None: every rank has the whole model, unless the code shards it."""
    check_collectives: bool = False
    """Comparison of collectives. True: torch compares name, shapes and types between ranks before each collective, and
    the error of a mismatch names each rank's collective and line. A small all-reduce takes 2 to 3 times as long."""
    engine: Engine | None = None
    """Machines on which the ranks run. None: the kernel's own. `Commands([...])`, `SSH([...])`, `Slurm()` or `Ray()`:
    the machines that the engine reaches, or its text: `"slurm"`, `"ray"` or `"ssh gpu1 gpu2"`. Rank 0 is on the first
    machine, and the ranks of each machine are consecutive."""
    start_method: StartMethod = "forkserver"
    """Way in which ranks start. `"forkserver"`: they are forked from a clean process, which works whatever the kernel
    did before. `"fork"`: they are forked from the kernel itself, so captured data is shared and need not pickle.
    `"spawn"`: each is a fresh interpreter, which is slow to start."""
    seed: int | None = None
    """Seed of torch, NumPy and Python's `random`, the same on all ranks, 0 to 2**32 - 1. None: the ranks begin with
    the states that these generators have in the kernel, where they stay as they are."""
    rank_seeds: RankSeeds | None = None
    """Random numbers of different ranks. None: the same until the function prepares something with an `Accelerator()`,
    and from then on each rank's own, unless the function has seeded torch itself. `"apart"`: each rank's own from the
    beginning, for a plain training function. `"alike"`: the same to the end."""
    timeout: float | None = None
    """Seconds from the launch after which the run is stopped. None: no limit."""
    idle_timeout: float | None = None
    """Seconds after which the run is stopped if meanwhile no rank has written output, displayed or reported anything,
    made an update with an `Accelerator`, or asked for input. A pause, and waiting for an answer, count as idle.
    None: no limit."""
    hang_notice: float | None = 10.0
    """Seconds that a rank waits in a collective that other ranks have not entered, until the cell and the monitor show
    which rank waits where, and where the others are. None: no notice."""
    debug: bool = False
    """True: the first failure opens a debugger in the failed rank's frames, in the cell that waits, before the other
    ranks are stopped. The run ends as usual once the debugger is left."""
    detached: bool = False
    """True: the run outlives the kernel, and `attach()` reconnects to it from any kernel or terminal. It is stopped
    after `timeout`, by default 7 days. A session keeps its ranks, and `attach_session()` reconnects to it."""
    max_restarts: int = 0
    """Number of times that all ranks start again after a failure."""
    resume: ResumePoint | None = None
    """Point from which the function resumes when it is called again after a failure. `"checkpoint"`: without a folder,
    `accelerator.load_state()` loads the newest checkpoint that this run has saved; before the first, it loads nothing.
    None: the function decides by itself."""
    preemption_signal: PreemptionSignal | None = None
    """Signal at which the host of a detached run saves the training after its next update and stops the run:
    `"SIGTERM"`, `"SIGUSR1"` or `"SIGUSR2"`. None: SIGTERM with `resume="checkpoint"`, else none."""
    setup: Callable[[], object] | str | None = None
    """Code that each rank runs before the function is unpacked and called, such as registrations with a library: a
    function without arguments, or text. Each process runs it once; there is no process group yet. None: nothing.
    `%%everywhere` does the same for all launches."""
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    """Environment variables that only the ranks get, in addition to the kernel's. Those that the launcher numbers ranks
    by (`RANK`, `MASTER_PORT` and the like) are refused, and so is a value that contradicts another option."""
    output: ShownRanks = "all"
    """Ranks whose output the cell shows: `"all"`, `"rank0"` or `"none"`. `run.logs(rank)` always has all output."""
    display: ShownRanks = "rank0"
    """Ranks whose rich output (figures, HTML, tables) the cell shows: `"all"`, `"rank0"` or `"none"`."""
    threads_per_process: int | None = None
    """Intra-op threads of each rank. None: an equal share of the cores."""
    name: str | None = None
    """Name of the run in its output, its folder, `runs()` and views; of a detached session, the name by which
    `attach_session()` finds it. None: the function's name."""
    tags: tuple[str, ...] = ()
    """Words by which `runs().filter(tag=...)` finds the run."""
    runs_folder: str | os.PathLike[str] | None = "auto"
    """Folder in which the run leaves a folder of its own, with its options, metrics, logs and summary, for `runs()` and
    `open_run()`. `"auto"`: the folder that the environment variable `NOTEBOOK_LAUNCHER_RUNS` names (`off`: none), else
    `$XDG_STATE_HOME/notebook-launcher/runs`, else `~/.local/state/notebook-launcher/runs`. None: no run folder."""
    monitor: bool | Literal["auto"] = "auto"
    """Live monitor of the run. `"auto"`: a run of more than a second shows the monitor if the front end draws widgets,
    else a line of progress; neither with `output="none"`. True: the monitor, whatever `output` is. False: neither."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("engine", option_checks.chosen_engine(self.engine))
        for name, number in NUMBERS.items():
            put(name, option_checks.check_option_number(name, getattr(self, name), number))
        option_checks.check_spread(self.num_processes, self.nodes, self.processes_per_node, self.engine)
        put("devices", option_checks.check_devices(self.devices))
        for name, choices in CHOICES.items():
            option_checks.check_choice(name, getattr(self, name), choices)
        option_checks.check_monitor(self.monitor)
        option_checks.check_option_switch("check_ranks", self.check_ranks, or_none=True)
        for name in ("check_collectives", "debug", "detached"):
            option_checks.check_option_switch(name, getattr(self, name))
        if self.shard is not None:
            option_checks.check_shard(self.shard, self.num_processes)
        option_checks.check_engine_fit(self.engine, self.start_method, self.devices)
        put("name", option_checks.check_name(self.name))
        put("tags", option_checks.check_tags(self.tags))
        put("runs_folder", option_checks.check_folder("runs_folder", self.runs_folder))
        option_checks.check_setup(self.setup)
        put("env", check_environment(self.env))
        check_no_contradiction(self.env, self)

    @classmethod
    def build(cls, config: LaunchConfig | None, options: Mapping[str, Any]) -> LaunchConfig:
        """Return `config` with its fields replaced by `options`; raise `ConfigError` for an unknown option."""
        if config is not None and not isinstance(config, LaunchConfig):
            raise ConfigError(f"config={config!r} is {type_of(config)}. Pass a LaunchConfig, or options by name.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {close[0]}=?" if close else "help(LaunchConfig) lists the options."
                raise ConfigError(f"unknown option {name}=. {HINTS.get(name, hint)}")
        return dataclasses.replace(config or cls(), **options)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str] | None = None) -> LaunchConfig:
        """Read Accelerate's settings file, by default the one that `accelerate config` writes.

        A `UserWarning` lists the settings of the file that a launch from here ignores.

        Raises:
            ConfigError: The file cannot be read, or describes a launch that a notebook cannot do: `num_machines`
                above 1 (pass `engine=` instead), a TPU, Megatron-LM.
        """
        config, file = load_accelerate_file(path)
        if file.ignored:
            warnings.warn(f"{file.path}: ignored: {', '.join(file.ignored)}.", stacklevel=2)
        return config

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a settings file that `accelerate launch` accepts, by default Accelerate's own; return its path.

        Other keys of an existing file are kept. Options that Accelerate has no key for go into a comment, which
        `from_yaml` reads. On CPUs `accelerate launch` starts several processes only through mpirun.

        An engine goes into the comment, too: `accelerate launch` knows nothing of it, and starts the ranks on one
        machine. `setup` is left out, because it is code, and so are variables of `env` that look like secrets, which a
        comment names. A file with other variables can be read by its owner alone.

        Raises:
            ConfigError: The file describes another kind of launch, or cannot be written, or Accelerate cannot do what
                these options ask for, or the engine is not one of this package.
        """
        from notebook_launcher.machine import allocation, devices

        file = accelerate_yaml.path_to_write(path)
        options = changed_options(self)
        options.pop("setup", None)
        if file.exists():
            load_accelerate_file(file)  # A file that describes another kind of launch is not overwritten.
        machine, asked = devices.detect(), self.num_processes or self.processes_per_node
        if self.engine is None:
            taken = allocation.allocate(machine, num_processes=asked, devices=self.devices, backend=self.backend)
            num_processes, use_gpu = taken.num_processes, bool(taken.gpus)
        else:
            options["engine"] = option_checks.engine_settings(self.engine)
            num_processes, use_gpu = asked or 1, self.devices != "cpu" and not machine.why_no_gpu
        accelerate_yaml.write(file, options, num_processes=num_processes, use_gpu=use_gpu)
        return file

    def training_settings(self) -> TrainingSettings:
        """Return the fields that an `Accelerator()` made in a rank adopts."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainingSettings)}
        return TrainingSettings(**values)

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["env"] = hidden(self.env)
        text = f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
        return bounded(text, "dataclasses.asdict(config) has all")

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(LaunchConfig, **{**fields, "env": dict(self.env)}), ()


def changed_options(config: LaunchConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, by name."""
    defaults = LaunchConfig()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def load_accelerate_file(path: str | os.PathLike[str] | None = None) -> tuple[LaunchConfig, AccelerateFile]:
    """Read Accelerate's settings file, by default its own; raise `ConfigError` if it cannot be launched from here."""
    file = accelerate_yaml.read(path)
    try:
        return LaunchConfig.build(None, file.options), file
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {one_line(error, MAX_ERROR)}", field=error.field) from None
