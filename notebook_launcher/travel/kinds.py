"""Kinds of objects that stay in their process, with the advice for each.

Pickle can copy some of these objects, but the copy would be wrong: an open file would arrive as a copy of its content,
a widget as one that no page shows, a wrapped model as one whose process group is gone. Objects are refused by their
type, which is found by name, so that no module is imported for the check.
"""

from __future__ import annotations

import dataclasses

__all__ = ["MAIN", "SHELL", "Kind", "describe_object", "kind_of_type", "type_name"]

MAIN = frozenset({"__main__", "__mp_main__"})
"""Names of the module of the notebook or script; multiprocessing gives the second in the children that it spawns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A class of objects that stay in their process."""

    in_call: str
    """Advice if a function captured such an object; `{name}` stands for the expression that leads to the object."""
    in_value: str
    """Advice if a function returned such an object."""


_CREATE = "Create {name} inside the function."
_FINISH = "Return plain data: numbers, strings, lists, dicts, tensors."
_LOCK = Kind(_CREATE, _FINISH)
_FILE = Kind("Pass the path and open {name} inside the function.", "Return the path, or what was read from the file.")
_LAZY = Kind("Pass a list, or create {name} inside the function.", "Return a list of the items.")
_CONNECTION = Kind("Connect inside the function.", "Return what was fetched, not the connection.")
_PROCESS = Kind("Start {name} inside the function.", "Return the outcome.")
_ASYNC = Kind("Call asyncio.run() inside the function.", "Await the result inside the function and return the outcome.")
_WIDGET = Kind(
    "Pass the value of {name}: a widget belongs to the notebook page.",
    "Return the value; display widgets from the notebook.",
)
_BAR = Kind("Create the progress bar inside the function.", _FINISH)
SHELL = Kind("Ranks have no IPython shell: `%magic` and `!command` lines need it, `subprocess.run` does not.", _FINISH)
_DEVICE = Kind(_CREATE, _FINISH)
_GROUP = Kind("Every rank has its own groups: use `torch.distributed.new_group()` inside the function.", _FINISH)
_WRAPPED = Kind(
    "Pass the bare model and wrap it inside the function.",
    "Return `model.module` or `model.module.state_dict()` instead of the wrapped model.",
)
_SHARDED = Kind(
    "Pass the bare model and shard it inside the function.",
    "Return whole tensors: accelerator.get_state_dict(model), or tensor.full_tensor(), on every rank.",
)
_LIBRARY = Kind(
    "Define operators with torch.library.custom_op, which travels, or make the library inside the function.", _FINISH
)
_LOADER_ITERATOR = Kind("Pass the DataLoader and call iter() inside the function.", "Return the batches you need.")
_STACK = Kind("Pass the formatted text: `traceback.format_exc()`.", "Return `traceback.format_exc()`.")

_SESSION = Kind(
    "A session belongs to the notebook, and ranks cannot use it: run it there, and pass the values that the function "
    "needs.",
    _FINISH,
)
_RUN = Kind(
    "A run belongs to the notebook, and ranks cannot use it: take its results there, and pass the values that the "
    "function needs.",
    _FINISH,
)

# Made in the kernel it believes that it is alone, and a rank that got it would train for itself.
_ALONE = Kind(_CREATE, _FINISH)

_KIND_OF_TYPE = {
    "_thread.lock": _LOCK,
    "_thread.RLock": _LOCK,
    "_thread._local": _LOCK,
    "threading.Condition": _LOCK,
    "threading.Event": _LOCK,
    "threading.Semaphore": _LOCK,
    "threading.Barrier": _LOCK,
    "threading.Thread": _PROCESS,
    "multiprocessing.synchronize.SemLock": _LOCK,
    "multiprocessing.queues.Queue": _LOCK,
    "multiprocessing.queues.SimpleQueue": _LOCK,
    "multiprocessing.connection._ConnectionBase": _LOCK,
    "multiprocessing.process.BaseProcess": _PROCESS,
    "multiprocessing.pool.Pool": _PROCESS,
    "concurrent.futures._base.Executor": _PROCESS,
    "concurrent.futures._base.Future": _PROCESS,
    "subprocess.Popen": _PROCESS,
    "_queue.SimpleQueue": _LOCK,
    "queue.Queue": _LOCK,
    "_io.TextIOWrapper": _FILE,
    "_io.BufferedReader": _FILE,
    "_io.BufferedWriter": _FILE,
    "_io.BufferedRandom": _FILE,
    "_io.FileIO": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "zipfile.ZipFile": _FILE,
    "tarfile.TarFile": _FILE,
    "h5py._hl.files.File": _FILE,
    "mmap.mmap": _FILE,
    "builtins.generator": _LAZY,
    "builtins.async_generator": _ASYNC,
    "builtins.coroutine": _ASYNC,
    "asyncio.events.AbstractEventLoop": _ASYNC,
    "_asyncio.Future": _ASYNC,
    "_asyncio.Task": _ASYNC,
    "asyncio.futures.Future": _ASYNC,
    "socket.socket": _CONNECTION,
    "_socket.socket": _CONNECTION,
    "ssl.SSLContext": _CONNECTION,
    "sqlite3.Connection": _CONNECTION,
    "sqlite3.Cursor": _CONNECTION,
    "psycopg2.extensions.connection": _CONNECTION,
    "psycopg.Connection": _CONNECTION,
    "sqlalchemy.engine.base.Engine": _CONNECTION,
    "sqlalchemy.engine.base.Connection": _CONNECTION,
    "sqlalchemy.orm.session.Session": _CONNECTION,
    "duckdb.DuckDBPyConnection": _CONNECTION,
    "pymongo.synchronous.mongo_client.MongoClient": _CONNECTION,
    "redis.client.Redis": _CONNECTION,
    "ipywidgets.widgets.widget.Widget": _WIDGET,
    "IPython.core.display_functions.DisplayHandle": _WIDGET,
    "tqdm.std.tqdm": _BAR,
    "IPython.core.interactiveshell.InteractiveShell": SHELL,
    "torch.cuda.streams.Stream": _DEVICE,
    "torch.cuda.streams.Event": _DEVICE,
    "torch.cuda.graphs.CUDAGraph": _DEVICE,
    "torch._C.Stream": _DEVICE,
    "torch.Stream": _DEVICE,
    "torch.Event": _DEVICE,
    "torch._C._distributed_c10d.ProcessGroup": _GROUP,
    "torch.distributed.distributed_c10d.ProcessGroup": _GROUP,
    "torch._C._distributed_c10d.Store": _GROUP,
    "torch._C._distributed_c10d.Work": _GROUP,
    "torch.distributed.device_mesh.DeviceMesh": _GROUP,
    "torch.nn.parallel.distributed.DistributedDataParallel": _WRAPPED,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _SHARDED,
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": _SHARDED,
    "torch.distributed.tensor.DTensor": _SHARDED,
    "torch.library.Library": _LIBRARY,
    "torch.utils.data.dataloader._BaseDataLoaderIter": _LOADER_ITERATOR,
    "accelerate.accelerator.Accelerator": _ALONE,
    "accelerate.state.AcceleratorState": _ALONE,
    "accelerate.state.PartialState": _ALONE,
    "notebook_launcher.training.accelerator.Accelerator": _ALONE,
    "notebook_launcher.training.process.process_state.ProcessState": _ALONE,
    "notebook_launcher.training.accumulation.windows.GradientState": _ALONE,
    "notebook_launcher.kernel.cells.session_cells.SessionCells": _SESSION,
    "notebook_launcher.kernel.run.handle.Run": _RUN,
    "notebook_launcher.detached.attached_run.AttachedRun": _RUN,
    "builtins.traceback": _STACK,
    "builtins.frame": _STACK,
}


def kind_of_type(cls: type) -> Kind | None:
    """Return the kind that a type, or the nearest of its bases, is known as."""
    for base in cls.__mro__:
        if kind := _KIND_OF_TYPE.get(f"{base.__module__}.{base.__qualname__}"):
            return kind
    return None


def type_name(cls: type) -> str:
    """Return `torch.Tensor`, or the bare name of a built-in."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def describe_object(value: object) -> str:
    """Return `a _thread.lock`, `an _io.TextIOWrapper`, `the class Net`, `the function train`."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type_name(type(value))
    if name in {"function", "builtin_function_or_method"}:
        return f"the function {getattr(value, '__qualname__', '?')}"
    article = "an" if name.lstrip("_")[:1].lower() in "aeio" else "a"
    return f"{article} {name}"
