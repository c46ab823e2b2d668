"""Decode samples into a batch: sequences of packed samples, with the entries and items that a rank needs.

A sample is a dict: entries with a row for each of its tokens, and entries of items. A dataset may decode less than
whole samples: `get_fields(number, names)` some entries, `get_items(number, names, items)` some items. Its random state
is seeded for each sample and step, so random numbers depend neither on the rank nor on the process that decodes the
sample. If `get_items` draws random numbers, all items of a sample are decoded, and those that are needed are kept. What
`get_fields` draws must not depend on `names`, because ranks ask for different entries.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from spindle.data.lengths import LengthFunction, Lengths, Unreadable, lengths_of_sample
from spindle.data.random_state import is_same, random_state, restored_random_state, seed_all
from spindle.errors import SpindleError, TrainingError

_NO_STEP = -1  # in place of a step, for samples that are read for their lengths


class SampleNumber(NamedTuple):
    source: str
    number: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The samples of each sequence of a microbatch, their lengths in the same order, and the step that it belongs
    to."""

    sequences: tuple[tuple[SampleNumber, ...], ...]
    lengths: tuple[Lengths, ...]
    num_tokens: int
    step: int = 0

    @property
    def samples(self) -> list[SampleNumber]:
        return [sample for sequence in self.sequences for sample in sequence]

    @property
    def item_lengths(self) -> tuple[int, ...]:
        return tuple(length for _, items in self.lengths for length in items)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank needs of a microbatch: for each entry with a row per token, the sequences `[first, last)` (None: all
    sequences of all entries); and the items, in this order (None: all)."""

    fields: tuple[tuple[str, int, int], ...] | None = None
    items: tuple[int, ...] | None = None


WHOLE = Wanted()


class SampleCache:
    """The latest samples that were read for their lengths, up to `max_bytes`, for the first step that decodes them in
    the same process. Later steps read them again, because a dataset may augment differently each time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._samples: dict[SampleNumber, tuple[Mapping[str, Any], int]] = {}
        self._step_of: dict[SampleNumber, int] = {}  # the first step that decoded each sample

    def add(self, number: SampleNumber, sample: Mapping[str, Any]) -> None:
        """Add a sample if it consists of tensors or arrays, whose sizes are known."""
        values = list(sample.values())
        if number in self._samples or not all(isinstance(value, torch.Tensor | np.ndarray) for value in values):
            return
        num_bytes = sum(int(value.nbytes) for value in values)
        self._samples[number] = dict(sample), num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._samples)))

    def get(self, number: SampleNumber, step: int) -> Mapping[str, Any] | None:
        if number in self._samples and self._step_of.setdefault(number, step) != step:
            self._remove(number)
        return self._samples[number][0] if number in self._samples else None

    def _remove(self, number: SampleNumber) -> None:
        _, num_bytes = self._samples.pop(number)
        self._num_bytes -= num_bytes
        self._step_of.pop(number, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Decodes microbatches.

    `item_entries` have rows for each item: as many as its length, or, if their value is None, one.
    `length_entry` is the entry that receives the lengths. `length_functions` return the lengths of decoded samples, for
    sources without an index. `watch` is called with each sample before it is read.
    """

    datasets: Mapping[str, Any]
    max_tokens: int
    padding: Mapping[str, float]
    segments: str | None
    item_entries: Mapping[str, str | None]
    length_entry: str | None
    seed: int = 0
    length_functions: Mapping[str, LengthFunction] = field(default_factory=dict)
    cache: SampleCache = field(default_factory=lambda: SampleCache(0), compare=False)
    watch: Callable[[SampleNumber], None] | None = None
    _drawing: set[str] = field(default_factory=set, compare=False)  # sources whose `get_items` draws random numbers

    def decode(self, microbatch: Microbatch, wanted: Wanted = WHOLE) -> dict[str, Any]:
        """The batch of a microbatch, or the `wanted` part of it."""
        rows: dict[str, list[torch.Tensor]] = {}
        with restored_random_state():
            lengths = iter(microbatch.lengths)
            for place, sequence in enumerate(microbatch.sequences):
                tokens = [next(lengths)[0] for _ in sequence]
                names = None
                if wanted.fields is not None:
                    names = [name for name, first, last in wanted.fields if first <= place < last]
                for name, tensor in self._sequence(microbatch.step, sequence, tokens, names).items():
                    rows.setdefault(name, []).append(tensor)
            batch: dict[str, Any] = {name: torch.stack(tensors) for name, tensors in rows.items()}
            return batch | self._items(microbatch, wanted.items)

    def read_lengths(self, samples: Sequence[SampleNumber]) -> list[Lengths | Unreadable]:
        """Read samples for their lengths. An error stands in place of its sample's lengths, and is raised when the
        sample is drawn."""
        with restored_random_state():
            return [self._read_lengths(sample) for sample in samples]

    def _read_lengths(self, sample: SampleNumber) -> Lengths | Unreadable:
        where = f"sample {sample.number} of {sample.source!r} could not be read for its lengths"
        try:
            with self._reading(_NO_STEP, sample):
                before = random_state()
                read = _entries(self.datasets[sample.source][sample.number], (), sample)
                lengths = lengths_of_sample(self.length_functions[sample.source], read)
                # Random numbers depend on the step, which is not known yet: cache only samples that drew none.
                if is_same(random_state(), before):
                    self.cache.add(sample, read)
            return lengths
        except SpindleError as error:
            return Unreadable(f"{where}: {error}")
        except Exception as error:
            return Unreadable(f"{where}: {type(error).__name__}: {error}", traceback.format_exc())

    @contextmanager
    def _reading(self, step: int, sample: SampleNumber) -> Iterator[None]:
        """A context for code of a dataset: random numbers are seeded for the sample, and errors name it."""
        if self.watch is not None:
            self.watch(sample)
        parts = f"{self.seed} {step} {sample.source} {sample.number}"
        seed_all(int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=7).digest(), "big"))
        try:
            yield
        except SpindleError:
            raise
        except Exception as error:
            error.add_note(f"in sample {sample.number} of source {sample.source!r} of balanced data")
            raise

    def _sequence(
        self,
        step: int,
        sequence: Sequence[SampleNumber],
        lengths: Sequence[int],
        fields: Collection[str] | None,
    ) -> dict[str, torch.Tensor]:
        """The entries of one sequence with a row for each token, padded."""
        entries: dict[str, list[torch.Tensor]] = {}
        segments: list[torch.Tensor] = []
        for place, (sample, length) in enumerate(zip(sequence, lengths, strict=True)):
            tokens = min(length, self.max_tokens)
            with self._reading(step, sample):
                decoded = self._fields(step, sample, fields)
            if place and decoded.keys() != entries.keys():
                first, name = sequence[0], min(decoded.keys() ^ entries.keys())
                raise TrainingError(
                    f"sample {sample.number} of {sample.source!r} and sample {first.number} of {first.source!r} are in "
                    f"one sequence, and only one of them has {name!r}; let all samples of balanced data have the same "
                    "entries for each token"
                )
            for name, value in decoded.items():
                tensor = torch.as_tensor(value)
                if tensor.dim() == 0 or len(tensor) != length:
                    raise TrainingError(
                        f"sample {sample.number} of {sample.source!r}: {name!r} has shape {tuple(tensor.shape)}, "
                        f"expected a row for each of the {length} tokens that {self._cause(sample)}"
                    )
                entries.setdefault(name, []).append(tensor[:tokens])
            segments.append(torch.full((tokens,), place + 1, dtype=torch.int64))
        if self.segments is not None and (fields is None or self.segments in fields):
            entries[self.segments] = segments
        return {name: self._padded(name, torch.cat(parts)) for name, parts in entries.items()}

    def _padded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        missing = self.max_tokens - len(tensor)
        filler = tensor.new_full((missing, *tensor.shape[1:]), self.padding.get(name, 0))
        return torch.cat([tensor, filler]) if missing else tensor

    def _fields(self, step: int, sample: SampleNumber, fields: Collection[str] | None) -> Mapping[str, Any]:
        dataset, whole = self.datasets[sample.source], self.cache.get(sample, step)
        if fields is not None:
            wanted = sorted(name for name in fields if name not in self.item_entries and name != self.segments)
            if not wanted:
                return {}
            if hasattr(dataset, "get_fields") and whole is None:
                return _entries(dataset.get_fields(sample.number, wanted), wanted, sample)
        if whole is None:
            whole = _entries(dataset[sample.number], (), sample)
        return {
            name: value
            for name, value in whole.items()
            if name not in self.item_entries and name != self.length_entry and (fields is None or name in fields)
        }

    def _items(self, microbatch: Microbatch, items: Collection[int] | None) -> dict[str, Any]:
        if not microbatch.item_lengths or not self.item_entries:
            return {}
        wanted = range(len(microbatch.item_lengths)) if items is None else items
        samples = microbatch.samples
        owners: list[tuple[int, int]] = []  # by item: the position of its sample, and its number in the sample
        for place, (_, lengths) in enumerate(microbatch.lengths):
            owners += [(place, number) for number in range(len(lengths))]
        entries: dict[str, list[torch.Tensor]] = {}
        place = 0
        wanted = list(wanted)
        while place < len(wanted):
            # Consecutive items of one sample are decoded together.
            owner = owners[wanted[place]][0]
            end = place
            while end < len(wanted) and owners[wanted[end]][0] == owner:
                end += 1
            numbers = [owners[item][1] for item in wanted[place:end]]
            lengths = microbatch.lengths[owner][1]
            for name, tensor in self._some_items(microbatch.step, samples[owner], lengths, numbers).items():
                entries.setdefault(name, []).append(tensor)
            place = end
        batch: dict[str, Any] = {name: torch.cat(parts) for name, parts in entries.items()}
        if self.length_entry is not None:
            batch[self.length_entry] = torch.tensor([microbatch.item_lengths[item] for item in wanted])
        return batch

    def _some_items(
        self, step: int, sample: SampleNumber, lengths: Sequence[int], numbers: list[int]
    ) -> dict[str, torch.Tensor]:
        names = [name for name in self.item_entries if name != self.length_entry]
        decoded, read = self._read_items(step, sample, names, numbers, list(range(len(lengths))))
        for name, tensor in decoded.items():
            expected = sum(self._rows(name, lengths)[number] for number in read)
            if len(tensor) != expected:
                raise TrainingError(
                    f"sample {sample.number} of {sample.source!r}: {name!r} has {len(tensor)} rows, expected the "
                    f"{expected} that {self._cause(sample)}"
                )
        if read == numbers:
            return decoded
        cut = {}
        for name, tensor in decoded.items():
            parts = torch.split(tensor, list(self._rows(name, lengths)))
            cut[name] = torch.cat([parts[number] for number in numbers])
        return cut

    def _read_items(
        self, step: int, sample: SampleNumber, names: list[str], numbers: list[int], every: list[int]
    ) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Entries of some items of a sample, or of all of them, and the numbers of these items."""
        dataset, cached = self.datasets[sample.source], self.cache.get(sample, step)
        if cached is not None:
            entries = _entries(cached, names, sample)
            return {name: torch.as_tensor(entries[name]) for name in names}, every
        has_items = hasattr(dataset, "get_items")
        # If `get_items` draws random numbers, those of an item depend on which others are read with it, and ranks that
        # share the item would differ: read all items of the sample.
        for items in [numbers, every] if has_items and sample.source not in self._drawing else [every]:
            with self._reading(step, sample):
                before = random_state()
                read = dataset.get_items(sample.number, names, items) if has_items else dataset[sample.number]
                has_drawn = has_items and items != every and not is_same(random_state(), before)
            if not has_drawn:
                entries = _entries(read, names, sample)
                return {name: torch.as_tensor(entries[name]) for name in names}, items
            self._drawing.add(sample.source)
        raise AssertionError("all items of a sample are read at last")

    def _cause(self, sample: SampleNumber) -> str:
        if sample.source in self.length_functions:
            return "the function lengths= returned before; it must return the same whenever a sample is read"
        return "its index says; make the index again"

    def _rows(self, name: str, lengths: Sequence[int]) -> Sequence[int]:
        return lengths if self.item_entries[name] is not None else (1,) * len(lengths)


def _entries(read: Any, names: Collection[str], sample: SampleNumber) -> Mapping[str, Any]:
    """The entries `names` of what a dataset returned for a sample; without names, all of them."""
    if not isinstance(read, Mapping):
        raise TrainingError(
            f"sample {sample.number} of {sample.source!r} is a {type(read).__name__}; expected a dict of entries"
        )
    missing = [name for name in names if name not in read]
    if missing:
        raise TrainingError(
            f"sample {sample.number} of {sample.source!r} has no {missing[0]!r}, which the task reads; it has "
            f"{', '.join(map(repr, read))}"
        )
    return {name: read[name] for name in names} if names else read
