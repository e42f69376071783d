"""Kinds of objects that stay in their process, with the advice for each.

Pickle can copy some of these objects, but the copy would be wrong: an open file would arrive as a copy of its content,
a widget as one that no page shows, a wrapped model as one whose process group is gone. Objects are refused by their
type, which is found by name, so that no module is imported for the check.
"""

from __future__ import annotations

import dataclasses

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
SHELL = Kind("Ranks have no IPython shell: `%magic` and `!command` lines need it, `subprocess.run` does not.", _FINISH)

_TYPES: dict[Kind, str] = {
    # An Accelerator made in the kernel believes that it is alone, and a rank that got it would train for itself.
    Kind(_CREATE, _FINISH): """
        _thread.lock _thread.RLock _thread._local threading.Condition threading.Event threading.Semaphore
        threading.Barrier multiprocessing.synchronize.SemLock multiprocessing.queues.Queue
        multiprocessing.queues.SimpleQueue multiprocessing.connection._ConnectionBase _queue.SimpleQueue queue.Queue
        torch.cuda.streams.Stream torch.cuda.streams.Event torch.cuda.graphs.CUDAGraph torch._C.Stream torch.Stream
        torch.Event accelerate.accelerator.Accelerator accelerate.state.AcceleratorState accelerate.state.PartialState
        notebook_launcher.training.accelerator.Accelerator
        notebook_launcher.training.process.process_state.ProcessState
        notebook_launcher.training.accumulation.windows.GradientState
    """,
    Kind("Pass the path and open {name} inside the function.", "Return the path, or what was read from the file."): """
        _io.TextIOWrapper _io.BufferedReader _io.BufferedWriter _io.BufferedRandom _io.FileIO
        tempfile._TemporaryFileWrapper zipfile.ZipFile tarfile.TarFile h5py._hl.files.File mmap.mmap
    """,
    Kind("Pass a list, or create {name} inside the function.", "Return a list of the items."): "builtins.generator",
    Kind("Connect inside the function.", "Return what was fetched, not the connection."): """
        socket.socket _socket.socket ssl.SSLContext sqlite3.Connection sqlite3.Cursor
        psycopg2.extensions.connection psycopg.Connection sqlalchemy.engine.base.Engine
        sqlalchemy.engine.base.Connection sqlalchemy.orm.session.Session duckdb.DuckDBPyConnection
        pymongo.synchronous.mongo_client.MongoClient redis.client.Redis
    """,
    Kind("Start {name} inside the function.", "Return the outcome."): """
        threading.Thread multiprocessing.process.BaseProcess multiprocessing.pool.Pool concurrent.futures._base.Executor
        concurrent.futures._base.Future subprocess.Popen
    """,
    Kind("Call asyncio.run() inside the function.", "Await the result inside the function and return the outcome."): """
        builtins.async_generator builtins.coroutine asyncio.events.AbstractEventLoop _asyncio.Future _asyncio.Task
        asyncio.futures.Future
    """,
    Kind(
        "Pass the value of {name}: a widget belongs to the notebook page.",
        "Return the value; display widgets from the notebook.",
    ): "ipywidgets.widgets.widget.Widget IPython.core.display_functions.DisplayHandle",
    Kind("Create the progress bar inside the function.", _FINISH): "tqdm.std.tqdm",
    SHELL: "IPython.core.interactiveshell.InteractiveShell",
    Kind("Every rank has its own groups: use `torch.distributed.new_group()` inside the function.", _FINISH): """
        torch._C._distributed_c10d.ProcessGroup torch.distributed.distributed_c10d.ProcessGroup
        torch._C._distributed_c10d.Store torch._C._distributed_c10d.Work torch.distributed.device_mesh.DeviceMesh
    """,
    Kind(
        "Pass the bare model and wrap it inside the function.",
        "Return `model.module` or `model.module.state_dict()` instead of the wrapped model.",
    ): "torch.nn.parallel.distributed.DistributedDataParallel",
    Kind(
        "Pass the bare model and shard it inside the function.",
        "Return whole tensors: accelerator.get_state_dict(model), or tensor.full_tensor(), on every rank.",
    ): """
        torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel
        torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule torch.distributed.tensor.DTensor
    """,
    Kind(
        "Define operators with torch.library.custom_op, which travels, or make the library inside the function.",
        _FINISH,
    ): "torch.library.Library",
    Kind(
        "Pass the DataLoader and call iter() inside the function.", "Return the batches you need."
    ): "torch.utils.data.dataloader._BaseDataLoaderIter",
    Kind(
        "A session belongs to the notebook, and ranks cannot use it: run it there, and pass the values that the "
        "function needs.",
        _FINISH,
    ): "notebook_launcher.kernel.cells.session_cells.SessionCells",
    Kind(
        "A run belongs to the notebook, and ranks cannot use it: take its results there, and pass the values that the "
        "function needs.",
        _FINISH,
    ): "notebook_launcher.kernel.run.handle.Run notebook_launcher.detached.attached_run.AttachedRun",
    Kind(
        "Pass the formatted text: `traceback.format_exc()`.", "Return `traceback.format_exc()`."
    ): "builtins.traceback builtins.frame",
}
"""By kind: its types, by their full names."""
_KIND_OF_TYPE = {name: kind for kind, names in _TYPES.items() for name in names.split()}


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
