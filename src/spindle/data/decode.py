"""From the numbers of samples to a batch: sequences of packed samples, with the entries and items that a rank needs.

A sample is a dict: entries with a row for each of its tokens, and entries of items. A dataset may decode less than
whole samples: `get_fields(number, names)` some entries, `get_items(number, names, items)` some items.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spindle.data.lengths import LengthIndex
from spindle.errors import TrainingError


class SampleNumber(NamedTuple):
    source: str
    number: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The samples of each sequence of a microbatch, and the lengths of all its items, in this order."""

    sequences: tuple[tuple[SampleNumber, ...], ...]
    item_lengths: tuple[int, ...]
    num_tokens: int

    @property
    def samples(self) -> list[SampleNumber]:
        return [sample for sequence in self.sequences for sample in sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Decodes microbatches. `item_entries` are entries with rows for each item: as many as its length, or one (None);
    `length_entry` is the entry that gets the lengths."""

    datasets: Mapping[str, Any]
    indices: Mapping[str, LengthIndex]
    max_tokens: int
    padding: Mapping[str, float]
    segments: str | None
    item_entries: Mapping[str, str | None]
    length_entry: str | None

    def decode(
        self, microbatch: Microbatch, fields: Collection[str] | None = None, items: Collection[int] | None = None
    ) -> dict[str, Any]:
        """The batch; with `fields`, only these entries with a row for each token, and with `items`, only these of its
        items, in this order."""
        rows: dict[str, list[torch.Tensor]] = {}
        for sequence in microbatch.sequences:
            for name, tensor in self._sequence(sequence, fields).items():
                rows.setdefault(name, []).append(tensor)
        batch: dict[str, Any] = {name: torch.stack(tensors) for name, tensors in rows.items()}
        return batch | self._items(microbatch, items)

    def _sequence(self, sequence: Sequence[SampleNumber], fields: Collection[str] | None) -> dict[str, torch.Tensor]:
        """The entries of one sequence with a row for each token, padded."""
        entries: dict[str, list[torch.Tensor]] = {}
        segments: list[torch.Tensor] = []
        for place, sample in enumerate(sequence):
            indexed = int(self.indices[sample.source].tokens[sample.number])
            tokens = min(indexed, self.max_tokens)
            decoded = self._fields(sample, fields)
            if place and decoded.keys() != entries.keys():
                first, name = sequence[0], min(decoded.keys() ^ entries.keys())
                raise TrainingError(
                    f"sample {sample.number} of {sample.source!r} and sample {first.number} of {first.source!r} are in "
                    f"one sequence, and only one of them has {name!r}; let all samples of balanced data have the same "
                    "entries for each token"
                )
            for name, value in decoded.items():
                tensor = torch.as_tensor(value)
                if tensor.dim() == 0 or len(tensor) != indexed:
                    raise TrainingError(
                        f"sample {sample.number} of {sample.source!r}: {name!r} has shape {tuple(tensor.shape)}, "
                        f"expected a row for each of the {indexed} tokens that its index says; make the index again"
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

    def _fields(self, sample: SampleNumber, fields: Collection[str] | None) -> Mapping[str, Any]:
        dataset = self.datasets[sample.source]
        if fields is not None:
            wanted = [name for name in fields if name not in self.item_entries and name != self.segments]
            if not wanted:
                return {}
            if hasattr(dataset, "get_fields"):
                read = dataset.get_fields(sample.number, wanted)
                return {name: read[name] for name in wanted}
        whole = dataset[sample.number]
        return {
            name: value
            for name, value in whole.items()
            if name not in self.item_entries and name != self.length_entry and (fields is None or name in fields)
        }

    def _items(self, microbatch: Microbatch, items: Collection[int] | None) -> dict[str, Any]:
        if not microbatch.item_lengths or not self.item_entries:
            return {}
        wanted = range(len(microbatch.item_lengths)) if items is None else items
        owners: list[tuple[SampleNumber, int]] = []  # by item: its sample, and its number there
        for sample in microbatch.samples:
            count = len(self.indices[sample.source].items_of(sample.number))
            owners += [(sample, number) for number in range(count)]
        entries: dict[str, list[torch.Tensor]] = {}
        place = 0
        wanted = list(wanted)
        while place < len(wanted):
            # Items of one sample that follow each other are decoded together.
            sample = owners[wanted[place]][0]
            end = place
            while end < len(wanted) and owners[wanted[end]][0] is sample:
                end += 1
            numbers = [owners[item][1] for item in wanted[place:end]]
            for name, tensor in self._some_items(sample, numbers).items():
                entries.setdefault(name, []).append(tensor)
            place = end
        batch: dict[str, Any] = {name: torch.cat(parts) for name, parts in entries.items()}
        if self.length_entry is not None:
            batch[self.length_entry] = torch.tensor([microbatch.item_lengths[item] for item in wanted])
        return batch

    def _some_items(self, sample: SampleNumber, numbers: list[int]) -> dict[str, torch.Tensor]:
        dataset, lengths = self.datasets[sample.source], self.indices[sample.source].items_of(sample.number)
        names = [name for name in self.item_entries if name != self.length_entry]
        if hasattr(dataset, "get_items"):
            read = dataset.get_items(sample.number, names, numbers)
            expected = {name: sum(self._rows(name, lengths)[number] for number in numbers) for name in names}
            decoded = {name: torch.as_tensor(read[name]) for name in names}
        else:
            whole = dataset[sample.number]
            expected = {name: sum(self._rows(name, lengths)) for name in names}
            decoded = {name: torch.as_tensor(whole[name]) for name in names}
        for name, tensor in decoded.items():
            if len(tensor) != expected[name]:
                raise TrainingError(
                    f"sample {sample.number} of {sample.source!r}: {name!r} has {len(tensor)} rows, and its index says "
                    f"{expected[name]}; make the index again"
                )
        if hasattr(dataset, "get_items"):
            return decoded
        cut = {}
        for name, tensor in decoded.items():
            parts = torch.split(tensor, list(self._rows(name, lengths)))
            cut[name] = torch.cat([parts[number] for number in numbers])
        return cut

    def _rows(self, name: str, lengths: Sequence[int]) -> Sequence[int]:
        return lengths if self.item_entries[name] is not None else (1,) * len(lengths)
