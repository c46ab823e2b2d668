"""Measure the times of all ops, forward and backward, at the batch shares that a planner can choose.

Each task runs one forward on its first batch. An op is timed on the inputs that reach it there, cut to a share of the
batch. Of its equal layers, three are timed, so that weights do not come from a cache. Equal work is timed once: the
same block in five tasks, on inputs of the same shapes, is one measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spindle.cluster import SmGroups
from spindle.errors import PeerLostError
from spindle.graph import MetaGraph
from spindle.measure.cache import Cache, Times
from spindle.measure.contention import NO_SHARING, NUM_COPIES, measure_contention
from spindle.measure.rank_sync import RankSync
from spindle.measure.sm_times import measure_sm_times
from spindle.measure.timing import Cut, Work, time_passes
from spindle.profile import Contention, ItemTimes, LayerSamples, SmTimes
from spindle.run import (
    Axes,
    ItemCode,
    LayerCode,
    LayersCode,
    Lengths,
    LossCode,
    OpCode,
    as_leaves,
    copied,
    cut,
    cut_items,
    items_to_measure,
    pytree_meta,
    takes_gradient,
)

_MAX_SIZES, _MAX_SIZES_ON_GPU = 6, 8
_MAX_CONTENDED = 3  # numbers of rows for which copies of an op share the device
_MAX_LAYERS = 3  # layers of an op that are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A description of what an op computes, which is different for different code.

    `glue` is the code before the first layer of a call, or of a loss; empty if it only selects parts of the batch.
    """

    layer: str
    glue: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """An op on a number of rows. Points with equal keys take equal time."""

    key: Mapping[str, str]
    work: Work
    num_layers: int


def shares(batch_size: int, num_devices: int, max_sizes: int = _MAX_SIZES) -> list[int]:
    """The numbers of rows per device in splits over up to `num_devices` devices. At most `max_sizes`, including the
    first and the last."""
    return _choose_sizes(
        sorted({-(-batch_size // count) for count in range(1, min(batch_size, num_devices) + 1)}), max_sizes
    )


def _choose_sizes(sizes: list[int], max_sizes: int) -> list[int]:
    """At most `max_sizes` of the sizes, including the first and the last."""
    if len(sizes) <= max_sizes:
        return sizes
    step = (len(sizes) - 1) / (max_sizes - 1)
    return sorted({sizes[round(number * step)] for number in range(max_sizes)})


def _distance(rows: int, others: int) -> float:
    """How different two numbers of rows are, as a ratio."""
    return max(rows / others, others / rows)


class LayerMeter:
    """Times points, each key once, and remembers the longest."""

    def __init__(self, rank_sync: RankSync, cache: Cache | None = None) -> None:
        self.num_timed = 0
        self.longest: Work | None = None
        self._longest_s = 0.0
        self._rank_sync, self._cache = rank_sync, cache  # only the first rank has the cache
        self._known: dict[tuple[tuple[str, str], ...], Times] = {}
        self._contention: dict[tuple[tuple[str, str], ...], tuple[Contention, float | None]] = {}
        self._sm_times: dict[tuple[tuple[str, str], ...], SmTimes] = {}

    def times(self, points: Sequence[_Point | Exception]) -> list[Times | Exception]:
        """The times of one layer at each point, or the error that prevented them."""
        # a point that one rank could not set up is timed on no rank
        set_up = self._rank_sync.all_gather(*(float(not isinstance(point, Exception)) for point in points))
        known = self._rank_sync.broadcast([self._find(point) for point in points])
        results: list[Times | Exception] = []
        for number, point in enumerate(points):
            if isinstance(point, Exception):
                results.append(point)
            elif not all(row[number] for row in set_up):
                results.append(PeerLostError("another rank could not run it"))
            else:
                results.append(known[number] or self._measure(point))
                self._remember(point, results[-1])
        return results

    def contention(
        self, copies: Sequence[_Point | Exception], *, splits: bool = False
    ) -> tuple[Contention, float | None]:
        """How much copies of a layer slow each other down; with `splits`, also the share of weight gradients in the
        time of backward. Each kind of layer is measured once."""
        points = [copy for copy in copies if isinstance(copy, _Point)]
        if len(points) < len(copies):
            return NO_SHARING, None
        splits = splits and bool(points[0].work.parameters)
        point = {**points[0].key, "splits": str(splits)}
        key = _sorted(point)
        if key not in self._contention:
            known = None if self._cache is None else self._cache.find_contention(point)
            self._contention[key] = known or measure_contention([copy.work for copy in points], splits=splits)
            # not stored if copies did not fit: next time there may be more memory
            if known is None and self._cache is not None and self._contention[key][0] is not NO_SHARING:
                self._cache.store_contention(point, *self._contention[key])
        return self._contention[key]

    def sm_times(self, copies: Sequence[_Point | Exception], groups: SmGroups) -> SmTimes | None:
        """How long a layer takes on some of the SMs, measured with copies of it. Each kind of layer is measured
        once."""
        points = [copy for copy in copies if isinstance(copy, _Point)]
        if len(points) < len(copies):
            return None
        key, point = _sorted(points[0].key), {**points[0].key, "SM groups": str(groups)}
        if key not in self._sm_times:
            known = None if self._cache is None else self._cache.find_sm_times(point)
            self._sm_times[key] = known or measure_sm_times([copy.work for copy in points], groups)
            if known is None and self._cache is not None:
                self._cache.store_sm_times(point, self._sm_times[key])
        return self._sm_times[key]

    def _find(self, point: _Point | Exception) -> Times | None:
        if isinstance(point, Exception):
            return None
        known = self._known.get(_sorted(point.key))
        return known or (None if self._cache is None else self._cache.find(point.key))

    def _measure(self, point: _Point) -> Times | Exception:
        self.num_timed += 1
        measured = time_passes(point.work, self._rank_sync)
        if isinstance(measured, Exception):
            return measured
        times = Times(*(time_s / point.num_layers for time_s in measured))
        if self._cache is not None:
            self._cache.store(point.key, times)
        return times

    def _remember(self, point: _Point, times: Times | Exception) -> None:
        if isinstance(times, Exception):
            return
        self._known[_sorted(point.key)] = times
        device_s = (times.forward_s + times.backward_s) * point.num_layers
        if device_s > self._longest_s:
            self.longest, self._longest_s = point.work, device_s


def measure_layers(
    graph: MetaGraph,
    code: Sequence[OpCode],
    kinds: Sequence[Kind],
    batches: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    num_devices: int,
    device: torch.device,
    meter: LayerMeter,
    *,
    graphs: bool = False,
    lanes: bool = False,
    sm_groups: SmGroups | None = None,
    notify: Callable[[str], None] = lambda text: None,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, LayerSamples]:
    """Times of one layer of each op, by op name.

    With `lanes`, also how much layers that share a device slow each other down; with `sm_groups`, how long they take on
    some of its SMs. Leaves no gradients behind.
    """
    sizes = [_sizes(graph, position, num_devices, device) for position in range(len(graph.metaops))]
    samples: dict[str, LayerSamples] = {}
    num_done = 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for position, op_inputs in _ops_with_inputs(graph, code, batches):
            op = graph.metaops[position]
            assert op.batch_size is not None
            points: list[_Point | Exception] = []
            arguments: dict[int, tuple[Any, dict[str, Any]]] = {}  # by number of rows
            for rows in sizes[position]:
                batch = cut(batches[op.task], batch_axes[op.task], op.batch_size, 0, rows)
                inputs = {
                    graph.source_name(source, position): as_leaves(
                        cut(nest, _axes(code[source]), op.batch_size, 0, rows)
                    )
                    for source, nest in op_inputs.items()
                }
                arguments[rows] = batch, inputs
                points.append(_point(code[position], kinds[position], batch, inputs, device, graphs, num_devices > 1))
            measured = _samples(op.task, op.name, sizes[position], meter.times(points))
            if lanes:
                try:
                    contentions: dict[int, tuple[Contention, float | None]] = {}
                    for rows in _choose_sizes(list(measured.rows), _MAX_CONTENDED):
                        copies = [
                            _point(copy, kinds[position], *arguments[rows], device, graphs, False)
                            for copy in _copies(code[position], *arguments[rows])
                        ]
                        # a compiled backward is one node of the autograd graph, which cannot be split
                        contentions[rows] = meter.contention(copies, splits=not _is_compiled(code[position]))
                    nearest = [min(contentions, key=partial(_distance, rows)) for rows in measured.rows]
                    measured = replace(
                        measured,
                        contention=tuple(contentions[rows][0] for rows in nearest),
                        weight_share=contentions[nearest[-1]][1],
                    )
                except Exception as error:  # lanes are optional: nothing that training needs has failed
                    lanes = False
                    notify(
                        f"no lanes: measuring how copies of {op.name} share the GPU failed with "
                        f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                    )
            if lanes and sm_groups is not None:
                try:
                    measured = replace(measured, sm_times=meter.sm_times(copies, sm_groups))
                except Exception as error:
                    sm_groups = None
                    notify(
                        f"no quotas: measuring {op.name} on some of the SMs failed with {type(error).__name__}: "
                        f"{(str(error).splitlines() or [''])[0]}"
                    )
            samples[op.name] = measured
            num_done += len(points)
            progress(num_done / sum(map(len, sizes)))
    return {op.name: samples[op.name] for op in graph.metaops}


def _is_compiled(code: OpCode) -> bool:
    return isinstance(code, LayersCode) and any(layer.compiled is not None for layer in code.layers)


def measure_items(
    graph: MetaGraph,
    code: Sequence[OpCode],
    kinds: Sequence[Kind],
    batches: Mapping[str, Any],
    lengths: Mapping[str, Lengths],
    device: torch.device,
    meter: LayerMeter,
) -> tuple[tuple[str, ItemTimes], ...]:
    """Times of one layer of each item call whose items may run separately, on single items of a few lengths, by op
    name. `lengths` are those of the items of each batch."""
    measured: list[tuple[str, ItemTimes]] = []
    for task in graph.tasks:
        ops = [position for position in graph.order if graph.metaops[position].task == task]
        codes = {position: item for position in ops if (item := _splittable(code[position])) is not None}
        for entries in dict.fromkeys(item.entries for item in codes.values()):
            group = [position for position, item in codes.items() if item.entries == entries]
            measured += _measure_group(graph, code, kinds, batches[task], lengths[task], device, meter, group)
    return tuple(measured)


def _splittable(code: OpCode) -> ItemCode | None:
    return code.items if isinstance(code, LayersCode) and code.items is not None and code.items.can_split else None


def _measure_group(
    graph: MetaGraph,
    code: Sequence[OpCode],
    kinds: Sequence[Kind],
    batch: Any,
    lengths: Lengths,
    device: torch.device,
    meter: LayerMeter,
    group: Sequence[int],
) -> Iterator[tuple[str, ItemTimes]]:
    item_code = _splittable(code[group[0]])
    assert item_code is not None
    entry = item_code.length_entry
    item_lengths = lengths[entry] if entry is not None else (1,) * item_code.num_items(batch, lengths)
    times: dict[int, list[tuple[int, float, float]]] = {position: [] for position in group}
    for item in items_to_measure(item_lengths):
        item_batch = cut_items(batch, item_code, lengths, [item])
        outputs: dict[int, Any] = {}
        for position in group:
            op_code = code[position]
            assert isinstance(op_code, LayersCode)
            inputs = {graph.source_name(source, position): outputs[source] for source in graph.predecessors[position]}
            leaves = {name: as_leaves(values) for name, values in inputs.items()}
            (result,) = meter.times([_point(op_code, kinds[position], item_batch, leaves, device, False, False)])
            if isinstance(result, Exception):
                raise result
            times[position].append((item_lengths[item], result.forward_s, result.backward_s))
            values: Any = None
            for run in _steps(op_code, item_batch, inputs):
                values = as_leaves(run(copied(values)))
            outputs[position] = values
    for position in group:
        rows, forward_s, backward_s = zip(*times[position], strict=True)
        yield (
            graph.metaops[position].name,
            ItemTimes(lengths=rows, forward_s=forward_s, backward_s=backward_s, together=tuple(item_lengths)),
        )


def _copies(code: OpCode, batch: Any, inputs: Mapping[str, Any]) -> list[OpCode]:
    """Copies of an op with weights of their own, as far as it has enough layers: versions with different layers after
    the first one.

    A layer may only follow one that returns what it takes, because values that no later layer reads are dropped on the
    way, and the first layer may return them in another order.
    """
    if isinstance(code, LossCode) or len(code.layers) <= _MAX_LAYERS:
        return [code] * NUM_COPIES
    input_forms, output_forms = [], []
    values: Any = None
    for run in _steps(code, batch, inputs):
        input_forms.append(_shapes_text(values))
        values = as_leaves(run(copied(values)))
        output_forms.append(_shapes_text(values))
    rest = range(1, len(code.layers))
    rotated = [[0, *rest[first:], *rest[:first]][:_MAX_LAYERS] for first in range(len(rest))]
    orders = [
        order
        for order in rotated
        if all(output_forms[before] == input_forms[after] for before, after in pairwise(order))
    ]
    # The first version has the op's own order. Copies are spread over all layers, so that few layers are in two copies.
    chosen = [orders[number * len(orders) // NUM_COPIES] for number in range(NUM_COPIES)]
    return [replace(code, layers=tuple(code.layers[place] for place in order)) for order in chosen]


def _sizes(graph: MetaGraph, position: int, num_devices: int, device: torch.device) -> list[int]:
    op = graph.metaops[position]
    assert op.batch_size is not None
    if op.cost is not None and op.cost.whole_batch:
        return [op.batch_size]
    return shares(op.batch_size, num_devices, _MAX_SIZES_ON_GPU if device.type == "cuda" else _MAX_SIZES)


def _samples(task: str, name: str, sizes: Sequence[int], results: Sequence[Times | Exception]) -> LayerSamples:
    """The samples of an op, from the shares for which it ran. Raises the error if it ran for none."""
    known = [(rows, *times) for rows, times in zip(sizes, results, strict=True) if not isinstance(times, Exception)]
    if not known:
        error = results[-1]
        assert isinstance(error, Exception)
        error.add_note(f"in task {task!r}, running {name} on its first batch")
        raise error
    rows, forward_s, backward_s, forward_launch_s, backward_launch_s = zip(*known, strict=True)
    # launch time does not depend on the rows, so larger values were disturbed
    launch_s = min(forward_launch_s), min(backward_launch_s)
    return LayerSamples(rows=rows, forward_s=forward_s, backward_s=backward_s, launch_s=launch_s)


def _ops_with_inputs(
    graph: MetaGraph, code: Sequence[OpCode], batches: Mapping[str, Any]
) -> Iterator[tuple[int, dict[int, Any]]]:
    """Yield every op with its inputs from other ops, for the whole batch of its task. Only one layer runs at a time,
    and nothing is saved for backward."""
    groups = graph.task_groups
    for group in dict.fromkeys(groups.values()):
        outputs: dict[int, Any] = {}
        for position in graph.order:
            op, op_code = graph.metaops[position], code[position]
            if groups[op.task] != group:
                continue
            op_inputs = {source: outputs[source] for source in graph.predecessors[position]}
            yield position, op_inputs
            if isinstance(op_code, LossCode):
                continue
            try:
                inputs = {graph.source_name(source, position): values for source, values in op_inputs.items()}
                values: Any = None
                for run in _steps(op_code, batches[op.task], inputs):
                    values = as_leaves(run(copied(values)))  # a layer may write to its input
                outputs[position] = values
            except Exception as error:
                error.add_note(f"in task {op.task!r}, running {op.name} on its first batch")
                raise


def _axes(code: OpCode) -> Axes:
    assert isinstance(code, LayersCode)  # a loss feeds nothing
    return code.layers[-1].axes


def _steps(code: LayersCode, batch: Any, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """The layers of an op, each as a function of the values before it. The first one takes the op's own inputs."""
    first, *rest = code.layers

    def begin(_: Any) -> Any:
        values = (batch, *_outputs(code, inputs)) if code.arguments is not None else next(iter(inputs.values()))
        if first.writes_input:
            values = copied(values)
        if code.arguments is None:
            return _run(first, values)
        args, kwargs = code.arguments(*values)
        return (first.compiled or first.run)(*args, **kwargs)

    yield begin
    for layer in rest:
        yield partial(_run, layer)


def _run(layer: LayerCode, values: Any) -> Any:
    return (layer.compiled or layer.run)(*values)


def _outputs(code: OpCode, inputs: Mapping[str, Any]) -> list[Any]:
    return [inputs[source][0] for source in code.sources]


def _point(
    code: OpCode,
    kind: Kind,
    batch: Any,
    inputs: Mapping[str, Any],
    device: torch.device,
    graphs: bool,
    copies_gradients: bool,
) -> _Point | Exception:
    """What to time for an op on this batch and these inputs. The key has everything on which the time depends."""
    try:
        key_inputs: dict[str, Any] = {}
        pieces: Callable[[], list[Cut]] | None = None
        match code:
            case LossCode():
                layers: tuple[LayerCode, ...] = ()
                is_random = code.is_random

                def run() -> Any:
                    result, _ = code.run(batch, *_outputs(code, inputs))
                    return result[0] / result[1] if code.is_mean else result

            case LayersCode():
                layers = code.layers[:_MAX_LAYERS]
                is_random = any(layer.is_random for layer in layers)
                steps = list(
                    _steps(LayersCode(layers=layers, arguments=code.arguments, sources=code.sources), batch, inputs)
                )

                def run() -> Any:
                    values = None
                    for step in steps:
                        values = step(values)
                    return values

                pieces = partial(_pieces, steps)
                if code.arguments is None:
                    key_inputs["inputs"] = tuple(inputs.values())
                else:
                    key_inputs["arguments"] = code.arguments(*copied((batch, *_outputs(code, inputs))))
        if kind.glue:
            key_inputs["glue inputs"] = (batch, _outputs(code, inputs))
    except Exception as error:
        return error
    # the key is equal for points that run the same kernels, which are then measured once
    parameters = list(dict.fromkeys(parameter for layer in layers for parameter in layer.parameters))
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    is_graphed = graphs and device.type == "cuda"
    key = {name: _shapes_text(nest) for name, nest in key_inputs.items()} | {
        "layer": kind.layer,
        "glue": kind.glue,
        "parameters": _shapes_text(parameters),
        "buffers": _shapes_text(buffers),
        "layers timed": str(max(1, len(layers))),
        "random": str(is_random),
        "graphed": f"{is_graphed}, gradients copied" if is_graphed and copies_gradients else str(is_graphed),
    }
    work = Work(
        run=run,
        leaves=tuple(leaf for leaf in tree_leaves(tuple(inputs.values())) if takes_gradient(leaf)),
        parameters=tuple(parameter for parameter in parameters if parameter.requires_grad),
        device=device,
        is_graphed=is_graphed,
        copies_gradients=copies_gradients,
        pieces=pieces,
    )
    return _Point(key=key, work=work, num_layers=max(1, len(layers)))


def _pieces(steps: Sequence[Callable[[Any], Any]]) -> list[Cut]:
    """Run layers, each with an autograd graph of its own, like the chunks of a slot."""
    pieces: list[Cut] = []
    values: Any = None
    for step in steps:
        leaves = [] if values is None else tree_leaves(values)
        values = step(values)
        pieces.append((leaves, tree_leaves(values)))
        values = as_leaves(values)
    return pieces


def _shapes_text(nest: Any) -> str:
    """Shapes, dtypes and which tensors require gradients; other values unchanged."""
    form = pytree_meta(nest, 0)
    return f"{form.spec} {form.leaves}"


def _sorted(key: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(key.items()))
