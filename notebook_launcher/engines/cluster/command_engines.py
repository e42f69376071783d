"""Engines whose link to each node is a command's standard input and output: no port, and as private as the command."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher.engines.cluster.clusters import ClosedByWith, clusters
from notebook_launcher.engines.cluster.connections import CommandConnection
from notebook_launcher.engines.cluster.ray_engine import Ray
from notebook_launcher.errors import ConfigError
from notebook_launcher.machine.allocation import NodeInfo
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from typing_extensions import Self

    from notebook_launcher.engines.cluster.cluster_tree import ClusterTree
    from notebook_launcher.engines.cluster.connections import Greeting
    from notebook_launcher.engines.engine import Engine
    from notebook_launcher.messaging import messages


AGENT = ("-m", "notebook_launcher.engines.cluster.agent")
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""No terminal, no question that waits for an answer, and an end within 15 s if the network is cut."""


UP_PATIENCE = 60.0
"""Longest wait in seconds for the start of all agents: a login, and the start of an interpreter."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommandNodes:
    """The nodes of an engine: the command that runs each agent, and the network of the ranks."""

    commands: tuple[tuple[str, ...], ...]
    network: str | None
    patience: ClassVar[float] = UP_PATIENCE
    keep: ClassVar[float | None] = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.commands)

    def connect(self, number: int) -> CommandConnection:
        """Start the command of a node; raises `ConfigError` if it cannot start."""
        command = self.commands[number]
        try:
            return CommandConnection(command)
        except OSError as error:
            raise ConfigError(
                f"node {number}: {command[0]} does not start: {error.strerror or error}.", field="engine"
            ) from error

    def check(self, number: int, greeting: Greeting) -> None:
        """Take any agent: these hold what the machine has."""


class CommandEngine(ClosedByWith):
    """The part that engines of this module share; the nodes stay up between launches, until `close`."""

    python: str
    network: str | None
    NODES: ClassVar[str] = "hosts"
    """Name of the field that has an entry for each node."""

    def agent_commands(self) -> tuple[tuple[str, ...], ...]:
        """Return the command line of each node's agent."""
        raise NotImplementedError

    @property
    def _key(self) -> CommandNodes:
        return CommandNodes(self.agent_commands(), self.network)

    def look(self) -> tuple[NodeInfo, ...]:
        """Return the nodes with their cores and GPUs; agents that are not up are started.

        Raises:
            ConfigError: A node does not come up, has other versions of Python, torch or this package, or no network.
        """
        return tuple(
            NodeInfo(
                node.number,
                node.greeting.host,
                node.address,
                node.greeting.num_cores,
                node.greeting.gpus,
                has_folder=node.has_folder,
            )
            for node in clusters().nodes_of(self._key)
            if node.greeting is not None
        )

    def without(self, nodes: Collection[int]) -> Self | None:
        """Return the engine of the other nodes; None if there is no other one."""
        present = getattr(self, self.NODES)
        left = tuple(node for number, node in enumerate(present) if number not in nodes)
        rest = copy.copy(self)
        object.__setattr__(rest, self.NODES, left)  # Not by `replace`: Slurm finds its hosts by itself.
        return rest if left else None

    def start(self, setup: messages.Setup) -> ClusterTree:
        """Start ranks on the nodes; launches call this."""
        return clusters().start(self._key, setup)

    def close(self) -> None:
        """End the agents: idle ones now, others at the end of their launch. The next launch starts them again."""
        clusters().close(self._key)


@dataclasses.dataclass(frozen=True)
class Commands(CommandEngine):
    """Ranks on nodes that commands reach, in their order: `Commands([["docker", "exec", "-i", "worker"], ...])`.

    Each command is to run the words that are appended to it on another machine, in a container or in a namespace, and
    to pass standard input and output on. The words start an agent; the ranks are its children.

        engine = Commands([[], []])    # two nodes, both on this machine: a trial

    Raises:
        ConfigError: A value cannot work. Nodes that cannot be reached are an error of the launch, and of `look()`.
    """

    NODES: ClassVar[str] = "commands"

    commands: Sequence[Sequence[str]]
    """A command for each node: words, or one text that is split as a shell would. An empty one: this machine."""
    python: str = sys.executable
    """The interpreter of the nodes."""
    network: str | None = None
    """The network over which ranks meet: an interface's name, or addresses such as `"10.0.0.0/8"`. None: loopback if
    all nodes share it, else the first network of the first node that all have."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "commands", _commands(self.commands))

    def agent_commands(self) -> tuple[tuple[str, ...], ...]:
        """Return the command line of each node's agent."""
        return tuple((*command, self.python, *AGENT) for command in self.commands)


@dataclasses.dataclass(frozen=True)
class SSH(CommandEngine):
    """Ranks on hosts that `ssh HOST` reaches without asking for a password: `SSH(["gpu1", "gpu2"])`.

    Raises:
        ConfigError: A value cannot work.
    """

    hosts: Sequence[str]
    """Names as ssh knows them, `user@host` too."""
    python: str = sys.executable
    """The interpreter of the hosts, with the same versions of Python, torch and this package."""
    network: str | None = None
    """As in `Commands`."""
    options: Sequence[str] = ()
    """Further options of ssh, such as `("-p", "2222")`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", _words("hosts", self.hosts))
        object.__setattr__(self, "options", _words("options", self.options, may_be_empty=True))
        if bad := [host for host in self.hosts if host.startswith("-")]:
            raise ConfigError(
                f"hosts={list(self.hosts)!r}: {bad[0]!r} is an option of ssh; pass options=[...].", field="engine"
            )

    def agent_commands(self) -> tuple[tuple[str, ...], ...]:
        """Return the command line of each host's agent."""
        # ssh joins its words with spaces, and the host's shell splits them again.
        agent = shlex.join([self.python, *AGENT])
        return tuple(("ssh", *SSH_OPTIONS, *self.options, host, f"exec {agent}") for host in self.hosts)


@dataclasses.dataclass(frozen=True)
class Slurm(CommandEngine):
    """Ranks on the nodes of the Slurm allocation in which the kernel runs, reached by `srun`: `Slurm()`.

    Raises:
        ConfigError: The kernel runs in no allocation, or a value cannot work.
    """

    python: str = sys.executable
    """The interpreter of the nodes."""
    network: str | None = None
    """As in `Commands`."""
    options: Sequence[str] = ()
    """Further options of srun."""
    hosts: tuple[str, ...] = dataclasses.field(default=(), init=False)
    """The nodes of the allocation."""

    VARIABLE: ClassVar[str] = "SLURM_JOB_NODELIST"

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _words("options", self.options, may_be_empty=True))
        object.__setattr__(self, "hosts", self._allocated())

    def _allocated(self) -> tuple[str, ...]:
        nodes = os.environ.get(self.VARIABLE)
        if not nodes:
            raise ConfigError(
                f"Slurm() works inside an allocation, and {self.VARIABLE} is not set here. Start Jupyter in one: "
                "salloc --nodes=2, then jupyter lab.",
                field="engine",
            )
        scontrol = shutil.which("scontrol")
        if scontrol is None:
            raise ConfigError("Slurm() needs scontrol, which is not on PATH here.", field="engine")
        listed = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if listed.returncode or not listed.stdout.split():
            raise ConfigError(
                f"scontrol show hostnames {nodes} ended with {listed.returncode}: {listed.stderr.strip()}",
                field="engine",
            )
        return tuple(listed.stdout.split())

    def agent_commands(self) -> tuple[tuple[str, ...], ...]:
        """Return the command line of each node's agent."""
        # `--overlap`: the notebook's own step holds the allocation's cores.
        srun = ("srun", "--nodes=1", "--ntasks=1", "--overlap", *self.options)
        return tuple((*srun, f"--nodelist={host}", self.python, *AGENT) for host in self.hosts)


def _commands(value: object) -> tuple[tuple[str, ...], ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(
            f"commands={value!r}: pass a list with a command for each node: Commands([['ssh', 'gpu1'], ...]).",
            field="engine",
        )
    commands = [shlex.split(command) if isinstance(command, str) else command for command in value]
    if not commands:
        raise ConfigError("commands=[] is empty; pass a command for each node.", field="engine")
    return tuple(_words("commands", command, may_be_empty=True) for command in commands)


def _words(name: str, value: object, *, may_be_empty: bool = False) -> tuple[str, ...]:
    words = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
    fits = all(isinstance(word, str) and word and "\0" not in word for word in words)
    if isinstance(value, str) or not isinstance(value, Iterable) or not fits or not (words or may_be_empty):
        raise ConfigError(f"{name}={value!r}: pass a list of words.", field="engine")
    return words


# --------------------------------------------------------------------------------------------------------------------
# Engines as texts that are typed, such as `"slurm"` or `"ssh gpu1 gpu2"`, and as plain values for a settings file.


ENGINES: dict[str, Any] = {kind.__name__: kind for kind in (Commands, Ray, SSH, Slurm)}
HERE = "this machine"


def read(text: str) -> Engine | None:
    """Return the engine that a text means; None for this machine; raises `ConfigError`."""
    if text.strip().lower() in ("", "none", HERE):
        return None
    kind, *hosts = text.replace(",", " ").split()
    if kind.lower() == "slurm" and not hosts:
        return Slurm()
    if kind.lower() == "ssh" and hosts:
        return SSH(hosts)
    if kind.lower() == "ray" and len(hosts) < 2:
        return Ray(hosts[0]) if hosts else Ray()
    raise ConfigError(
        f"engine={text!r} is not an engine. A text can be '{HERE}', 'slurm', 'ray', 'ray' with a cluster's address, "
        "or 'ssh' with names of hosts, as in 'ssh gpu1 gpu2'; in code, pass Commands([...]), Ray(), SSH([...]) or "
        "Slurm().",
        field="engine",
    )


def write(engine: Engine | None) -> str:
    """Return the text that `read` takes for an engine; empty for this machine, and for an engine that has no text."""
    settings = to_settings(engine) if type(engine) in ENGINES.values() and engine is not None else {}
    if settings == {"kind": "Slurm"}:
        return "slurm"
    if settings.get("kind") == "Ray" and settings.keys() <= {"kind", "address"}:
        return " ".join(["ray", *([settings["address"]] if "address" in settings else [])])
    return " ".join(["ssh", *settings["hosts"]]) if settings.keys() == {"kind", "hosts"} else ""


def to_settings(engine: Any) -> dict[str, Any]:
    """Return an engine as plain values: its kind, and the fields that differ from their defaults."""
    if type(engine) not in ENGINES.values():
        raise ConfigError(
            f"engine={engine!r} has no place in a settings file: it is not one of {', '.join(ENGINES)}.", field="engine"
        )
    fields = [field for field in dataclasses.fields(engine) if field.init]
    values = {field.name: getattr(engine, field.name) for field in fields}
    changed = {field.name: _plain(values[field.name]) for field in fields if values[field.name] != field.default}
    return {"kind": type(engine).__name__, **changed}


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def from_settings(settings: Mapping[str, Any]) -> Engine:
    """Return the engine of settings that `to_settings` returned; raises `ConfigError` for others."""
    options = dict(settings)
    try:
        return ENGINES[options.pop("kind", "")](**options)  # type: ignore[no-any-return]
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"engine={dict(settings)!r} is not an engine: its kind can be {', '.join(ENGINES)}, with their fields "
            f"({error}).",
            field="engine",
        ) from None


def describe_found(environ: Mapping[str, str]) -> str:
    """Return what to type for each kind of machine, as far as it is known without asking the machines."""
    texts = [f"Empty: {HERE}", "ssh gpu1 gpu2: hosts that ssh reaches"]
    if importlib.util.find_spec("ray") is not None:
        address = environ.get("RAY_ADDRESS")
        texts.append(f"ray: the Ray cluster {f'at {address}' if address else 'of this machine'}")
    if environ.get(Slurm.VARIABLE):
        nodes, gpus = environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_GPUS_ON_NODE", "")
        has = [plural(int(nodes), "node")] if nodes.isdecimal() else []
        has += [f"{plural(int(gpus), 'GPU')} each"] if gpus.isdecimal() else []
        texts.insert(1, f"slurm: the allocation here{' with ' if has else ''}{', '.join(has)}")
    return "; ".join(texts)
