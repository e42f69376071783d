"""Accelerate's settings file: files of Accelerate are read, and Accelerate accepts the written ones."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from notebook_launcher import Accelerator, ConfigError, LaunchConfig, notebook_launch
from notebook_launcher.machine import devices
from notebook_launcher.machine.devices import GPU, Machine
from notebook_launcher.settings import accelerate_yaml

if TYPE_CHECKING:
    from pathlib import Path

ASKED = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""File that `accelerate config` of 1.15 writes for two of three GPUs."""
DEEPSPEED_ALONE = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}
NO = {"num_processes": 1, "mixed_precision": "no"}


def machine(num_gpus: int) -> Machine:
    gpus = tuple(GPU(index=at, name="H200", total_memory=1, free_memory=1) for at in range(num_gpus))
    return Machine(num_cores=8, gpus=gpus, why_no_gpu="" if gpus else "no GPU found")


@pytest.fixture(params=[0, 4], ids=["no GPU", "4 GPUs"])
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(devices, "detect", lambda: machine(request.param))
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def accepted(path: Path) -> Any:
    """Return the arguments that `accelerate launch` reads from a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    with contextlib.redirect_stdout(io.StringIO()):
        return launch._validate_launch_command(args)[0]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_from_yaml_reads_the_file_of_write_basic_config(tmp_path, precision):
    from accelerate.utils import write_basic_config

    path = tmp_path / "default_config.yaml"
    assert write_basic_config(precision, str(path))
    config = LaunchConfig.from_yaml(path)
    assert (config.mixed_precision, config.num_processes) == (precision, 1)
    assert config.to_yaml(path) == path
    assert LaunchConfig.from_yaml(path) == config
    assert accepted(path).mixed_precision == precision


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_processes": 2, "devices": "cpu"},
        {"mixed_precision": "no", "gradient_accumulation_steps": 1, "comm_hook": "no"},
        {"num_processes": 4, "devices": "cpu", "shard": 2},
        {"num_processes": 4, "env": {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}},
        {"num_processes": 2, "env": {**FSDP, "A": "b", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head"}},
        {"num_processes": 3, "mixed_precision": "bf16", "gradient_accumulation_steps": 4, "seed": 7},
        {"backend": None, "env": {"A": "b: c # d", "É": "\n"}, "timeout": 60, "max_restarts": 1, "detached": True},
    ],
)
def test_written_file_is_accepted_by_accelerate_and_read_back_equal(tmp_path, num_gpus, options):
    config = LaunchConfig(**options)
    path = config.to_yaml(tmp_path / "new" / "config.yaml")
    assert LaunchConfig.from_yaml(path) == config
    args = accepted(path)
    assert args.num_processes == options.get("num_processes", num_gpus or 4)
    assert args.mixed_precision == (config.mixed_precision or "no")
    assert bool(args.use_cpu) is (not num_gpus or config.devices == "cpu")
    sharded = "shard" in options or "ACCELERATE_USE_FSDP" in config.env
    assert args.use_fsdp is sharded
    assert args.multi_gpu is (not args.use_cpu and args.num_processes > 1 and not sharded)


SHARDED = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
num_processes: 2
use_cpu: true
"""


def test_sharding_of_a_file_reaches_the_ranks_and_is_written_back(path):
    path.write_text(SHARDED)
    config = LaunchConfig.from_yaml(path)
    assert config.to_yaml(path) == path
    assert yaml.safe_load(SHARDED).items() <= yaml.safe_load(path.read_text()).items()

    def look():
        accelerator = Accelerator()
        plugin: Any = accelerator.state.fsdp_plugin
        return accelerator.is_fsdp2, plugin.reshard_after_forward, plugin.transformer_cls_names_to_wrap

    assert list(notebook_launch(look, config=config, output="none")) == [(True, False, ["Block"])] * 2


def test_open_precision_removes_the_one_in_the_file(path):
    LaunchConfig(mixed_precision="bf16").to_yaml(path)
    config = LaunchConfig(num_processes=1)
    assert LaunchConfig.from_yaml(config.to_yaml(path)) == config
    assert accepted(path).mixed_precision == "no"


def test_chosen_gpus_are_written_and_cannot_be_shared(path, monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda: machine(4))
    config = LaunchConfig(devices=(1, 3))
    config.to_yaml(path)
    assert accepted(path).gpu_ids == "1,3"
    assert LaunchConfig.from_yaml(path) == config
    with pytest.raises(ConfigError, match=r"num_processes=4 with devices=\[0\]: Accelerate cannot let processes share"):
        LaunchConfig(num_processes=4, devices=(0,)).to_yaml(path)


def test_edited_keys_replace_the_comment(path, monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda: machine(4))
    LaunchConfig(gradient_accumulation_steps=4).to_yaml(path)
    assert '"gradient_accumulation_steps": 4' in path.read_text().splitlines()[0]
    path.write_text(path.read_text().replace("num_processes: 4", "num_processes: 3"))
    config = LaunchConfig.from_yaml(path)
    assert (config.num_processes, config.gradient_accumulation_steps) == (3, 4)


def test_foreign_keys_are_kept_and_listed_in_a_warning(path):
    kept = {"downcast_bf16": "yes", "debug": True, "main_process_port": 29501}
    path.write_text(yaml.safe_dump({"distributed_type": "NO", "num_processes": 1, **kept}))
    with pytest.warns(UserWarning, match=r"config.yaml: ignored: debug: True, downcast_bf16: yes\.$"):
        config = LaunchConfig.from_yaml(path)
    LaunchConfig.build(config, {"num_processes": 2, "devices": "cpu"}).to_yaml(path)
    written = yaml.safe_load(path.read_text())
    assert {key: written[key] for key in kept} == kept
    assert (written["num_processes"], written["distributed_type"]) == (2, "MULTI_CPU")
    assert accepted(path).main_process_port == 29501


def test_compiler_of_a_file_reaches_the_ranks(path):
    section = {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": False}
    path.write_text(yaml.safe_dump({"distributed_type": "NO", "num_processes": 1, "dynamo_config": section}))
    with pytest.warns(UserWarning, match=r"config.yaml: ignored: dynamo_mode: max-autotune\.$"):
        config = LaunchConfig.from_yaml(path)
    assert config.env == {"ACCELERATE_DYNAMO_BACKEND": "aot_eager"}
    backend = notebook_launch(lambda: Accelerator().dynamo_backend, config=config, devices="cpu", monitor=False)
    assert backend[0] == "aot_eager"
    config.to_yaml(path)
    assert yaml.safe_load(path.read_text())["dynamo_config"] == section
    assert accepted(path).dynamo_backend == "AOT_EAGER"
    LaunchConfig(num_processes=1).to_yaml(path)
    assert "dynamo_config" not in yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("keys", "backend"),
    [
        ("dynamo_backend: EAGER", "eager"),
        ("dynamo_config: {backend: EAGER}", "eager"),
        ("dynamo_config: {dynamo_backend: 'NO', dynamo_mode: max-autotune}", None),
    ],
)
def test_compiler_is_read_from_files_of_all_versions(tmp_path, path, keys, backend):
    path.write_text(f"distributed_type: MULTI_CPU\nnum_processes: 2\n{keys}\n")
    config = LaunchConfig.from_yaml(path)
    assert config.env == ({} if backend is None else {"ACCELERATE_DYNAMO_BACKEND": backend})
    other = config.to_yaml(tmp_path / "other.yaml")
    assert LaunchConfig.from_yaml(other) == config
    assert accepted(other).dynamo_backend.lower() == (backend or "no")


DEEPSPEED = """\
distributed_type: DEEPSPEED
num_processes: 2
mixed_precision: bf16
use_cpu: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  zero3_init_flag: true
  zero_stage: 3
"""
"""File that `accelerate config` of 1.15 writes for ZeRO stage 3, without the keys that all files have."""


def test_deepspeed_section_becomes_the_variables_of_accelerate_launch_and_is_kept(path, monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda: machine(4))
    path.write_text(DEEPSPEED)
    config = LaunchConfig.from_yaml(path)
    assert (config.num_processes, config.mixed_precision, config.gradient_accumulation_steps) == (2, "bf16", 4)
    assert dict(config.env) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }
    assert LaunchConfig.from_yaml(config.to_yaml(path)) == config
    written = yaml.safe_load(path.read_text())
    assert (written["distributed_type"], written["deepspeed_config"]["zero_stage"]) == ("DEEPSPEED", 3)
    LaunchConfig(num_processes=2).to_yaml(path)
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_GPU", "DeepSpeed is no longer asked for"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (ASKED, {"num_processes": 2, "devices": [0, 2], "mixed_precision": "bf16"}),
        ("distributed_type: NO\nmixed_precision: no\nuse_cpu: true\n", {**NO, "devices": "cpu"}),
        ("distributed_type: NO\nfp16: true\n", {"num_processes": 1, "mixed_precision": "fp16"}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\ngpu_ids: all\n", {}),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", {"num_processes": 2, "devices": "cpu"}),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\n", {"num_processes": 2, "env": DEEPSPEED_ALONE}),
    ],
)
def test_from_yaml_reads_the_file_of_accelerate_config_and_older_and_shorter_ones(path, text, config):
    path.write_text(text)
    assert LaunchConfig.from_yaml(path) == LaunchConfig(**config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MULTI_GPU\nnum_machines: 2\n", r"it has num_machines: 2, but a launch reaches other mach"),
        ("distributed_type: XLA\n", r"distributed_type: XLA, and it is for a TPU. Use `accelerate launch`"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", r"AMAZON_SAGEMAKER, but a notebook"),
        ("distributed_type: NO\nmixed_precision: fp8\n", r"mixed_precision: fp8, and it can be no, fp16, bf16"),
        ("distributed_type: NO\nmixed_precision: bf61\n", r"config.yaml: mixed_precision='bf61' is unknown. Did you"),
        ("distributed_type: MULTI_GPU\ngpu_ids: GPU-1\n", r"gpu_ids: 'GPU-1' must be 'all' or indices"),
        ("num_processes: 2\n", r"has no distributed_type, so it is not a settings file of Accelerate"),
        ("- 1\n", r"has no distributed_type"),
        ("# notebook-launcher: {seed}\ndistributed_type: NO\n", r"is not JSON: .* Correct it, or remove it"),
        ("# notebook-launcher: 3\ndistributed_type: NO\n", r"must hold options by name"),
        ('# notebook-launcher: {"sed": 1}\ndistributed_type: NO\n', r"unknown option sed=. Did you mean seed=\?"),
    ],
)
def test_file_that_cannot_be_launched_is_refused_and_kept(path, text, message):
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LaunchConfig.from_yaml(path)
    with pytest.raises(ConfigError, match=message):
        LaunchConfig().to_yaml(path)
    assert path.read_text() == text


def test_missing_and_unwritable_files_raise_with_a_hint(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read: No such file or directory. `notebook-launcher"):
        LaunchConfig.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"config.yaml cannot be written: "):
        LaunchConfig().to_yaml(tmp_path / "file" / "config.yaml")
    with pytest.raises(ConfigError, match=r"Choose a name that ends in .yaml"):
        LaunchConfig().to_yaml(tmp_path / "config.json")


def test_default_path_is_that_of_accelerate(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert accelerate_yaml.default_path() == tmp_path / "accelerate/default_config.yaml"
    path = LaunchConfig(num_processes=1, seed=3).to_yaml()
    assert path == tmp_path / "accelerate/default_config.yaml"
    assert LaunchConfig.from_yaml() == LaunchConfig(num_processes=1, seed=3)
    path.rename(path.with_suffix(".json"))
    assert accelerate_yaml.default_path() == path.with_suffix(".json")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert accelerate_yaml.default_path() == tmp_path / "cache/huggingface/accelerate/default_config.yaml"
