"""The plan of a launch: its options, resolved against the machine."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from notebook_launcher.errors import ConfigError
from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.calls.call_scope import import_folders
from notebook_launcher.machine import devices
from notebook_launcher.machine.allocation import SHARING_VARIABLE, allocate, allocate_nodes
from notebook_launcher.machine.devices import ROCM_VARIABLE
from notebook_launcher.messaging import messages
from notebook_launcher.settings.option_checks import check_shard, check_shard_backend
from notebook_launcher.settings.training_settings import PRECISION_VARIABLE, STEPS_VARIABLE
from notebook_launcher.travel import random_states
from notebook_launcher.wording import name_of, plural, recordable_variables, redact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.machine.allocation import NodeInfo
    from notebook_launcher.machine.devices import Machine


NCCL_START = "the first collective takes seconds"
"""Note on NCCL, which connects the GPUs at the first collective: without it the ranks would seem to hang there."""
PEER_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
FIRST_GOOD_DRIVER = (550, 40, 7)
HIDDEN = {ROCM_VARIABLE: "-1"}
"""Values that hide all GPUs, if the empty value does not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A launch with every option resolved."""

    config: LaunchConfig
    """The options as given."""
    num_processes: int
    backend: str | None
    """The backend of the process group; None: no group."""
    gpus: tuple[int | str, ...]
    """The GPUs that the ranks take, in turn, by NVML's index, and slices of one (MIG) by their UUID; empty: the ranks
    use the CPU."""
    threads_per_process: int
    random: int | messages.RandomStates
    """The seed of the ranks' generators, or the states that the kernel's have, with which they begin."""
    environ: dict[str, str]
    """Environment variables that are set in addition to the kernel's, or instead of them."""
    found: str
    """A clause for the summary: the GPUs, or the reason why there is none."""
    note: str = ""
    """A clause for the summary about an unusual decision."""
    num_nodes: int = 1
    """Number of machines that get ranks."""
    node_names: tuple[str, ...] = ()
    """By rank: the name of its machine; empty if there is one."""
    uses_gpus_of_nodes: bool = False
    """True if the ranks use the GPUs of other machines, whose numbers the kernel need not know."""

    @property
    def use_gpu(self) -> bool:
        """True if the ranks use GPUs."""
        return bool(self.gpus) or self.uses_gpus_of_nodes

    @property
    def summary(self) -> str:
        """One line that names the hardware and the chosen options."""
        num, threads = self.num_processes, self.threads_per_process
        parts = [
            plural(num, "GPU rank" if self.use_gpu else "CPU rank"),
            self._group,
            plural(threads, "thread") + " each" * (num > 1) + self.note,
            self.found,
            self.random_summary,
        ]
        if self.config.start_method != "forkserver":
            parts.insert(2, self.config.start_method)
        return ", ".join(parts)

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: the ranks begin with the kernel's states."""
        return self.random if isinstance(self.random, int) else None

    @property
    def random_summary(self) -> str:
        """A clause about what the ranks' generators begin with, the last one of the summary."""
        return random_states.describe_random(self.random)

    @property
    def _group(self) -> str:
        if self.backend is None:
            return "no process group"
        return f"{self.backend} ({NCCL_START})" if "nccl" in self.backend else self.backend

    def setup(self, *, many_calls: bool) -> messages.Setup:
        """Return the settings of all ranks, with the kernel's present environment; raises `ConfigError`."""
        try:
            cwd = os.getcwd()
        except FileNotFoundError:
            raise ConfigError(
                "the kernel's working directory was deleted (a new folder of the same name does not replace it), and "
                "torch cannot be imported from a deleted folder. Change to an existing folder: os.chdir(...)."
            ) from None
        options = sys.argv[1:]
        is_kernels = kernel_shell() is not None and options == sys.orig_argv[-len(options) :]
        is_one = self.config.detached and not many_calls
        return messages.Setup(
            run_id=uuid.uuid4().hex,
            num_processes=self.num_processes,
            start_method=self.config.start_method,
            # Another machine has an environment of its own, and the kernel's may hold secrets.
            environ={**({} if self.config.engine is not None else os.environ), **self.environ},
            sys_path=import_folders(),
            # Without the kernel's own options, unless the user has changed them.
            argv=sys.argv[:1] if is_kernels else list(sys.argv),
            cwd=cwd,
            kernel_pid=os.getpid(),
            ends_at=time.monotonic() + self.config.timeout if self.config.timeout and is_one else None,
            threads_per_process=self.threads_per_process,
            random=self.random,
            rank_seeds=self.config.rank_seeds,
            settings=self.config.training_settings(),
            backend=self.backend,
            many_calls=many_calls,
            keeps_failures=many_calls or self.config.debug,
            use_gpu=self.use_gpu,
            place=messages.Place(ranks=tuple(range(self.num_processes)), num_nodes=self.num_nodes),
            master_port=0,
        )


def make_plan(config: LaunchConfig, machine: Machine | None = None) -> Plan:
    """Resolve the options against a machine (default: this one). Raise `ConfigError` if it has too few resources."""
    if config.engine is not None:
        return _plan_of_nodes(config, config.engine.look())
    machine = machine or devices.detect()
    asked = config.num_processes or config.processes_per_node
    taken = allocate(
        machine,
        num_processes=asked,
        devices=config.devices,
        backend=config.backend,
        nccl_shares={**os.environ, **config.env}.get(SHARING_VARIABLE) == "1",
    )
    if config.shard is not None:
        check_shard(config.shard, taken.num_processes, by_default=config.num_processes is None)
        check_shard_backend(config.shard, taken.backend, use_gpu=bool(taken.gpus))
    threads = config.threads_per_process or _share_of_cores(machine, taken.num_processes)
    return Plan(
        config=config,
        num_processes=taken.num_processes,
        backend=taken.backend,
        gpus=tuple(machine.gpus[at].key for at in taken.gpus),
        threads_per_process=threads,
        random=_random(config),
        environ=_environment(config, machine, taken.gpus, threads),
        found=_found(machine, taken.gpus),
    )


def _plan_of_nodes(config: LaunchConfig, nodes: Sequence[NodeInfo]) -> Plan:
    """Resolve the options against the nodes of an engine."""
    taken = allocate_nodes(
        nodes,
        num_processes=config.num_processes,
        devices=config.devices,
        backend=config.backend,
        num_nodes=config.nodes,
        processes_per_node=config.processes_per_node,
    )
    if config.shard is not None:
        check_shard(config.shard, taken.num_processes, by_default=config.num_processes is None)
        check_shard_backend(config.shard, taken.backend, use_gpu=taken.use_gpu)
    threads = config.threads_per_process or taken.cores_per_process
    return Plan(
        config=config,
        num_processes=taken.num_processes,
        backend=taken.backend,
        gpus=(),
        uses_gpus_of_nodes=taken.use_gpu,
        num_nodes=taken.num_nodes,
        node_names=taken.node_names,
        threads_per_process=threads,
        random=_random(config),
        environ=_common_environment(config, threads, use_gpu=taken.use_gpu),
        found=taken.found,
    )


def _random(config: LaunchConfig) -> int | messages.RandomStates:
    return random_states.read_random_states() if config.seed is None else config.seed


def _share_of_cores(machine: Machine, num_processes: int) -> int:
    share = max(1, machine.num_cores // num_processes)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else share


def _environment(config: LaunchConfig, machine: Machine, gpus: tuple[int, ...], threads: int) -> dict[str, str]:
    environ: dict[str, str] = {}
    if gpus:
        environ[machine.variable] = ",".join(machine.gpus[at].selector or str(machine.gpus[at].index) for at in gpus)
        if _lacks_peer_access(machine, gpus):
            environ.update({name: "1" for name in PEER_VARIABLES if name not in os.environ})
    elif machine.gpus:
        environ[machine.variable] = HIDDEN.get(machine.variable, "")
    return {**environ, **_common_environment(config, threads, use_gpu=bool(gpus))}


def _common_environment(config: LaunchConfig, threads: int, *, use_gpu: bool) -> dict[str, str]:
    # In HF's Accelerator these variables override its arguments, so only those that the user gave are set.
    environ: dict[str, str] = {}
    if config.mixed_precision is not None:
        environ[PRECISION_VARIABLE] = config.mixed_precision
    if config.gradient_accumulation_steps is not None:
        environ[STEPS_VARIABLE] = str(config.gradient_accumulation_steps)
    if not use_gpu:
        # Without this variable, HF's Accelerator on a machine with no GPU takes every rank for a run of its own.
        environ["ACCELERATE_USE_CPU"] = "true"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ[name] = str(threads)
    if config.check_collectives:
        environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return {**environ, **config.env}


def _found(machine: Machine, gpus: tuple[int, ...]) -> str:
    left_out = "".join(f", left out {reason}" for reason in machine.left_out)
    if not gpus:
        return (machine.why_no_gpu or f"{plural(len(machine.gpus), 'GPU')} left unused") + left_out
    names = [machine.gpus[at].name for at in gpus]
    kinds = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    note = f", NCCL without peer access (driver {machine.driver})" if _lacks_peer_access(machine, gpus) else ""
    return kinds + note + left_out


def _lacks_peer_access(machine: Machine, gpus: tuple[int, ...]) -> bool:
    """Return True where NCCL would hang or fail unless it avoids direct transfers between GPUs.

    Cards of the RTX 40 series cannot do them, and drivers before 550.40.07 reported that they could; Hugging Face
    Accelerate's launcher has the same check (`check_cuda_p2p_ib_support`).
    """
    if len(gpus) < 2 or not any("RTX 40" in machine.gpus[at].name for at in gpus):
        return False
    version = tuple(int(part) for part in machine.driver.split(".") if part.isdecimal())
    return bool(version) and version < FIRST_GOOD_DRIVER


# --------------------------------------------------------------------------------------------------------------------
# The options of a launch as a run's record has them.


def config_as_json(config: LaunchConfig) -> dict[str, Any]:
    """Return the fields as values for JSON; of most variables of `env` the name alone, with the value None."""
    fields = {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {**fields, "env": recordable_variables(config.env)}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):  # An engine.
        return redact(repr(value))
    if callable(value):  # `setup`.
        return name_of(value)
    return list(cast("tuple[int, ...]", value)) if isinstance(value, tuple) else value
