"""`save_model`, `load_model` and `save`: names, shards, tied tensors, and what other libraries read."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import transformers
from accelerate.utils import load_checkpoint_in_model

from notebook_launcher.training import checkpoints
from notebook_launcher.training.checkpoints.models import parse_size
from tests.support.checkpoints import files, same, small_files

pytestmark = pytest.mark.usefixtures("compiler_cache")

FORMATS = pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickled"])


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def plain(seed: int = 0, width: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 2))


def tied(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Tied()


@pytest.mark.parametrize(
    ("safe", "size", "expected"),
    [
        (True, "10GB", {"model.safetensors"}),
        (False, "10GB", {"pytorch_model.bin"}),
        (True, 100, {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)} | {"model.safetensors.index.json"}),
        (False, 100, {f"pytorch_model-0000{n}-of-00003.bin" for n in (1, 2, 3)} | {"pytorch_model.bin.index.json"}),
    ],
)
def test_files_have_hugging_faces_names_and_are_exchanged_with_accelerate(tmp_path, safe, size, expected):
    options = {"max_shard_size": size, "safe_serialization": safe}
    checkpoints.save_model(plain(), tmp_path / "plain", **options)
    assert files(tmp_path / "plain") == expected
    checkpoints.save_model(tied(1), tmp_path / "ours", **options)
    model = tied(2)
    load_checkpoint_in_model(model, str(tmp_path / "ours"))
    assert same(model, tied(1))
    accelerate.Accelerator(cpu=True).save_model(tied(3), tmp_path / "theirs", **options)
    checkpoints.load_model(model, tmp_path / "theirs")
    assert same(model, tied(3))


def test_models_are_exchanged_with_transformers(tmp_path):
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "ours")
    checkpoints.save_model(model, tmp_path / "ours", max_shard_size="2KB")
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    theirs, report = loaded
    assert same(theirs, model)
    assert not report["missing_keys"]
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    again = transformers.GPT2LMHeadModel(config)
    checkpoints.load_model(again, tmp_path / "theirs")
    assert same(again, model)


def test_tied_tensors_are_written_once_and_load_into_a_model_that_ties_them_no_more(tmp_path):
    checkpoints.save_model(tied(1), tmp_path)
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "embed.weight" in written
    assert "head.weight" not in written
    loose = Tied()
    loose.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    checkpoints.load_model(loose, tmp_path)
    assert torch.equal(loose.head.weight, loose.embed.weight)
    assert same(loose, tied(1))


def views(start: float) -> dict[str, torch.Tensor]:
    whole = torch.arange(start, start + 50_000)
    return {"left": whole[:10], "right": whole[5:15], "turned": whole[:12].view(3, 4).t()}


def mixed(fill: int) -> dict[str, torch.Tensor]:
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8)
    tensors = {str(dtype).replace(".", "_"): torch.full((3,), fill, dtype=dtype) for dtype in dtypes}
    return {**tensors, "empty": torch.zeros(0, 3), "scalar": torch.tensor(float(fill))}


class Buffers(torch.nn.Module):
    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


@FORMATS
@pytest.mark.parametrize("make", [views, mixed])
def test_views_of_one_storage_and_all_dtypes_come_back_and_cost_no_more_than_they_show(tmp_path, safe, make):
    checkpoints.save_model(Buffers(make(1)), tmp_path, safe_serialization=safe)
    model = Buffers(make(0))
    checkpoints.load_model(model, tmp_path)
    assert same(model, Buffers(make(1)))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


def test_wrappers_are_seen_through(tmp_path):
    model: Any = torch.compile(plain(1), backend="eager")
    checkpoints.save_model(torch.nn.DataParallel(model), tmp_path)
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == set(plain().state_dict())
    again: Any = torch.compile(plain(2), backend="eager")
    checkpoints.load_model(again, tmp_path)
    assert same(again, model)


@pytest.mark.parametrize(
    ("earlier", "newer"),
    [
        ({"max_shard_size": 60}, {"max_shard_size": 100}),
        ({"max_shard_size": 60}, {}),
        ({"safe_serialization": False}, {}),
        ({}, {"safe_serialization": False, "max_shard_size": 100}),
    ],
)
def test_save_leaves_nothing_of_an_earlier_one_and_everything_else(tmp_path, earlier, newer):
    others = {"config.json": "{}", "pictures/model.bin": "x", "model-notes.txt": "y"}
    folder, alone = tmp_path / "folder", tmp_path / "alone"
    checkpoints.save_model(plain(1), folder, **earlier)
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    checkpoints.save_model(plain(2), folder, **newer)
    checkpoints.save_model(plain(2), alone, **newer)
    assert files(folder) == files(alone) | set(others)
    assert all((folder / name).read_text() == text for name, text in others.items())
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "alone"}
    model = plain(3)
    checkpoints.load_model(model, folder)
    assert same(model, plain(2))


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        checkpoints.save_model(plain(), tmp_path / "a")
        checkpoints.save({"a": torch.zeros(1)}, tmp_path / "b", safe_serialization=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "model.safetensors").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o644


def test_link_to_a_folder_and_the_folder_that_this_process_works_in_stay(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for seed in (1, 2):
        checkpoints.save_model(plain(seed), tmp_path / "link")
        checkpoints.save_model(plain(seed), ".")
        assert Path("model.safetensors").exists()
    assert (tmp_path / "link").is_symlink()
    assert files(tmp_path / "real") == {"model.safetensors"}
    model = plain(3)
    checkpoints.load_model(model, ".")
    assert same(model, plain(2))


@pytest.mark.parametrize(("safe", "size"), [(True, 5000), (False, "10GB")])
def test_full_disk_leaves_the_earlier_save_whole(tmp_path, safe, size):
    checkpoints.save_model(plain(1), tmp_path / "a", safe_serialization=safe)
    with small_files(), pytest.raises(OSError, match="File too large"):
        checkpoints.save_model(plain(2, width=64), tmp_path / "a", max_shard_size=size, safe_serialization=safe)
    model = plain(3)
    checkpoints.load_model(model, tmp_path / "a")
    assert same(model, plain(1))
    assert files(tmp_path) == {"a/model.safetensors" if safe else "a/pytorch_model.bin"}


def test_only_rank_0_writes_and_no_rank_waits_for_another(ranks, tmp_path):
    def alone() -> None:
        rank = torch.distributed.get_rank()
        checkpoints.save_model(torch.nn.Linear(1, 1), tmp_path / f"folder_{rank}")
        checkpoints.save(rank, tmp_path / f"file_{rank}")
        if rank == 0:
            checkpoints.save(rank, tmp_path / "by_rank_0")

    ranks.run(2, alone)
    assert {path.name for path in tmp_path.iterdir()} == {"folder_0", "file_0", "by_rank_0"}


def test_max_shard_size_accepts_bytes_and_units_and_what_is_no_size_or_has_no_data_is_refused(tmp_path):
    sizes: Any = ("200MB", 200 * 10**6), ("10 gb", 10**10), ("1.5KB", 1500), ("2KiB", 2048), ("7B", 7), (12, 12)
    assert all(parse_size(size) == expected for size, expected in sizes)
    wrong: Any = ("", "ten", "10", "-1MB", 0, True, 1.5, None, "0KB")
    for size in wrong:
        with pytest.raises(ValueError, match=r"max_shard_size=.* is not a size. It can be .*'200MB'"):
            checkpoints.save_model(plain(), tmp_path / "a", max_shard_size=size)
    with pytest.raises(checkpoints.CheckpointError, match="'weight' and 1 more are on the meta device"):
        checkpoints.save_model(torch.nn.Linear(2, 2, device="meta"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Extra(torch.nn.Linear):
    """A model with a state that is no tensor."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), r"safetensors cannot hold .* Pass safe_serialization=False"),
        (torch.eye(3).to_sparse(), r"safetensors cannot hold .* Pass safe_serialization=False"),
        ({"extra": "saved"}, r"'_extra_state' is no tensor but dict.*safe_serialization"),
    ],
)
def test_what_safetensors_does_not_hold_needs_pickling(tmp_path, odd, words):
    model, other = Extra(1, 1), Extra(1, 1)
    model.extra = odd
    with pytest.raises(checkpoints.CheckpointError, match=words):
        checkpoints.save_model(model, tmp_path / "a")
    checkpoints.save_model(model, tmp_path / "a", safe_serialization=False)
    checkpoints.load_model(other, tmp_path / "a")
    assert files(tmp_path) == {"a/pytorch_model.bin"}
    assert str(other.extra) == str(odd)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            torch.nn.Linear(3, 4),
            r"(?s)does not fit Linear; nothing was loaded.*Missing .*'bias'.*Unexpected .*'0.bias'",
        ),
        (plain(width=5), r"size mismatch for 0.bias: \(4,\) in the file, \(5,\) in the model"),
    ],
)
def test_weights_of_another_model_are_refused_before_any_is_loaded(tmp_path, other, words):
    checkpoints.save_model(plain(), tmp_path)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(checkpoints.CheckpointError, match=words):
        checkpoints.load_model(other, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model-00002-of-00003.safetensors", None, "safetensors is missing: .* Save the model again"),
        ("model-00002-of-00003.safetensors", b"x", "safetensors cannot be read: .* Load another checkpoint"),
        ("model.safetensors.index.json", b"{", "index.json is damaged: it does not parse"),
        ("model.safetensors.index.json", None, "holds no weights: none of model.safetensors, "),
    ],
)
def test_damaged_save_is_refused(tmp_path, name, damage, words):
    checkpoints.save_model(plain(1), tmp_path, max_shard_size=100)
    (tmp_path / name).unlink() if damage is None else (tmp_path / name).write_bytes(damage)
    model = plain(2)
    with pytest.raises(checkpoints.CheckpointError, match=words):
        checkpoints.load_model(model, tmp_path)
    assert same(model, plain(2))


@FORMATS
def test_save_writes_an_object_once_and_whole_to_a_path_or_an_open_file(tmp_path, safe):
    state, file = {"a": torch.arange(3.0), "b": torch.ones(2)}, io.BytesIO()
    checkpoints.save(state, file, safe_serialization=safe)
    checkpoints.save(state, tmp_path / "f", safe_serialization=safe)
    with small_files(), pytest.raises(OSError, match="File too large"):
        checkpoints.save({"a": torch.zeros(9999)}, tmp_path / "f", safe_serialization=safe)
    for content in (file.getvalue(), (tmp_path / "f").read_bytes()):
        read = safetensors.torch.load(content) if safe else torch.load(io.BytesIO(content))
        assert {name: tensor.tolist() for name, tensor in read.items()} == {"a": [0, 1, 2], "b": [1, 1]}
    assert files(tmp_path) == {"f"}
