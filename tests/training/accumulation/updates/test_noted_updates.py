"""Updates that wait for an exchange beside the next forward are those of the ordinary loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.overlapped_training import Training, alike, trained
from tests.support.toy_training import make_exchange_group, make_model, sessions_fixture

ranks = sessions_fixture(2, set_up=make_exchange_group)


def test_checkpoint_has_the_last_update_and_training_continues_from_it(ranks, tmp_path):
    def train(folder: str, *, overlaps: bool) -> Any:
        training = trained(overlaps=overlaps)
        saved = training.accelerator.save_state(f"{folder}/{overlaps}")
        training.update()
        training.update()
        training.accelerator.load_state(saved)
        training.number = 2
        training.update()
        return training.weights(), list(training.optimizer.state.values())

    alike(ranks, train, str(tmp_path))


class Failing(torch.nn.Sequential):
    fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](inputs))
        if self.fails:
            raise ValueError("in the middle")
        outputs: torch.Tensor = self[2](hidden)
        return outputs


def test_forward_that_fails_loses_no_update(ranks):
    def train(*, overlaps: bool) -> Any:
        training = Training(Failing(*make_model()), overlaps=overlaps)
        training.update()
        training.update()
        training.original.fails = True
        with pytest.raises(ValueError, match="in the middle"):
            training.loss()
        assert [parameter.numel() for parameter in training.kept] == ([12, 4, 0, 0] if overlaps else [12, 4, 4, 1])
        training.original.fails = False
        training.update()
        return training.weights()

    alike(ranks, train)


def test_several_models_and_optimizers(ranks):
    def train(*, overlaps: bool) -> Any:
        from notebook_launcher import Accelerator, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(bucket_cap_mb=1e-5, overlap_with_forward=overlaps)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2)
        encoder: Any = torch.nn.Sequential(*make_model(1), torch.nn.Linear(1, 3))
        head: Any = make_model(2)
        torch.manual_seed(0)
        encoder[3].reset_parameters()
        leaf = torch.ones(3, requires_grad=True)
        optimizers = [
            torch.optim.AdamW([*encoder[:2].parameters(), *head[:2].parameters(), leaf], lr=0.1),
            torch.optim.SGD([*encoder[2:].parameters(), *head[2:].parameters()], lr=0.1),
        ]
        encoder, head, leaf, *optimizers = accelerator.prepare(encoder, head, leaf, *optimizers)
        for number in range(11):
            generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
            with accelerator.accumulate():
                loss = head(encoder(torch.rand(2, 3, generator=generator)) * leaf).square().mean()
                if number % 3:
                    loss = loss + head(leaf.expand(2, 3)).mean()
                accelerator.backward(loss)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        return [*encoder.module.state_dict().values(), *head.module.state_dict().values(), leaf.detach()]

    alike(ranks, train)


class Coupled(torch.optim.SGD):
    """Steps along a part of the gradient that depends on all of it."""

    def step(self, closure: Any = None) -> Any:
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        torch._foreach_mul_(gradients, float(sum(gradient.norm() for gradient in gradients)))
        return super().step(closure)


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "a subclass":
        return Coupled(parameters, lr=0.1)
    if kind == "LBFGS":
        return torch.optim.LBFGS(parameters, lr=0.1)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if kind == "a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    if kind == "a step of the user":
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("kind", ["a subclass", "LBFGS", "a hook", "a step of the user", "a closure"])
def test_step_that_needs_all_gradients_at_once_waits(ranks, kind):
    def train(kind: str, *, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps)
        optimizer = training.accelerator.prepare(make_optimizer(kind, training.kept))
        for number in range(3):

            def compute(number: int = number) -> torch.Tensor:
                training.number = number
                optimizer.zero_grad()
                loss = training.loss()
                training.accelerator.backward(loss)
                return loss

            if kind in ("LBFGS", "a closure"):
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
            assert not training.waits
        return training.weights()

    alike(ranks, train, kind)


def test_steps_that_are_repeated_skipped_or_not_cleared(ranks):
    def train(*, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps)
        for number in range(8):
            training.backward()
            if number != 4:
                training.optimizer.step()
            if number == 3:
                training.optimizer.step()
            if number % 3:
                training.model.zero_grad()
        return training.weights(), [parameter.grad for parameter in training.kept]

    alike(ranks, train)


def test_settings_of_the_step_are_those_of_its_time(ranks):
    def train(*, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps)
        for number in range(4):
            training.update()
            training.optimizer.param_groups[0]["lr"] = 0.1 + number
            if number == 2:
                extra = torch.nn.Parameter(torch.ones(1))
                training.optimizer.add_param_group({"params": [extra], "lr": 1.0})
        return training.weights()

    alike(ranks, train)


def test_every_micro_batch_may_exchange(ranks):
    def train(*, overlaps: bool) -> Any:
        from notebook_launcher import GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
        training = Training(overlaps=overlaps, gradient_accumulation_plugin=plugin)
        for _ in range(9):
            with training.accelerator.accumulate(training.model):
                training.update()
        return training.weights()

    alike(ranks, train)


def test_window_does_not_take_its_predecessors_update_for_a_change(ranks, recwarn):
    def train(*, overlaps: bool) -> Any:
        import warnings

        warnings.simplefilter("error")
        training = Training(overlaps=overlaps, gradient_accumulation_steps=3)
        for _ in range(12):
            with training.accelerator.accumulate(training.model):
                training.update()
        return training.weights()

    alike(ranks, train)


def test_sparse_gradients_are_exchanged_in_the_backward(ranks):
    def train(*, overlaps: bool) -> Any:
        from notebook_launcher import Accelerator, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(bucket_cap_mb=1e-5, overlap_with_forward=overlaps)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        )
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(4):
            rows = torch.tensor([number, accelerator.process_index])
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return list(model.module.state_dict().values())

    alike(ranks, train)


def test_local_sgd_and_uneven_inputs_need_no_exchange_beside_a_forward(ranks):
    def train(*, overlaps: bool) -> Any:
        from notebook_launcher.training import LocalSGD

        training = Training(overlaps=overlaps)
        training.update()
        training.update()
        with LocalSGD(training.accelerator, training.model, local_sgd_steps=2) as local:
            for _ in range(4):
                training.update()
                local.step()
        training.update()
        with training.accelerator.join_uneven_inputs([training.model], even_batches=False):
            for _ in range(2 + training.accelerator.process_index):
                training.update()
        return training.weights()

    alike(ranks, train)


def test_compiled_models_train_as_before(ranks):
    def train(how: str, *, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps, cap=25, dynamo_backend="eager" if how == "prepared" else None)
        if how == "in place":
            training.original[0].compile(backend="eager")
        if how == "around":
            training.model = torch.compile(training.model, backend="eager")
        for _ in range(4):
            training.update()
            assert not training.waits
        return training.weights()

    for how in ("prepared", "in place", "around"):
        alike(ranks, train, how)


def test_exchange_leaves_nothing_to_the_garbage_collector(ranks):
    def train() -> list[bool]:
        import gc
        import weakref

        training = trained(overlaps=True)
        exchange = training.model.exchange
        kept = [weakref.ref(one) for bucket in exchange._buckets for one in (bucket, bucket._pending[0])]
        gc.collect()
        gc.disable()
        try:
            training.update()
            return [ref() is None for ref in kept]
        finally:
            gc.enable()

    for freed in ranks.run(2, train):
        assert len(freed) >= 4
        assert all(freed)


def test_backward_through_the_same_forward_adds_to_the_exchanged_gradients(ranks):
    def train(*, overlaps: bool) -> Any:
        training = Training(overlaps=overlaps, check_ranks=False)
        training.update()
        loss = training.loss()
        training.accelerator.backward(loss, retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in training.kept]

    alike(ranks, train)
