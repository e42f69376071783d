"""`launch`: run a script or module on every rank, as `accelerate launch` and `torchrun` do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.parser import Command, Once, Parser, field_help, words_of
from notebook_launcher.config import LaunchConfig, changed_options, load_accelerate_file
from notebook_launcher.errors import ConfigError, LaunchError, RankFailedError, RunTimeoutError
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.settings.option_checks import NUMBERS
from notebook_launcher.wording import hidden, read_bool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType


# --------------------------------------------------------------------------------------------------------------------
# Options of `launch`: every field of `LaunchConfig`, under the names that `accelerate launch` and `torchrun` give it.
#
# Their options that have no field are of three kinds: those with a meaning of their own here (in `add_options`),
# those without any meaning where one process starts all ranks of one machine (`WITHOUT_EFFECT`), and those that ask
# for something that this package does not do (`REFUSED`).


OTHER_NAMES = {
    "processes_per_node": ("nproc_per_node",),
    "devices": ("gpu_ids",),
    "threads_per_process": ("num_cpu_threads_per_process",),
    "max_grad_norm": ("gradient_clipping",),
    "runs_folder": ("log_dir",),
    "tags": ("tag",),
}
"""By field: its names in `accelerate launch` and `torchrun`, where they differ."""

WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "master_addr", "master_port", "local_addr", "same_network"),
        "the launcher binds a port of its own on the loopback interface",
    ),
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "standalone", "machine_rank", "node_rank", "role"),
        "ranks of one machine meet at the launcher's own store",
    ),
    **dict.fromkeys(("tee", "redirects", "quiet"), "--output chooses the ranks that are shown"),
    **dict.fromkeys(("local_ranks_filter",), "--output rank0 shows rank 0 alone"),
    **dict.fromkeys(("monitor_interval",), "a rank's end is noticed at once"),
    **dict.fromkeys(("run_path", "module_path"), "a script is always run as the main program"),
    **dict.fromkeys(("enable_cpu_affinity", "numa_binding"), "--threads_per_process limits each rank's threads"),
}
"""Options that are accepted and reported as ignored, each with the reason."""
FLAGS = ("same_network", "standalone", "quiet", "run_path", "enable_cpu_affinity")
"""The ignored options that take no value."""
SEVERAL = {"env": "NAME=VALUE", "tags": "TAG"}
"""Fields whose option may be given several times, each with the word that `--help` shows for one value."""

ELSEWHERE = "use `accelerate launch` for it"
REFUSED = {
    "tpu": f"no TPU can be used here; {ELSEWHERE}",
    "deepspeed": f"it is for several machines, which --engine reaches here; or {ELSEWHERE}",
    "offload_optimizer_nvme_path": f"offloading to NVMe has no counterpart in torch; {ELSEWHERE}",
    "offload_param_nvme_path": f"offloading to NVMe has no counterpart in torch; {ELSEWHERE}",
    "use_megatron_lm": f"Megatron-LM is not supported; {ELSEWHERE}",
    "megatron_lm": f"Megatron-LM is not supported; {ELSEWHERE}",
    "parallelism_config": f"sequences are not split over ranks here; {ELSEWHERE}",
    "fp8": f"fp8 is not supported; {ELSEWHERE}",
    "mpirun": f"ranks are not started by mpirun here; {ELSEWHERE}",
    "aws": f"nothing is launched in a cloud; {ELSEWHERE}",
    "dynamo": "only --dynamo_backend is supported: for others, call torch.compile(model, ...) in the script",
    **dict.fromkeys(
        ("log_with", "project_dir", "report_to"),
        "it belongs to the script: `Accelerator(log_with=..., project_dir=...)`, or an option written after the script",
    ),
    "no_python": "ranks are Python processes: name a script, or a module with -m",
}
"""Options that cannot work, each with the reason; `--fp8_backend` is refused as `fp8`."""


def add_options(parser: Parser) -> None:
    """Add all options to a parser."""
    parser.refused, parser.reminder = REFUSED, "The script's own options are written after the script."
    group = parser.add_argument_group("settings")
    _add(group, "config_file", metavar="FILE", help="a settings file of Accelerate's; options win over it")
    _add(group, "no_config_file", action="store_true", help="do not read Accelerate's default settings file")
    _add(group, "module", short=["-m"], action="store_true", help="SCRIPT names a module, as in python -m")
    group = parser.add_argument_group("ranks and training", "Fields of LaunchConfig, with its defaults.")
    texts = field_help(LaunchConfig)
    for field in _fields().values():
        _add_field(group, field, texts.get(field.name, ""))
    _add(group, "cpu", "use_cpu", action="store_true", help="the same as --devices cpu")
    _add(group, "multi_gpu", action="store_true", help="fail if there is no GPU, instead of using CPU ranks")
    _add(group, "debug", action="store_true", help="compare shapes of tensors before each collective operation")
    _add(group, "num_machines", "nnodes", metavar="N", help="with --engine: the same as --nodes; else 1")
    group = parser.add_argument_group("sharding and compiling, as of `accelerate launch`", "Read by an Accelerator.")
    for switch, (_, needing_it) in SWITCHES.items():
        _add(group, switch, action="store_true", help=f"with --{', --'.join(needing_it)}")
        for name in needing_it:
            _add(group, name, help=argparse.SUPPRESS)
    _add(group, DYNAMO, metavar="X", help="compile prepared models with this backend of torch.compile")
    names = ", ".join(f"--{name}" for name in WITHOUT_EFFECT)
    group = parser.add_argument_group("accepted without effect", f"Named and ignored:\n{textwrap.fill(names, 110)}")
    for name in WITHOUT_EFFECT:
        how: dict[str, Any] = {"action": "store_true"} if name in FLAGS else {"metavar": "X"}
        _add(group, name, dest=f"ignored_{name}", help=argparse.SUPPRESS, **how)


def given_options(options: argparse.Namespace, *, has_engine: bool = False) -> dict[str, Any]:
    """Return the fields of `LaunchConfig` that were given, as its constructor takes them; raise `ConfigError`.

    A settings file may name machines, too (`has_engine`).
    """
    fields = _fields()
    given = {name: _value(fields[name], value) for name, value in vars(options).items() if name in fields}
    has_engine = bool(given["engine"]) if "engine" in given else has_engine
    if not has_engine and "num_processes" not in given and "processes_per_node" in given:
        given["num_processes"] = given.pop("processes_per_node")  # torchrun's usual option, and this is one node.
    if options.num_machines not in (None, "1", "1:1"):
        if not has_engine:
            raise ConfigError(
                f"--num_machines {options.num_machines}: a launch from here takes one machine, unless --engine names "
                "more: --engine slurm, or --engine 'ssh gpu1 gpu2'."
            )
        given.setdefault("nodes", _number(options.num_machines))
    if options.cpu:
        if given.get("devices", "cpu") != "cpu":
            raise ConfigError(f"--cpu and --devices {options.devices} exclude each other. Leave one of them out.")
        given["devices"] = "cpu"
    if options.debug:
        given["env"] = {"ACCELERATE_DEBUG_MODE": "true", **given.get("env", {})}
    number = given.get("num_processes")
    if number == "cpu":  # torchrun's word.
        from notebook_launcher.machine import devices

        given |= {"num_processes": devices.detect().num_cores, "devices": "cpu"}
    elif number in ("auto", "gpu"):
        given["num_processes"] = None
    return given


def _fields() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of LaunchConfig that are options; `--debug` is Accelerate's, and a script has its own setup."""
    return {field.name: field for field in dataclasses.fields(LaunchConfig) if field.name not in ("debug", "setup")}


def _add_field(group: Any, field: dataclasses.Field[Any], text: str) -> None:
    unset = "Without it:" if field.default is None else "none:"
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
    text = text.replace("%", "%%")
    if str(field.type) in ("bool", "bool | None"):
        pair = group.add_mutually_exclusive_group()
        _add(pair, field.name, action="store_true", help=text, **how)
        _add(pair, f"no_{field.name}", action="store_false", help=f"the opposite of --{field.name}", **how)
        return
    how["metavar"] = SEVERAL.get(field.name, "N" if field.name in NUMBERS else "X")
    if field.name in SEVERAL:
        how["action"] = "append"
    if field.name in NUMBERS:
        how["reads"] = _checked_number
    short = ["-n"] if field.name == "num_processes" else []
    names = (field.name, *OTHER_NAMES.get(field.name, ()))
    _add(group, *names, short=short, help=text.replace("None:", unset), **how)


def _add(group: Any, *names: str, short: Sequence[str] = (), **how: Any) -> None:
    group.add_argument(*short, *(f"--{name}" for name in names), **{"action": Once, **how})


def _value(field: dataclasses.Field[Any], text: Any) -> Any:
    """Return the value that a text means for a field; `LaunchConfig` refuses a text that means none."""
    if not isinstance(text, str):
        return _environment(text) if field.name == "env" else words_of(text) if field.name == "tags" else text
    if field.name == "devices":
        return devices_of(text)
    if field.name == "monitor":
        return {"true": True, "false": False}.get(text.lower(), text)
    if "None" in str(field.type) and field.name != "name" and text.lower() == "none":
        return None
    return _number(text) if field.name in NUMBERS else text


def _checked_number(text: str) -> str:
    if isinstance(_number(text), str) and text.lower() not in ("none", "auto", "gpu", "cpu"):
        raise ValueError("type a number")
    return text


def _number(text: str) -> int | float | str:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def devices_of(text: str) -> Any:
    """Return the devices that a text means: `0,1`, `all` or `cpu`."""
    if text in ("all", "cpu"):
        return None if text == "all" else text
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() for item in items):
        raise ConfigError(f"--devices {text}: type indices of GPUs such as 0,1, or all, or cpu.")
    return tuple(map(int, items))


def _environment(items: list[str]) -> Mapping[str, str]:
    for item in items:
        if "=" not in item:
            raise ConfigError(f"--env {item}: write --env NAME=VALUE.", field="env")
    return dict(item.split("=", 1) for item in items)


TIMED_OUT = 124
"""Exit status of a run that exceeded `--timeout`, as of timeout(1)."""
BY_SIGNAL = 128
"""Exit status of a run that a signal ended, less the signal's number, as shells have it."""


def _add_arguments(parser: Parser) -> None:
    add_options(parser)
    parser.usage = "notebook-launcher launch [OPTIONS] SCRIPT [ARGUMENTS]"
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a folder or zip file with a __main__.py")
    rest = parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    rest.required = False  # argparse would call them missing, too, where the script is.


def _run(options: argparse.Namespace) -> int:
    # Imported here: the module is for ranks, and other commands do not need it.
    from notebook_launcher.processes.rank.user_function import Script

    config = _config(options)
    script = Script(options.script, is_module=options.module)
    script.check()
    for name, reason in WITHOUT_EFFECT.items():
        value = getattr(options, f"ignored_{name}")
        if value not in (None, False):
            _say(f"ignored: --{name}{'' if value is True else f' {value}'} ({reason})")
    return _launch(script, options.words, config)


def _config(options: argparse.Namespace) -> LaunchConfig:
    config, file = LaunchConfig(), None
    default = accelerate_yaml.default_path()
    if options.config_file is not None or (default.is_file() and not options.no_config_file):
        try:
            config, file = load_accelerate_file(options.config_file)
        except ConfigError as error:
            way_out = "" if options.config_file is not None else " --no_config_file launches without it."
            raise ConfigError(f"{error}{way_out}") from None
    given = given_options(options, has_engine=config.engine is not None)
    if file is not None:
        there = {**changed_options(config), **({"env": hidden(config.env)} if config.env else {})}
        changed = [f"{name}={value}" for name, value in there.items() if name not in given]
        _say(f"settings of {file.path}: {', '.join(changed) or 'the defaults'}")
        if file.ignored:
            _say(f"ignored in {file.path}: {', '.join(file.ignored)}")
    env = {**sharding_env(vars(options), config.env), **given.get("env", {})}
    config = LaunchConfig.build(config, {**given, "env": {**config.env, **env}} if env else given)
    if options.multi_gpu:
        from notebook_launcher.machine import devices

        if why := devices.detect().why_no_gpu:
            raise ConfigError(f"--multi_gpu: {why}. Without --multi_gpu, the ranks use the CPU.")
    return config


def _launch(script: Any, words: Sequence[str], config: LaunchConfig) -> int:
    from notebook_launcher.kernel.launch import notebook_launch

    caught: list[int] = []

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        caught.append(signum)
        raise KeyboardInterrupt

    # Slurm, systemd and `kill` ask by SIGTERM; a terminal that closes, by SIGHUP. Both stop the run as Ctrl-C does.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)
    try:
        notebook_launch(script, args=tuple(words), config=config)
    except KeyboardInterrupt:
        return BY_SIGNAL + (caught[0] if caught else signal.SIGINT)
    except RunTimeoutError as error:
        _say(str(error))
        return TIMED_OUT
    except Exception as error:  # the script's own exception, of any type
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """Show a failure as a notebook's cell would; return the exit status."""
    story = vars(error).get("_render_traceback_")
    if story is None and (isinstance(error, ConfigError) or not isinstance(error, LaunchError)):
        raise error
    _show("\n".join(story()) if story is not None else f"{type(error).__name__}: {error}")
    code = error.exitcode if isinstance(error, RankFailedError) else None
    if isinstance(error, ConfigError):
        return 2
    return 1 if code is None else code if code >= 0 else BY_SIGNAL - code


def _say(text: str) -> None:
    _show(f"notebook-launcher launch: {text}")


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(
    name="launch",
    summary="run a script or module on every rank, as `accelerate launch` and `torchrun` do",
    description="""\
Run a Python script on every rank, as the main program with its own arguments. torchrun's variables are set, and the
process group exists. The script may use torch.distributed, Hugging Face Accelerate, or this package.

  notebook-launcher launch --num_processes 2 train.py --lr 0.1
  notebook-launcher launch --nproc_per_node 4 --mixed_precision bf16 -m package.train
  notebook-launcher launch --cpu --config_file settings.yaml train.py
  notebook-launcher launch --engine "ssh gpu1 gpu2" --processes_per_node 8 train.py
  notebook-launcher launch --detached train.py

Options of `accelerate launch` and `torchrun` are accepted by their names, with _ or - between the words. Options come
before the script; everything after it belongs to the script. Without --config_file, the file that `accelerate config`
or `notebook-launcher config` has written is read, if there is one.

Ctrl-C stops the run, and a second Ctrl-C kills it. With --detached, the run continues after the first Ctrl-C and after
the end of the terminal; `notebook-launcher attach` shows it again. The run leaves a folder: see `notebook-launcher
runs`. The exit status is 0, n for sys.exit(n), 128 + n for signal n, 1 for an exception, 124 for --timeout, 130 for
Ctrl-C, and 2 if nothing could be started.""",
    add_arguments=_add_arguments,
    run=_run,
)


# --------------------------------------------------------------------------------------------------------------------
# Options of `accelerate launch` about FSDP, DeepSpeed, parallelism and compilation, as the variables that it sets.
#
# An Accelerator in the script reads the variables; this package's and Hugging Face's alike.


SWITCHES = {
    "use_fsdp": (
        accelerate_yaml.USE_FSDP,
        ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
         "fsdp_min_num_params", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
         "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_state_dict_type", "fsdp_use_orig_params",
         "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing",
         "fsdp_activation_checkpointing_offload"),
    ),
    "use_parallelism_config": (
        accelerate_yaml.USE_PARALLELISM,
        tuple(f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    ),
    "use_deepspeed": (
        accelerate_yaml.SWITCH,
        ("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
         "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names"),
    ),
}  # fmt: skip
"""By option without a value: its variable, and the options that need it, whose values the Accelerator checks."""
DYNAMO = "dynamo_backend"


def sharding_env(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the options stand for; raise `ConfigError` if one stands without what it needs.

    `environ` has the variables of a settings file, which may switch FSDP or DeepSpeed on.
    """
    if options.get("use_fsdp") and options.get("use_deepspeed"):
        raise ConfigError("--use_fsdp and --use_deepspeed exclude each other. Leave one of them out.")
    env: dict[str, str] = {}
    for switch, (variable, names) in SWITCHES.items():
        given = {name: str(options[name]) for name in names if options.get(name) is not None}
        if options.get(switch):
            env[variable] = "true"
        elif given and read_bool(environ.get(variable, "")) is not True:
            first, text = next(iter(given.items()))
            raise ConfigError(f"--{first} {text} has no effect without --{switch}: write both.")
        for name, text in given.items():
            env[accelerate_yaml.variable_of(name)] = text.lower() if text.lower() in ("true", "false") else text
    if options.get(DYNAMO) is not None:
        env[accelerate_yaml.COMPILER] = options[DYNAMO].lower()
    return env
