"""The base of all prepared loaders: it knows its position and shows it while it is iterated."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.autograd import _profiler_enabled
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from notebook_launcher import reporting
from notebook_launcher.context import current, step_boundary
from notebook_launcher.messaging.board_layout import STOP_FLAG
from notebook_launcher.training.accumulation.windows import ActiveLoaders
from notebook_launcher.training.data.iterables import compare_data_sets, open_as_only_rank
from notebook_launcher.training.data.position import LoaderProgress, Order, Position, generator_owners
from notebook_launcher.training.data.rows import find_rows, ready_rows
from notebook_launcher.training.data.samplers import (
    SeedableRandomSampler,
    generator_apart,
    get_sampler,
    length_of,
    sampler_chain,
    set_epochs,
)
from notebook_launcher.training.data.sharding import SkipBatchSampler, Walk, WalkedSampler
from notebook_launcher.training.operations import recursively_apply, send_to_device
from notebook_launcher.training.recording.phases import make_clock, read_clock
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

    from notebook_launcher.training.data.rows import Round


# --------------------------------------------------------------------------------------------------------------------
# The state that a loader shows while it is iterated.


OF_THE_LOOP = ("end_of_dataloader", "remainder", "current_full_rows", "current_round", "current_rows",
               "gathers_parts", "iteration_token", "num_drawn", "repeat_is_known")  # fmt: skip


class DataLoaderStateMixin:
    """The state that a loader shows while it is iterated.

    Attributes:
        end_of_dataloader: True while the current batch is the last; False outside a loop.
        remainder: Number of samples of the last round that are not repetitions; -1 if that is unknown before it
            comes, or with `drop_last`.
        current_full_rows: Samples of a full batch of one rank, as the loop began; None if unknown, or outside a loop.
        current_round: The current batches of all ranks, counted; None if unknown.
        current_rows: Rows of this rank's batch, if the data set makes batches ready (`batch_size=None`): other ranks
            cannot know them. None for all other batches, which their samplers count.
        counts_otherwise: Warning that the rows of batches vary while their samples do not; empty without a reason.
        gathers_parts: True if `gather_for_metrics` has got a list of parts in this loop, such as predictions and
            targets.
        iteration_token: An object of the present loop, another one for each loop; None outside a loop.
        num_drawn: Batches that the loop has drawn so far.
        repeat_is_known: True if a backward or `gather_for_metrics` has left out a batch that a rank got again.
        active_loaders: Loaders that are being iterated; the loader is among them while it is iterated.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    current_full_rows: int | None = None
    current_round: Round | None = None
    current_rows: int | None = None
    counts_otherwise: str = ""
    gathers_parts: bool = False
    iteration_token: object | None = None
    num_drawn: int = 0
    repeat_is_known: bool = False
    active_loaders: ActiveLoaders

    @property
    def gradient_state(self) -> Any:
        """The `GradientState` of the Accelerator that prepared this loader; None without."""
        return self.active_loaders.owner

    def reset(self) -> None:
        """Forget the loop."""
        for name in OF_THE_LOOP:
            vars(self).pop(name, None)

    def begin(self) -> None:
        """Become the active loader."""
        self.reset()
        self.iteration_token = object()
        self.active_loaders.begin(self)

    def end(self) -> None:
        """Stop being the active loader."""
        self.active_loaders.end(self)


class PreparedLoader(DataLoaderStateMixin, DataLoader[Any], ABC):
    """Base of the loaders that `prepare` returns.

    A prepared loader has the attributes of the loader that it was made from; `base_dataloader`, which a subclass makes
    by `_make_base`, does the fetching. Many of its methods are there because users and other libraries call them on
    torch's and Accelerate's loaders.

    Args:
        dataset: As `DataLoader`'s.
        device: Device that batches are moved to; None: they are not moved.
        skip_batches: Number of batches, or of rounds, that are left out at the start of each epoch.
        use_stateful_dataloader: Accepted; these loaders always know their position.
        iteration: The first epoch's number.
        stack: Loaders that are being iterated; the loader is among them while it is iterated. None: it is alone.
        progress: Progress of the loader whose rest this loader reads; None: a new one.
        kwargs: As `DataLoader`'s.
    """

    OWN: ClassVar[tuple[str, ...]] = ()
    """The arguments of the kind of loader, which are its attributes of the same names."""
    base_dataloader: DataLoader[Any]
    num_processes: int
    """Number of ranks that the data are shared out among."""
    split_batches: bool
    """True if `batch_size` counts all ranks together."""
    _place: int
    """This rank's place among the ranks that share the data."""
    _reads_for_all: bool
    """True if this rank reads a stream of which other ranks take parts."""

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | str | int | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        iteration: int = 0,
        stack: ActiveLoaders | None = None,
        progress: LoaderProgress | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self.active_loaders = ActiveLoaders() if stack is None else stack
        self._drop_last = _drop_last
        """True if the user's loader drops a last batch that is not full."""
        self._non_blocking = _non_blocking
        self._progress = LoaderProgress(iteration, Position(iteration)) if progress is None else progress
        """The epoch and position, which the loader of an epoch's rest shares."""
        self._is_rest = progress is not None
        """True if `skip_first_batches` has made this loader from another one."""
        self._loaded = False
        """True if the position at which the next loop begins was loaded into this loader."""
        self._open_loops: list[object] = []
        """The tokens of the loops that have begun and not ended."""
        self._has_compared = False
        """True once the ranks have compared what their data sets hold."""
        self._walked: WalkedSampler | None = None
        """The batch sampler that `base_dataloader` fetches with; None for an iterable data set."""

    @property
    def iteration(self) -> int:
        """The number of the current or next epoch, counted from 0."""
        return self._progress.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._progress.set_epoch(iteration)

    def _make_base(self) -> DataLoader[Any]:
        """Return the loader that fetches."""
        if isinstance(self.dataset, IterableDataset):
            return self._make_stream(self._fetching())
        indices = sampler_chain(self)[0]
        if self.skip_batches:
            indices = SkipBatchSampler(indices, self.skip_batches * self._fetched_per_round)
        self._walked = WalkedSampler(indices)
        return DataLoader(self.dataset, **data_arguments(self, self._walked), **self._fetching())

    def _fetching(self) -> dict[str, Any]:
        """Return the arguments of the loader that fetches, but for the data."""
        return fetching_arguments(self)

    def _make_stream(self, arguments: dict[str, Any]) -> DataLoader[Any]:
        """Return the loader that fetches from an iterable data set."""
        return DataLoader(self.dataset, **data_arguments(self, None), **arguments)

    def _walk(self, start: Position, order: Order | None) -> Iterator[Delivery]:
        """Yield the batches of a map-style data set."""
        assert self._walked is not None
        walk = self._walked.walk = Walk(self._walked.batch_sampler, start.samples, order)
        # Creating the iterator makes torch draw a worker seed. A resumed loop has drawn its seed already.
        with contextlib.nullcontext() if order is None else torch.random.fork_rng(devices=[]):
            fetched = self._open_base()
        self._walked.walk = None
        for batch in without_label(fetched):
            (_, drawn, samples), is_last = walk.taken.popleft()
            self._progress.order = walk.order
            yield Delivery(batch, drawn, is_last, Position(start.epoch, samples))

    def _open_base(self) -> Iterator[Any]:
        """Return an iterator of `base_dataloader`.

        torch draws a seed for workers when it makes an iterator. Persistent workers keep their iterator, so a resumed
        run draws their seed apart from the generators, which the run that saved did not ask again.
        """
        base, progress = self.base_dataloader, self._progress
        if not (progress.has_seeded_workers and base.persistent_workers):
            return iter(base)
        progress.has_seeded_workers = False
        own, base.generator = base.generator, generator_apart()
        try:
            return iter(base)
        finally:
            base.generator = own

    @contextlib.contextmanager
    def _opened_stream(self, order: Order | None) -> Iterator[Iterator[Any]]:
        """Open `base_dataloader` over an iterable data set; in the block, generators are as when `order` was drawn."""
        owners = self._owners()
        self._progress.order = order or Order.capture(owners)
        with contextlib.nullcontext() if order is None else order.replayed(owners):
            poses = self._reads_for_all and not self.num_workers
            yield open_as_only_rank(self._open_base) if poses else self._open_base()

    def _compare_once(self, dataset: Any) -> None:
        """Compare what the ranks' data sets hold, the first time; every rank calls this."""
        if not self._has_compared:
            self._has_compared = True
            compare_data_sets(dataset)

    @property
    def _has_seeded_workers(self) -> bool:
        base = self.base_dataloader
        return base.persistent_workers and (self._progress.has_seeded_workers or base._iterator is not None)  # noqa: SLF001

    def without_first(self, num_batches: int) -> Self:
        """Return a loader of the same kind that begins `num_batches` later."""
        indices = None if isinstance(self.dataset, IterableDataset) else sampler_chain(self)[0]
        return type(self)(
            self.dataset,
            device=self.device,
            skip_batches=self.skip_batches + num_batches,
            use_stateful_dataloader=self.use_stateful_dataloader,
            _drop_last=self._drop_last,
            _non_blocking=self._non_blocking,
            iteration=self.iteration,
            stack=self.active_loaders,
            progress=self._progress,
            **{name: getattr(self, name) for name in self.OWN},
            **data_arguments(self, indices),
            **fetching_arguments(self),
        )

    @abstractmethod
    def _deliveries(self, start: Position, order: Order | None) -> Iterator[Delivery]:
        """Yield this rank's batches from `start` on."""

    def _prepare_epoch(self, start: Position) -> None:
        """Prepare an epoch together with the other ranks."""

    @property
    def _fetched_per_round(self) -> int:
        """Number of batches of `base_dataloader` that this rank takes in each round."""
        return 1

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full round; None if unknown."""
        size = self._nominal_batch_size()
        return size if size is None or self.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole data set; a TypeError is raised if it has no length."""
        return int(self.dataset.total_length) if hasattr(self.dataset, "total_length") else len(self.dataset)  # type: ignore[arg-type]

    def _nominal_batch_size(self) -> int | None:
        if isinstance(self.dataset, IterableDataset):
            return self.batch_size
        return getattr(sampler_chain(self)[0], "batch_size", None)

    def get_sampler(self) -> Any:
        """Return the sampler that draws single indices."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that draws single indices."""
        owner = next(link for link in reversed(sampler_chain(self)) if hasattr(link, "sampler"))
        owner.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next loop, if samplers or the data set have several.

        A position that was loaded for another epoch is dropped.
        """
        self._progress.set_epoch(epoch)
        set_epochs([*sampler_chain(self), self.dataset], epoch)
        self._take_chosen_epoch()

    def _take_chosen_epoch(self) -> int | None:
        """Return the epoch that other code than this loader gave to a seedable sampler; None if none did."""
        sampler = self.get_sampler()
        return sampler.take_chosen() if isinstance(sampler, SeedableRandomSampler) else None

    def begin(self) -> None:
        """Become the active loader."""
        total, remainder = self.total_batch_size, -1
        if total and not self._drop_last:
            try:
                remainder = self.total_dataset_length % total
            except (TypeError, NotImplementedError):
                remainder = -1
        super().begin()
        self.remainder = remainder
        # Asking the samplers for the size in each micro-batch took 20 µs.
        self.current_full_rows = None if total is None else total // self.num_processes

    def __len__(self) -> int:
        if self._walked is not None:
            return len(self._walked)
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = self._progress
        if (chosen := self._take_chosen_epoch()) is not None:
            progress.set_epoch(chosen)
        start, order = self._find_start()
        self._prepare_epoch(start)
        outer = {name: getattr(self, name) for name in OF_THE_LOOP}
        self.begin()
        token, evaluates = self.iteration_token, self.active_loaders.evaluates()
        drawn, has_ended = None, False
        self._open_loops.append(token)
        try:
            progress.begin(token, start)
            self._loaded = False
            self.set_epoch(start.epoch)
            deliveries, moved = self._moving(self._deliveries(start, order))
            # DataLoader looks at the name of every attribute that is set, which takes 0.4 µs.
            attributes, watch = vars(self), watch_rows(self, self._place)
            active_loaders = self.active_loaders
            requests = None if active_loaders.are_several else active_loaders.requests
            for number, (batch, drawn, is_last, position) in enumerate(self._with_progress(deliveries, start), 1):
                attributes["current_round"], attributes["end_of_dataloader"] = drawn, is_last
                attributes["iteration_token"], attributes["num_drawn"] = token, number
                active_loaders.note_draw(self)
                if watch is not None:
                    watch(batch, drawn)
                progress.position, progress.is_complete = position, is_last
                yield batch if moved is None else moved(batch)
                if requests is not None and requests.is_due:
                    requests.act()
            progress.count_epoch(start.epoch)
            has_ended = True
            self._warn_of_repetition(drawn)
            if drawn is None and start:  # A program that counts this loop as an epoch trains for one epoch less.
                warn_user(
                    f"the state that was loaded is of the last batch of epoch {start.epoch}, so this loop, over the "
                    f"rest of that epoch, has no batches. If the loop is to be epoch {start.epoch + 1}, iterate "
                    "skip_first_batches(loader, 0)."
                )
            self.active_loaders.note_end(self)
        finally:
            if not has_ended:
                progress.leave(token, evaluates=evaluates and self.active_loaders.evaluates())
            if self.iteration_token is token:
                self.reset()
            self.end()
            self._open_loops.remove(token)
            if self.iteration_token is None and outer["iteration_token"] in self._open_loops:
                vars(self).update(outer)  # The loop around this one, over the same loader, goes on.

    def _warn_of_repetition(self, drawn: Round | None) -> None:
        """Warn if the loop's last batch was this rank's for the second time, and the loop cannot have known that."""
        rank = self._place
        if drawn is None or self.repeat_is_known or rank >= len(drawn.weights):
            return  # A rank that reads shards of its own may know its own rounds alone.
        if self.active_loaders.awaits_micro_batch(self):
            return  # The loop has read ahead, and what it does with the batch is still to come.
        if drawn.weights[rank] or not drawn.rows[rank]:
            return
        warn_user(
            "even_batches=False: no samples were left for this rank, so it got a batch again, weight 0, to keep in "
            "step with others. Neither backward() nor gather_for_metrics() was called with that batch: what the "
            f"loop added up counts {plural(drawn.rows[rank], 'sample')} twice. Add up what gather_for_metrics() "
            "returns; or let ranks end apart, if the loop calls nothing in which ranks meet: "
            'DataLoaderConfiguration(even_batches=False, uneven="leave").'
        )

    def _with_progress(self, deliveries: Iterator[Delivery], start: Position) -> Iterator[Delivery]:
        """Report the progress of the loop, and its waits for data, to the launcher, if any."""
        clock, context = make_clock(), current()
        if clock is None or context is None or self.active_loaders.are_several:
            yield from deliveries
            return
        report = reporting.LoopReport(context, length_of(self), f"epoch {start.epoch}")
        note = clock.note
        step_boundary()
        note((None, read_clock()))
        for done, delivery in enumerate(deliveries, 1):
            note(("data", read_clock()))
            yield delivery
            now = read_clock()
            note((None, now))
            # What follows stands here for the sake of speed: a call between two micro-batches takes about 1 µs.
            context.num_items += 1
            if now >= report.due or done == report.total:
                report.send(done, now)
                clock.attend(now, syncs=False)
            if context.board[STOP_FLAG]:
                step_boundary()

    def _moving(self, deliveries: Iterator[Delivery]) -> tuple[Iterator[Delivery], Callable[[Any], Any] | None]:
        """Return the deliveries, and the function that moves a batch to the device; None if nothing is left to move."""
        if self.device is None:
            return deliveries, None
        device = torch.device(self.device)
        if self._non_blocking and device.type == "cuda":
            return copied_ahead(deliveries, device), None
        return deliveries, functools.partial(move, device=device, non_blocking=self._non_blocking)

    def _find_start(self) -> tuple[Position, Order | None]:
        """Return the position at which the next loop begins, and the states that drew its order if they are known."""
        progress = self._progress
        wanted = progress.begin_at
        # A user who loads a position and skips batches by hand skips from the epoch's start, in the same order. None
        # are skipped of the epoch after the one that is complete: such users divide the steps by those of an epoch.
        by_hand = self._is_rest and not self._loaded
        is_next = by_hand and not self.skip_batches and progress.is_complete and not progress.from_start
        if wanted is not None and not is_next and (by_hand or not progress.from_start):
            return Position(wanted.epoch) if by_hand else wanted, progress.order
        if progress.later is not None:
            progress.later.restore_generators(self._owners())
        return Position(self.iteration if wanted is None else wanted.epoch + is_next), None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, or the point where it was left, in plain types and tensors.

        The state holds the epoch, the number of its samples that all ranks together have consumed, with the present
        batch, and the states of the generators that draw the order. Another number of ranks can continue from it.
        """
        progress = self._progress
        position = progress.begin_at or progress.position or Position(self.iteration)
        now = Order.capture(self._owners())
        order, later = (progress.order, progress.later or now) if position else (now, None)
        sampler = self.get_sampler()
        seed = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "streams": list(position.streams),
            "stream": position.stream,
            "generators": None if order is None else list(order.generators),
            "defaults": {} if order is None else order.defaults,
            "seed": seed,
            "is_complete": progress.is_complete,
            "was_evaluation": progress.was_evaluation,
            "later": None if later is None else list(later.generators),
            "has_seeded_workers": self._has_seeded_workers,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop begin right after the batch that was current when the state was taken.

        Consumed samples are not loaded again, but samples of an iterable data set are read and dropped.

        Raises:
            ValueError: The state is not one of `state_dict`.
        """
        state = state_dict
        try:
            position = Position(state["epoch"], state["samples"], tuple(state["streams"]), state["stream"])
            generators, defaults, seed = state["generators"], state["defaults"], state["seed"]
        except KeyError as error:
            raise ValueError(
                f"load_state_dict got a state without {error}. It takes what state_dict() of a prepared loader "
                f"returned, and this has {sorted(state)}."
            ) from None
        order = None if generators is None else Order(tuple(generators), defaults)
        sampler = self.get_sampler()
        if seed is not None and isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = seed
        if order is not None and not position:
            order.restore_generators(self._owners())
        self.set_epoch(position.epoch)
        progress, self._loaded = self._progress, True
        progress.position, progress.order, progress.begin_at = position, order, position or None
        progress.from_start = False
        # The other fields are newer than the first checkpoints.
        later = state.get("later")
        progress.later = None if later is None else Order(tuple(later))
        progress.is_complete = state.get("is_complete", False)
        progress.was_evaluation = state.get("was_evaluation", False)
        progress.has_seeded_workers = state.get("has_seeded_workers", False)

    def restart_epoch(self, *, draws_on: bool = True) -> None:
        """Let the next loop begin at the start of its epoch, in a new order, though a position was loaded.

        A loader that `skip_first_batches` returns still has the order that was loaded.

        Args:
            draws_on: True: the order is the one that the run would have drawn that saved. False: as in Accelerate,
                generators are left as this process has made them.
        """
        self._progress.from_start = True
        if not draws_on:
            self._progress.later = None

    @property
    def was_evaluation(self) -> bool:
        """True if the last loop evaluated, and was left before its end: a resumed run begins it anew."""
        return self._progress.was_evaluation

    def _owners(self) -> list[Any]:
        """Return the objects whose generators draw the order."""
        links = [self.dataset] if isinstance(self.dataset, IterableDataset) else sampler_chain(self)
        return generator_owners(links)


# --------------------------------------------------------------------------------------------------------------------
# A look ahead by one item, so that the last item is known as such.


T = TypeVar("T")


def look_ahead(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with True if it is the last, reading one item ahead.

    An exception comes where it would come without looking ahead: after the item before.
    """
    iterator = iter(items)
    try:
        current = next(iterator)
    except StopIteration:
        return
    while True:
        try:
            following = next(iterator)
        except StopIteration:
            yield current, True
            return
        except Exception:
            yield current, False
            raise
        yield current, False
        current = following


# --------------------------------------------------------------------------------------------------------------------
# The rows of batches beside the samples that a loader counts, where the two may differ.


def watch_rows(loader: Any, place: int) -> Callable[[Any, Round | None], None] | None:
    """Return a function that looks at each batch of a loader; None if each sample is a row of its batch.

    With `batch_size=None` the data set makes the batches, and each index is one of them: their rows are the loader's
    `current_rows`. A `collate_fn` may join samples of several rows, or take a ready batch out of a list. Its rows may
    also be another dimension, such as time. So the loader's count stays, and rows that vary against it get a warning.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None  # Its elements are counted as they are read.
    if loader.batch_sampler is not None and loader.collate_fn in (default_collate, default_convert):
        return None
    first: tuple[int, int] | None = None

    def look(batch: Any, drawn: Round | None) -> None:
        nonlocal first
        if loader.batch_sampler is None:
            loader.current_rows = ready_rows(batch)
        elif not loader.counts_otherwise and drawn is not None and place < len(drawn.rows):
            samples = drawn.rows[place]
            rows = None if _lists_samples(batch, samples) else find_rows(batch)
            if rows is not None and samples:
                first = first or (rows, samples)
                if rows * first[1] != first[0] * samples:
                    described = " and one with ".join(
                        f"{plural(rows, 'row')} for {plural(number, 'sample')}"
                        for rows, number in (first, (rows, samples))
                    )
                    loader.counts_otherwise = (
                        f"collate_fn made a batch with {described}, and a micro-batch weighs as many samples as the "
                        "loader counted. If the loss is a mean over the rows, pass weight=len(inputs) to backward. If "
                        "it is a mean over the samples, all is well, and weight= with their number says so."
                    )

    return look


def _lists_samples(batch: Any, samples: int) -> bool:
    """Return True if a batch is a list of samples, or has one of their parts, as `tuple(zip(*samples))` does."""
    if type(batch) is list and len(batch) == samples:
        return True
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return any(isinstance(part, (list, tuple)) and len(part) == samples for part in parts)


# --------------------------------------------------------------------------------------------------------------------
# The arguments of a loader that is made like another loader.


FETCHING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def fetching_arguments(dataloader: Any) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that control fetching.

    `in_order` is not among them: the round of a batch is known by its place, and so is the position.
    """
    arguments = {name: getattr(dataloader, name) for name in FETCHING}
    if dataloader.pin_memory_device:
        arguments["pin_memory_device"] = dataloader.pin_memory_device
    return arguments


def data_arguments(dataloader: Any, indices: Any) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that choose its data, and batch it as this loader does.

    `indices` are a batch sampler, or a sampler where items are not batches; None for an iterable data set.
    """
    if indices is None:
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": indices}
    return {"batch_sampler": indices}


# --------------------------------------------------------------------------------------------------------------------
# Transfer of batches to the device.


class Delivery(NamedTuple):
    """One rank's batch with its round and position."""

    batch: Any
    round: Round | None
    """The counts of all ranks' batches; None if unknown."""
    is_last: bool
    """True if the batch is the loop's last."""
    position: Position
    """The position in the epoch, with this batch."""


def without_label(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of torch's iterator, without the label for a profiler where none listens.

    The label of `DataLoader` takes 6.5 of the 7 µs that its iterator adds to a batch.
    """
    read = getattr(batches, "_next_data", batches.__next__)
    while True:
        try:
            batch = next(batches) if _profiler_enabled() else read()
        except StopIteration:
            return
        yield batch


def move(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return the batch on the device; itself if it is a list or tuple of tensors that are there."""
    if device.type == "cpu" and type(batch) in (list, tuple):
        for part in batch:
            if type(part) is not torch.Tensor or not part.is_cpu:
                break
        else:
            return batch
    return send_to_device(batch, device, non_blocking=non_blocking)


def copied_ahead(deliveries: Iterable[Delivery], device: torch.device) -> Iterator[Delivery]:
    """Copy each batch to a CUDA device, from pinned memory, while the batch before is computed on."""
    stream = torch.cuda.Stream(device)

    def copies() -> Iterator[tuple[Delivery, torch.cuda.Event]]:
        for batch, drawn, is_last, position in deliveries:
            pinned = recursively_apply(_pin, batch)
            # Work that is queued by now may still use memory of a freed batch; the copy must wait for it.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                moved, copied = send_to_device(pinned, device, non_blocking=True), stream.record_event()
            yield Delivery(moved, drawn, is_last, position), copied

    for (delivery, copied), _ in look_ahead(copies()):
        torch.cuda.current_stream(device).wait_event(copied)
        yield delivery


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor
