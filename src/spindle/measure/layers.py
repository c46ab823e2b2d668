"""Times of every op, forward and backward apart, at the batch shares that a planner can choose.

A task's ops run one after the other on so many rows, cut from each other as slots are. Medians of a few repeats; one
device alone, so neighbours' load is for the profile's rates to say.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from spindle.graph import MetaGraph
from spindle.profile import LayerSamples
from spindle.run.code import LayersCode, LossCode, OpCode
from spindle.run.rows import Axes, as_leaves, copied, cut, takes_gradient

REPEATS = 3
_MOST_SIZES = 6


def shares(batch_size: int, num_devices: int) -> list[int]:
    """Rows on one device that splits over up to so many devices can give; at most a handful, the ends among them."""
    sizes = sorted({-(-batch_size // count) for count in range(1, min(batch_size, num_devices) + 1)})
    if len(sizes) <= _MOST_SIZES:
        return sizes
    step = (len(sizes) - 1) / (_MOST_SIZES - 1)
    return sorted({sizes[round(number * step)] for number in range(_MOST_SIZES)})


def measure_layers(
    graph: MetaGraph,
    code: Sequence[OpCode],
    batches: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    num_devices: int,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, LayerSamples]:
    """Seconds of one layer of each op, by op name. Leaves no gradients behind."""
    times: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    jobs = [
        (task, rows)
        for task in graph.tasks
        for rows in shares(_batch_size(graph, task), num_devices)
        for _ in range(1 + REPEATS)
    ]
    warmed: set[tuple[str, int]] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for number, (task, rows) in enumerate(jobs):
            batch = cut(batches[task], batch_axes[task], _batch_size(graph, task), 0, rows)
            is_whole = rows == _batch_size(graph, task)
            found = _time_task(graph, code, task, tree_map(lambda leaf: _to(leaf, device), batch), device, is_whole)
            if (task, rows) in warmed:
                for position, seconds in found.items():
                    times[position, rows].append(seconds)
            warmed.add((task, rows))
            progress((number + 1) / len(jobs))
    samples = {}
    for position, op in enumerate(graph.metaops):
        sizes = sorted(rows for known, rows in times if known == position)
        samples[op.name] = LayerSamples(
            rows=tuple(sizes),
            forward_s=tuple(statistics.median(one for one, _ in times[position, rows]) for rows in sizes),
            backward_s=tuple(statistics.median(one for _, one in times[position, rows]) for rows in sizes),
        )
    return samples


def _batch_size(graph: MetaGraph, task: str) -> int:
    return next(op.batch_size for op in graph.metaops if op.task == task and op.batch_size is not None)


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def _time_task(
    graph: MetaGraph, code: Sequence[OpCode], task: str, batch: Any, device: torch.device, is_whole: bool
) -> dict[int, tuple[float, float]]:
    """Forward and backward seconds of a layer of each op of a task, on this batch."""
    forward_s: dict[int, float] = {}
    taken: dict[int, dict[int, Any]] = {}  # op -> producer -> its leaves
    given: dict[int, Any] = {}
    order = [position for position in graph.order if graph.metaops[position].task == task]

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    try:
        for position in order:
            taken[position] = {source: as_leaves(given[source]) for source in graph.predecessors[position]}
            begin = clock()
            given[position] = _run(graph, code[position], batch, taken[position])
            forward_s[position] = (clock() - begin) / graph.metaops[position].num_layers
    except Exception as error:
        if is_whole:
            error.add_note(f"in task {task!r}, trying out {graph.metaops[position].name} on its first batch")
            raise
        # A task that does not run on part of its batch is planned with the shares that it ran on.
        order = [position for position in order if position in forward_s]
    seconds = {}
    for position in reversed(order):
        outputs = [leaf for leaf in tree_leaves(given[position]) if takes_gradient(leaf)]
        gradients: list[Any] = [None if leaf.dim() == 0 else torch.zeros_like(leaf) for leaf in outputs]
        for consumer in graph.successors[position]:
            if consumer in taken:
                leaves = [leaf for leaf in tree_leaves(taken[consumer][position]) if takes_gradient(leaf)]
                for number, leaf in enumerate(leaves):
                    if leaf.grad is not None and gradients[number] is not None:
                        gradients[number] += leaf.grad
        begin = clock()
        if outputs:
            torch.autograd.backward(outputs, [_filled(one, grad) for one, grad in zip(outputs, gradients, strict=True)])
        seconds[position] = (forward_s[position], (clock() - begin) / graph.metaops[position].num_layers)
    for one in code:
        for layer in one.layers if isinstance(one, LayersCode) else ():
            for parameter in layer.parameters:
                parameter.grad = None
    return seconds


def _filled(output: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(output) if gradient is None else gradient


def _run(graph: MetaGraph, code: OpCode, batch: Any, taken: dict[int, Any]) -> Any:
    by_call = {graph.metaops[source].call: values for source, values in taken.items()}
    match code:
        case LossCode():
            result = code.loss(batch, *(by_call[source][0] for source in code.sources))
            return (result[0] / result[1] if code.is_mean else result,)
        case LayersCode(layers=layers, arguments=arguments, sources=sources):
            if arguments is None:
                (values,) = taken.values()
                rest = layers
            else:
                args, kwargs = arguments(batch, *(copied(by_call[source][0]) for source in sources))
                values = layers[0].run(*args, **kwargs)
                rest = layers[1:]
            for number, layer in enumerate(rest):
                values = layer.run(*(copied(values) if layer.writes_input and number == 0 else values))
            return values
