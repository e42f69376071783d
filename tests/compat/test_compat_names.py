"""Names that code written for Accelerate uses beside training: operations, launchers, small helpers."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import compat
from tests.support.toy_training import Sessions, make_model, sessions_fixture

ranks = sessions_fixture(1, 2)


def test_operations_refuse_other_shapes_with_and_without_debug(ranks):
    def check():
        state = compat.PartialState(cpu=True)
        told = []
        for debug in (True, False):
            state.debug = debug
            assert state.debug == compat.AcceleratorState(cpu=True).debug == debug
            with pytest.raises(compat.DistributedOperationException) as caught:
                compat.broadcast(torch.zeros(1 + state.process_index))
            told.append(str(caught.value))
        compat.AcceleratorState._reset_state(True)
        return told

    for debug, none in ranks.run(2, check):
        assert "float32 [1] on rank 0, float32 [2] on rank 1" in debug
        assert none == debug


def test_tensor_that_one_rank_has_is_copied_to_the_others(ranks):
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)

    def copy(owners):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        try:
            return compat.copy_tensor_to_devices(tensor if rank in owners else None)
        except ValueError as error:
            return str(error)

    for copied in ranks.run(2, copy, [1]) + ranks.run(1, copy, [0]):
        assert torch.equal(copied, tensor)
    assert "got a tensor on no process. Pass it on one" in ranks.run(2, copy, [])[0]
    assert "got a tensor on processes [0, 1]." in ranks.run(2, copy, [0, 1])[1]


@pytest.mark.parametrize(
    ("joined", "even_batches", "warning"),
    [
        ("model", None, None),
        ("nothing of DDP", None, "only supported for multi-GPU and multi-CPU training with DistributedDataParallel"),
        ("model", False, "only supported for map-style datasets that each rank reads; 1 of the 2"),
    ],
)
def test_join_warns_of_loaders_that_it_cannot_join(ranks, joined, even_batches, warning):
    def join():
        class Stream(IterableDataset[int]):
            def __iter__(self):
                return iter(range(8))

        accelerator = compat.Accelerator(cpu=True)
        model, *_ = accelerator.prepare(make_model(), DataLoader(Stream()), DataLoader(TensorDataset(torch.arange(8))))
        target = model if joined == "model" else accelerator.unwrap_model(model)
        with warnings.catch_warnings(record=True) as said, accelerator.join_uneven_inputs([target], even_batches):
            warnings.simplefilter("always")
        compat.AcceleratorState._reset_state(True)
        return [str(warning.message) for warning in said if "join_uneven_inputs" in str(warning.message)]

    for said in ranks.run(2, join):
        assert [warning in text for text in said] == ([] if warning is None else [True])


@pytest.mark.parametrize(("num_ranks", "library"), [(1, "notebook_launcher"), (2, "notebook_launcher.compat")])
def test_accelerator_pickles_in_a_rank(ranks, num_ranks, library):
    def there_and_back():
        names = importlib.import_module(library)
        accelerator = names.Accelerator(cpu=True, gradient_accumulation_steps=3)
        model, loader = make_model(), DataLoader(TensorDataset(torch.arange(8)))
        _, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        again = pickle.loads(pickle.dumps(accelerator))
        accelerator.gradient_state.sync_gradients = again.gradient_state.sync_gradients = False
        for stepped in (optimizer, *again._optimizers):  # the windows of its own Accelerator still hold it back
            before = [parameter.clone() for parameter in stepped.param_groups[0]["params"]]
            for parameter in stepped.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            stepped.step()
            assert all(map(torch.equal, before, stepped.param_groups[0]["params"]))
        assert again.state.__dict__ == accelerator.state.__dict__
        assert again._micro_batches.clock is accelerator._micro_batches.clock is not None
        if library.endswith("compat"):
            names.AcceleratorState._reset_state(True)
            names.GradientState._reset_state()
        return again.gradient_accumulation_steps, again.process_index

    assert ranks.run(num_ranks, there_and_back) == [(3, rank) for rank in range(num_ranks)]


def test_accelerator_whose_state_was_reset_raises():
    accelerator = compat.Accelerator(cpu=True)
    compat.AcceleratorState._reset_state(True)
    compat.GradientState._reset_state()
    with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute `.*was called while an Acc"):
        accelerator.prepare(make_model())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_accelerator_whose_state_was_reset_still_knows_its_process(ranks, num_ranks):
    def shares():
        accelerator = compat.Accelerator(cpu=True)
        accelerator.state._reset_state()
        accelerator.wait_for_everyone()
        with accelerator.split_between_processes([1, 2]) as share, accelerator.main_process_first():
            accelerator.print("share", share)
        places = accelerator.is_main_process, accelerator.is_local_main_process, accelerator.use_distributed
        named = accelerator.on_process(lambda: True, process_index=num_ranks - 1)()
        gathered = accelerator.gather(torch.ones(1)).tolist()
        accelerator.end_training()
        return share, places, named, gathered

    every = [[1, 2]] if num_ranks == 1 else [[1], [2]]
    assert ranks.run(num_ranks, shares) == [
        (every[rank], (rank == 0, rank == 0, num_ranks > 1), True if rank == num_ranks - 1 else None, [1.0] * num_ranks)
        for rank in range(num_ranks)
    ]


def count_down(queue, folder):
    left = queue.get()
    if left:
        queue.put(left - 1)
        message = f"{left} to go"
        raise RuntimeError(message)
    (folder / "done").touch()
    compat.PartialState(cpu=True)
    queue.put(0)


@pytest.mark.parametrize("library", ["accelerate", "notebook_launcher.compat"])
def test_overflow_that_a_loop_notes_holds_the_scheduler_back_until_it_takes_the_note_away(library):
    names = importlib.import_module(library)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    accelerator = names.Accelerator(cpu=True)
    _, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for overflow in (True, True, False):
        optimizer._is_overflow = overflow
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
        assert optimizer.step_was_skipped == overflow
    assert rates == [1.0, 1.0, 0.5]
    if library == "accelerate":
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)


def test_queue_that_cannot_be_pickled_reaches_the_ranks(tmp_path):
    queue = multiprocessing.get_context("fork").Queue()
    queue.put(1)
    compat.notebook_launcher(count_down, (queue, tmp_path), num_processes=2, max_restarts=1)
    assert (tmp_path / "done").exists()
    queue.close()
    queue.join_thread()


def test_variables_are_set_for_a_block(monkeypatch):
    monkeypatch.setenv("OF_BEFORE", "old")
    monkeypatch.delenv("OF_THE_BLOCK", raising=False)
    with pytest.raises(KeyError), compat.patch_environment(of_before=1, OF_THE_BLOCK="x"):
        assert (os.environ["OF_BEFORE"], os.environ["OF_THE_BLOCK"]) == ("1", "x")
        raise KeyError
    assert os.environ["OF_BEFORE"] == "old"
    assert "OF_THE_BLOCK" not in os.environ
    everything = dict(os.environ)
    with compat.clear_environment():
        assert not os.environ
        os.environ["OF_THE_BLOCK"] = "y"
    assert dict(os.environ) == everything


def test_one_process_of_a_machine_shows_the_progress(ranks):
    def show():
        compat.PartialState._reset_state()
        bars = [compat.tqdm(range(3), **options) for options in ({}, {"main_process_only": False}, {"disable": True})]
        hidden = [bar.disable for bar in bars]
        assert [list(bar) for bar in bars] == [[0, 1, 2]] * 3
        return hidden

    assert ranks.run(2, show) == [[False, False, True], [True, False, True]]
    with pytest.raises(ValueError, match=r"tqdm\(False, ...\): the first argument is the iterable"):
        compat.tqdm(False, range(3))


def test_files_are_read_back(tmp_path):
    path = tmp_path / "file"
    compat.save({"a": torch.ones(2)}, path)
    assert torch.equal(compat.load(path)["a"], torch.ones(2))
    with path.open("rb") as file:
        assert list(compat.load(file, map_location="cpu")) == ["a"]
    torch.save({"b": Sessions}, path)
    with pytest.raises(compat.CheckpointError, match="pass weights_only=False to load"):
        compat.load(path)
    assert compat.load(path, weights_only=False)["b"] is Sessions


def test_questions_about_other_parallelism_are_answered():
    accelerator, model = compat.Accelerator(cpu=True), make_model()
    assert accelerator.distributed_type not in (compat.DistributedType.FSDP, compat.DistributedType.XLA)
    assert not accelerator.verify_device_map(model)
    next(model.children()).__dict__["hf_device_map"] = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model)
    assert not accelerator.gradient_state.is_xla_gradients_synced
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert accelerator.flag_tensor == 1
    assert accelerator.check_trigger()
    assert accelerator.state.default_device.type in ("cpu", "cuda")
    compat.wait_for_everyone()
    compat.synchronize_rng_states([compat.RNGType.TORCH])
