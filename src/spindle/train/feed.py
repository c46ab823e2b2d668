"""Batches of one task, step after step, the same on every rank.

A batch may lack an entry that others have: it is missing, None, or has no rows. A batch that is None or has no rows at
all leaves its task out of the step. An exhausted loader starts its next epoch. A short last batch is dropped, with a
notice, unless `drop_last=False`. Loaders that shuffle draw from random streams of their own, which start the same on
all ranks, so nothing else a rank does can change the order of its data.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from spindle.data import WHOLE, RandomState, Wanted, is_same, random_state, restored_random_state, set_random_state
from spindle.errors import TrainingError
from spindle.run import Axes, Lengths, fingerprint_of, plain, signature_of
from spindle.train.items import lengths_in, with_lengths
from spindle.train.plain_json import to_plain
from spindle.train.task import TaskDefinition
from spindle.train.trace import batch_axes, describe_batch

Held = tuple[tuple[int, int], ...]


class Load(Protocol):
    """How the values of a batch are decoded when they are needed."""

    def start(self, wanted: Wanted) -> None:
        """Start to decode what will be taken, if that can be done ahead of time."""

    def take(self, wanted: Wanted) -> Any:
        """The wanted rows and fields of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it was read, with digests of its shapes (`signature`) and values (`fingerprint`), and the key of the
    task variant that it takes. If only part of the batch is on this rank, `held` has the rows `[first, last)` of each
    leaf."""

    nest: Any
    num_rows: int
    signature: int
    fingerprint: int
    variant: int = 0
    tokens: int = 0
    held: Held | None = None
    lengths: Lengths = field(default_factory=dict)  # the number of rows of each item
    item_entries: frozenset[str] = frozenset()
    load: Load | None = None  # decodes the values of a batch that has only shapes so far

    def loaded(self, wanted: Wanted = WHOLE) -> Batch:
        """The batch with values: the wanted ones, or all of them."""
        if self.load is None:
            return self
        nest = self.load.take(wanted)
        rows = {name: (first, last) for name, first, last in wanted.fields or ()}
        if all(bounds == (0, self.num_rows) for bounds in rows.values()):
            return replace(self, nest=nest, load=None)
        # Only some rows were decoded: keep the structure of the whole batch, with None for the rest.
        rows |= {name: (0, self.num_rows) for name in nest if name in self.item_entries}
        held = tuple(rows.get(name, (0, 0)) for name in self.nest)
        return replace(self, nest={name: nest.get(name) for name in self.nest}, held=held, load=None)


_MOST_EMPTY = 1000  # the largest number of empty batches in a row
_MOST_POSITIONS = 4096  # the number of batches whose positions are kept
_MANY_SKIPPED = 100  # batches, from which on skipping shows a progress bar


def draw() -> None:
    """Advance all random states, so that the next user starts from a different one."""
    torch.rand(1), random.random(), np.random.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """Where a loader is read next: the random state at the start of its epoch, and the number of entries read since.

    `generator` is the state of the loader's own `torch.Generator` at that point, if it has one, and
    `sampler_generators` are those of generators that its samplers have beside it. `now` is the random state before the
    next entry, for a loader that can skip entries without reading them. `loader_state` is the `state_dict` of a
    `StatefulDataLoader`. `rows` says which tensors of batches are known to have one row per sample. `resets` says that
    the epoch began with worker processes of an earlier one: DataLoader draws a seed when it starts them.
    """

    random_state: RandomState
    num_read: int = 0
    generator: torch.Tensor | None = None
    sampler_generators: Sequence[torch.Tensor] = ()
    now: RandomState | None = None
    loader_state: Mapping[str, Any] | None = None
    rows: Mapping[str, Any] | None = None
    resets: bool = False

    def values(self) -> dict[str, Any]:
        """All fields, for a checkpoint. Leaves out a loader's state if a checkpoint cannot store its values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            to_plain(self.loader_state, "the state of a loader")
        except TrainingError:
            values["loader_state"] = None
        return values


class Feed:
    """Reads one task's loader, starting at a position."""

    def __init__(
        self,
        definition: TaskDefinition,
        loader: Iterable[Any],
        drop_last: bool,
        position: LoaderPosition,
        notify: Callable[[str], None],
        *,
        compared: bool,
        facts: Mapping[str, Any] | None = None,
        bar: Callable[[str], AbstractContextManager[Callable[[float], None]]] | None = None,
    ) -> None:
        """`facts` are the properties that a loader must share with this one to continue from its position. `bar` shows
        progress while batches are skipped."""
        self.facts, self._bar = facts or {}, bar
        self.definition, self.loader, self.drop_last, self._notify = definition, loader, drop_last, notify
        # Whether its batches are compared with those that other ranks read.
        self._state, self._compared = position.random_state, compared
        self._epoch = position  # where this epoch began; before the first batch, where to continue
        self._is_started = False
        self._num_read = 0  # entries of the loader read in this epoch
        self._positions: deque[LoaderPosition] = deque(maxlen=_MOST_POSITIONS)  # positions of the last batches
        self._num_batches = 0  # how many batches were read
        self._draws = not isinstance(loader, list | tuple)  # whether reading may draw random numbers
        self._fingerprints: dict[tuple[int, ...], int] = {}
        self._iterator: Iterator[Any] | None = None
        rows = position.rows or {"axes": {}, "with_rows": {}}
        self._axes: dict[str, Axes] = dict(rows["axes"])  # by structure of the batch
        self._with_rows: dict[str, bool] = dict(rows["with_rows"])  # by the path of a tensor in a batch
        self._has_noted_short_batch = False
        self._since_start = 0  # full batches in this epoch
        self._read_ahead: deque[Batch] = deque()
        self._given = 0

    def prepare(self, number: int) -> None:
        """Prepare for reading a batch. Called by all ranks together, before any rank reads it."""

    def example(self) -> Batch:
        """The next batch that has rows, without consuming it."""
        while not (self._read_ahead and self._read_ahead[-1].num_rows):
            if len(self._read_ahead) == _MOST_EMPTY:
                raise TrainingError(
                    f"task {self.definition.name!r}: its loader's first {_MOST_EMPTY} batches are empty"
                )
            self._read_ahead.append(self._read())
        return self._read_ahead[-1]

    def extreme_steps(self, num_steps: int) -> list[list[Batch]]:
        """The shapes of steps with the extremes that a mix has in the next `num_steps`; none without a mix."""
        return []

    def peek(self, number: int) -> Batch:
        """The batch that comes `number` batches after the next one, without consuming any."""
        while len(self._read_ahead) <= number:
            self._read_ahead.append(self._read())
        return self._read_ahead[number]

    def note_trained(self, number: int) -> None:
        """Note how many batches all ranks together have trained on."""

    def close(self) -> None:
        """Stop reading ahead."""

    def position(self, number: int) -> LoaderPosition:
        """The position of a batch by number: an upcoming batch, or one of the last ones."""
        # Other ranks may have read batches that this rank did not need and has not read.
        while self._num_batches < number:
            self._read_ahead.append(self._read())
        is_next = number == self._num_batches
        position = self._next_position() if is_next else self._positions[number - self._num_batches]
        return replace(position, rows={"axes": dict(self._axes), "with_rows": dict(self._with_rows)})

    def _next_position(self) -> LoaderPosition:
        if not self._is_started:
            return self._epoch
        if self._iterator is not None:
            position = replace(self._epoch, num_read=self._num_read)
            if _is_stateful(self.loader):
                generator = _generator_of(self.loader)
                state = {
                    "num_workers": self.loader.num_workers,
                    "state": self.loader.state_dict(),  # type: ignore[attr-defined]
                    # Without workers, it draws a seed after it has shuffled, which its own state leaves out.
                    "generator": None if generator is None or self.loader.num_workers else generator.get_state(),
                }
                return replace(position, now=self._state, loader_state=state)
            if _reads_by_index(self.loader) and self.loader.num_workers == 0:
                return replace(position, now=self._state)
            return position
        return self._epoch_start(self._state)

    def _epoch_start(self, state: RandomState) -> LoaderPosition:
        generator = _generator_of(self.loader)
        return LoaderPosition(
            random_state=state,
            generator=None if generator is None else generator.get_state(),
            sampler_generators=[generator.get_state() for generator in _sampler_generators(self.loader)],
            resets=_keeps_workers(self.loader) and (self._is_started or self.loader._iterator is not None),
        )

    def at(self, number: int) -> Batch:
        """The batch of this number. Batches before it are skipped."""
        while True:
            batch = self._read_ahead.popleft() if self._read_ahead else self._read()
            self._given += 1
            if self._given > number:
                return batch

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        if not self._draws:
            yield
            return
        with restored_random_state():
            set_random_state(self._state)
            try:
                yield
            finally:
                state = random_state()
                if not is_same(state, self._state):  # otherwise all positions share one random state
                    self._state = state

    def _read(self) -> Batch:
        name = self.definition.name
        self._positions.append(self._next_position())
        self._num_batches += 1
        try:
            with self._own_random_numbers():
                return self._next_batch()
        except TrainingError:
            raise
        except Exception as error:
            error.add_note(f"in the loader of task {name!r}")
            raise

    def _next_batch(self) -> Batch:
        name, size = self.definition.name, self.definition.batch_size
        while True:
            if self._iterator is None:
                self._start_epoch()
            nest = self._next_entry()
            if nest is _END:
                if self._since_start == 0:
                    raise TrainingError(
                        f"task {name!r}: its loader yields no batch"
                        + (" of its batch_size" if self._has_noted_short_batch else "")
                        + "; a generator cannot start again: give a list, a DataLoader, or ask for fewer steps"
                    )
                self._iterator = None
                continue
            nest = plain(nest)
            rows = self._rows(nest)
            if rows == 0:
                self._since_start += 1
                return Batch(nest=nest, num_rows=0, signature=0, fingerprint=0)
            if rows == size:
                self._since_start += 1
                return self._batch(nest, rows)
            # Only the last batch of an epoch may be short.
            if rows > size or self._next_entry() is not _END:
                # A DataLoader whose samples are fetched one by one yields their numbers here.
                has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(nest))
                got = f": {describe_batch(nest)}" if has_tensors else ""
                raise TrainingError(
                    f"task {name!r}: its loader gave a batch of {rows} samples, expected {size}, its batch_size{got}. "
                    "Both count the samples of all ranks together"
                )
            self._iterator = None
            if not self.drop_last:
                return self._batch(nest, rows)
            if not self._has_noted_short_batch:
                self._notify(
                    f"task {name!r}: the last batch of its loader has {rows} of {size} samples and is dropped "
                    "(drop_last=False trains on it, too)"
                )
            self._has_noted_short_batch = True
            if self._since_start == 0:
                raise TrainingError(f"task {name!r}: its loader has {rows} samples, fewer than its batch_size {size}")

    def _start_epoch(self) -> None:
        if self._is_started:
            self._epoch = self._epoch_start(random_state() if self._draws else self._state)
            self._iterator, self._num_read = _iterator_of(self.loader, self._epoch.resets), 0
        else:
            generator, position = _generator_of(self.loader), self._epoch
            if generator is not None and position.generator is not None:
                generator.set_state(position.generator)
            generators = _sampler_generators(self.loader)
            for sampler_generator, saved in zip(generators, position.sampler_generators, strict=False):
                sampler_generator.set_state(saved)
            resets = position.resets or self._epoch_start(position.random_state).resets
            self._epoch = replace(self._epoch_start(position.random_state), resets=resets)
            self._is_started = True
            self._iterator, self._num_read = self._iterator_at(position), position.num_read
        self._since_start = self._num_read

    def _iterator_at(self, position: LoaderPosition) -> Iterator[Any]:
        """The entries of an epoch, starting at a position. With a sampler, sample indices are drawn again and no sample
        is read; entries of other loaders are read."""
        loader, state = self.loader, position.loader_state
        if state is not None and _is_stateful(loader) and state["num_workers"] == loader.num_workers:
            loader.load_state_dict(state["state"])  # type: ignore[attr-defined]
            entries = iter(loader)
            generator = _generator_of(loader)
            if generator is not None and state.get("generator") is not None:
                generator.set_state(state["generator"])
            if position.now is not None:
                set_random_state(position.now)
            return entries
        if position.num_read and _reads_by_index(loader):
            return _iterator_of(_loader_after(loader, position.num_read, position.now), self._epoch.resets)
        iterator = _iterator_of(loader, self._epoch.resets)
        shown = position.num_read >= _MANY_SKIPPED and self._bar is not None
        text = f"skipping batches of task {self.definition.name!r} that are trained"
        with self._bar(text) if shown and self._bar is not None else nullcontext(_ignored) as report_share:
            for number in range(position.num_read):
                next(iterator, _END)
                report_share(number / position.num_read)
        return iterator

    def _next_entry(self) -> Any:
        assert self._iterator is not None
        self._num_read += 1
        return next(self._iterator, _END)

    def _rows(self, nest: Any) -> int:
        """The number of samples of a batch, on which all tensors with rows must agree.

        Which tensors have one row per sample follows from the first batch of the same structure, or from their paths in
        batches of other structures.
        """
        name, size = self.definition.name, self.definition.batch_size
        entries = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(nest)[0]]
        if is_empty(nest):
            return 0
        form = form_of_batch(nest)
        if form not in self._axes:
            row_counts = {
                leaf.shape[0]
                for path, leaf in entries
                if self._with_rows.get(path) and isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0]
            }
            self._axes[form] = batch_axes(self.definition, min(row_counts, default=size), nest)
            for (path, _), axis in zip(entries, self._axes[form], strict=True):
                self._with_rows[path] = self._with_rows.get(path, False) or axis is not None
        path_by_rows = {
            leaf.shape[0]: path
            for (path, leaf), axis in zip(entries, self._axes[form], strict=True)
            if axis is not None and isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        if len(path_by_rows) != 1:
            text = ", ".join(f"{path} {rows}" for rows, path in sorted(path_by_rows.items()))
            raise TrainingError(
                f"task {name!r}: its loader gave a batch whose tensors disagree about the number of samples: {text}; "
                f"expected {size}"
            )
        return next(iter(path_by_rows))

    def _batch(self, nest: Any, rows: int) -> Batch:
        lengths = lengths_in(self.definition, nest)
        return Batch(
            nest=nest,
            num_rows=rows,
            signature=with_lengths(signature_of(nest), lengths),
            lengths=lengths,
            fingerprint=self._fingerprint(nest) if self._compared else 0,
            tokens=0 if self.definition.tokens is None else int(self.definition.tokens(nest)),
        )

    def _fingerprint(self, nest: Any) -> int:
        """A digest of a batch's values. Computed only once for batches in a list, because reading values waits for the
        GPU."""
        if self._draws:
            return fingerprint_of(nest)
        key = tuple(id(leaf) for leaf in tree_leaves(nest))
        if key not in self._fingerprints:
            self._fingerprints[key] = fingerprint_of(nest)
        return self._fingerprints[key]


def _is_stateful(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader is torchdata's `StatefulDataLoader`, or has its interface."""
    return isinstance(loader, DataLoader) and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _reads_by_index(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader reads samples by the indices of its sampler."""
    return type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)


class _SkippingSampler:
    """The entries of a sampler after the first `count`. From there on, it draws from the random state `now`."""

    def __init__(self, sampler: Any, count: int, now: RandomState | None) -> None:
        self._sampler, self._count, self._now = sampler, count, now

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self._sampler)
        for _ in range(self._count):
            next(entries, None)
        if self._now is not None:
            set_random_state(self._now)
        yield from entries


def _loader_after(loader: DataLoader[Any], count: int, now: RandomState | None) -> DataLoader[Any]:
    """A copy of a loader that starts after its first `count` batches."""
    later = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # Bypass `DataLoader.__setattr__`, which refuses a new sampler.
    object.__setattr__(later, name, _SkippingSampler(getattr(loader, name), count, now))
    return later


def _keeps_workers(loader: Any) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and loader.persistent_workers


def _iterator_of(loader: Any, resets: bool) -> Iterator[Any]:
    """The entries of an epoch; if it `resets`, with the random numbers of one whose workers were there before it."""
    if not resets or not _keeps_workers(loader) or loader._iterator is not None:
        return iter(loader)
    own, generators = _generator_of(loader), _sampler_generators(loader)
    generators += [] if own is None else [own]
    state, states = random_state(), [generator.get_state() for generator in generators]
    iter(loader)  # starts them
    set_random_state(state)
    for generator, generator_state in zip(generators, states, strict=True):
        generator.set_state(generator_state)
    return iter(loader)


def _ignored(share: float) -> None:
    pass


def _generator_of(loader: Any) -> torch.Generator | None:
    """The generator that a DataLoader, or a sampler, was given to draw from."""
    generator = getattr(loader, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _sampler_generators(loader: Any) -> list[torch.Generator]:
    """The generators that samplers of a DataLoader draw from, but for the loader's own."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    generators = [_generator_of(sampler) for sampler in samplers]
    own = _generator_of(loader)
    return list({id(each): each for each in generators if each is not None and each is not own}.values())


def is_empty(nest: Any) -> bool:
    """Whether a batch has no samples."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return nest is None or (bool(tensors) and all(leaf.shape[0] == 0 for leaf in tensors))


def form_of_batch(nest: Any) -> str:
    """The structure of a batch, whatever its sizes and values."""
    leaves, spec = tree_flatten(nest)
    return f"{spec} {[_kind(leaf) for leaf in leaves]}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "empty" if leaf.dim() and leaf.shape[0] == 0 else "tensor"
    return type(leaf).__name__


_END = object()
