"""Tokens and items of each sample of a dataset, known without decoding it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as index_of
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spindle.artifact import json_value, read_text_file
from spindle.errors import InputError

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LengthIndex:
    """By sample: its tokens, and the lengths of its items, `item_lengths[item_starts[i]:item_starts[i + 1]]`."""

    tokens: Column
    item_starts: Column
    item_lengths: Column

    def __len__(self) -> int:
        return len(self.tokens)

    def items_of(self, sample: int) -> tuple[int, ...]:
        return tuple(self.item_lengths[self.item_starts[sample] : self.item_starts[sample + 1]].tolist())

    @property
    def digest(self) -> str:
        """Differs if any length differs."""
        hashed = hashlib.blake2b(digest_size=12)
        for column in (self.tokens, self.item_starts, self.item_lengths):
            hashed.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return hashed.hexdigest()


def length_index(lengths: Any, dataset: Any, where: str) -> LengthIndex:
    """The index of a dataset: from a JSONL or Parquet file with `tokens` and `items` of each sample, an array of
    tokens, a list of pairs (tokens, items), or, without any, the dataset's own `lengths(number)`."""
    if isinstance(lengths, LengthIndex):
        index = lengths
    elif lengths is None:
        if not hasattr(dataset, "lengths"):
            raise InputError(
                f"{where}: nothing says how long its samples are; give lengths=..., a file or an array, or let the "
                "dataset have a method lengths(number) that returns tokens, or tokens and the lengths of items"
            )
        index = _from_entries((dataset.lengths(number) for number in range(len(dataset))), where)
    elif isinstance(lengths, str | Path):
        index = _from_file(Path(lengths))
    else:
        entries = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        if not isinstance(entries, Iterable):
            raise InputError(
                f"{where}: lengths is a {type(lengths).__name__}; expected a file, an array, or pairs (tokens, items)"
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
            tokens, items = entry if isinstance(entry, tuple | list) else (entry, ())
            pairs.append((index_of(tokens), tuple(map(index_of, items))))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{where}: the lengths of sample {len(pairs)} are {entry!r}; expected its tokens, such as 812, or its "
                "tokens and the lengths of its items, such as (812, [256, 1024])"
            ) from error
    return _index([tokens for tokens, _ in pairs], [items for _, items in pairs], where)


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
