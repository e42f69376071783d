"""The compared ways to run a function on N ranks: each is made once and then called.

Imports are inside functions, so that a cold call includes the imports of its own launcher and no others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any


class Ours:
    """`notebook_launch`."""

    takes_closures = True
    start_method = "forkserver"

    def __init__(self, num_ranks: int) -> None:
        from notebook_launcher import notebook_launch

        self._launch, self._num_ranks = notebook_launch, num_ranks

    def call(self, fn: Any, *args: Any) -> Any:
        return self._launch(fn, self._num_ranks, args=args, start_method=self.start_method, devices="cpu")

    def call_for_result(self, fn: Any, *args: Any) -> Any:
        return self.call(fn, *args)[0]

    def close(self) -> None:
        pass


class OursForked(Ours):
    """`notebook_launch`, with ranks forked from the kernel, which has imported torch."""

    start_method = "fork"

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        importlib.import_module("torch.distributed")


class OursSession(Ours):
    """`Session(...).run`."""

    def __init__(self, num_ranks: int) -> None:
        from notebook_launcher import Session

        self._session = Session(num_ranks, devices="cpu").__enter__()

    def call(self, fn: Any, *args: Any) -> Any:
        return self._session.run(fn, args=args)

    def close(self) -> None:
        self._session.close()


class Bare:
    """`os.fork` and `os._exit` of N processes, and nothing else: the cost of any fork."""

    bare = True
    modules: tuple[str, ...] = ("torch.distributed", "torch.nn.parallel")
    huge_pages = False

    def __init__(self, num_ranks: int) -> None:
        # By name, because a linter would remove an import statement whose name is not used; and a fork without
        # torch takes only a tenth of the time.
        for module in self.modules:
            importlib.import_module(module)
        if self.huge_pages:
            from notebook_launcher.processes import libraries
            from notebook_launcher.processes.notebook import frontend

            frontend.warm()
            libraries.collapse()
        gc.collect()
        gc.freeze()
        self._num_ranks = num_ranks

    def call(self, _fn: Any, *_args: Any) -> None:
        pids = []
        for _ in range(self._num_ranks):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def close(self) -> None:
        pass


class BareCompiler(Bare):
    """The bare fork of a process that has also imported torch's compiler, as after the first optimizer."""

    modules = (*Bare.modules, "torch._dynamo", "torch.utils.data")


class BareHuge(BareCompiler):
    """The bare fork of a process with torch's compiler and its heap in huge pages."""

    huge_pages = True


class TorchFork:
    """`torch.multiprocessing.start_processes`, with a process group and a queue for results made by hand."""

    start_method = "fork"

    def __init__(self, num_ranks: int) -> None:
        import torch.multiprocessing as mp

        importlib.import_module("torch.distributed")  # so that its forks need not import it
        self._mp: Any = mp
        self._num_ranks = num_ranks

    def call(self, fn: Any, *args: Any) -> None:
        self._start(fn, args, None, join=True)

    def call_for_result(self, fn: Any, *args: Any) -> Any:
        context = self._mp.get_context(self.start_method)
        back = context.SimpleQueue(), context.Event()
        processes = self._start(fn, args, back, join=False)
        result = back[0].get()
        back[1].set()
        while not processes.join():
            pass
        return result

    def _start(self, fn: Any, args: Any, back: Any, *, join: bool) -> Any:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return self._mp.start_processes(
            _enter_group, (self._num_ranks, port, fn, args, back),
            nprocs=self._num_ranks, join=join, start_method=self.start_method,
        )  # fmt: skip

    def close(self) -> None:
        pass


class TorchSpawn(TorchFork):
    start_method = "spawn"


def _enter_group(rank: int, num_ranks: int, port: int, fn: Any, args: Any, back: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    result = fn(*args)
    if back is not None and rank == 0:
        back[0].put(result)
        back[1].wait()  # this process shares its tensors until the other has read them
    dist.barrier()  # rank 0 hosts the store that the others may still need
    dist.destroy_process_group()


class Accelerate:
    """Accelerate's `notebook_launcher`; the function makes the state, and with it the group."""

    def __init__(self, num_ranks: int) -> None:
        from accelerate import notebook_launcher

        if num_ranks == 1:
            raise RuntimeError("the function would run in the caller: no process, no group")
        self._launch, self._num_ranks = notebook_launcher, num_ranks

    def call(self, fn: Any, *args: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._launch(_enter_state, (fn, args, None), num_processes=self._num_ranks, use_port=port)

    def call_for_result(self, fn: Any, *args: Any) -> Any:
        import torch

        path = os.path.join(args[0], "state.pt")
        self._launch(_enter_state, (fn, args, path), num_processes=self._num_ranks)
        return torch.load(path)

    def close(self) -> None:
        pass


def _enter_state(fn: Any, args: Any, path: str | None) -> None:
    from accelerate import PartialState

    state = PartialState(cpu=True)
    result = fn(*args)
    if path is not None and state.process_index == 0:
        import torch

        torch.save(result, path)


class Torchrunx:
    """`torchrunx.Launcher`."""

    takes_closures = True

    def __init__(self, num_ranks: int) -> None:
        import torchrunx

        self._launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=num_ranks, backend="gloo")
        self._launcher.extra_env_vars = {"GLOO_SOCKET_IFNAME": "lo"}

    def call(self, fn: Any, *args: Any) -> Any:
        return self._launcher.run(fn, *args)

    def call_for_result(self, fn: Any, *args: Any) -> Any:
        return self.call(fn, *args).rank(0)

    def close(self) -> None:
        pass


class Nbdistributed:
    """`%dist_init` once, then one `%%distributed` cell for each call."""

    def __init__(self, num_ranks: int) -> None:
        from IPython.core.interactiveshell import InteractiveShell

        # It starts the first "python" on PATH.
        os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
        self._shell = InteractiveShell.instance()
        self._shell.run_line_magic("load_ext", "nbdistributed")
        self._shell.run_line_magic("dist_init", f"-n {num_ranks} -a 127.0.0.1")
        self._wait_connected(num_ranks)

    def _wait_connected(self, num_ranks: int) -> None:
        # A cell that is sent before the workers have connected is lost, which is noticed after 30 s.
        import psutil

        magics = self._shell.magics_manager.magics["cell"]["distributed"].__self__
        manager = magics._process_manager  # noqa: SLF001 - it has no public name
        deadline = time.monotonic() + 60
        while manager is not None and time.monotonic() < deadline:
            connected = [
                process.pid
                for process in manager.processes
                if any(link.raddr and link.raddr.port == manager.comm_port and link.status == psutil.CONN_ESTABLISHED
                       for link in psutil.Process(process.pid).net_connections("tcp"))
            ]  # fmt: skip
            if len(connected) == num_ranks:
                time.sleep(0.1)
                return
            time.sleep(0.02)
        raise RuntimeError("the workers did not connect")

    def call(self, fn: Any, *args: Any) -> None:
        if args and not isinstance(args[-1], str):
            raise RuntimeError("a cell is text: data of the kernel does not reach the ranks")
        words = ", ".join(repr(arg) for arg in args)
        cell = f"from support.contender import {fn.__name__}\n{fn.__name__}({words})\n"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._shell.run_cell_magic("distributed", "", cell)
        # It prints errors, and raises none.
        wrong = [line for line in printed.getvalue().splitlines() if "Error" in line]
        if wrong:
            raise RuntimeError(wrong[0])

    def call_for_result(self, _fn: Any, *_args: Any) -> Any:
        raise RuntimeError("values come back as text only")

    def close(self) -> None:
        self._shell.run_line_magic("dist_shutdown", "")


WAYS: dict[str, Any] = {
    "ours": Ours,
    "ours-fork": OursForked,
    "session": OursSession,
    "bare": Bare,
    "bare-compiler": BareCompiler,
    "bare-huge": BareHuge,
    "torch-fork": TorchFork,
    "torch-spawn": TorchSpawn,
    "accelerate": Accelerate,
    "torchrunx": Torchrunx,
    "nbdistributed": Nbdistributed,
}
