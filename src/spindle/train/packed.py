"""Entries of a batch without a row for each sample: the patches of all images in one sequence, as Qwen-VL takes them.

`packed(values, lengths)` declares how many rows of an entry belong to each sample. Batches carry such an entry padded,
`(samples, most rows of a sample, ...)`, so that they are divided over ranks by samples like any other; a task, and the
code of its modules, get it packed again, with the rows of the rank's own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import TrainingError


class Packed(NamedTuple):
    """An entry of a batch in which samples have different numbers of rows. Made by `packed`."""

    padded: Any  # (samples, most rows of a sample, ...)
    lengths: Any  # the number of rows of each sample


def packed(values: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> Packed:
    """Declare how many rows of a packed tensor belong to each sample of a batch, in order.

    For batches with entries that do not have one row per sample: `pixel_values` of Qwen-VL has one row per patch,
    `image_grid_thw` one per image. The task receives the tensor as it was, with the rows of the samples that its rank
    has. Every sample needs at least one row, because a rank may have only that sample.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.long)
    if lengths.dim() != 1 or not len(lengths):
        raise TrainingError(f"spindle.packed(values, lengths): expected a length for each sample, got {lengths}")
    if int(lengths.min()) < 1:
        raise TrainingError(
            f"spindle.packed(values, lengths): sample {int(lengths.argmin())} has no row, and a rank may have that "
            "sample alone; put samples without an image in batches without this entry"
        )
    if int(lengths.sum()) != values.shape[0]:
        raise TrainingError(
            f"spindle.packed(values, lengths): the lengths add up to {int(lengths.sum())}, but values have "
            f"{values.shape[0]} rows; give the rows of each sample, in order"
        )
    return Packed(pad(values, lengths, int(lengths.max())), lengths)


def pad(values: torch.Tensor, lengths: torch.Tensor, most: int) -> torch.Tensor:
    """Pad packed rows with zeros, so that every sample has the same number of rows."""
    padded = values.new_zeros((len(lengths), most, *values.shape[1:]))
    return padded.index_put((_mask(lengths, most),), values)


def unpack(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return padded[_mask(lengths, padded.shape[1])]


unpack.reads_values = True  # type: ignore[attr-defined]


def _mask(lengths: torch.Tensor, most: int) -> torch.Tensor:
    return torch.arange(most, device=lengths.device) < lengths.unsqueeze(1)


def unpacked(batch: Any) -> Any:
    """A batch with its packed entries in their original form, for calling a task's function outside of recording."""
    if not entries_of(batch):
        return batch
    return tree_map(lambda node: unpack(*node) if isinstance(node, Packed) else node, batch, is_leaf=_is_packed)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def entries_of(batch: Any) -> list[Packed]:
    """The packed entries of a batch, in the order in which rules number them."""
    nodes = tree_leaves(batch, is_leaf=_is_packed)
    return [node for node in nodes if isinstance(node, Packed)]
