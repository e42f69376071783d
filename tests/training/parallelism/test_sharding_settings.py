"""The records of sharding: FSDP1's names, variables, and errors that name what is valid."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import ConfigError, LaunchConfig, ParallelismConfig
from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from notebook_launcher.training.parallelism.mesh import make_layout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"reshard_after_forward": True, "cpu_offload": False, "fsdp_version": 2, "auto_wrap_policy": None}),
        ({"fsdp_version": 1}, {"reshard_after_forward": True, "sharding_strategy": None}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": "shard_grad_op"}, {"reshard_after_forward": False}),
        ({"sharding_strategy": 2, "reshard_after_forward": True}, {"reshard_after_forward": True}),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, {"sharding_strategy": "HYBRID_SHARD_ZERO2"}),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 9}, {"auto_wrap_policy": "SIZE_BASED_WRAP"}),
        ({"transformer_cls_names_to_wrap": "A, B"}, {"transformer_cls_names_to_wrap": ["A", "B"]}),
        ({"state_dict_type": "sharded_state_dict"}, {"state_dict_type": "SHARDED_STATE_DICT"}),
        ({"use_orig_params": True, "backward_prefetch": "NO_PREFETCH"}, {"dropped": ("use_orig_params",)}),
    ],
)  # fmt: skip
def test_settings_of_both_versions_are_understood(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    plugin = Plugin(**arguments)
    assert {name: getattr(plugin, name) for name in expected} == expected


def test_torchs_own_records_are_understood() -> None:
    from torch.distributed.fsdp import (
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardingStrategy,
        StateDictType,
    )

    plugin = Plugin(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True),
        state_dict_type=StateDictType.FULL_STATE_DICT,
        mixed_precision_policy=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    )
    assert (plugin.sharding_strategy, plugin.cpu_offload) == ("SHARD_GRAD_OP", True)
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert Plugin(mixed_precision_policy=policy, cpu_offload=CPUOffloadPolicy()).mixed_precision_policy == policy
    assert Plugin(mixed_precision_policy={"param_dtype": "bf16"}).mixed_precision_policy.param_dtype == torch.bfloat16
    assert Plugin(mixed_precision_policy="bf16").mixed_precision_policy.reduce_dtype == torch.float32


def test_models_are_not_shared_out_over_gpus_by_gloo() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(RuntimeError, match=r"sharding of models on GPUs with gloo, .* torch's sharding needs NCCL"):
            make_layout(None, Plugin(), launched=2, num_processes=2, process_index=0, device=torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


def test_variables_give_what_the_code_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RESHARD_AFTER_FORWARD": "false", "OFFLOAD_PARAMS": "true", "MIN_NUM_PARAMS": "7"}
    classes = {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "Block"}
    for name, value in {**variables, **classes}.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    plugin = Plugin(cpu_offload=False)
    assert (plugin.reshard_after_forward, plugin.cpu_offload, plugin.min_num_params) == (False, False, 7)
    assert (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap) == ("TRANSFORMER_BASED_WRAP", ["Block"])
    assert ParallelismConfig().dp_shard_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "two")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_DP_SHARD_SIZE='two' is a str; it must be a whole number"):
        ParallelismConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_strategy": "FULL_SHARDS"}, "sharding_strategy='FULL_SHARDS' is unknown. Did you mean 'FULL_SHARD'"),
        ({"sharding_strategy": 2, "reshard_after_forward": "FULL_SHARD"}, "sharding_strategy='?2'? and .* differ"),
        ({"auto_wrap_policy": "transformer"}, "auto_wrap_policy='transformer' is unknown. Did you mean 'TRANSFORMER_B"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "'LOCAL_STATE_DICT' is not supported: only the same number of ranks"),
        ({"cpu_offload": "perhaps"}, "cpu_offload='perhaps' must be True or False"),
        ({"min_num_params": -1}, "min_num_params=-1 is too small"),
        ({"activation_checkpointing_offload": True}, "is not supported. Use activation_checkpointing=True"),
        (
            {"mixed_precision_policy": "fp8"},
            "mixed_precision_policy='fp8' is unknown. It can be 'fp16', 'bf16', 'fp32'",
        ),
        ({"dp_shard_size": 0}, "dp_shard_size=0 is too small"),
        ({"cp_size": 2}, r"ParallelismConfig\(cp_size=2\): context parallelism"),
        ({"sp_size": 2}, r"ParallelismConfig\(sp_size=2\): sequence parallelism of DeepSpeed is not supported"),
    ],
)
def test_setting_without_a_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    record: Any = Plugin if arguments.keys() <= {field.name for field in fields(Plugin)} else ParallelismConfig
    with pytest.raises(ValueError, match=message):
        record(**arguments)


@pytest.mark.parametrize(
    ("config", "plugin", "launched", "message"),
    [
        (ParallelismConfig(dp_shard_size=2), None, None, "= 2, but there are 4 ranks. Write .*dp_replicate_size=2"),
        (ParallelismConfig(dp_shard_size=3), None, None, "= 3, but there are 4 ranks. 3 does not divide 4"),
        (ParallelismConfig(dp_replicate_size=4), Plugin(), None, r"every rank has a whole model. Write Para.*size=4\)"),
        (None, None, 3, "shard=3 with 4 ranks: 4 / 3 is not a whole number of replicas. It can be 1, 2, 4"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_the_ranks_are_refused_with_the_sum(config, plugin, launched, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout(config, plugin, launched=launched, num_processes=4, process_index=0, device=torch.device("cpu"))


def test_shard_of_a_launch_is_checked_before_anything_starts() -> None:
    assert LaunchConfig(num_processes=4, shard=2).shard == 2
    with pytest.raises(ConfigError, match=r"shard=3 with num_processes=4: 4 / 3 is not a whole number of replicas"):
        LaunchConfig(num_processes=4, shard=3)
    with pytest.raises(ConfigError, match="shard=0 is too small"):
        LaunchConfig(shard=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"dp_shard_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
    ],
)
def test_sizes_describe_themselves_as_accelerates_do(sizes: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    ours, theirs = ParallelismConfig(**sizes), accelerate.ParallelismConfig(**sizes)
    enabled = [f"{dimension}_enabled" for dimension in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    dimensions = ["total_size", "non_data_parallel_size", "active_mesh_dims", "dp_dim_names", "non_dp_dim_names"]
    for name in enabled + dimensions:
        assert getattr(ours, name) == getattr(theirs, name), name
