"""Options of `launch`: every field of `LaunchConfig`, under the names that `accelerate launch` and `torchrun` give it.

Their options that have no field are of three kinds: those with a meaning of their own here (in `add_options`), those
without any meaning where one process starts all ranks of one machine (`WITHOUT_EFFECT`), and those that ask for
something that this package does not do (`REFUSED`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import textwrap
from typing import TYPE_CHECKING, Any

from notebook_launcher.command_line.field_help import field_help
from notebook_launcher.command_line.parser import Once, Parser, words_of
from notebook_launcher.command_line.sharding_options import DYNAMO, SWITCHES
from notebook_launcher.config import LaunchConfig
from notebook_launcher.errors import ConfigError
from notebook_launcher.settings.option_numbers import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "OTHER_NAMES",
    "REFUSED",
    "WITHOUT_EFFECT",
    "add_options",
    "as_typed",
    "check_words",
    "devices_of",
    "given_options",
    "without_effect",
]

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


def add_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Add all options to a parser; return them."""
    group = parser.add_argument_group("settings")
    added = [
        _add(group, "config_file", metavar="FILE", help="a settings file of Accelerate's; options win over it"),
        _add(group, "no_config_file", action="store_true", help="do not read Accelerate's default settings file"),
        _add(group, "module", short=["-m"], action="store_true", help="SCRIPT names a module, as in python -m"),
    ]
    group = parser.add_argument_group("ranks and training", "Fields of LaunchConfig, with its defaults.")
    texts = field_help(LaunchConfig)
    for field in _fields().values():
        added += _add_field(group, field, texts.get(field.name, ""))
    added += [
        _add(group, "cpu", "use_cpu", action="store_true", help="the same as --devices cpu"),
        _add(group, "multi_gpu", action="store_true", help="fail if there is no GPU, instead of using CPU ranks"),
        _add(group, "debug", action="store_true", help="compare shapes of tensors before each collective operation"),
        _add(group, "num_machines", "nnodes", metavar="N", help="with --engine: the same as --nodes; else 1"),
    ]
    group = parser.add_argument_group("sharding and compiling, as of `accelerate launch`", "Read by an Accelerator.")
    for switch, names_of_group in SWITCHES.items():
        added.append(_add(group, switch, action="store_true", help=f"with --{', --'.join(names_of_group)}"))
        for name, values in names_of_group.items():
            shown = "X" if values is None else "|".join(values)
            added.append(_add(group, name, metavar=shown, help=argparse.SUPPRESS))
    added.append(_add(group, DYNAMO, metavar="X", help="compile prepared models with this backend of torch.compile"))
    names = ", ".join(f"--{name}" for name in WITHOUT_EFFECT)
    group = parser.add_argument_group("accepted without effect", f"Named and ignored:\n{textwrap.fill(names, 110)}")
    for name in WITHOUT_EFFECT:
        how: dict[str, Any] = {"action": "store_true"} if name in FLAGS else {"metavar": "X"}
        added.append(_add(group, name, dest=f"ignored_{name}", help=argparse.SUPPRESS, **how))
    return added


def check_words(words: Sequence[str]) -> None:
    """Raise `ConfigError` for the first option before the script that is unknown or cannot work."""
    options = add_options(Parser(add_help=False))
    known = {spelling: option for option in options for spelling in option.option_strings}
    switches: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word in ("-", "--"):
            return
        typed, has_value, value = word.partition("=")
        option = known.get(typed)
        if option is None:
            if typed in ("-h", "--help"):
                return
            _refuse(typed, known)
        elif option.nargs == 0:
            earlier = switches.setdefault(option.dest, typed)
            if known[earlier].const != option.const:
                raise ConfigError(f"{earlier} and {typed} exclude each other. Leave one of them out.")
        else:
            text = value if has_value else next(rest, None)
            if text is not None and isinstance(option, Once):
                option.read(typed, text)


def _refuse(typed: str, known: Iterable[str]) -> None:
    name = typed.lstrip("-").replace("-", "_")
    for refused, reason in REFUSED.items():
        if name == refused or name.startswith(f"{refused}_"):
            raise ConfigError(f"{typed}: {reason}.")
    spelling = f"--{name}"
    longer = [other for other in known if other.startswith(spelling)]
    close = longer or difflib.get_close_matches(spelling, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else "`notebook-launcher launch --help` lists the options."
    raise ConfigError(f"unknown option {typed}. {hint} The script's own options are written after the script.")


def given_options(options: argparse.Namespace, *, has_engine: bool = False) -> dict[str, Any]:
    """Return the fields of `LaunchConfig` that were given, as its constructor takes them; raise `ConfigError`.

    Args:
        options: Options as typed.
        has_engine: True if a settings file names machines.
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
    return {**given, **_numbers_by_name(given.get("num_processes"))}


def without_effect(options: argparse.Namespace) -> dict[str, str]:
    """Return the given options that are ignored, as they were typed, each with the reason."""
    given = {name: getattr(options, f"ignored_{name}", None) for name in WITHOUT_EFFECT}
    return {
        f"--{name}" + ("" if value is True else f" {value}"): WITHOUT_EFFECT[name]
        for name, value in given.items()
        if value not in (None, False)
    }


def _numbers_by_name(number: Any) -> dict[str, Any]:
    """Return what torchrun's words for a number of processes mean."""
    if number == "cpu":
        from notebook_launcher.machine import devices

        return {"num_processes": devices.detect().num_cores, "devices": "cpu"}
    return {"num_processes": None} if number in ("auto", "gpu") else {}


def _fields() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of LaunchConfig that are options; `--debug` is Accelerate's, and a script has its own setup."""
    return {field.name: field for field in dataclasses.fields(LaunchConfig) if field.name not in ("debug", "setup")}


def _add_field(group: Any, field: dataclasses.Field[Any], text: str) -> list[argparse.Action]:
    unset = "Without it:" if field.default is None else "none:"
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
    text = text.replace("%", "%%")
    if str(field.type) in ("bool", "bool | None"):
        off = _add(group, f"no_{field.name}", action="store_false", help=f"the opposite of --{field.name}", **how)
        return [_add(group, field.name, action="store_true", help=text, **how), off]
    how["metavar"] = "N" if field.name in NUMBERS else "X"
    if field.name in SEVERAL:
        how |= {"metavar": SEVERAL[field.name], "action": "append"}
    elif reads := _reader(field):
        how["reads"] = reads
    short = ["-n"] if field.name == "num_processes" else []
    names = (field.name, *OTHER_NAMES.get(field.name, ()))
    return [_add(group, *names, short=short, help=text.replace("None:", unset), **how)]


def _add(group: Any, *names: str, short: Sequence[str] = (), **how: Any) -> argparse.Action:
    spellings = [f"--{name}" for name in names]
    spellings += [name.replace("_", "-") for name in spellings if "_" in name]
    action: argparse.Action = group.add_argument(*short, *spellings, **{"action": Once, **how})
    return action


def _value(field: dataclasses.Field[Any], text: Any) -> Any:
    """Return the value that a text means for a field; `LaunchConfig` refuses a text that means none."""
    if not isinstance(text, str):
        return _environment(text) if field.name == "env" else words_of(text) if field.name == "tags" else text
    if field.name == "devices":
        return devices_of(text)
    if field.name == "monitor":
        return {"true": True, "false": False}.get(text.lower(), text)
    return None if _takes_none(field) and text.lower() == "none" else text


def _takes_none(field: dataclasses.Field[Any]) -> bool:
    return "None" in str(field.type) and field.name != "name"


def _reader(field: dataclasses.Field[Any]) -> Callable[[str], Any] | None:
    """Return the function that reads a field's text where `LaunchConfig` takes another type; None for text."""
    if field.name == "devices":
        return _checked_devices
    if (number := NUMBERS.get(field.name)) is None:
        return None
    by_name = ("auto", "gpu", "cpu") if field.name in ("num_processes", "processes_per_node") else ()

    def read(text: str) -> Any:
        if text in by_name:
            return text
        if _takes_none(field) and text.lower() == "none":
            return None
        value = _number(text)
        if isinstance(value, str) or (number.is_whole and not isinstance(value, int)):
            raise ValueError(f"type a {'whole ' if number.is_whole else ''}number")
        return value

    return read


def _checked_devices(text: str) -> str:
    if text != "cpu" and isinstance(devices_of(text), str):
        raise ValueError("type indices of GPUs such as 0,1, or all, or cpu")
    return text


def _number(text: str) -> int | float | str:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def as_typed(error: ConfigError, given: Mapping[str, Any], typed: Mapping[str, tuple[str, str]]) -> ConfigError:
    """Return an error of `LaunchConfig` that names the option as it was typed, in the place of the field.

    Args:
        error: The error.
        given: Fields as `LaunchConfig` got them.
        typed: By field: the option and its text.
    """
    name = error.field or ""
    names = [name, "processes_per_node"] if name == "num_processes" else [name]
    found = next((typed[name] for name in names if name in typed), None)
    words = str(error)
    value = given.get(name)
    forms = [value, list(value)] if isinstance(value, tuple) else [value]  # Messages show several values as a list.
    start = next((start for form in forms if words.startswith(start := f"{name}={form!r}")), None)
    if found is None or start is None:
        return error
    return ConfigError(" ".join(found) + words.removeprefix(start).replace("None", "none"), field=name)


def devices_of(text: str) -> Any:
    """Return the devices that a text means: `0,1`, `all` or `cpu`; another text as it is."""
    if text in ("all", "cpu"):
        return None if text == "all" else text
    items = [item.strip() for item in text.split(",")]
    return tuple(map(int, items)) if all(item.isdecimal() for item in items) else text


def _environment(items: list[str]) -> Mapping[str, str]:
    for item in items:
        if "=" not in item:
            raise ConfigError(f"--env {item}: write --env NAME=VALUE.", field="env")
    return dict(item.split("=", 1) for item in items)
