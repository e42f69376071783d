"""Every import line of a ported program: `accelerate` replaced by `notebook_launcher.compat` is enough."""

from __future__ import annotations

import collections
import importlib
import inspect
import os
import pickle
from typing import Any

import pytest
import torch

from notebook_launcher import compat
from notebook_launcher.compat import refusals, utils

PATHS = """
    accelerator big_modeling checkpointing data_loader hooks inference launchers local_sgd logging memory_utils
    optimizer parallelism_config scheduler state tracking utils utils.ao utils.bnb utils.dataclasses utils.deepspeed
    utils.environment utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling
    utils.offload utils.operations utils.other utils.random utils.torch_xla utils.transformer_engine utils.versions
"""
INTERNAL = {
    # What Accelerate's modules have for each other, and its examples and the libraries around it do not import.
    "BaseEnum", "CPUInformation", "EnumWithContains", "FP8BackendType", "SageMakerConfig",
    "ThreadLocalSharedDict", "build_pipeline", "chained_operation", "check_device_same",
    "check_tied_parameters_in_config", "check_tied_parameters_on_same_device",
    "compute_module_total_buffer_size", "do_nothing", "env_var_path_add", "fallback_allocate",
    "filter_linear_layers", "find_first_last_linear_layers", "find_pippy_batch_size", "finish_mpu_init",
    "fsdp2_prepare_auto_wrap_policy", "gather_tensor_shape", "generate_device_map", "get_driver_version",
    "get_free_port", "get_keys_to_not_convert", "get_module_class_from_name", "get_module_leaves",
    "get_module_size_with_ties", "get_non_persistent_buffers", "get_parameter_device",
    "get_parameters_from_modules", "get_quantized_model_device_map", "get_shape",
    "get_state_dict_from_offload", "get_state_dict_offloaded_model", "has_repeated_blocks", "initialize",
    "is_repeated_blocks", "is_torch_xpu_tensor", "model_provider_func", "override_numa_affinity",
    "parse_bert_config", "parse_glm4_moe_config", "parse_gpt2_config", "parse_llama_config",
    "parse_t5_config", "pippy_forward", "prepare_extend_env_parallelism_config",
    "prepare_model_optimizer_scheduler", "prepare_optimizer", "prepare_scheduler",
    "quantize_and_offload_8bit", "replace_with_bnb_layers", "setup_fp8_env", "test_launch",
    "verify_operation",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:memory_utils has been reorganized:FutureWarning")
def test_modules_have_the_names_of_accelerates():
    missing = []
    for path in ["", *(f".{path}" for path in PATHS.split())]:
        ours = importlib.import_module(f"notebook_launcher.compat{path}")
        for name, value in vars(importlib.import_module(f"accelerate{path}")).items():
            is_theirs = str(getattr(value, "__module__", "")).startswith("accelerate.") and not name.startswith("_")
            if is_theirs and (inspect.isclass(value) or inspect.isfunction(value)) and not hasattr(ours, name):
                missing += [f"accelerate{path}.{name}"] if name not in INTERNAL else []
    assert missing == []


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("save_fsdp_model", "Pass fsdp_plugin=, and call prepare, save_state"),
        ("TorchDynamoPlugin", 'Pass dynamo_backend="inductor" to Accelerator'),
        ("prepare_tpu", "TPUs are not supported"),
    ],
)
def test_name_without_a_counterpart_raises_on_use_with_the_way_out(name, way_out):
    refused = getattr(utils, name)
    assert not isinstance(torch.nn.Linear(1, 1), refused)
    with pytest.raises(NotImplementedError, match=f"{name} has no counterpart in notebook_launcher.compat") as caught:
        refused(1, two=2)
    assert way_out in str(caught.value)
    with pytest.raises(AttributeError, match=f"{name} has no counterpart"):
        _ = refused.from_something
    assert not hasattr(refused, "from_something")


def test_refused_names_are_offered_nowhere_else():
    from notebook_launcher.compat import availability, names, utilities

    offered = {*names.OFFERED, *availability.NAMES, *utilities.NAMES}
    assert not offered & refusals.NAMES.keys()


def test_availability_is_that_of_accelerate():
    from accelerate.utils import imports as theirs

    packages = ("datasets", "matplotlib", "pandas", "schedulefree", "tensorboard", "transformers", "wandb", "peft")
    for name in (*packages, "rocm", "mps"):
        asked = f"is_{name}_available"
        assert getattr(utils, asked)() == bool(getattr(theirs, asked)()), asked
    assert not any((utils.is_deepspeed_available(), utils.is_torch_xla_available(check_is_tpu=True)))
    assert utils.is_bf16_available(ignore_tpu=True) == theirs.is_bf16_available(True)
    assert utils.is_cuda_available() == torch.cuda.is_available()
    assert all(getattr(utils, f"is_{name}_available")() for name in ("torch_distributed", "fp16", "weights_only"))
    assert utils.SAFE_WEIGHTS_NAME == "model.safetensors"


def test_small_functions_answer_as_accelerates(monkeypatch):
    from accelerate import utils as theirs

    monkeypatch.setenv("AS_A_FLAG", "yes")
    monkeypatch.setenv("AS_A_NUMBER", "7")
    Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - what the function asks for
    model = torch.nn.Linear(2, 2)
    cases: list[Any] = [
        ("compare_versions", "torch", ">=", "2.4"),
        ("is_torch_version", "!=", "2.4"),
        ("convert_bytes", 2**52),
        ("merge_dicts", {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}),
        ("str_to_bool", "On"),
        ("str_to_bool", "off", True),
        ("are_libraries_initialized", "torch", "nowhere"),
        ("is_port_in_use", 1),
        ("get_int_from_env", ["UNSET", "AS_A_NUMBER"], 3),
        ("get_int_from_env", ["UNSET"], 3),
        ("parse_choice_from_env", "UNSET", "bf16"),
        ("parse_flag_from_env", "AS_A_FLAG"),
        ("parse_flag_from_env", "UNSET", True),
        ("get_pretty_name", torch.nn.Linear),
        ("is_compiled_module", torch.compile(model, backend="eager")),
        ("has_compiled_regions", model),
        ("model_has_dtensor", model),
        ("is_namedtuple", Point(1, 2)),
        ("is_namedtuple", (1, 2)),
        ("is_torch_tensor", torch.zeros(1)),
        ("is_tensor_information", 1),
        ("id_tensor_storage", model.weight),
        ("ignorant_find_batch_size", {"x": torch.zeros(3)}),
        ("recursive_getattr", model, "weight.shape"),
    ]
    for name, *args in cases:
        assert getattr(utils, name)(*args) == getattr(theirs, name)(*args), name
    assert not utils.is_peft_model(model)
    with pytest.raises(ValueError, match=r"str_to_bool got 'maybe'\. It can be yes"):
        utils.str_to_bool("maybe")
    with pytest.raises(ValueError, match="compare_versions got the operation '~'"):
        utils.compare_versions("torch", "~", "2")
    converted = utils.ConvertOutputsToFp32(lambda: {"logits": torch.zeros(2, dtype=torch.bfloat16), "n": 1})()
    assert (converted["logits"].dtype, converted["n"]) == (torch.float32, 1)


def test_environment_is_purged_of_what_a_function_set(monkeypatch):
    monkeypatch.setenv("ACCELERATE_KEPT", "1")

    @utils.purge_accelerate_environment
    def change():
        os.environ["ACCELERATE_KEPT"] = os.environ["ACCELERATE_NEW"] = "2"
        return "changed"

    assert change() == "changed"
    assert os.environ["ACCELERATE_KEPT"] == "1"
    assert "ACCELERATE_NEW" not in os.environ


def test_basic_config_is_one_that_accelerate_reads(tmp_path, capsys):
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "made" / "config.yaml"
    assert utils.write_basic_config("bf16", save_location=path) == path
    assert load_config_from_file(str(path)).mixed_precision == "bf16"
    assert utils.write_basic_config(save_location=str(path)) is False
    assert "is there already, and is kept" in capsys.readouterr().out


def test_device_variable_names_the_device(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert compat.PartialState().device == torch.device("meta")


def test_prepared_objects_carry_accelerates_marks():
    accelerator = compat.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data: Any = range(4)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, torch.utils.data.DataLoader(data))
    assert all(prepared._is_accelerate_prepared for prepared in (optimizer, scheduler, loader))
    assert loader.gradient_state is accelerator.gradient_state
    assert compat.skip_first_batches(loader, 1).gradient_state is accelerator.gradient_state
    assert pickle.loads(pickle.dumps(loader)).gradient_state is None
