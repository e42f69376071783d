"""Checks of several ranks: collectives, gradients, agreed stops, other frameworks."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from notebook_launcher import Session, notebook_launch
from notebook_launcher.gpu_check.checks import (
    Check,
    Hardware,
    Skipped,
    train,
    where,
)
from notebook_launcher.machine import devices as machine_devices
from tests.gpu.launches import bare, uuid_in_torch
from tests.gpu.trainings import prepared, update

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
          "complex128")  # fmt: skip
HOOKS = ("fp16", "bf16", "power_sgd", "batched_power_sgd")


def _own_gpu() -> str:
    import torch

    where()
    return uuid_in_torch(torch.cuda.current_device())


def _chosen(hardware: Hardware) -> str:
    visible = [bare(gpu.uuid) for gpu in machine_devices.detect().gpus]
    for chosen in ([1], [1, 0]):
        options = {**hardware.ranks(2), "devices": chosen, "num_processes": len(chosen)}
        got = list(notebook_launch(_own_gpu, **options))
        assert len(got) == len(chosen)
        if all([*visible, *got]):
            places = [visible.index(uuid) if uuid in visible else None for uuid in got]
            assert places == chosen, f"devices={chosen} gave the ranks GPUs {places}"
    return "[1] and [1, 0]" if all(visible) else "[1] and [1, 0]; the UUIDs are not known"


def _try_operations() -> int:
    import torch

    from notebook_launcher import Accelerator
    from notebook_launcher.training.operations import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from notebook_launcher.training.random import synchronize_rng_states

    accelerator = Accelerator()
    number = accelerator.process_index
    count = 0
    for kind in dict.fromkeys(["cpu", accelerator.device.type]):
        device = accelerator.device if kind == "cuda" else torch.device("cpu")
        for name in DTYPES:
            mine = torch.full((3,), number, device=device).to(getattr(torch, name))
            everyone = gather(mine)
            assert everyone.device == mine.device, f"gather of {name} on {kind} came back on {everyone.device}"
            assert everyone.dtype == mine.dtype
            assert everyone[3:].tolist() == torch.ones(3).to(mine.dtype).tolist(), f"gather of {name} on {kind}"
            assert broadcast(mine.clone()).tolist() == torch.zeros(3).to(mine.dtype).tolist(), f"broadcast of {name}"
            for reduction in ("sum",) if mine.is_complex() else ("sum", "max"):
                reduced = reduce(mine, reduction=reduction)
                assert reduced.tolist() == [1.0] * 3, f"{reduction} of {name} on {kind}: {reduced}"
            ragged = pad_across_processes(mine[: 1 + number])
            assert ragged.tolist() == [*mine[: 1 + number].tolist(), *[0] * (1 - number)], (
                f"padding of {name} on {kind}"
            )
            count += 4
    assert gather_object([number]) == [0, 1]
    assert broadcast_object_list([number]) == [0]
    for kind in dict.fromkeys(["torch", "cuda" if accelerator.device.type == "cuda" else "torch"]):
        synchronize_rng_states([kind])
        drawn = gather(torch.rand(1, device="cpu" if kind == "torch" else accelerator.device))
        assert drawn[0] == drawn[1], f"the ranks draw {drawn.tolist()} from {kind} after they were synchronised"
    return count + 3


def _operations(hardware: Hardware) -> str:
    return f"{notebook_launch(_try_operations, **hardware.ranks(2))[0]} operations"


def _hook_weights(hook: str) -> Any:
    from notebook_launcher import DistributedDataParallelKwargs

    return train(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])


def _hooks(hardware: Hardware) -> str:
    import torch

    with Session(**hardware.ranks(2)) as session:
        for hook in HOOKS:
            both = session.run(functools.partial(_hook_weights, hook))
            assert torch.equal(both[0], both[1]), f"{hook}: the ranks' weights differ"
            assert bool(both[0].isfinite().all()), f"{hook}: weights are not finite"
    return ", ".join(HOOKS)


def _leaf_gradients() -> list[float]:
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator(device_placement=False)
    gradients: list[float] = []
    for device in ("cpu", accelerator.device):
        scale = torch.ones(1, requires_grad=True, device=device)
        scale = accelerator.prepare(scale)
        with accelerator.accumulate(scale):
            accelerator.backward((scale * float(accelerator.process_index + 1)).sum())
        assert scale.grad is not None
        assert scale.device.type == torch.device(device).type, f"a leaf on {device} went to {scale.device}"
        gradients += scale.grad.tolist()
    return gradients


def _leaves(hardware: Hardware) -> str:
    assert list(notebook_launch(_leaf_gradients, **hardware.ranks(2))) == [[1.5, 1.5]] * 2
    return "gradients are means, where the leaves are"


def _train_by_option(folder: str) -> list[float]:
    """Train a model that the launch shards, or does not; return the losses, with a checkpoint loaded in between."""
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, optimizer, batch = prepared(accelerator, functools.partial(torch.optim.AdamW, lr=1e-2))
    losses = []
    for number in range(4):
        losses.append(float(update(accelerator, model, optimizer, batch)))
        if number == 1:
            accelerator.save_state(folder)
        if number == 2:
            accelerator.load_state(folder)
    assert losses[2] == losses[3], f"other weights after load_state: {losses}"
    assert losses[2] < losses[0], f"losses {losses}"
    return losses


def _sharded_by_option(hardware: Hardware) -> str:
    from notebook_launcher.training.parallelism.sharded_models import sums_on_request

    if not (hardware.num_gpus or sums_on_request()):
        raise Skipped("sharding on CPUs needs torch 2.8 or newer")
    found = []
    for shard in (2, None):
        with tempfile.TemporaryDirectory() as folder:
            args = (str(Path(folder) / "state"),)
            found.append(notebook_launch(_train_by_option, args=args, **hardware.ranks(2), shard=shard)[0])
    difference = max(abs(loss - other) / other for loss, other in zip(*found, strict=True))
    assert difference < 1e-4, f"losses {found[0]} with shard=2, {found[1]} without"
    return f"relative difference to a whole model {difference:.1e}, checkpoint loaded"


def _inside_accelerate() -> list[float]:
    import accelerate
    import torch

    accelerator = accelerate.Accelerator()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), reduction="sum")
    accelerator.wait_for_everyone()
    found: list[float] = total.tolist()
    return found


def _inside(hardware: Hardware) -> str:
    if importlib.util.find_spec("accelerate") is None:
        raise Skipped("accelerate is not installed")
    assert list(notebook_launch(_inside_accelerate, **hardware.ranks(2))) == [[2.0], [2.0]]
    return "its sums are right"


def _all_gpus(hardware: Hardware) -> str:
    options = hardware.ranks(hardware.num_gpus)
    seconds = []
    for env in ({}, {"NCCL_P2P_DISABLE": "1"}):
        began = time.monotonic()
        notebook_launch(where, **options, env=env)
        seconds.append(time.monotonic() - began)
    return f"{hardware.num_gpus} GPUs, with peer access {seconds[0]:.1f} s, without {seconds[1]:.1f} s"


CHECKS = (
    Check(name="chosen GPUs", run=_chosen, num_gpus=2, can_share=False, on_cpu=False),
    Check(name="operations on CPU and device, all dtypes", run=_operations, num_gpus=2),
    Check(name="communication hooks", run=_hooks, num_gpus=2),
    Check(name="leaf tensors on CPU and device", run=_leaves, num_gpus=2),
    Check(name="sharded model by an option, with a checkpoint", run=_sharded_by_option, num_gpus=2),
    Check(name="Accelerate inside", run=_inside, num_gpus=2),
    Check(name="all GPUs, with and without peer access", run=_all_gpus, num_gpus=2, can_share=False, on_cpu=False),
)
