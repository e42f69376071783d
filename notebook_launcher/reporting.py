"""Records that the code of a rank sends to its run: `report(...)`, `track(...)`, `tunable(...)`.

All of it works in a rank and is harmless anywhere else, so the same function runs in the kernel, under
torchrun and in a test.
"""

from __future__ import annotations

import math
import operator
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.context import current, notify_of_loss, step_boundary
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS
from notebook_launcher.wording import WHOLE_RUN, shape_of, type_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from notebook_launcher.context import RankContext

T = TypeVar("T")

# The functions that send a message import `messages` themselves: a notebook's first cell imports this module, and the
# messages take a third of the time of importing them both.

PROGRESS_INTERVAL = 0.2
"""Seconds between two progress records of one loop: an eye follows no more, and a record costs the loop 0.1 ms."""


def report(*, step: int | None = None, total_steps: int | None = None, **metrics: Any) -> None:
    """Send metrics and pictures to the run: `report(step=3, loss=loss, sample=image, weights=histogram(w))`.

    Numbers are in `run.metrics`, pictures in `run.pictures`; the monitor shows both.

    Args:
        step: The step that the metrics belong to, an integer or a tensor of one; None: the number of updates that the
            rank's Accelerator has made, with those before the checkpoint that it loaded; before the first update the
            number of reports so far.
        total_steps: Number of steps of the whole run: the monitor shows the time left, also of a loop whose length
            nothing else tells.
        metrics: Anything that `float()` takes; a tensor must have one element. A picture is an image of Pillow, a
            figure of matplotlib, a `histogram(...)`, or an array or tensor of shape (H, W, C) or (C, H, W) with 1, 3
            or 4 channels, in bytes or in floats from 0 to 1; a larger one than 1024 pixels on a side is made smaller.

    Raises:
        TypeError: A value is neither a number nor a picture, or a step not an integer.
        KeyboardInterrupt: The run was asked to stop; it stops at a step boundary such as this call.
    """
    send_values(metrics, step=step)
    if total_steps is not None:
        _send_whole(step, _integer("total_steps", total_steps))
    step_boundary()


def _send_whole(step: int | None, total: int) -> None:
    context, now = current(), time.monotonic()
    if context is None:
        return
    done = next(count for count in (step, updates_so_far(), context.num_reports) if count is not None)
    if now - context.last_total >= PROGRESS_INTERVAL or done >= total:
        context.last_total = now
        _send_progress(context, now, operator.index(done), total, WHOLE_RUN, context.num_loops)


def report_values(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Report a mapping, in which a metric may have any name, `"step"` too."""
    send_values(values, step=step)
    step_boundary()


def send_values(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Do the same where the rank must not stop."""
    context = current()
    drawn = {name: picture for name, value in values.items() if (picture := _picture(value)) is not None}
    numbers = {name: _number(name, value) for name, value in values.items() if name not in drawn}
    step = None if step is None else _integer("step", step)
    if context is None:
        return
    from notebook_launcher.messaging import messages

    context.num_reports += 1
    step = updates_so_far() if step is None else step
    _send_pictures(context, drawn, step)
    for name, value in numbers.items():
        if not math.isfinite(value) and "loss" in name.lower():
            notify_of_loss(value, f"in report({name}=...)" + ("" if step is None else f" of step {step}"))
    if numbers or not drawn:
        context.send(messages.Metrics(time=time.monotonic(), step=step, values=numbers))


def report_pictures(pictures: Mapping[str, tuple[str, bytes]], *, step: int | None = None) -> None:
    """Send pictures of `encode_pictures`, or a table as CSV, to the run, if there is one."""
    context = current()
    if context is not None:
        _send_pictures(context, pictures, updates_so_far() if step is None else step)
        step_boundary()


def encode_pictures(values: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
    """Return the type and the bytes of each picture; raise `TypeError` for what is none."""
    encoded = {}
    for name, value in values.items():
        picture = _picture(value)
        if picture is None:
            raise TypeError(
                f"log_images({{{name!r}: {_shown(value)}}}): this is not an image. Pass an array or tensor with 1, 3 "
                "or 4 channels, such as x[..., None], an image of Pillow, or a figure."
            )
        encoded[name] = picture
    return encoded


def _send_pictures(context: RankContext, pictures: Mapping[str, tuple[str, bytes]], step: int | None) -> None:
    from notebook_launcher.messaging import messages

    now = time.monotonic()
    for name, (mime, data) in pictures.items():
        context.send(messages.ReportedPicture(time=now, step=step, name=name, mime=mime, data=data))


def updates_so_far() -> int | None:
    """Return the number of updates of the rank's training; None before the first one of a new training."""
    context = current()
    if context is None:
        return None
    return context.num_loaded if context.safepoint is None else context.safepoint.last_update


def _picture(value: Any) -> tuple[str, bytes] | None:
    if isinstance(value, (int, float, str)):
        return None
    from notebook_launcher.pictures import encode_picture  # here, as messages

    return encode_picture(value)


def _number(name: str, value: Any) -> float:
    # A loss that is not detached: torch warns where it becomes a float.
    detach = getattr(value, "detach", None)
    try:
        return float(detach() if callable(detach) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"report({name}={_shown(value)}): a metric must be one number. {_way_to_a_number(value)}"
        ) from error


def _way_to_a_number(value: Any) -> str:
    if value is None:
        return "Leave it out until it has a value."
    if shape_of(value) is not None:
        return "Pass its .mean(). A picture needs 1, 3 or 4 channels: pass x[..., None]."
    if isinstance(value, (list, tuple)):
        return "Pass their mean: sum(values) / len(values)."
    return f"This is {type_of(value)}: pass a number of it, or print it."


def _shown(value: Any) -> str:
    """Return the type and the shape of an array or tensor, whose contents can be long; other values in a few words."""
    shape = shape_of(value)
    if shape is not None:
        return f"{type(value).__name__} of shape {shape}"
    # Imported late, because a notebook's first cell imports this module.
    from notebook_launcher.wording import describe_value

    return describe_value(value)


def _integer(name: str, step: Any) -> int:
    try:
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        what = "a step" if name == "step" else "it"
        raise TypeError(f"report({name}={_shown(step)}): {what} must be an integer. Pass int({name}).") from error


def track(iterable: Iterable[T], *, total: int | None = None, description: str = "") -> Iterator[T]:
    """Iterate, and send the progress of the loop to the run.

    Args:
        iterable: A data loader, for instance.
        total: Number of items; None: the `len` of the iterable, if it has one.
        description: The name of the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = current()
    if context is None:
        yield from iterable
        return
    if total is None:
        total = _length(iterable)
    last = -PROGRESS_INTERVAL
    context.num_loops += 1
    loop = context.num_loops
    for done, item in enumerate(iterable, 1):
        step_boundary()
        items = context.num_items
        yield item
        if context.num_items == items:
            context.num_items += 1  # Otherwise an inner loop has counted.
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL or done == total:
            _send_progress(context, now, done, total, description, loop)
            last = now


def tunable(name: str, default: float) -> float:
    """Return a setting that `run.set(name=value)` changes during the run; read it wherever it is used.

        temperature = tunable("temperature", 0.7)

    A change arrives on all ranks after the same update of the first prepared `Accelerator`, between two micro-batches,
    so the ranks never differ. Outside a run this is the default.

    Args:
        name: The keyword for `run.set`.
        default: The value until it is changed. Its type, int, float or bool, stays.

    Raises:
        TypeError: The default is not a number.
        ValueError: The name is not an identifier, or belongs to a setting of the `Accelerator`.
    """
    if not isinstance(default, (int, float)):
        raise TypeError(f"tunable({name!r}, {default!r}): the default is {type_of(default)}; it must be a number.")
    if not isinstance(name, str) or not name.isidentifier() or name in ACCELERATOR_SETTINGS:
        taken = (
            f"; {', '.join(ACCELERATOR_SETTINGS)} are settings of the Accelerator"
            if name in ACCELERATOR_SETTINGS
            else ""
        )
        raise ValueError(f"tunable({name!r}): the name must be a keyword for run.set, such as temperature{taken}.")
    context = current()
    if context is None:
        return default
    if name not in context.tunables:
        context.tunables[name] = default
        if context.pid == os.getpid():
            from notebook_launcher.messaging import messages

            context.send(messages.Offered(name=name, value=default))
    return context.tunables[name]


def progress(done: int, total: int | None = None, description: str = "") -> None:
    """Send the progress of a loop that `track` cannot wrap; call this at every item.

    Args:
        done: Number of items that are done.
        total: Number of all items; None: unknown.
        description: The name of the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = current()
    if context is None:
        return
    context.num_loops += done == 1
    context.num_items += 1
    now = time.monotonic()
    if now - context.last_progress >= PROGRESS_INTERVAL or done == total:
        context.last_progress = now
        _send_progress(context, now, done, total, description, context.num_loops)
    step_boundary()


class LoopReport:
    """Sends the progress of a loop that counts its items in `context.num_items` itself.

    Args:
        context: The rank.
        total: Number of all items; None: unknown.
        description: The name of the loop.
    """

    def __init__(self, context: RankContext, total: int | None, description: str) -> None:
        self.total = total
        self.due = context.last_progress + PROGRESS_INTERVAL
        """The moment, by the monotonic clock, after which the next item is to be sent."""
        context.num_loops += 1
        self._context, self._description, self._loop = context, description, context.num_loops

    def send(self, done: int, now: float) -> None:
        """Send that `done` items are done now."""
        self._context.last_progress, self.due = now, now + PROGRESS_INTERVAL
        _send_progress(self._context, now, done, self.total, self._description, self._loop)


def _send_progress(
    context: RankContext, now: float, done: int, total: int | None, description: str, num_loops: int
) -> None:
    from notebook_launcher.messaging import messages

    context.send(
        messages.Progress(
            time=now, done=done, total=total, description=description, loops=num_loops, items=context.num_items
        )
    )


def _length(iterable: Any) -> int | None:
    # A data loader has a `__len__` that raises TypeError where its data set has none.
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None
