"""A rank's part of a task's loss and metrics, and the check that the parts add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from spindle.errors import TrainingError
from spindle.run.op_code import LossCode
from spindle.run.pytrees import detached, on_device
from spindle.run.rank_program import RankSlot
from spindle.run.world import World, peers


def loss_part(
    code: LossCode,
    slot: RankSlot,
    batch: Any,
    inputs_by_call: dict[str, Any],
    world: World,
    check_with: Any = None,
    num_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a task's loss over its rows, and the total and count of each metric. The parts of all ranks
    add up.

    With `check_with`, the whole batch, the sums are compared with the loss of the whole batch. With `num_tokens`, the
    count of the loss is compared with what `tokens(batch)` returned.
    """
    result: Any = torch.zeros((), device=world.device)
    values: tuple[Any, ...] = (0.0,) * len(code.metrics)
    count: Any = torch.zeros((), dtype=torch.float64, device=world.device)
    outputs = [inputs_by_call[source][0] for source in code.sources] if slot.rows else []
    if slot.rows:
        result, values = code.run(batch, *outputs)
        if code.is_mean:
            result, count = result
            count = torch.as_tensor(count, device=world.device).detach().to(torch.float64)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise TrainingError(
                f"task {slot.task!r}: its loss must be one number in a tensor, got {got}; average the losses of "
                "samples, and report other numbers with spindle.result(loss, name=...)"
            )
    # Each rank divides its part by the count of all ranks, so that the parts, and their gradients, add up.
    if code.is_mean:
        if len(slot.ranks) > 1:
            count = count.clone()
            with peers("counting"):
                dist.all_reduce(count, group=world.group("loss", slot.ranks))
        if num_tokens is not None:
            # this waits for a GPU, so there only while losses are checked
            if (not count.is_cuda or check_with is not None) and float(count) != num_tokens:
                raise TrainingError(
                    f"task {slot.task!r}: tokens(batch) gives {num_tokens} for a batch whose spindle.mean counts "
                    f"{float(count):g}; batches of a step are weighed by their tokens, so let both count the same"
                )
            count = count.clamp(min=1)  # a batch without tokens has no share of the step's loss
        result = result / count.to(result.dtype)
    elif code.per_sample_mean:
        result = result * (slot.rows / slot.num_rows)
    sums = metric_sums(values, slot.rows, world.device)
    if check_with is not None and len(slot.ranks) > 1 and not code.is_random:
        _check_split(code, slot, check_with, outputs, result.detach(), sums, world)
    return result.reshape(()), sums


@torch.no_grad()
def metric_sums(values: Sequence[Any], num_rows: int, device: torch.device) -> torch.Tensor:
    """The total and count of each metric over `num_rows` rows, as a flat list. A pair is used as it is; of a tensor
    with dimensions, the sum and the number of elements; any other value is a mean over the rows."""
    sums: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, tuple):
            total, count = value
        elif isinstance(value, torch.Tensor) and value.dim():
            total, count = value.sum(dtype=torch.float64), value.numel()
        else:
            # multiplied in float64, the dtype of the sums
            total, count = _scalar(value, device) * num_rows, num_rows
        sums += [_scalar(total, device), _scalar(count, device)]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=device)


def _scalar(value: Any, device: torch.device) -> torch.Tensor:
    """A number as a float64 tensor, without a copy from the host, which could not be captured."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _check_split(
    code: LossCode,
    slot: RankSlot,
    batch: Any,
    outputs: list[Any],
    part: torch.Tensor,
    sums: torch.Tensor,
    world: World,
) -> None:
    """Compare the sums of all parts with loss and metrics of the whole batch, on the first rank of the slot."""
    # on the host: a CUDA tensor from another process would be unpickled onto its device index
    record = (slot.begin, on_device(detached(outputs), torch.device("cpu")), float(part), sums.tolist())
    records = world.all_gather_objects(record, "loss", slot.ranks)
    if world.rank != slot.ranks[0]:
        return
    # the inputs that all ranks gave to the loss, joined in the order of rows: those of the whole batch
    parts = sorted((record for record in records if record[1]), key=lambda record: record[0])
    axes = [link.axes for source in code.sources for link in slot.inputs if link.source == source]
    flat = [tree_flatten(on_device(part[1], world.device)) for part in parts]
    leaves = [
        leaf[0] if axis is None else torch.cat(leaf, dim=axis) if isinstance(leaf[0], torch.Tensor) else sum(leaf)
        for leaf, axis in zip(
            zip(*(part_leaves for part_leaves, _ in flat), strict=True),
            [axis for source_axes in axes for axis in source_axes],
            strict=True,
        )
    ]
    with torch.no_grad():
        whole, values = code.run(batch, *tree_unflatten(leaves, flat[0][1]))
    whole = float(whole[0] / whole[1] if code.is_mean else whole)
    summed = sum(record[2] for record in records)
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-3}.get(part.dtype, 5e-2)
    if torch.is_autocast_enabled(world.device.type):
        tolerance = 5e-2
    whole_sums = metric_sums(values, slot.num_rows, world.device).tolist()
    added_sums = [sum(record[3][number] for record in records) for number in range(len(whole_sums))]
    for name, total, count, added, added_count in zip(
        code.metrics, whole_sums[::2], whole_sums[1::2], added_sums[::2], added_sums[1::2], strict=True
    ):
        expected, actual = total / (count or 1.0), added / (added_count or 1.0)
        if abs(expected - actual) > tolerance * max(abs(expected), 1e-3):
            raise TrainingError(
                f"task {slot.task!r}: its metric {name!r} is {expected:.6g} over the whole batch, but {actual:.6g} put "
                f"together from the parts of {len(slot.ranks)} ranks; give spindle.result(...) a mean over samples, a "
                "value for each sample, or a pair (total, count) of sums over samples"
            )
    if abs(whole - summed) > tolerance * max(abs(whole), 1e-3):
        raise TrainingError(
            f"task {slot.task!r}: its loss over the whole batch is {whole:.6g}, but {summed:.6g} when put "
            f"together from the parts of {len(slot.ranks)} ranks; "
            + (
                "spindle.mean(total, count) needs a total and a count that are sums over samples"
                if code.is_mean
                else "it is not a mean over samples: leave out per_sample_mean=True, or return a spindle.mean"
            )
        )
