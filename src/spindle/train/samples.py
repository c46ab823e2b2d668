"""Samples of a map-style dataset: each rank fetches the rows and fields that its slots use, while it computes.

Which samples make up a batch follows from the seed, or from the loader's own sampler, on all ranks alike; the plan only
decides which rank fetches them. Random numbers that a dataset draws are seeded for each row, so they do not depend on
the plan either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from spindle.data import is_same, random_state, restored_random_state, seed_all
from spindle.errors import TrainingError
from spindle.run import plain, seed_of, signature_of
from spindle.train.feed import Batch, Feed, Held, LoaderPosition
from spindle.train.items import EVERYTHING, fields_of

T = TypeVar("T")
_BLOCK = 1 << 18  # samples: the size of the blocks in which samples are shuffled, if they lie in shards
Needs = tuple[tuple[str, int, int], ...]  # rows `[first, last)` by field


def needs_of(uses: Iterable[tuple[Callable[..., Any], int, int]]) -> Needs:
    """The rows of each field that pieces of code read. `uses` has each piece of code with its rows."""
    rows_of: dict[str, tuple[int, int]] = {}
    for code, first, last in uses:
        for field in fields_of(code) if first < last else ():
            begin, end = rows_of.get(field, (first, last))
            rows_of[field] = (min(begin, first), max(end, last))
    return tuple((field, *rows) for field, rows in sorted(rows_of.items()))


@dataclass(frozen=True, slots=True)
class Request:
    """Rows of one batch, by sample number; all rows without `needs`. Without a seed, samples draw no random numbers and
    may be fetched by another thread."""

    seed: int | None
    samples: tuple[int, ...]
    needs: Needs | None


class Rows(Dataset[Any]):
    """Fetches requested rows, also in the worker processes of a DataLoader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Any:
        """The batch, or a dict of the needed fields."""
        needs = request.needs
        if needs is None or any(field == EVERYTHING for field, _, _ in needs):
            first, last = (0, len(request.samples)) if needs is None else _span(needs)
            return default_collate([self._sample(request, row, None) for row in range(first, last)])
        columns: dict[str, list[Any]] = {field: [] for field, _, _ in needs}
        begin, end = _span(needs)
        for row in range(begin, end):
            names = [field for field, first, last in needs if first <= row < last]
            sample = self._sample(request, row, names) if names else {}
            for name in names:
                columns[name].append(sample[name])
        return {name: default_collate(column) for name, column in columns.items()}

    def _sample(self, request: Request, row: int, names: list[str] | None) -> Any:
        if request.seed is not None:
            seed_all(seed_of(request.seed, row))
        if names is not None and hasattr(self.dataset, "get_fields"):
            return self.dataset.get_fields(request.samples[row], names)
        return self.dataset[request.samples[row]]


def _span(needs: Needs) -> tuple[int, int]:
    """The rows from the first to the last that are needed; empty if the rank's code reads nothing of a batch."""
    return min((first for _, first, _ in needs), default=0), max((last for _, _, last in needs), default=0)


class StreamedSamples(Dataset[Any]):
    """The samples of a mosaicml-streaming `StreamingDataset` by number.

    It is never iterated, because its iterator waits for all ranks of a host, and some of them need not read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.shard_lengths = [int(length) for length in dataset.samples_per_shard]

    def __len__(self) -> int:
        return sum(self.shard_lengths)  # `len(dataset)` is the share of one rank

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number]


def is_streaming(loader: Any) -> bool:
    """Whether this is a `StreamingDataset`, without importing its library."""
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(loader).__mro__]
    return ("streaming", "StreamingDataset") in names


def by_number(loader: Any) -> Any:
    """The loader as a map-style dataset, if its samples can be read by number although it does not look like one."""
    return StreamedSamples(loader) if is_streaming(loader) else loader


class Shuffled:
    """Sample numbers in batches: shuffled in each epoch by the seed alone, starting after `num_batches` batches.

    Samples in shards are shuffled shard by shard, then within blocks of `_BLOCK`, so that few shards are open at a time
    (`py1b` of mosaicml-streaming).
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        drop_last: bool,
        seed: int,
        num_batches: int,
        shard_lengths: Sequence[int] | None = None,
    ) -> None:
        self.length, self.batch_size, self.seed, self._shard_lengths = length, batch_size, seed, shard_lengths
        batches_per_epoch = length // batch_size if drop_last else -(-length // batch_size)
        self._epoch, self._skipped = divmod(num_batches, max(1, batches_per_epoch))

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "epoch", self._epoch))
        order = self._order(generator)
        first, self._skipped, self._epoch = self._skipped * self.batch_size, 0, self._epoch + 1
        for begin in range(first, self.length, self.batch_size):
            yield order[begin : begin + self.batch_size]

    def _order(self, generator: torch.Generator) -> list[int]:
        if self._shard_lengths is None:
            return torch.randperm(self.length, generator=generator).tolist()
        lengths = self._shard_lengths
        shards = [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
        in_shards = [number for shard in _permuted(shards, generator) for number in shard]
        blocks = [in_shards[begin : begin + _BLOCK] for begin in range(0, self.length, _BLOCK)]
        return [number for block in blocks for number in _permuted(block, generator)]


def _permuted(values: Sequence[T], generator: torch.Generator) -> list[T]:
    return [values[place] for place in torch.randperm(len(values), generator=generator).tolist()]


class Sampled:
    """Sample numbers in batches, as a DataLoader's own batch sampler yields them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.generator, self.batch_sampler = loader, loader.generator, loader.batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader draws this at the start of an epoch; drawing it here, too, lets its sampler draw the same
        # numbers.
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        assert self.loader.batch_sampler is not None
        yield from self.loader.batch_sampler


def sample_feed(loader: Any, seed: int, num_batches: int, **named: Any) -> SampleFeed | None:
    """A feed of samples for a map-style dataset, or for a plain DataLoader of one that stacks its samples. None for
    other loaders."""
    definition, drop_last = named["definition"], named["drop_last"]
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        if not hasattr(loader, "__len__"):
            raise TrainingError(f"task {definition.name!r}: its dataset has no length; give a DataLoader of it instead")
        task_seed = seed_of(seed, definition.name)
        shards = loader.shard_lengths if isinstance(loader, StreamedSamples) else None
        chosen = Shuffled(len(loader), definition.batch_size, drop_last, task_seed, num_batches, shards)
        return SampleFeed(loader, chosen, task_seed, num_batches, {}, **named)
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    stacks = loader.collate_fn is default_collate and loader.batch_sampler is not None
    if not stacks or hasattr(loader.dataset, "__getitems__"):
        return None
    workers = {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    return SampleFeed(
        loader.dataset, Sampled(loader), seed, num_batches, workers if loader.num_workers else {}, **named
    )


class SampleFeed(Feed):
    """Reads one task's dataset by sample index."""

    def __init__(
        self,
        dataset: Any,
        chosen: Iterable[list[int]],
        seed: int,
        num_batches: int,
        workers: Mapping[str, Any],
        **named: Any,
    ) -> None:
        super().__init__(loader=chosen, **named)
        self._rows_of, self._seed, self._before, self._workers = Rows(dataset), seed, num_batches, dict(workers)
        self._chosen: dict[int, Batch] = {}  # sample numbers of batches, by batch number
        self._num_chosen = 0
        self.num_again = 1  # how many of the last batches may be requested again
        # The loader's own iterator, with the number of its next batch.
        self._stream: tuple[Needs | None, int, Iterator[Any]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Needs | None, Future[Any]] | None = None
        self._fetches_ahead = False  # until a sample has shown that it draws no random numbers
        self._example: Batch | None = None

    @property
    def divides(self) -> bool:
        """Whether a batch can be read in parts: whether all of it is tensors with one row per sample."""
        example, size = self.example(), self.definition.batch_size
        leaves = tree_leaves(example.nest)
        return self.definition.tokens is None and all(
            isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == example.num_rows == size for leaf in leaves
        )

    def example(self) -> Batch:
        if self._example is None:
            request = self._request(0, None)
            with restored_random_state():
                nest = plain(self._named_errors(lambda: self._rows_of[request]))
                # nothing was drawn if the random state is still the one that the last row was seeded with
                after_last_row = random_state()
                seed_all(seed_of(request.seed, len(request.samples) - 1))
                self._fetches_ahead = is_same(random_state(), after_last_row)
            self._example = self._whole(nest, self._choose(0))
        return self._example

    def peek(self, number: int) -> Batch:
        with restored_random_state():
            nest = plain(self._named_errors(lambda: self._rows_of[self._request(number, None)]))
        return self._whole(nest, self._choose(number))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._ahead = self._stream = None

    def at(self, number: int, needs: Needs | None = None) -> Batch:
        for passed in [earlier for earlier in self._chosen if earlier <= number - self.num_again]:
            del self._chosen[passed]
        chosen, example = self._choose(number), self.example()
        if number == 0 and needs is None:
            return example
        if needs is not None and chosen.num_rows != self.definition.batch_size:
            needs = None
        nest = plain(self._named_errors(lambda: self._fetch(number, needs)))
        if needs is None:
            return self._whole(nest, chosen)
        whole, held = _in_whole_structure(nest, needs, example.nest)
        return replace(chosen, nest=whole, signature=signature_of(nest), held=held)

    def _whole(self, nest: Any, chosen: Batch) -> Batch:
        return replace(super()._batch(nest, super()._rows(nest)), fingerprint=chosen.fingerprint)

    def _named_errors(self, fetch: Callable[[], Any]) -> Any:
        try:
            return fetch()
        except Exception as error:
            error.add_note(f"in the dataset of task {self.definition.name!r}")
            raise

    # What the loader yields are sample numbers.

    def _rows(self, nest: Any) -> int:
        return len(nest)

    def _batch(self, nest: Any, rows: int) -> Batch:
        samples = tuple(int(sample) for sample in nest)
        return Batch(nest=samples, num_rows=rows, signature=0, fingerprint=seed_of(samples) % 2**48)

    def position(self, number: int) -> LoaderPosition:
        if isinstance(self.loader, Shuffled):  # the position follows from the number of batches alone
            return LoaderPosition(random_state=self._state)
        if number > self._num_chosen:
            self._choose(number - 1)
        return super().position(number)

    def _choose(self, number: int) -> Batch:
        while self._num_chosen <= number:
            self._chosen[self._num_chosen] = self._read()
            self._num_chosen += 1
        return self._chosen[number]

    def _request(self, number: int, needs: Needs | None) -> Request:
        return Request(seed_of(self._seed, self._before + number), self._choose(number).nest, needs)

    def _requests(self, number: int, needs: Needs | None) -> Iterator[Request]:
        while True:
            yield self._request(number, needs)
            number += 1

    def _fetch(self, number: int, needs: Needs | None) -> Any:
        """Fetch a batch: from worker processes, from a thread that reads ahead, or directly."""
        if self._workers:
            if self._stream is None or self._stream[:2] != (needs, number):
                requests: Any = self._requests(number, needs)
                self._stream = (needs, number, iter(DataLoader(self._rows_of, None, sampler=requests, **self._workers)))
            nest = next(self._stream[2])
            self._stream = (needs, number + 1, self._stream[2])
            return nest
        nest = self._from_thread(number, needs)
        # Random numbers must come from a row's own seed, so a dataset that draws any is read here, not in the thread.
        if nest is None:
            with restored_random_state():
                nest = self._rows_of[self._request(number, needs)]
        if self._fetches_ahead:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
            ahead = replace(self._request(number + 1, needs), seed=None)
            self._ahead = (number + 1, needs, self._thread.submit(Rows.__getitem__, self._rows_of, ahead))
        return nest

    def _from_thread(self, number: int, needs: Needs | None) -> Any:
        """What the thread has fetched, if it was this batch. Waits for the thread in any case, because only one thread
        at a time may read a dataset."""
        if self._ahead is None:
            return None
        (*fetched, future), self._ahead = self._ahead, None
        if fetched != [number, needs] and future.cancel():
            return None
        # The dataset may be bound to one thread. If it is broken, fetching again raises the error.
        if future.exception() is not None:
            self._fetches_ahead = False
            return None
        return future.result() if fetched == [number, needs] else None


def _in_whole_structure(nest: Any, needs: Needs, example: Any) -> tuple[Any, Held]:
    """Part of a batch in the structure of a whole one, with None for what is missing, and the rows that each leaf
    has."""
    rows = {field: (first, last) for field, first, last in needs}
    if EVERYTHING in rows:
        return nest, tuple(_span(needs) for _ in tree_leaves(nest))
    whole, held = {}, []
    if not rows:
        return tree_map(lambda leaf: None, example), ((0, 0),) * len(tree_leaves(example))
    for key, value in example.items():
        whole[key] = nest[key] if key in rows else tree_map(lambda leaf: None, value)
        held += [rows.get(key, (0, 0))] * len(tree_leaves(value))
    return whole, tuple(held)
