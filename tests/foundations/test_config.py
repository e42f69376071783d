"""Options of a launch: refused values, and the words of each refusal."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, r"num_processes=0 is too small; it must be 1 or more"),
        ({"num_processes": 2.0}, r"num_processes=2.0 is a float; it must be a whole number. Write 2\."),
        ({"num_processes": "2"}, r"num_processes='2' is a str; .* Write 2 without quotes"),
        ({"num_processes": (1, 2)}, r"Arguments of the function go by name: notebook_launch\(fn, 2, args="),
        ({"devices": [0, 0]}, r"devices=\[0, 0\] names a GPU twice"),
        ({"devices": []}, r"devices=\[\] is empty. Pass 'cpu'"),
        ({"devices": "gpu"}, r"devices='gpu' is unknown. Pass a list of GPU indices"),
        ({"backend": "nccll"}, r"backend='nccll' is unknown. Did you mean 'nccl'\? It can be 'auto'"),
        ({"backend": 3}, r"backend=3 is unknown. It can be .* or None"),
        ({"mixed_precision": "bf61"}, r"mixed_precision='bf61' is unknown. Did you mean 'bf16'\?"),
        ({"max_restarts": -1}, r"max_restarts=-1 is too small; it must be 0 or more"),
        ({"seed": 2**32}, r"seed=4294967296 is too large; it must be 4294967295 or less"),
        ({"timeout": 0}, r"timeout=0 must be more than 0 seconds and finite; None means no limit"),
        ({"timeout": float("nan")}, r"timeout=nan must be more than 0 seconds"),
        ({"timeout": "10"}, r"timeout='10' is a str; it must be a number of seconds"),
        ({"max_grad_norm": 0}, r"max_grad_norm=0 must be more than 0 and finite; None means no clipping"),
        ({"comm_hook": "powersgd"}, r"comm_hook='powersgd' is unknown. Did you mean 'power_sgd'\? It can be 'no'"),
        ({"detached": 1}, r"detached=1 is an int; it must be True or False\."),
        ({"check_ranks": "no"}, r"check_ranks='no' is a str; it must be True, False or None\."),
        ({"runs_folder": ""}, r"runs_folder='' is not a path\. Pass a folder, 'auto', or None"),
        ({"tags": {"a": 1}}, r"are not tags\. Pass words"),
        ({"env": {"A": 1}}, r"env\['A'\]=1: names and values must be strings. Write 'A': '1'"),
        ({"env": {"A=B": "1"}}, r"must not be empty or contain '='"),
        ({"env": {"A": "\ud800"}}, r"it cannot be put into an environment \(surrogates not allowed\)"),
        (
            {"env": {"RANK": "8"}},
            r"env\['RANK'\]='8': the launcher sets .* Leave it out: num_processes= sets how many ranks",
        ),
        ({"env": {"MASTER_PORT": "1"}}, r"'MASTER_PORT'.* Leave it out: the launcher binds a free port"),
        ({"env": {"TORCHELASTIC_MAX_RESTARTS": "1"}}, r"Leave it out: max_restarts= sets it"),
        ({"env": {"NCCL_SOCKET_IFNAME": "eth0"}}, r"Leave it out: it is loopback on one machine, and network= of"),
        ({"env": ["A"]}, r"env=\['A'\] is a list; it must map names to strings"),
    ],
)
def test_invalid_option_raises_config_error_with_its_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        LaunchConfig(**options)
    assert [refusal.value.field] == list(options)


@pytest.mark.parametrize(
    ("options", "variable", "other", "equal"),
    [
        ({"mixed_precision": "bf16"}, "ACCELERATE_MIXED_PRECISION", "fp16", "BF16"),
        ({"gradient_accumulation_steps": 2}, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "2"),
        ({"threads_per_process": 3}, "OMP_NUM_THREADS", "5", "3"),
        ({"check_collectives": True}, "TORCH_DISTRIBUTED_DEBUG", "OFF", "DETAIL"),
        ({"devices": [0, 1]}, "CUDA_VISIBLE_DEVICES", "2,3", "0, 1"),
        ({"devices": "cpu"}, "HIP_VISIBLE_DEVICES", "0", "-1"),
    ],
)
def test_env_that_contradicts_an_option_is_refused(
    options: dict[str, Any], variable: str, other: str, equal: str
) -> None:
    (name, value) = next(iter(options.items()))
    words = f"env['{variable}']='{other}' contradicts {name}={value!r}, which sets the same. Write one of the two"
    with pytest.raises(ConfigError, match=re.escape(words)) as refusal:
        LaunchConfig(**options, env={variable: other})
    assert refusal.value.field == "env"
    assert LaunchConfig(**options, env={variable: equal}).env == {variable: equal}
    assert LaunchConfig(env={variable: other}).env == {variable: other}


def test_env_may_be_the_kernels_own_environment_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"RANK", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}
    for name in chosen:
        monkeypatch.setenv(name, "7")
    options: dict[str, Any] = {"threads_per_process": 3, "gradient_accumulation_steps": 2}
    env = LaunchConfig(**options, env={**os.environ, "MORE": "1"}).env
    assert env["MORE"] == "1"
    assert env["PATH"] == os.environ["PATH"]
    assert not chosen & env.keys()
    with pytest.raises(ConfigError, match=r"'OMP_NUM_THREADS'.* contradicts threads_per_process=3"):
        LaunchConfig(**options, env={**os.environ, "OMP_NUM_THREADS": "5"})
    with pytest.raises(ConfigError, match=r"'RANK'.* Leave it out"):
        LaunchConfig(env={"RANK": "7"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("mixed_precison", r"unknown option mixed_precison=. Did you mean mixed_precision=\?"),
        ("use_port", r"unknown option use_port=. The launcher binds a port of its own"),
        (
            "num_nodes",
            r"unknown option num_nodes=. It is called nodes here. Name the machines by an engine: engine=SSH",
        ),
        ("function", r"unknown option function=. It is called fn here"),
        ("accumulate_grad_batches", r"=. It is called gradient_accumulation_steps here"),
        ("dynamo_backend", r"Accelerator\(dynamo_backend='inductor'\)"),
        ("qqqqqq", r"unknown option qqqqqq=. help\(LaunchConfig\) lists the options"),
    ],
)
def test_unknown_option_raises_config_error_with_a_hint(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        LaunchConfig.build(None, {option: 1})
    assert refusal.value.field is None
    assert ConfigError.field is None


def test_field_of_a_config_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("num_processes=0 is too small", field="num_processes")))
    assert (str(error), error.field) == ("num_processes=0 is too small", "num_processes")


def test_options_replace_those_of_a_config_and_another_type_is_refused() -> None:
    config = LaunchConfig(num_processes=2, mixed_precision="bf16")
    assert LaunchConfig.build(config, {"num_processes": 4}) == LaunchConfig(num_processes=4, mixed_precision="bf16")
    with pytest.raises(ConfigError, match=r"config=\{\} is a dict. Pass a LaunchConfig, or options by name"):
        LaunchConfig.build({}, {})  # type: ignore[arg-type]


def test_config_is_frozen_and_survives_pickling() -> None:
    config = LaunchConfig(num_processes=2, devices=[1, 0], env={"A": "b"})  # type: ignore[arg-type]
    assert config.devices == (1, 0)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.num_processes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.env["A"] = "c"  # type: ignore[index]
