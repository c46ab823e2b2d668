"""The lengths of each sample of a dataset and of its items: from an index, or known once the sample was read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as index_of
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spindle.artifact import json_value, read_text_file
from spindle.errors import InputError, TrainingError

Column = NDArray[np.int64]
Lengths = tuple[int, tuple[int, ...]]  # tokens of a sample, and the lengths of its items
LengthFunction = Callable[[dict[str, Any]], Any]  # decoded sample → lengths
_MAX_KNOWN = 1 << 20  # samples of a source whose lengths are remembered after they were read
_EXPECTED = "expected its tokens, such as 812, or its tokens and the lengths of its items, such as (812, [256, 1024])"


@dataclass(frozen=True, slots=True, eq=False)
class LengthIndex:
    """The tokens of each sample, and the lengths of its items: `item_lengths[item_starts[i] : item_starts[i + 1]]`."""

    tokens: Column
    item_starts: Column
    item_lengths: Column

    def __len__(self) -> int:
        return len(self.tokens)

    def items_of(self, sample: int) -> tuple[int, ...]:
        return tuple(self.item_lengths[self.item_starts[sample] : self.item_starts[sample + 1]].tolist())

    def lengths_of(self, sample: int) -> Lengths:
        return int(self.tokens[sample]), self.items_of(sample)

    @property
    def digest(self) -> str:
        """Differs if any length differs."""
        hashed = hashlib.blake2b(digest_size=12)
        for column in (self.tokens, self.item_starts, self.item_lengths):
            hashed.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in place of the lengths of a sample: why they could not be read."""

    message: str
    details: str = ""


class UnknownLengths(Exception):
    """A step needs lengths that have not been read yet, after `num_draws` draws."""

    def __init__(self, num_draws: int) -> None:
        super().__init__(f"after {num_draws} draws")
        self.num_draws = num_draws


class ReadLengths:
    """Lengths that a user's function returned for decoded samples, as far as these were read. All ranks have the same
    ones: they gather them from each other, and no rank adds any on its own."""

    def __init__(self, function: LengthFunction, num_samples: int) -> None:
        self.function, self._num_samples = function, num_samples
        self._known: dict[int, Lengths | Unreadable] = {}

    def __len__(self) -> int:
        """The number of samples with known lengths."""
        return len(self._known)

    def __contains__(self, sample: int) -> bool:
        return sample in self._known

    def add(self, sample: int, lengths: Lengths | Unreadable) -> None:
        self._known[sample] = lengths
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]  # the oldest, on all ranks; it is read again in the next epoch

    def forget_unreadable(self) -> None:
        """Forget samples that could not be read, so that they are read again."""
        self._known = {sample: each for sample, each in self._known.items() if not isinstance(each, Unreadable)}

    def lengths_of(self, sample: int) -> Lengths:
        lengths = self._known[sample]
        if isinstance(lengths, Unreadable):
            error = TrainingError(lengths.message)
            if lengths.details:
                error.add_note(lengths.details)
            raise error
        return lengths

    @property
    def digest(self) -> str:
        """Identifies what is known of the lengths before samples are read. A state also has the lengths that were read
        last."""
        return f"read from {self._num_samples} samples"


def lengths_of_sample(function: LengthFunction, sample: Mapping[str, Any]) -> Lengths:
    """The lengths that a user's function returns for a sample. Raises an InputError if they cannot be lengths."""
    returned = function(dict(sample))
    try:
        tokens, items = _pair(returned)
    except (TypeError, ValueError) as error:
        raise InputError(f"balanced(lengths=...): the function returned {returned!r:.200}; {_EXPECTED}") from error
    if tokens < 1 or min(items, default=1) < 1:
        raise InputError(
            f"balanced(lengths=...): the function returned {returned!r:.200}; expected at least one token, and a row "
            "of each item"
        )
    return tokens, items


def length_index(lengths: Any, dataset: Any, where: str) -> LengthIndex | ReadLengths:
    """The index of a dataset: from a JSONL or Parquet file with `tokens` and `items` of each sample, an array of
    tokens, or a list of pairs (tokens, items); if None, from the dataset's own `lengths(number)`. For a function of
    decoded samples, an index that is filled as samples are read."""
    if callable(lengths):
        return ReadLengths(lengths, len(dataset))
    if isinstance(lengths, LengthIndex):
        index = lengths
    elif lengths is None:
        if not hasattr(dataset, "lengths"):
            raise InputError(
                f"{where}: nothing says how long its samples are; give lengths=..., a file, an array or a "
                "function of a decoded sample, or let the dataset have a method lengths(number), that returns tokens, "
                "or tokens and the lengths of items"
            )
        index = _from_entries((dataset.lengths(number) for number in range(len(dataset))), where)
    elif isinstance(lengths, str | Path):
        index = _from_file(Path(lengths))
    else:
        entries = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        if not isinstance(entries, Iterable):
            raise InputError(
                f"{where}: lengths is a {type(lengths).__name__}; expected a file, an array, or pairs (tokens, items), "
                "or a function of a decoded sample"
            )
        index = _from_entries(entries, where)
    if len(index) < len(dataset):
        raise InputError(
            f"{where}: the index has the lengths of {len(index)} samples, and the dataset {len(dataset)}; make it again"
        )
    return index


def _from_entries(entries: Iterable[Any], where: str) -> LengthIndex:
    pairs: list[tuple[int, tuple[int, ...]]] = []
    for entry in entries:
        try:
            pairs.append(_pair(entry))
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: the lengths of sample {len(pairs)} are {entry!r}; {_EXPECTED}") from error
    return _index([tokens for tokens, _ in pairs], [items for _, items in pairs], where)


def _pair(entry: Any) -> Lengths:
    tokens, items = entry if isinstance(entry, tuple | list) else (entry, ())
    return index_of(tokens), tuple(map(index_of, items))


def _index(tokens: Sequence[int], items: Sequence[Sequence[int]], where: str) -> LengthIndex:
    starts = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum([len(each) for each in items], out=starts[1:])
    flat = np.array([length for each in items for length in each], dtype=np.int64)
    for number, count in enumerate(tokens):
        if count < 1 or min(items[number], default=1) < 1:
            raise InputError(
                f"{where}: sample {number} has {count} tokens and items of {list(items[number])[:8]}; expected at "
                "least one token, and a row of each item"
            )
    return LengthIndex(np.array(tokens, dtype=np.int64), starts, flat)


def _from_file(path: Path) -> LengthIndex:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise InputError(f"{path}: reading Parquet needs pyarrow (pip install pyarrow); or write JSONL") from error
        try:
            columns = parquet.read_table(path).to_pydict()
        except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise InputError(f"{path}: cannot be read as Parquet ({reason})") from error
        if "tokens" not in columns:
            raise InputError(f"{path}: expected a column 'tokens', and 'items' with lists, got {', '.join(columns)}")
        items = columns.get("items") or [()] * len(columns["tokens"])
        return _index(columns["tokens"], [each or () for each in items], str(path))
    tokens, all_items = [], []
    for number, line in enumerate(read_text_file(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json_value(line)
            tokens.append(index_of(entry["tokens"]))
            all_items.append([index_of(length) for length in entry.get("items", ())])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f'{path}, line {number}: expected an object such as {{"tokens": 812, "items": [256, 1024]}}'
            ) from error
    return _index(tokens, all_items, str(path))
