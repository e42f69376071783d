"""DeepSpeed's settings: which file and arguments are taken, what they come to, and what is refused by name."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import context
from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin
from notebook_launcher.training.parallelism.zero import ZeroSettings, apply_deepspeed, resolve_zero
from notebook_launcher.training.plugins import GradScalerKwargs
from notebook_launcher.training.resolving import Settings

if TYPE_CHECKING:
    from pathlib import Path

TYPICAL = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1e5,
    "wall_clock_breakdown": False,
}
"""A file as it is passed from hand to hand."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG_FILE", "ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE"):
        monkeypatch.delenv(f"ACCELERATE_DEEPSPEED_{name}", raising=False)


def settled(config: dict[str, Any], scaler: Any = None, **call: Any) -> ZeroSettings:
    """Return what a file comes to on 2 ranks; `call` gives what the call gives beside it."""
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    given = {name: (value, f"Accelerator({name}={value!r})") for name, value in call.items()}
    return resolve_zero(plugin, num_ranks=2, given=given, scaler=scaler)


def file_with(**changes: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **changes}


def test_typical_file_is_taken_and_tuning_is_named():
    zero = settled(TYPICAL)
    assert (zero.stage, zero.offloads, zero.mixed_precision) == (3, True, "bf16")
    assert (zero.gradient_accumulation_steps, zero.max_grad_norm, zero.micro_batch_size) == (2, 1.0, 4)
    assert "zero_optimization.overlap_comm" in zero.left_out
    assert not any(name in zero.describe() for name in ("steps_per_print", "wall_clock_breakdown", "offload_param"))
    assert "ZeRO stage 3" in zero.describe()
    assert "carried out by torch" in zero.describe()


@pytest.mark.parametrize("form", ["path", "text", "base64", "dictionary"])
def test_file_is_read_in_every_form_that_accelerate_reads(form: str, tmp_path: Path):
    text, path = json.dumps(TYPICAL), tmp_path / "zero3.json"
    path.write_text(text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    forms = {"path": path, "text": text, "base64": encoded, "dictionary": TYPICAL}
    plugin = DeepSpeedPlugin(hf_ds_config=forms[form])
    assert plugin.zero_stage == 3
    assert plugin.get_value("gradient_clipping") == 1.0
    assert plugin.is_auto("train_batch_size")
    assert TYPICAL["train_batch_size"] == "auto", "the user's dictionary is left alone"


def test_variables_of_the_launcher_fill_what_nothing_else_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", 0.5)
    assert DeepSpeedPlugin(zero_stage=1, offload_param_device="none").zero_stage == 1
    path = tmp_path / "file.json"
    path.write_text(json.dumps(file_with(gradient_clipping="auto")), encoding="utf-8")
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert (DeepSpeedPlugin().zero_stage, DeepSpeedPlugin().gradient_clipping) == (2, 0.5)


def test_auto_takes_what_the_call_gives():
    auto = file_with(gradient_accumulation_steps="auto", gradient_clipping="auto", bf16={"enabled": "auto"})
    zero = settled(auto, gradient_accumulation_steps=8, max_grad_norm=0.25, mixed_precision="bf16")
    assert (zero.gradient_accumulation_steps, zero.max_grad_norm) == (8, 0.25)
    assert zero.mixed_precision is None, "the call decides"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4}, (6, 4)),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 3}, (3, 8)),
        ({"train_batch_size": 48}, (1, 24)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}, (3, 8)),
        ({"train_micro_batch_size_per_gpu": 8}, (None, 8)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, (None, None)),
    ],
)
def test_missing_batch_size_follows_from_the_others(sizes: dict[str, Any], expected: tuple[int, int]):
    zero = settled(file_with(**sizes))
    assert (zero.gradient_accumulation_steps, zero.micro_batch_size) == expected


STEPS = "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        ({STEPS: 2}, {STEPS: 4}, r"gradient_accumulation_steps=2 and .*\(gradient_accumulation_steps=4\)"),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}, r"gradient_clipping=1.0 and Accelerator\(max_grad_norm"),
        ({"bf16": {"enabled": True}}, {"mixed_precision": "no"}, r"precision='bf16' and Accelerator\(mixed_precision"),
        ({"fp16": {"enabled": False}}, {"mixed_precision": "fp16"}, "fp16.enabled=False and Accelerator"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "enable both bf16 and fp16"),
        (
            {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {},
            r"train_batch_size=48 is not train_micro_batch_size_per_gpu=4 x .*_steps=2 x 2 ranks = 16",
        ),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, {}, "is not a multiple of .*= 4"),
        ({"gradient_accumulation_steps": 0}, {}, '_steps=0 is too small; it must be 1 or more.* "auto", too'),
        ({"gradient_clipping": -1}, {}, "gradient_clipping=-1 must be a number, 0 or more"),
        ({"torch_autocast": {"enabled": True, "dtype": "float8"}}, {}, "torch_autocast.dtype='float8' is unknown"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {}, "fp16.loss_scale=128: a fixed scale"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 10}},
            {"scaler": GradScalerKwargs(init_scale=4.0)},
            "gives init_scale=1024.0, and GradScalerKwargs init_scale=4.0",
        ),
    ],
)
def test_disagreement_with_the_call_names_both_values(config: dict[str, Any], call: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        settled(file_with(**config), **call)


def test_arguments_and_file_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"DeepSpeedPlugin\(zero_stage=3\) and zero_optimization.stage=2 in hf_ds_"):
        DeepSpeedPlugin(hf_ds_config=file_with(), zero_stage=3)
    assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": "auto"}}, zero_stage=3).zero_stage == 3


@pytest.mark.parametrize(
    ("config", "key", "instead"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "param_device='nvme'", "cpu"),
        (file_with(amp={"enabled": True}), "amp.enabled=True", "bf16"),
        (file_with(optimizer={"type": "AdamW"}), "DeepSpeed's optimizer is not created", "accelerator.prepare()"),
        (file_with(pipeline={"stages": 2}), "pipeline.stages=2", "ParallelismConfig"),
        (file_with(communication_data_type="fp16"), "communication_data_type='fp16'", "reduce_dtype"),
        (file_with(tensor_parallel={"autotp_size": 2}), "tensor_parallel.autotp_size=2", "tp_size"),
        (file_with(elasticity={"enabled": True}), "elasticity.enabled=True", "max_restarts"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights=True", "bf16"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size=4", "dp_replicate_size"),
        (file_with(gradient_cliping=1.0), "no setting 'gradient_cliping'", "Did you mean 'gradient_clipping'"),
        ({"train_batch_size": 8}, "no zero_optimization.stage", "zero_stage=2"),
        ({"zero_optimization": {"stage": 4}}, "zero_stage=4 is unknown", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs zero_stage=3, not 2", "optim"),
        ({"zero_optimization": {"stage": 0, "cpu_offload": True}}, "needs zero_stage=1, 2 or 3, not 0", ""),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "device='gpu' is unknown", "cpu"),
    ],
)
def test_setting_without_counterpart_is_refused_with_the_nearest_thing(config: dict[str, Any], key: str, instead: str):
    with pytest.raises(ValueError, match=key) as caught:
        DeepSpeedPlugin(hf_ds_config=config)
    assert instead in str(caught.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"elasticity": {"enabled": False, "min_gpus": 1}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"tensor_parallel": {"autotp_size": 0}},
        {"sparse_gradients": False, "some_new_section": {"enabled": True}},
    ],
)
def test_setting_that_is_switched_off_or_unknown_is_accepted(harmless: dict[str, Any]):
    assert DeepSpeedPlugin(hf_ds_config={**file_with(), **harmless}).zero_stage in {2, 3}


def test_scaler_starts_with_the_scale_of_the_file():
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 50}
    zero: Any = settled(file_with(fp16=fp16))
    assert (zero.mixed_precision, zero.scaler.init_scale, zero.scaler.growth_interval) == ("fp16", 256.0, 50)


def test_settings_differ_from_those_of_an_exported_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context._Current, "adopted", {"max_grad_norm": 0.5})
    with pytest.raises(ValueError, match=r"gradient_clipping=1.0 and the launch's max_grad_norm=0.5 differ"):
        apply_deepspeed(Settings(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=TYPICAL)))
