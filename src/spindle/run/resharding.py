"""Tensors sent from one sharding to another: each rank's slices, from its own and from those of other ranks.

What a rank sends another travels in one message per dtype, a bounded number of elements at a time, so that a change of
plan needs little memory beside the tensors themselves. Device tensors go through the device's backend, host tensors
through gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from spindle.program import Box, Sharding, Slice, Transfer, transfer
from spindle.run.world import Message, World

_ROUND_ELEMENTS = 1 << 24  # elements that a rank sends or receives at a time


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a rank must know of a tensor to receive it."""

    dtype: torch.dtype
    device: torch.device


def reshard(
    world: World,
    old: Sharding,
    new: Sharding,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield what this rank holds of every tensor under `new`; None for tensors of which it holds nothing.

    `tensors` are its own under `old`. Every rank calls this with the same maps and specs. A tensor is yielded once all
    its transfers are done, so that the caller may free the old one; if the slice stays the same, the old tensor itself
    is yielded. `old` need not have a tensor that no rank receives.
    """
    # Every rank computes the same transfers from the same maps, so nothing is negotiated.
    rounds = list(_rounds(transfer(old, new)))
    last_round = {sent.parameter: number for number, transfers in enumerate(rounds) for sent in transfers}
    unsent = [name for name in new if name not in last_round]
    finished: list[list[str]] = [[] for _ in rounds]
    for name, number in last_round.items():
        finished[number].append(name)
    results: dict[str, torch.Tensor | None] = {}

    def result(name: str) -> torch.Tensor | None:
        if name not in results:
            before, after = old.get(name, {}).get(world.rank), new[name].get(world.rank)
            results[name] = _with_own_elements(before, after, tensors.get(name), specs[name])
        return results[name]

    # First the tensors that stay in place, so that a caller that frees old tensors has memory for those that arrive.
    for name in unsent:
        yield name, result(name)
        del results[name]
    for transfers, names in zip(rounds, finished, strict=True):
        arrived = _exchange(world, transfers, old, tensors, specs)
        for sent, values in arrived:
            tensor = result(sent.parameter)
            assert tensor is not None
            box_view(tensor, new[sent.parameter][world.rank], sent.box).copy_(values)
        for name in names:
            yield name, result(name)
            del results[name]


def send_tensors(world: World, tensors: Sequence[torch.Tensor], sources: Sequence[int], ranks: Sequence[int]) -> None:
    """Overwrite tensors on `ranks` with those of their `sources`. All ranks call this with tensors of the same shapes,
    dtypes and kinds of devices, and with the same sources."""
    own = {str(number): tensor.detach() for number, tensor in enumerate(tensors)}
    wholes = {name: Slice.whole(tensor.shape) for name, tensor in own.items()}
    old = {str(number): {source: wholes[str(number)]} for number, source in enumerate(sources)}
    new = {name: dict.fromkeys(ranks, whole) for name, whole in wholes.items()}
    specs = {name: TensorSpec(tensor.dtype, tensor.device) for name, tensor in own.items()}
    for name, value in reshard(world, old, new, own, specs):
        if value is not None and value is not own[name]:
            own[name].copy_(value)


def _rounds(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Transfers in order, in rounds in which no rank sends or receives many elements, unless they belong to a single
    box."""
    current: list[Transfer] = []
    num_elements: Counter[tuple[str, int]] = Counter()
    for sent in transfers:
        ends = [("out", sent.source), ("in", sent.destination)]
        # all ranks see all transfers, so all of them start a new round at the same transfer
        if current and any(num_elements[end] + sent.box.num_elements > _ROUND_ELEMENTS for end in ends):
            yield current
            current = []
            num_elements.clear()
        current.append(sent)
        for end in ends:
            num_elements[end] += sent.box.num_elements
    if current:
        yield current


def _exchange(
    world: World,
    transfers: Sequence[Transfer],
    old: Sharding,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
) -> list[tuple[Transfer, torch.Tensor]]:
    """What this rank receives in a round, after it has sent what others receive."""
    messages: dict[tuple[int, int, TensorSpec], list[Transfer]] = {}
    for sent in transfers:
        if world.rank in (sent.source, sent.destination):
            messages.setdefault((sent.source, sent.destination, specs[sent.parameter]), []).append(sent)
    sends, receives = [], []
    arrived: list[tuple[Transfer, torch.Tensor]] = []
    for (source, destination, spec), sent_together in messages.items():
        if source == world.rank:
            parts = [box_view(tensors[sent.parameter], old[sent.parameter][source], sent.box) for sent in sent_together]
            # weights that no plan used are on the host (`Weights.take_over`), but are sent from the device
            flat = torch.cat([part.to(spec.device).reshape(-1) for part in parts])
            sends.append(Message(flat, destination))
        else:
            sizes = [sent.box.num_elements for sent in sent_together]
            flat = torch.empty(sum(sizes), dtype=spec.dtype, device=spec.device)
            receives.append(Message(flat, source))
            boxes = zip(sent_together, torch.split(flat, sizes), strict=True)
            arrived += [(sent, values.view(sent.box.lengths)) for sent, values in boxes]
    world.exchange(sends, receives)
    return arrived


def _with_own_elements(
    before: Slice | None, after: Slice | None, tensor: torch.Tensor | None, spec: TensorSpec
) -> torch.Tensor | None:
    """A tensor for a rank's new slice that contains what the rank already had of it. The rest is received later."""
    if after is None:
        return None
    if before == after and tensor is not None:
        return tensor
    result = torch.empty(after.shape, dtype=spec.dtype, device=spec.device)
    for _, held in before.boxes() if before is not None and tensor is not None else ():
        for _, box in after.boxes():
            overlap = held.overlap(box)
            if before is not None and tensor is not None and overlap is not None:
                box_view(result, after, overlap).copy_(box_view(tensor, before, overlap))
    return result


def box_view(tensor: torch.Tensor, part: Slice, box: Box) -> torch.Tensor:
    """The elements of a box within the tensor that holds a slice; the box must lie inside one of the slice's boxes. A
    view, unless the tensor is not contiguous and holds a range."""
    if part.num_elements == part.box.num_elements:
        return _narrow(tensor, part.box, box)
    for begin, held in part.boxes():
        if held.overlap(box) == box:
            flat = tensor.reshape(-1)[begin : begin + held.num_elements]
            return _narrow(flat.view(held.lengths), held, box)
    raise AssertionError(f"{box} is not inside {part}")


def slice_of(whole: torch.Tensor, part: Slice) -> torch.Tensor:
    """A copy of a slice of a whole tensor."""
    box = _narrow(whole, Slice.whole(whole.shape).box, part.box)
    return box.reshape(-1)[part.first : part.last].reshape(part.shape).clone()


def _narrow(tensor: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    for dim, (start, offset, length) in enumerate(zip(held.offsets, box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset - start, length)
    return tensor
