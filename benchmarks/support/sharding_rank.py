"""A rank of `sharding.py`: trains one contender's transformer, and reports its memory, time and traffic."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from support.ranks import report, start_rank

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, LENGTH, BATCH_SIZE, HEADS = 1024, 128, 1, 8
Step = tuple["nn.Module", "Callable[[torch.Tensor, bool], None]"]
"""A contender's model, and its function for one micro-batch: tokens, and True at the end of a window."""


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.before(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        out: torch.Tensor = hidden + self.mlp(self.between(hidden))
        return out


class Transformer(nn.Module):
    """Predicts tokens: 12 * width ** 2 parameters in each layer."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def loss_of(model: nn.Module, tokens: torch.Tensor) -> Any:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def with_ddp(model: Transformer, window: int) -> Step:
    """DistributedDataParallel by hand."""
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(model)

    def step(tokens: torch.Tensor, ends: bool) -> None:
        wrapped.require_backward_grad_sync = ends  # what no_sync() sets
        (loss_of(wrapped, tokens) / window).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def by_hand(model: Transformer, window: int) -> Step:
    """`fully_shard` by hand, as in torch's tutorial: each block, then the root."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of(model)

    def step(tokens: torch.Tensor, ends: bool) -> None:
        (loss_of(model, tokens) / window).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def with_ours(model: Transformer, window: int) -> Step:
    """Our Accelerator."""
    from notebook_launcher import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return _with(Accelerator(cpu=True, gradient_accumulation_steps=window, fsdp_plugin=plugin), model)


def with_accelerate(model: Transformer, window: int) -> Step:
    """Hugging Face's Accelerator."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, fsdp_plugin=plugin)
    found = str(accelerator.distributed_type).rpartition(".")[2]
    if found != "FSDP":
        raise RuntimeError(f"ignores fsdp_plugin on CPUs: its distributed_type is {found}, which is plain DDP")
    return _with(accelerator, model)


def _with(accelerator: Any, model: Transformer) -> Step:
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))

    def step(tokens: torch.Tensor, ends: bool) -> None:  # noqa: ARG001
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, tokens))
            optimizer.step()
            optimizer.zero_grad()

    return prepared, step


CONTENDERS = {"ddp": with_ddp, "hand": by_hand, "huge": by_hand, "ours": with_ours, "accelerate": with_accelerate}


def status(field: str) -> int:
    """Return a size of this process in bytes, such as `VmHWM`, its largest memory so far."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def loopback_bytes() -> int:
    """Return the bytes that the loopback has sent, in this network namespace."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])


def import_everything() -> None:
    """Import what the first optimizer and the contenders import, so that it does not count as memory of a model."""
    optimizer_of(nn.Linear(1, 1))


def train(name: str, width: int, num_layers: int, window: int, num_windows: int) -> dict[str, Any]:
    """Train, and return this rank's figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import_everything()
    before = status("VmRSS")
    model = Transformer(width, num_layers)
    sizes = {
        part: 4 * sum(parameter.numel() for parameter in module.parameters()) for part, module in model.named_children()
    }
    _, step = CONTENDERS[name](model, window)
    del model
    prepared = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again
    seconds, busy, sent = [], [], []
    for _ in range(num_windows):
        dist.barrier()
        begin, busy_before, at_first = time.perf_counter(), time.process_time(), loopback_bytes()
        for index in range(window):
            step(torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1)), index == window - 1)
        busy.append(time.process_time() - busy_before)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        sent.append((loopback_bytes() - at_first) / dist.get_world_size())
    return {
        "before": before,
        "preparing": prepared - before,
        "training": status("VmHWM") - before,
        "seconds": seconds[1:],
        "busy": busy[1:],
        "sent": sent[1:],
        "sizes": sizes,
    }


def main() -> None:
    """Train as a process of torchrun, and report all ranks' figures."""
    spec = start_rank()
    dist.init_process_group("gloo")
    try:
        mine = train(**spec)
    except RuntimeError as error:
        report(failed=str(error))
        return
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    report(ranks=everybody)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
