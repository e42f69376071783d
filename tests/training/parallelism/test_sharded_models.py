"""Kinds of models and settings that an Accelerator shards: each trains as the model that each rank has whole."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from notebook_launcher import (
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    Session,
    notebook_launch,
)
from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from notebook_launcher.context import WAITING, current
from notebook_launcher.training.process.arrivals import find_ahead
from tests.support.toy_training import micro_batch, session_fixture, shards_on_cpus
from tests.support.toy_training import whole as copies

pytestmark = shards_on_cpus

WIDTH = 6
BLOCKS = "transformer_based_wrap"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs + self.scale * torch.tanh(self.inner(inputs))


class Adapted(torch.nn.Module):
    """A frozen linear layer in bfloat16 beside a trained one of low rank, as LoRA has them."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False).bfloat16()
        self.down = torch.nn.Linear(WIDTH, 2, bias=False)
        self.up = torch.nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.base(inputs.bfloat16()).to(inputs.dtype) + self.up(self.down(inputs))


class Scalar(torch.nn.Module):
    """A trained number without dimensions, as temperatures and gates are."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.value


class Net(torch.nn.Module):
    """A stack of blocks between two layers that belong to no unit; `kind` changes some of them."""

    _no_split_modules = ("Block",)

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, WIDTH, bias=False)
        self.norm: torch.nn.Module = torch.nn.BatchNorm1d(WIDTH) if kind == "batch norm" else torch.nn.Identity()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        blocks: Any = self.blocks
        self.last = torch.nn.Linear(WIDTH, WIDTH if kind == "tied" else 3, bias=False)
        if kind == "tied":
            blocks[2].inner.weight = blocks[0].inner.weight
            self.last.weight = blocks[1].inner.weight
        elif kind == "frozen":
            self.first.requires_grad_(False)
            self.blocks.requires_grad_(False)
        elif kind == "adapted":
            self.requires_grad_(False)
            for block in blocks:
                block.inner = Adapted(block.inner)
        elif kind == "scalars":
            self.norm = Scalar(0.5)
            for block in blocks:
                block.inner = torch.nn.Sequential(block.inner, Scalar(2.0))

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).sum(1)


session = session_fixture(2)  # Groups of failed calls stay open behind the meshes of other files.


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state, gathered."""
    state = model.state_dict()
    return dict(zip(state, copies(state.values()), strict=True))


def train(kind: str, clip: float | None, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    torch.manual_seed(0)
    net: Any = Net(kind)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:2], "lr": 0.05}, {"params": trained[2:]}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.02)
    net, optimizer = accelerator.prepare(net, optimizer)
    for number in range(6):
        torch.manual_seed(10 * number + accelerator.process_index)
        inputs = torch.randn(number % 3 + 2, 3)
        with micro_batch(accelerator, optimizer, net) as backward:
            backward((net(inputs) - inputs.sum(1)).pow(2).mean(), weight=len(inputs))
            if clip is not None:
                accelerator.clip_grad_norm_(net.parameters(), clip)
                accelerator.clip_grad_value_(net.parameters(), clip / 4)
    return whole(accelerator.unwrap_model(net, keep_torch_compile=False))


@pytest.mark.parametrize(
    ("kind", "plugin", "clip", "backend"),
    [
        *((kind, Plugin(), None, None) for kind in ("batch norm", "tied", "frozen", "adapted", "scalars")),
        ("", Plugin(), 1e3, None),
        ("", Plugin(ignored_modules=r"blocks\.1"), 0.05, None),
        ("", Plugin(ignored_modules="first"), 0.05, None),
        ("", Plugin(activation_checkpointing=True), None, "eager"),
        ("", Plugin(auto_wrap_policy="size_based_wrap", min_num_params=30), None, "no"),
    ],
)
def test_each_kind_of_model_and_unit_trains_and_clips_as_a_whole_one(session, kind, plugin, clip, backend):
    settings = {"dynamo_backend": backend}
    expected = session.run(train, args=(kind, clip, settings))[0]
    for mine in session.run(train, args=(kind, clip, {**settings, "fsdp_plugin": plugin})):
        assert list(mine) == list(expected)
        for name, value in mine.items():
            difference = float((value - expected[name]).abs().max())
            assert difference <= 1e-6, f"{name} differs by {difference:.1e}"


def average(options: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], float]:
    from torch.optim.swa_utils import AveragedModel

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    net: Any = Net("batch norm")
    averaged: Any = AveragedModel(net, avg_fn=lambda old, new, _: old + 0.25 * (new - old), use_buffers=True)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    averaged.module = accelerator.prepare(averaged.module)
    for number in range(4):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * number + accelerator.process_index))
        accelerator.backward(net(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(accelerator.unwrap_model(net))
    state = {name: value.clone() for name, value in accelerator.get_state_dict(averaged.module).items()}
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in averaged.module.parameters():
            parameter.zero_()
        accelerator.load_state(folder)
        return state, averaged.eval()(torch.ones(1, 3)).item()


def test_moving_average_of_a_sharded_model_is_that_of_a_whole_one(session, tmp_path):
    (whole_state, expected), _ = session.run(average, args=({}, str(tmp_path / "whole")))
    ranks = session.run(average, args=({"fsdp_plugin": Plugin()}, str(tmp_path / "sharded")))
    for _, value in ranks:
        assert value == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(ranks[0][0], whole_state)


def test_clipping_by_the_largest_element_is_exact_where_a_rank_has_no_part(session):
    def clip(sharded: bool) -> tuple[float, list[float]]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
        net = torch.nn.Linear(3, 1, bias=False)  # One row, so rank 1 has none.
        torch.nn.init.ones_(net.weight)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        accelerator.backward(net(torch.tensor([[1.0, -4.0, 2.0]])).sum())
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.5, norm_type=float("inf"))
        assert norm is not None
        optimizer.step()
        weight: Any = next(net.parameters())
        weight = weight.full_tensor() if sharded else weight
        return norm.item(), weight.flatten().tolist()

    for sharded in (False, True):
        for norm, weight in session.run(clip, args=(sharded,)):
            assert norm == 4.0
            assert weight == pytest.approx([1 - 0.125, 1 + 0.5, 1 - 0.25], abs=1e-5)


def test_several_models_and_an_optimizer_with_state_are_sharded(session):
    def train(sharded: bool) -> list[torch.Tensor]:
        nets: list[Any] = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
        for net in nets:
            torch.nn.init.constant_(net.weight, 0.5)
            torch.nn.init.zeros_(net.bias)
        optimizer: Any = torch.optim.Adam([*nets[0].parameters(), *nets[1].parameters()], lr=0.1)
        nets[1](nets[0](torch.ones(1, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
        optimizer = accelerator.prepare(optimizer)
        nets = [accelerator.prepare(net) for net in nets]
        torch.manual_seed(accelerator.process_index)
        for _ in range(3):
            with micro_batch(accelerator, optimizer, *nets) as backward:
                backward(nets[1](nets[0](torch.randn(2, 3))).pow(2).mean())
        moments = [optimizer.state[parameter]["exp_avg"] for net in nets for parameter in net.parameters()]
        assert all(hasattr(moment, "full_tensor") for moment in moments) == sharded
        return [value for net in nets for value in whole(accelerator.unwrap_model(net)).values()]

    expected = session.run(train, args=(False,))[0]
    for mine in session.run(train, args=(True,)):
        torch.testing.assert_close(mine, expected)


class Switched(torch.nn.Module):
    """Two layers of which each rank uses another one at each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers[int(inputs[0, 0])](inputs).sum(1)


@pytest.mark.parametrize(("has_switch", "sync_each_batch"), [(True, False), (False, None)])  # None in torch 2.11.
def test_ranks_that_use_different_parameters_of_a_unit_train_as_with_ddp(session, sync_each_batch, has_switch):
    def train(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
        from torch.distributed.fsdp import FSDPModule

        torch.manual_seed(0)
        net: Any = Switched()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=sync_each_batch),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            **settings,
        )
        with pytest.MonkeyPatch.context() as patch:
            if not has_switch:
                patch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
            net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for number in range(4):
            inputs = torch.full((2, 3), float((number + accelerator.process_index) % 3))
            with micro_batch(accelerator, optimizer, net) as backward:
                backward(net(inputs).pow(2).mean())
        return whole(accelerator.unwrap_model(net))

    expected = session.run(train, args=({},))[0]
    for mine in session.run(train, args=({"fsdp_plugin": Plugin(auto_wrap_policy="no_wrap")},)):
        torch.testing.assert_close(mine, expected)


def test_weights_on_the_meta_device_are_initialised_once_and_equal_on_all_ranks(session):
    def make() -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(cpu_ram_efficient_loading=True))
        torch.manual_seed(accelerator.process_index)
        with torch.device("meta"):
            net: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
        return whole(accelerator.prepare(net))

    first, second = session.run(make)
    assert all(value.abs().sum() > 0 for value in first.values())
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("make", "plugin", "message"),
    [
        (Net, Plugin(auto_wrap_policy=BLOCKS, transformer_cls_names_to_wrap=["Blok"]), "contains no Blok. It .*Block"),
        (lambda: torch.nn.Linear(2, 2), Plugin(auto_wrap_policy=BLOCKS), "Linear has no _no_split_modules"),
        (lambda: torch.nn.Linear(2, 2), Plugin(activation_checkpointing=True), "Linear has no units"),
        (Net, Plugin(ignored_modules="head"), "ignored_modules='head' matches the name of no module in Net"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_a_model_are_refused_by_name(session, make, plugin, message):
    def prepare() -> None:
        Accelerator(cpu=True, fsdp_plugin=plugin).prepare(make())

    with pytest.raises(ValueError, match=message):
        session.run(prepare)
    session.run(gc.collect)  # The sockets of the group that failed close once its frames are collected.


def act_alone(act: str, peers: str) -> None:
    """Let rank 0 do what all ranks have to do, while the other trains on, or waits elsewhere."""
    context: Any = current()
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin())
    net: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(3):
        if number == 1 and accelerator.is_main_process:
            if act == "evaluate":
                with torch.no_grad():
                    net(torch.ones(1, 2))
            elif act == "train":
                accelerator.backward(net(torch.ones(1, 2)).sum())
            else:
                getattr(accelerator, act)(net, *(["unwritten"] if act == "save_model" else []))
        elif number == 1 and peers == "wait":
            accelerator.wait_for_everyone()
        elif number == 1 and act not in ("evaluate", "train"):
            while find_ahead([0]) != {0: act} or context.peers_in(WAITING) != [0]:
                pass  # until rank 0 waits in it
        with micro_batch(accelerator, optimizer, net) as backward:
            backward(net(torch.ones(1, 2)).sum())


@pytest.mark.parametrize(
    ("act", "peers", "message"),
    [
        ("evaluate", "train", r"Rank \d (gathers|reduces) .* while rank \d (gathers|reduces) .*forward that others"),
        ("train", "train", r"Rank \d (gathers|has made) .* while rank \d (gathers|has made) .*forward that others"),
        ("save_model", "train", "rank 0 waits in save_model, and rank 1 begins a forward of Seq.* on every rank"),
        ("get_state_dict", "wait", r"rank \d waits in (get|wait).*, and rank \d waits in (get|wait).* on every rank"),
    ],
    ids=["evaluation", "extra update", "save before a forward", "two calls"],
)
def test_what_one_rank_does_alone_with_a_sharded_model_is_named_at_once(act, peers, message):
    with pytest.raises(RuntimeError, match=message):
        notebook_launch(act_alone, 2, args=(act, peers), devices="cpu", output="none")


def step_on_one_rank_then_on_all(*, fails: bool) -> float:
    """Train with objects that live as long as the ranks; at first rank 1 fails before its step."""
    import builtins

    if fails:
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin())
        net: Any = torch.nn.Linear(2, 2)
        builtins.kept = accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[attr-defined]
    accelerator, net, optimizer = builtins.kept  # type: ignore[attr-defined]
    for _ in range(2):
        accelerator.backward(net(torch.ones(1, 2)).sum())
        if fails and accelerator.process_index == 1:
            raise ValueError("rank 1 failed before its step")
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            return 0.0
    return float(accelerator.reduce(torch.tensor(1.0)))


def test_sharded_objects_train_on_after_a_call_that_failed_between_the_steps_of_ranks():
    with Session(2, devices="cpu", output="none") as session:
        with pytest.raises(ValueError, match="rank 1 failed before its step"):
            session.run(step_on_one_rank_then_on_all, kwargs={"fails": True})
        assert list(session.run(step_on_one_rank_then_on_all, kwargs={"fails": False})) == [2.0, 2.0]


def misuse(how: str) -> None:
    handler = DistributedDataParallelKwargs(comm_hook="power_sgd" if how == "hook" else "no")
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(), kwargs_handlers=[handler])
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if how == "stray":
        optimizer = accelerator.prepare(optimizer)
        net(torch.ones(1, 2)).sum().backward()
    else:
        other.weight = net.weight
        net, optimizer = accelerator.prepare(net, optimizer)
        if how == "shared":
            accelerator.prepare(other)
        with accelerator.no_sync(net):
            accelerator.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shared", "Linear shares parameters with a model that was sharded before.* Put both into one module"),
        ("unsynced", r"gradients of Linear were not synchronised.*Its backward ran under no_sync\(\)"),
        ("stray", "nothing synchronised the gradients of 2 parameters of this SGD"),
        ("hook", "comm_hook='power_sgd' compresses what DDP sends.* Use 'bf16', 'fp16' or 'no'"),
    ],
)
def test_misuse_of_a_sharded_model_is_an_error_with_the_right_call(session, how, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        session.run(misuse, args=(how,))
    session.run(gc.collect)  # as above


# --------------------------------------------------------------------------------------------------------------------
# Lists of parameters from before a model was sharded: prepared optimizers and clipping take the sharded ones.


def weights_after(*, shards: bool, clips: str, unfreezes: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with lists that were made before `prepare`; return the whole weights before and after."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2) if shards else None)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    before, first = copies(model.parameters()), list(model[0].parameters())
    model[0].requires_grad_(not unfreezes)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(parameters, lr=1.0)
    model[0].requires_grad_(not (unfreezes and shards))  # DDP knows the parameters that train when it wraps a model.
    model, optimizer = accelerator.prepare(model, optimizer)
    if unfreezes:
        for parameter in first:
            parameter.requires_grad_(True)
        with pytest.raises(TypeError, match="ordered collections"):
            optimizer.add_param_group({"params": set(first)})
        optimizer.add_param_group({"params": first})
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(3):
        inputs = torch.randn(8, 4, dtype=torch.double, generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if clips == "norm":
                assert (accelerator.clip_grad_norm_(parameters, 0.01) or 0) > 0
            else:
                accelerator.clip_grad_value_(parameters, 0.001)
            optimizer.step()
            optimizer.zero_grad()
    return before, list(whole(model).values())


@pytest.mark.parametrize(("clips", "unfreezes"), [("norm", False), ("value", False), ("value", True)])
def test_an_old_list_clips_and_trains_the_shards(session: Session, clips: str, unfreezes: bool) -> None:
    def train() -> Any:
        return [weights_after(shards=shards, clips=clips, unfreezes=unfreezes) for shards in (True, False)]

    for (first, sharded), (_, replicated) in session.run(train):
        torch.testing.assert_close(sharded, replicated, rtol=1e-12, atol=1e-12)
        assert not any(map(torch.equal, first, sharded))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_optimizer_of_whole_parameters_that_trains_nothing_warns(session: Session, num_steps: int) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, fsdp_plugin=Plugin(fsdp_version=2))
        model: Any = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model = accelerator.prepare(model)
        with pytest.warns(UserWarning, match="^a sharded model has gradients that no optimizer has used or cleared"):
            for _ in range(2 * num_steps):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 4)).mean())
                    if accelerator.sync_gradients:
                        optimizer.step()
                        optimizer.zero_grad()

    session.run(train)
