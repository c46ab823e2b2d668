"""Trace recorded tasks layer by layer, by running them on fake tensors at two batch sizes.

The first run gives FLOPs, bytes and the activations saved for backward; the difference between the two gives the row
axis of everything that crosses a cut. Code that reads values, which fake tensors do not have, runs on real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from spindle.errors import GuardError, WorkloadError
from spindle.models import (
    NEEDS_VALUES,
    ChainLayer,
    CrossEntropies,
    FakeWeights,
    as_when_compiling,
    device_of,
    fake_like,
    fake_mode,
    zero_outputs,
    zero_weights,
    zeros_like,
)
from spindle.run import Axes, axes_of, cut, has_uneven_rows, pytree_meta
from spindle.train.items import has_items, item_entries
from spindle.train.record import RecordedCall, RecordedTask, with_whole_loss
from spindle.train.task import TaskDefinition
from spindle.train.task_errors import named_call
from spindle.train.unchanged import unchanged

HAS_ITEMS = "its batch has items, whose rows belong to no one sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """One layer of one call, over the whole batch."""

    forward_flops: int
    backward_flops: int
    input_bytes: int
    output_bytes: int
    saved_bytes: int
    axes: Axes
    writes_input: bool
    # Whether its output does not grow with the rows, or an intermediate tensor has an entry for each pair of rows.
    mixes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    recorded: RecordedTask
    batch_axes: Axes
    layers: Mapping[str, tuple[TracedLayer, ...]]  # by call
    loss_bytes: int  # of the inputs of the loss
    whole_only: str = ""  # why the task does not run on part of a batch; empty if it does
    # Calls whose outputs have different numbers of rows for different samples. What reads them needs the whole batch.
    uneven: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.recorded.definition.name


def batch_axes(definition: TaskDefinition, batch_size: int, batch: Any) -> Axes:
    """The row axis of each leaf of a task's batch: the first dimension if it has the batch's size. None for entries
    with rows per item."""
    definition_name, entries = definition.name, item_entries(definition)
    leaves = tree_flatten_with_path(batch)[0]
    axes: Axes = tuple(
        0
        if isinstance(leaf, torch.Tensor)
        and leaf.dim()
        and leaf.shape[0] == batch_size
        and not (path and getattr(path[0], "key", None) in entries)
        else None
        for path, leaf in leaves
    )
    if not any(axis == 0 for axis in axes):
        raise WorkloadError(
            f"task {definition_name!r}: no tensor of its batch has {batch_size} rows, its batch_size; got "
            f"{describe_batch(batch)}. Make the loader yield {batch_size} samples, or correct "
            "@spindle.task(batch_size=...)"
        )
    return axes


def describe_batch(batch: Any) -> str:
    """The paths and shapes of the tensors of a batch, as text."""
    entries = [
        f"{keystr(path) or 'the batch'} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else ""
        for path, leaf in tree_flatten_with_path(batch)[0]
    ]
    shown = [entry for entry in entries if entry]
    if shown:
        return ", ".join(shown[:8])
    if not isinstance(batch, Mapping):
        return f"no tensor at all ({type(batch).__name__})"
    kinds = ", ".join(f"{name!r} {type(entry).__name__}" for name, entry in batch.items())
    return f"no tensor at all ({kinds})"


def _without_rows(batch: Any, axes: Axes) -> list[str]:
    """The tensors of a batch whose first dimension is not the batch size."""
    leaves = zip(tree_flatten_with_path(batch)[0], axes, strict=True)
    return [
        keystr(path) for (path, leaf), axis in leaves if axis is None and isinstance(leaf, torch.Tensor) and leaf.dim()
    ]


@dataclass(slots=True)
class Visit:
    """A layer that is about to run. Call `run()` once; its values are passed on to the next layer."""

    call: RecordedCall
    number: int
    layer: ChainLayer
    inputs: Any  # the layer's inputs; for the first layer of a call, the batch and the outputs of other calls
    run: Callable[[], tuple[Any, ...]]
    values: tuple[Any, ...] | None = None


def walk(recorded: RecordedTask, batch: Any, outputs: dict[str, Any]) -> Iterator[Visit]:
    """Visit a task's layers in order. The caller runs each layer and leaves its values in the visit. `outputs` collects
    the outputs of calls."""
    for call in recorded.calls:
        sources = [outputs[source] for source in call.sources]
        values: tuple[Any, ...] | None = None
        for number, layer in enumerate(call.chain.layers):
            if values is None:

                def run(layer: ChainLayer = layer, call: RecordedCall = call, sources: Any = sources) -> Any:
                    args, kwargs = call.arguments(batch, *sources)
                    return layer.run(*args, **kwargs)

                visit = Visit(call, number, layer, (batch, sources), run)
            else:

                def go_on(layer: ChainLayer = layer, values: Any = values) -> Any:
                    return layer.run(*values)

                visit = Visit(call, number, layer, values, go_on)
            yield visit
            values = visit.values
            assert values is not None
        assert values is not None
        outputs[call.name] = values[0]


def trace(recorded: RecordedTask, batch: Any) -> TracedTask:
    """Trace a task on fake tensors with the shapes of its batch. Modules and random state are restored afterwards."""
    with unchanged(call.handle.module for call in recorded.calls):
        return _trace(recorded, batch)


def _trace(recorded: RecordedTask, batch: Any) -> TracedTask:
    definition = recorded.definition
    rows = definition.batch_size
    axes = batch_axes(definition, rows, batch)
    # Run the whole batch, then the batch without its last row: what differs between the runs grows with the batch.
    large, used, loss_shapes = _layers(recorded, batch)
    small: dict[str, list[_Run]] = {}
    couples = True
    whole_only = "its batch is one sample" if rows == 1 else ""
    if has_items(definition, batch):
        whole_only = HAS_ITEMS
    if not whole_only:
        try:
            small, _, fewer_shapes = _layers(recorded, cut(batch, axes, rows, 0, rows - 1))
            couples = not loss_shapes or any(map(_pairs_rows, fewer_shapes, loss_shapes))
        except GuardError as error:
            # The task may still run on whole batches.
            if any(call.handle.module is error.module for call in recorded.calls):
                raise
            whole_only = "its code between towers depends on the number of samples"
        except Exception as error:  # the user's code may fail on fewer rows than it expects
            whole_only = f"it does not run on part of a batch ({type(error).__name__}: {first_line(error)})"
            if unaligned := _without_rows(batch, axes):
                whole_only += (
                    f"; {', '.join(unaligned)} of the batch has no row for each sample: "
                    "spindle.packed(values, lengths) declares how many of its rows belong to each"
                )
    is_declared = any(call.handle.composite and call.handle.composite.whole_batch for call in recorded.calls)
    if recorded.whole_loss is not None and (whole_only or couples or is_declared):
        recorded = with_whole_loss(recorded)
    layers: dict[str, tuple[TracedLayer, ...]] = {}
    uneven = {call for call, runs in large.items() if call in small and _is_uneven(small[call][-1], runs[-1], rows)}
    for call, runs in large.items():
        traced = []
        for number, run in enumerate(runs):
            output_axes: Axes = (None,) * len(tree_leaves(run.values))
            mixes, saved_bytes = False, run.saved_bytes
            if call in small:
                # only what grows with the batch: saved views of weights are not activations
                saved_bytes = rows * max(0, saved_bytes - small[call][number].saved_bytes)
                output_axes, mixes = axes_of(small[call][number].values, rows - 1, run.values, rows)
                # if the lengths differ, code that reads values took another path
                if len(run.shapes) == len(small[call][number].shapes):
                    mixes |= any(map(_pairs_rows, small[call][number].shapes, run.shapes))
            traced.append(
                TracedLayer(
                    forward_flops=run.flops,
                    backward_flops=run.flops * (run.trains + run.passes_gradient),
                    input_bytes=run.input_bytes,
                    output_bytes=_num_bytes(run.values),
                    saved_bytes=saved_bytes,
                    axes=output_axes,
                    writes_input=run.writes_input,
                    mixes=mixes,
                )
            )
        layers[call] = tuple(traced)
    return TracedTask(
        recorded=recorded,
        batch_axes=axes,
        layers=layers,
        loss_bytes=_num_bytes(used),
        whole_only=whole_only,
        uneven=frozenset(uneven),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    values: Any
    shapes: list[torch.Size]  # of everything that was computed, in order
    flops: int
    input_bytes: int
    saved_bytes: int
    writes_input: bool
    trains: bool
    passes_gradient: bool


def _is_uneven(small: _Run, large: _Run, rows: int) -> bool:
    return has_uneven_rows(small.values, rows - 1, large.values, rows)


_Runs = tuple[dict[str, list[_Run]], list[Any], list[torch.Size]]


def _layers(recorded: RecordedTask, batch: Any) -> _Runs:
    """The traced layers, the inputs of the loss, and the shapes in a loss that was found inside a module."""
    modules = {id(call.handle.module): call.handle.module for call in recorded.calls}
    try:
        with fake_weights(modules.values(), device_of(batch)) as mode:
            return _run_layers(recorded, tree_map(lambda leaf: _fake(mode, leaf), batch), {})
    except (*NEEDS_VALUES, RuntimeError) as error:
        if any(parameter.is_meta for module in modules.values() for parameter in module.parameters()):
            if recorded.reads_values:
                return _run_layers_without_weights(recorded, batch)
            raise WorkloadError(
                f"task {recorded.definition.name!r} cannot be followed without values, and its modules have none (they "
                f"are on meta): {first_line(error)}. If its code reads values, measure it where its weights fit "
                "(spindle profile), and plan from that profile"
            ) from error
        # Fake tensors do not support everything, and fail with many kinds of errors. If the code itself is wrong, real
        # tensors give a better error.
        return _run_layers(recorded, batch)


@contextmanager
def fake_weights(modules: Iterable[nn.Module], device: torch.device) -> Iterator[FakeTensorMode]:
    """A context in which modules have fake weights, and code runs on fake tensors of this mode."""
    mode = fake_mode()
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(FakeWeights(module, mode, device))
        stack.enter_context(mode)
        stack.enter_context(as_when_compiling())
        yield mode


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _run_layers(recorded: RecordedTask, batch: Any, known: dict[Any, _Run] | None = None) -> _Runs:
    """Like `_layers`. A layer that computes the same as a `known` one is not run again; this requires tensors without
    values."""
    runs: dict[str, list[_Run]] = {}
    outputs: dict[str, Any] = {}
    for visit in walk(recorded, batch, outputs):
        key = _computation_key(visit) if known is not None else None
        if known is not None and key in known:
            visit.values = known[key].values
            runs.setdefault(visit.call.name, []).append(known[key])
            continue
        before = [leaf for leaf in tree_leaves(visit.inputs) if isinstance(leaf, torch.Tensor)]
        versions = [leaf._version for leaf in before]
        passes_gradient = any(leaf.requires_grad for leaf in before)
        with (
            _ShapesAndFlops() as noted,
            counted_saved_bytes() as saved_bytes,
            named_call(visit.call.line, visit.call.handle.name),
        ):
            visit.values = visit.run()
        _refuse_objects(visit)
        run = _Run(
            values=visit.values,
            shapes=noted.shapes,
            flops=noted.flops,
            input_bytes=_num_bytes(before),
            saved_bytes=saved_bytes(),
            writes_input=[leaf._version for leaf in before] != versions,
            trains=any(parameter.requires_grad for parameter in visit.layer.parameters),
            passes_gradient=passes_gradient,
        )
        runs.setdefault(visit.call.name, []).append(run)
        if known is not None and key is not None:
            known[key] = run
    used = [outputs[source] for source in recorded.loss_sources]
    return runs, used, _loss_shapes(recorded, batch, used)


def _loss_shapes(recorded: RecordedTask, batch: Any, used: list[Any]) -> list[torch.Size]:
    """The shapes in a loss that was found inside a module. For replayed code, which may behave differently for other
    numbers of samples, only the shapes of the logits."""
    if recorded.whole_loss is None:
        return []
    losses, noted = CrossEntropies(), _ShapesAndFlops()
    with losses, noted:
        recorded.loss(batch, *used)
    return losses.shapes or noted.shapes


def _run_layers_without_weights(recorded: RecordedTask, batch: Any) -> _Runs:
    """Like `_layers`, for tasks whose code reads values of the batch while modules have no weights: layers run on fake
    tensors, and code that reads values runs on zeros."""
    runs: dict[str, list[_Run]] = {}
    outputs: dict[str, Any] = {}
    for call in recorded.calls:
        mode = fake_mode()
        weights = FakeWeights(call.handle.module, mode, device_of(batch))
        with torch.no_grad():
            args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
        for layer in call.chain.layers:
            trains = any(parameter.requires_grad for parameter in layer.parameters)
            fakes = tree_map(lambda leaf, mode=mode: fake_like(mode, leaf), (args, kwargs))
            noted = _ShapesAndFlops()
            try:
                with weights, mode, as_when_compiling(), noted, counted_saved_bytes() as saved_bytes:
                    values = layer.run(*fakes[0], **fakes[1])
                given = zip(tree_leaves(fakes), tree_leaves((args, kwargs)), strict=True)
                passed = {id(fake): leaf for fake, leaf in given}  # leaves that the code returns unchanged
                values = tree_map(lambda leaf, passed=passed: passed.get(id(leaf), zeros_like(leaf)), values)
            except (*NEEDS_VALUES, RuntimeError):
                module, noted = call.handle.module, _ShapesAndFlops()
                parts = zero_outputs(call.chain.parts)
                with torch.no_grad(), zero_weights(module, device_of(batch)), noted, parts:
                    values = layer.run(*args, **kwargs)
            runs.setdefault(call.name, []).append(
                _Run(
                    values=values,
                    shapes=noted.shapes,
                    flops=noted.flops,
                    input_bytes=_num_bytes((args, kwargs)),
                    saved_bytes=saved_bytes(),
                    writes_input=False,
                    trains=trains,
                    passes_gradient=trains or bool(call.sources),
                )
            )
            args, kwargs = values, {}
        outputs[call.name] = values[0]
    used = [outputs[source] for source in recorded.loss_sources]
    with torch.no_grad():
        return runs, used, _loss_shapes(recorded, batch, used)


def _computation_key(visit: Visit) -> Any:
    """A key that is equal for layers that compute the same on inputs of the same structure; None if that is unknown."""
    if visit.number == 0 or not visit.layer.settings:
        return None
    trained = tuple(parameter.requires_grad for parameter in visit.layer.parameters)
    form = pytree_meta(visit.inputs, 0)
    return visit.layer.settings, trained, repr(form.spec), repr(form.leaves)


class _ShapesAndFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shapes of everything that is computed inside, and counts FLOPs.

    torch's own `FlopCounterMode` also tracks every call of every module, which takes longer than everything else here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        result = NotImplemented
        if count is None and func is not torch.ops.prim.device.default:
            with self:  # composite operators that autograd has not decomposed
                result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            if count is not None:
                self.flops += count(*args, **kwargs, out_val=result)
        self.shapes += [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


def _pairs_rows(small: torch.Size, large: torch.Size) -> bool:
    """Whether a tensor grows with the batch in two dimensions, because it compares every row with every other."""
    return len(small) == len(large) and sum(length != longer for length, longer in zip(small, large, strict=True)) > 1


@contextmanager
def counted_saved_bytes() -> Iterator[Callable[[], int]]:
    """A context that counts the bytes that autograd saves for backward: each storage once, without parameters.

    The graph itself saves nothing, because a tensor in a hook of the graph that made it would never be freed.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        yield lambda: sum(storage.nbytes() for storage in saved.values())


def _refuse_objects(visit: Visit) -> None:
    for leaf in tree_leaves(visit.values):
        if not isinstance(leaf, torch.Tensor | bool | int | float | str | None):
            kind = type(leaf).__name__
            hint = "let it return tensors, or tuples, lists and dicts of them"
            if dataclasses.is_dataclass(leaf):
                hint = f"write torch.export.register_dataclass({kind}) once, below the class"
            elif "Cache" in kind:
                hint = f"call it with use_cache=False, or {hint}"
            raise WorkloadError(
                f"module {visit.call.handle.name!r} returns an object of class {kind}, which is not a tensor or a "
                f"nested tuple, list or dict of tensors; {hint}"
            )


def _num_bytes(nest: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, to be quoted in a sentence."""
    return (str(error).splitlines() or [""])[0][:200]
