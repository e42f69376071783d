"""Accelerate's settings file, `default_config.yaml`: `accelerate config` writes it and `accelerate launch` reads it.

`accelerate launch` refuses a file with an unknown key (accelerate 1.15, `ClusterConfig.from_yaml_file`), and Accelerate
has no keys for most options of this package. These options are written into a comment:

    # notebook-launcher: {"backend": "gloo", "gradient_accumulation_steps": 4}
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.files import read_text, replace_file
from notebook_launcher.settings.option_checks import CHOICES
from notebook_launcher.wording import is_secret, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------------------------
# Sections of Accelerate's settings file, and the variables that `accelerate launch` makes of them.
#
# Two are about sharding, and one, `dynamo_config`, is about compiling.


SECTIONS = {"fsdp_config": "FSDP_", "parallelism_config": "PARALLELISM_CONFIG_"}
"""Keys of sections, each with the prefix of its variables."""
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables whose keys in the file have other names."""
COMPILER_KEYS = ("dynamo_config", "dynamo_backend")
"""Keys about the compiler: the section, and the key of older files."""
COMPILER = "ACCELERATE_DYNAMO_BACKEND"
SHARD_ALONE = {"fsdp_config": {"fsdp_version": 2}}
"""The section that is written for `shard`, which is in the comment."""


def variables_of(values: Mapping[str, Any], *, shard: Any) -> dict[str, str]:
    """Return the variables of a file's sections; a section that was written for the option `shard` adds nothing."""
    sections = {key: values[key] for key in SECTIONS if isinstance(values.get(key), dict)}
    shards = values.get("distributed_type") == "FSDP"
    if not (shards or values.get("use_parallelism_config")) or (shard is not None and sections == SHARD_ALONE):
        return {}
    found = {USE_FSDP: "true"} if shards else {USE_PARALLELISM: "true"}
    for section in sections.values():
        for key, value in section.items():
            if value is not None:
                found[variable_of(key)] = _variable_text(value)
    return found


def sections_of(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections that options stand for, and the variables that are in no section."""
    env = dict(options.get("env", {}))
    if env.pop(USE_FSDP, "").lower() != "true":
        sections: dict[str, Any] = dict(SHARD_ALONE) if options.get("shard", 1) > 1 else {}
        return sections, dict(options.get("env", {}))
    names = {variable: key for key, variable in OTHER_NAMES.items()}
    sections = {key: {} for key in SECTIONS}
    for name in list(env):
        for key, prefix in SECTIONS.items():
            if name.startswith(prefix):
                sections[key][names.get(name, name).lower()] = _value(env.pop(name))
    return {key: section for key, section in sections.items() if section or key == "fsdp_config"}, env


def compiler_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings of the compiler by their full names; empty if the file asks for no compiler."""
    section = values.get("dynamo_config") or {}
    if not isinstance(section, dict):
        return {}
    found = {key if key.startswith("dynamo_") else f"dynamo_{key}": value for key, value in section.items()}
    found.setdefault("dynamo_backend", values.get("dynamo_backend"))
    # YAML reads a bare NO as false.
    return {} if str(found["dynamo_backend"] or "no").lower() == "no" else found


def _value(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() and str(int(text)) == text else text


# --------------------------------------------------------------------------------------------------------------------
# The section `deepspeed_config` of Accelerate's settings file, as the variables that `accelerate launch` sets.


KIND = "DEEPSPEED"
SECTION = "deepspeed_config"
SWITCH = "ACCELERATE_USE_DEEPSPEED"
VARIABLES = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
}
"""Keys of the section, each with its variable (accelerate 1.15, `prepare_deepspeed_cmd_env`)."""


def deepspeed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a launch that a settings file with `distributed_type: DEEPSPEED` gives."""
    if values.get("distributed_type") != KIND:
        return {}
    section = values.get(SECTION) or {}
    given = {key: section[key] for key in VARIABLES if section.get(key) is not None}
    env = {SWITCH: "true", **{VARIABLES[key]: _variable_text(value) for key, value in given.items()}}
    steps = section.get("gradient_accumulation_steps")
    return {"env": env, **({} if steps in (None, "auto") else {"gradient_accumulation_steps": steps})}


def variable_of(key: str) -> str:
    """Return the variable that stands for a key of a section."""
    return VARIABLES.get(key) or OTHER_NAMES.get(key.upper(), key.upper())


def _variable_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MARK = "# notebook-launcher: "
LOADING = (
    "BASH_ENV", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONPATH",
    "PYTHONSTARTUP", "PYTHONUSERBASE",
)  # fmt: skip
"""Variables by which a process loads code that nobody has typed."""
SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", KIND)
INSTEAD = {
    "MEGATRON_LM": "it splits the model with Megatron-LM, which ranks of a notebook do not run",
    "XLA": "it is for a TPU",
    "TPU": "it is for a TPU",
}
OWN_KEYS = ("distributed_type", "gpu_ids", "mixed_precision", "num_processes", "use_cpu")
"""Keys that a save replaces; all other keys stay as they are."""
HARMLESS_KEYS = ("compute_environment", "machine_rank", "main_process_ip", "main_process_port",
                 "main_training_function", "num_machines", "rdzv_backend", "same_network")  # fmt: skip
"""Keys without a meaning here, where one kernel starts all ranks and binds its own port."""
NEW_FILE = {"compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "num_machines": 1}


MAX_LENGTH = 100_000
"""Bytes of a settings file that is read; `accelerate config` writes about 1,000."""
MAX_SCALAR = 1_000
"""Characters of one value, of which messages may quote the whole."""
MAX_ALIASES = 8
"""Uses of anchors: each may double what a file stands for."""
MAX_DEPTH = 16
MAX_VALUES = 2_000
"""Keys and values of a file; `accelerate config` writes about 100. PyYAML takes 0.1 ms for each."""
MAX_IGNORED = 40
"""Ignored settings that are listed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateFile:
    """Contents of a settings file."""

    path: Path
    options: dict[str, Any]
    """Fields of `LaunchConfig` that the file gives, by name; their values are not checked yet."""
    ignored: tuple[str, ...]
    """Settings that a launch from here ignores, each as `key: value`; a save keeps them."""


def default_path() -> Path:
    """Return the path of Accelerate's own file, by the same variables as Accelerate; the file need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))).expanduser()
    yaml_file, json_file = (home / "accelerate" / f"default_config.{ending}" for ending in ("yaml", "json"))
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def read(path: str | os.PathLike[str] | None = None) -> AccelerateFile:
    """Read a settings file, by default Accelerate's own.

    Raises:
        ConfigError: There is no such file, it is not a settings file, or it describes what cannot be launched from a
            notebook: several machines, a TPU, Megatron-LM.
    """
    file = _given_or_default(path)
    text = _text(file)
    values = _mapping(file, text)
    _check_kind(file, values)
    options = {**_options(file, values), **_extras(file, text, values)}
    variables = variables_of(values, shard=options.get("shard"))
    if compiler := compiler_of(values):
        variables[COMPILER] = str(compiler["dynamo_backend"]).lower()
    if variables:
        options["env"] = {**variables, **options.get("env", {})}
    return AccelerateFile(path=file, options=options, ignored=_ignored(values))


def path_to_write(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the path at which `write` can write a file, by default Accelerate's own; raise `ConfigError` for JSON."""
    file = _given_or_default(path)
    if file.suffix == ".json":
        raise ConfigError(
            f"{file}: options of this package are written as a comment, and JSON has no comments. Choose a name that "
            "ends in .yaml."
        )
    return file


def write(file: Path, options: Mapping[str, Any], *, num_processes: int, use_gpu: bool) -> None:
    """Write a settings file that `accelerate launch` accepts; keys of a file that is there are kept.

    The file is from `path_to_write`; one that is there must be one that `read` accepts. The options are the fields of
    `LaunchConfig` that differ from their defaults. `accelerate launch` needs the number of processes, also where they
    leave it open. Raises `ConfigError` if the file cannot be written, or Accelerate cannot carry out the options.
    """
    import yaml

    kept: Mapping[str, Any] = _mapping(file, _text(file)) if file.exists() else NEW_FILE
    given = options.get("env", {})
    secret = sorted(name for name, value in given.items() if is_secret(name, value))
    loading = sorted(given.keys() & {*LOADING})
    env = {name: value for name, value in given.items() if name not in (*secret, *loading)}
    backend = env.pop(COMPILER, "no")
    values, extras = _values({**options, "env": env}, num_processes, use_gpu=use_gpu)
    if backend != "no":  # with further keys of the file before
        values["dynamo_config"] = {**compiler_of(kept), "dynamo_backend": backend.upper()}
    if kept.get("distributed_type") == KIND and SWITCH in env:
        values["distributed_type"] = KIND
    replaced = ("fp16", "mixed_precision", *SECTIONS, *COMPILER_KEYS)
    kept = {key: value for key, value in kept.items() if key not in replaced}
    text = yaml.safe_dump({**kept, **values})
    if extras:
        text = f"{MARK}{json.dumps(extras, sort_keys=True, default=dict)}\n{text}"
    for names, why in ((loading, "they load code"), (secret, "their values are secrets")):
        if names:
            text = f"# Not written, because {why}: {', '.join(names)}. Pass them as env=.\n{text}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda part: part.write_text(text, encoding="utf-8"), mode=0o600 if env else 0o666)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error


def _given_or_default(path: str | os.PathLike[str] | None) -> Path:
    return default_path() if path is None else Path(path).expanduser()


def _text(file: Path) -> str:
    try:
        return read_text(file, MAX_LENGTH)
    except (OSError, UnicodeDecodeError) as error:
        hint = " `notebook-launcher config` writes one." if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.{hint}") from error


def _mapping(file: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        _check_bounds(file, text)
        values = yaml.safe_load(text)
    except ConfigError:
        raise
    # A number of many digits and a date that does not exist are ValueErrors.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not YAML: {one_line(error)}") from error
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise ConfigError(
            f"{file} has no distributed_type, so it is not a settings file of Accelerate. `notebook-launcher config` "
            "writes one."
        )
    if values["distributed_type"] is False:
        values["distributed_type"] = "NO"  # YAML reads a bare NO as false
    for name, section in {
        "": values,
        **{name: values.get(name) or {} for name in (*SECTIONS, SECTION, COMPILER_KEYS[0])},
    }.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{file}: {name}: {one_line(section)} must hold settings by name.")
        if odd := [key for key in section if not isinstance(key, str)]:
            raise ConfigError(f"{file}: the key {one_line(repr(odd[0]))} is no name. Correct it, or remove it.")
    return values


def _check_bounds(file: Path, text: str) -> None:
    """Refuse a file of a few lines that stands for gigabytes, before anything is made of it."""
    import yaml

    depth = num_aliases = num_values = 0
    for event in yaml.parse(text):
        num_values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_aliases += isinstance(event, yaml.AliasEvent)
        is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR
        limits = {
            f"a value of more than {MAX_SCALAR:,} characters": is_long,
            f"more than {MAX_ALIASES} aliases": num_aliases > MAX_ALIASES,
            f"more than {MAX_VALUES:,} keys and values": num_values > MAX_VALUES,
            f"more than {MAX_DEPTH} levels": depth > MAX_DEPTH,
        }
        for what, exceeded in limits.items():
            if exceeded:
                line = event.start_mark.line + 1
                raise ConfigError(
                    f"{file}, line {line}: {what}; no settings file of Accelerate has that. Write it out."
                )


def _check_kind(file: Path, values: Mapping[str, Any]) -> None:
    kind = str(values["distributed_type"])
    machines, where = values.get("num_machines", 1), values.get("compute_environment", "LOCAL_MACHINE")
    why = ""
    if where != "LOCAL_MACHINE":
        why = f"compute_environment: {one_line(where)}, but a notebook does not launch in a cloud"
    elif machines not in (None, 1):
        why = f"num_machines: {one_line(machines)}, but a launch reaches other machines by engine= alone"
    elif kind not in SUPPORTED:
        why = f"distributed_type: {one_line(kind)}, and {INSTEAD.get(kind, 'ranks run on CPUs or NVIDIA GPUs')}"
    elif values.get("mixed_precision") == "fp8":
        why = f"mixed_precision: fp8, and it can be {', '.join(CHOICES['mixed_precision'].words)}"
    if why:
        raise ConfigError(
            f"{file} cannot be launched from a notebook: it has {why}. Use `accelerate launch`, or another file."
        )


def _options(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options from Accelerate's keys."""
    num, precision = values.get("num_processes", -1), values.get("mixed_precision")
    if values["distributed_type"] == "NO":
        num = values.get("num_processes", 1)
    if precision is None and values.get("fp16"):
        precision = "fp16"  # the form of older versions
    uses_cpu = values.get("use_cpu") or values["distributed_type"] == "MULTI_CPU"
    if precision is False:
        precision = "no"  # YAML reads a bare `no` as false.
    return {
        "num_processes": None if num in (None, -1) else num,
        "mixed_precision": precision,
        "devices": "cpu" if uses_cpu else _devices(file, values.get("gpu_ids")),
        **deepspeed_options(values),
    }


def _devices(file: Path, gpu_ids: Any) -> tuple[int, ...] | None:
    if gpu_ids in (None, "all"):
        return None
    try:
        return tuple(int(item) for item in str(gpu_ids).split(","))
    except ValueError:
        shown = one_line(repr(gpu_ids))
        raise ConfigError(f"{file}: gpu_ids: {shown} must be 'all' or indices such as '0,1'.") from None


def _extras(file: Path, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options from the comment; keys that were changed since it was written replace them."""
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    if line is None:
        return {}
    shown = one_line(line)
    try:
        extras = json.loads(line.removeprefix(MARK))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: the line {shown!r} is not JSON: {error}. Correct it, or remove it.") from error
    if not isinstance(extras, dict):
        raise ConfigError(f"{file}: the line {shown!r} must hold options by name. Correct it, or remove it.")
    if "setup" in extras:
        raise ConfigError(
            f"{file}: setup is code, and settings files hold none. Remove it from {shown!r}, and pass setup= to the "
            "launch."
        )
    if loading := sorted({*LOADING} & set(extras["env"] if isinstance(extras.get("env"), dict) else ())):
        raise ConfigError(
            f"{file}: env sets {', '.join(loading)}, which loads code, and settings files hold none. Remove it from "
            f"{shown!r}, and pass env={{{loading[0]!r}: ...}} to the launch."
        )
    written = extras.pop("written", {})
    if not isinstance(written, dict) or any(values.get(key) != value for key, value in written.items()):
        for key in ("devices", "num_processes"):
            extras.pop(key, None)
    return extras


def _ignored(values: Mapping[str, Any]) -> tuple[str, ...]:
    kind = values["distributed_type"]
    sections = SECTIONS if kind == "FSDP" else (SECTION,) if kind == KIND else ()
    silent = (*OWN_KEYS, *HARMLESS_KEYS, *sections, "fp16", *COMPILER_KEYS)
    asked = {key: value for key, value in values.items() if key not in silent and value not in (None, "no", "NO")}
    asked |= {
        key: value for key, value in compiler_of(values).items() if key not in COMPILER_KEYS and value != "default"
    }
    ignored = [one_line(f"{key}: {value}") for key, value in asked.items() if value]
    more = len(ignored) - MAX_IGNORED
    return (*ignored[:MAX_IGNORED], *([f"and {more} more"] if more > 0 else []))


def _values(options: Mapping[str, Any], num: int, *, use_gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of Accelerate's keys, and the options for our comment."""
    gpus = options["devices"] if isinstance(options.get("devices"), tuple) else None
    if gpus is not None and num > len(gpus):
        raise ConfigError(
            f"num_processes={num} with devices={list(gpus)}: Accelerate cannot let processes share a GPU, "
            "so this cannot be written for it. Choose a GPU for each process.",
            field="num_processes",
        )
    sections, env = sections_of(options)
    several = "FSDP" if sections else "MULTI_GPU" if use_gpu else "MULTI_CPU"
    values = {
        "distributed_type": "NO" if num == 1 else several,
        "gpu_ids": "all" if gpus is None else ",".join(map(str, gpus)),
        **({"mixed_precision": options["mixed_precision"]} if "mixed_precision" in options else {}),
        "num_processes": num,
        "use_cpu": not use_gpu,
        **(sections if num > 1 else {}),
    }
    extras = {name: value for name, value in options.items() if name not in ("devices", "env", *values)}
    env = env if num > 1 else options.get("env", {})
    extras |= {"env": env} if env else {}
    left_open = [name for name in ("num_processes", "devices") if name not in options]
    if use_gpu and "devices" in left_open:
        left_open.remove("devices")  # `gpu_ids: all` has the same meaning
    if left_open:
        written = {key: values[key] for key in ("num_processes", "use_cpu")}
        extras |= {**dict.fromkeys(left_open), "written": written}
    return values, extras
