"""The parts of an Accelerator, made once and in order: each gets its collaborators in its constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training import precision, resolving
from notebook_launcher.training.accumulation.members import Members
from notebook_launcher.training.accumulation.micro_batches import MicroBatches
from notebook_launcher.training.accumulation.updates import LiveOptimizers, StepChecks, Updates
from notebook_launcher.training.accumulation.weighing import Weighing
from notebook_launcher.training.checkpoints.checkpointer import Checkpointer
from notebook_launcher.training.parallelism.mesh import make_layout
from notebook_launcher.training.parallelism.sharded_models import Replacements, Sharding
from notebook_launcher.training.preparation import Preparation, Prepared
from notebook_launcher.training.rank_check.check import RankCheck
from notebook_launcher.training.recording.phases import make_clock
from notebook_launcher.training.recording.trackers import Trackers
from notebook_launcher.training.requests import Steering, make_fence
from notebook_launcher.training.user_warnings import Warner

if TYPE_CHECKING:
    import torch

    from notebook_launcher.training.accumulation.windows import GradientState
    from notebook_launcher.training.parallelism.mesh import Layout
    from notebook_launcher.training.plugins import Rules
    from notebook_launcher.training.process.process_state import AcceleratorState
    from notebook_launcher.training.requests import Safepoint
    from notebook_launcher.training.resolving import Resolved

__all__ = ["AcceleratorParts", "lay_out"]


def lay_out(resolved: Resolved, process: AcceleratorState) -> Layout:
    """Make the mesh of ranks that the settings ask for, and note it in `process`.

    Raises:
        ValueError: The number of ranks does not fit the sizes, or the device cannot compute in the precision.
    """
    resolving.check_precision(resolved.precision, process.device)
    if resolved.zero is not None:
        process.note_deepspeed(resolved.deepspeed_plugin)
    layout = make_layout(
        resolved.parallelism_config,
        resolved.fsdp_plugin,
        launched=resolved.shard,
        num_processes=process.num_processes,
        process_index=process.process_index,
        device=process.device,
    )
    if layout.shards:
        process.note_layout(layout)
        resolving.report_dropped(() if layout.plugin is None else layout.plugin.dropped)
    return layout


class AcceleratorParts:
    """Makes the parts of one Accelerator, in the order in which they need each other.

    Args:
        resolved: The settings of the Accelerator.
        rules: The differences from Accelerate.
        process: This process among its peers.
        layout: The mesh of ranks.
        gradient_state: The state of accumulation.
        safepoint: Carries out what the launcher asks for; None outside of a launch.
        log_with: The trackers that the user named.
    """

    def __init__(
        self,
        resolved: Resolved,
        rules: Rules,
        process: AcceleratorState,
        layout: Layout,
        gradient_state: GradientState,
        *,
        safepoint: Safepoint | None,
        log_with: Any,
    ) -> None:
        self._resolved = resolved
        self._rules = rules
        self._process = process
        self._layout = layout
        self._gradient_state = gradient_state
        self._safepoint = safepoint
        self._optimizers = LiveOptimizers()
        self._replacements = Replacements()
        self._warn_once = Warner()
        """Gives each warning once for each Accelerator."""
        self.prepared = Prepared(Members(num_processes=process.num_processes, strict=rules.guards))
        gradient_state.loops.models = self.prepared.members.models
        self.rank_check = self._make_rank_check()
        """Compares the ranks' weights now and then; None with one process, and where it is switched off."""
        self._scaler = self._make_scaler()
        self._weighing = self._make_weighing()
        self.micro_batches = self._make_micro_batches()
        self.updates = self._make_updates()
        self.steering = Steering(self.prepared, self.updates, gradient_state)
        self.preparation = self._make_preparation()
        self.checkpointer = self._make_checkpointer()
        self.trackers = self._make_trackers(log_with)

    def _make_rank_check(self) -> RankCheck | None:
        process = self._process
        if not self._resolved.checks_ranks or process.num_processes == 1:
            return None
        return RankCheck(
            self.prepared.members,
            self._optimizers,
            self._gradient_state,
            rank=process.process_index,
            num_processes=process.num_processes,
            fence=make_fence(process.device, process.num_processes),
        )

    def _make_weighing(self) -> Weighing:
        return Weighing(
            self._gradient_state,
            self.prepared.members,
            self._rules,
            self._process,
            self._layout,
            self._optimizers,
            scaler=self._scaler,
            warn_once=self._warn_once,
        )

    def _make_micro_batches(self) -> MicroBatches:
        return MicroBatches(
            self._gradient_state,
            self.prepared.members,
            self._rules,
            self._weighing,
            num_processes=self._process.num_processes,
            scaler=self._scaler,
            clock=make_clock(),
            safepoint=self._safepoint,
            rank_check=self.rank_check,
            warn_once=self._warn_once,
        )

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        device, handler = self._process.device, self._resolved.scaler_handler
        if self._process.mixed_precision != "fp16" or (device.type == "cpu" and not self._rules.fp16_on_cpu):
            return None
        return precision.make_scaler(device, handler) if handler.enabled else None

    def _make_updates(self) -> Updates:
        gradient_state, members = self._gradient_state, self.prepared.members
        return Updates(
            gradient_state,
            members,
            self._optimizers,
            self._rules,
            self._weighing,
            StepChecks(gradient_state, members, self.rank_check, self._warn_once),
            num_processes=self._process.num_processes,
            max_grad_norm=self._resolved.max_grad_norm,
            scaler=self._scaler,
            note_step=self.micro_batches.note_step,
            present=self._replacements.present,
        )

    def _make_preparation(self) -> Preparation:
        resolved = self._resolved
        computes_in = precision.forward_precision(self._process.mixed_precision, self._scaler)
        return Preparation(
            process=self._process,
            prepared=self.prepared,
            updates=self.updates,
            gradient_state=self._gradient_state,
            rules=self._rules,
            zero=resolved.zero,
            sharding=Sharding(
                layout=self._layout,
                device=self._process.device,
                computes_in=computes_in,
                replacements=self._replacements,
            ),
            computes_in=computes_in,
            compares=self.rank_check is not None,
            device_placement=resolved.device_placement,
            ddp_handler=resolved.ddp_handler,
            dataloader_config=resolved.loaders,
            dynamo_backend=resolved.dynamo_backend,
            rng_types=resolved.rng_types,
            step_scheduler_with_optimizer=resolved.step_scheduler_with_optimizer,
        )

    def _make_checkpointer(self) -> Checkpointer:
        return Checkpointer(
            self._process,
            self.prepared,
            self.updates,
            self._gradient_state,
            self._rules,
            project=self._resolved.project,
            rank_check=self.rank_check,
            fsdp_plugin=self._layout.plugin,
        )

    def _make_trackers(self, log_with: Any) -> Trackers:
        return Trackers(
            self._process,
            log_with,
            self._resolved.project.logging_dir,
            observe=self.updates.observe,
            skip_missing=self._rules.skip_missing_trackers,
        )
