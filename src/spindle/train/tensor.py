"""Determine by trial which modules can be tensor parallel, up to which degree, and how many bytes their groups send.

Every layer of a module that has a tensor parallel plan runs as the members of a group would run it, one after another
in this process (`EmulatedTensorGroup`): without values, for groups of two, four and eight, which shows whether shapes
allow it (heads that do not divide, a forward that hard-codes its number of heads), how much is all-reduced and what
share of activations is split; and with values for groups of two, forward and backward, which shows whether the plan is
correct. Modules are in evaluation mode meanwhile, because dropout inside a part draws different numbers than in the
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from spindle.models import (
    MAX_TENSOR_DEGREE,
    EmulatedTensorGroup,
    StyledModule,
    apply_styles,
    builtin_tp_plan,
    device_of,
    drop_tied_conflicts,
    fake_like,
    resolve_styles,
    shard_of,
    split_dims,
    with_styles,
    without_caches,
)
from spindle.run import as_leaves, copied, cut, takes_gradient
from spindle.train.record import handles_of
from spindle.train.task import ModuleHandle
from spindle.train.trace import TracedTask, Visit, counted_saved_bytes, fake_weights, first_line, walk
from spindle.train.unchanged import unchanged

_DEGREES = tuple(degree for degree in (2, 4, 8) if degree <= MAX_TENSOR_DEGREE)
_SEED = 20240611
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The result: the largest tensor degree of each module that may have more than one; the reasons why others may not;
    and, by task, call and kind of layer, the bytes that are all-reduced per sample and the share of activations that is
    split."""

    most: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)


class _NoShare(Exception):
    """Raised if a layer cannot have this tensor degree; the message says why."""


def styles_in(handles: Mapping[str, ModuleHandle]) -> list[StyledModule]:
    """The submodules with a tensor-parallel style, from plans that users gave or that come with models."""
    styled: dict[int, StyledModule] = {}
    for handle in handles.values():
        given = handle.tensor_parallel
        plan = builtin_tp_plan(handle.module) if given is None else given
        for part in resolve_styles(handle.module, plan):
            styled.setdefault(id(part.module), part)
    return drop_tied_conflicts(list(styled.values()), [handle.module for handle in handles.values()])


def parts_of(parameters: Sequence[nn.Parameter], styled: Sequence[StyledModule]) -> tuple[StyledModule, ...]:
    """The styled submodules of a layer with these parameters."""
    own = {id(parameter) for parameter in parameters}
    return tuple(part for part in styled if any(id(each) in own for each in part.module.parameters()))


def find_sharing(tasks: Sequence[TracedTask], batches: Mapping[str, Any], *, has_values: bool) -> Sharing:
    """Try layers on two rows of the tasks' batches. Modules and random state are restored afterwards."""
    handles = handles_of([task.recorded for task in tasks])
    styled = styles_in(handles)
    if not styled:
        return Sharing()
    search = _Search(handles, styled)
    with unchanged([handle.module for handle in handles.values()]), ExitStack() as stack:
        for handle in handles.values():
            handle.module.eval()
            stack.enter_context(without_caches(handle.module))
        for task in tasks:
            rows = task.recorded.definition.batch_size
            few = cut(batches[task.name], task.batch_axes, rows, 0, min(rows, 2))
            search.try_task(task, few, min(rows, 2), has_values)
    most = {name: degree for name, degree in search.most.items() if degree > 1}
    return Sharing(most=most, reasons=search.reasons, costs=search.costs)


class _Search:
    def __init__(self, handles: Mapping[str, ModuleHandle], styled: Sequence[StyledModule]) -> None:
        self._styled = styled
        self.most = dict.fromkeys(_sharing_weights(handles, styled), MAX_TENSOR_DEGREE)
        self.reasons: dict[str, str] = {}
        self.costs: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._tried: set[tuple[str, str]] = set()

    def try_task(self, task: TracedTask, batch: Any, rows: int, has_values: bool) -> None:
        modules = {call.handle.name: call.handle.module for call in task.recorded.calls}
        parts = {
            id(layer): parts_of(layer.parameters, self._styled)
            for call in task.recorded.calls
            for layer in call.chain.layers
        }

        def measure(visit: Visit) -> None:
            self._measure(task, visit, parts[id(visit.layer)], rows)

        def compare(visit: Visit) -> None:
            self._compare(visit, parts[id(visit.layer)])

        try:
            try:
                with fake_weights(modules.values(), device_of(batch)) as mode:
                    self._walk(task, tree_map(lambda leaf: fake_like(mode, leaf), batch), measure)
            except Exception:  # code that reads values
                if not has_values:
                    raise
                self._walk(task, batch, measure)
            if has_values:
                self._walk(task, batch, compare)
        except Exception as error:  # the user's code may fail on two rows, or without values
            for name in modules:
                self._limit(name, 1, f"it cannot be tried out ({type(error).__name__}: {first_line(error)})")

    def _walk(self, task: TracedTask, batch: Any, try_task: Callable[[Visit], None]) -> None:
        outputs: dict[str, Any] = {}
        for visit in walk(task.recorded, batch, outputs):
            name = visit.call.handle.name
            if self.most.get(name, 1) > 1:
                try:
                    try_task(visit)
                except _NoShare as error:
                    self._limit(name, 1, str(error))
            visit.values = as_leaves(_run(visit, visit.layer.run))

    def _limit(self, name: str, degree: int, reason: str) -> None:
        if degree < self.most.get(name, 1):
            self.most[name] = degree
            self.reasons[name] = reason

    def _measure(self, task: TracedTask, visit: Visit, parts: Sequence[StyledModule], rows: int) -> None:
        """Run the layer without values: which degrees work, and what they send and keep."""
        name, key = visit.call.handle.name, (task.name, visit.call.name, visit.layer.kind)
        if not parts or key in self.costs:
            return
        with counted_saved_bytes() as saved:
            whole = _run(visit, visit.layer.run)
        for degree in _DEGREES:
            if degree > self.most[name]:
                return
            rehearsal, counts = EmulatedTensorGroup(degree), [0]

            def member(
                place: int, rehearsal: EmulatedTensorGroup = rehearsal, counts: list[int] = counts, degree: int = degree
            ) -> Any:
                with _shards(parts, degree, place), counted_saved_bytes() as kept_here:
                    values = _run(visit, with_styles(visit.layer.run, parts, rehearsal))
                counts[0] = kept_here()
                return values

            try:
                values = rehearsal.run(member)[0]
                if [_shape(leaf) for leaf in tree_leaves(values)] != [_shape(leaf) for leaf in tree_leaves(whole)]:
                    raise _NoShare("its output then has a different shape")
            except Exception as error:
                reason = str(error) if isinstance(error, _NoShare) else f"{type(error).__name__}: {first_line(error)}"
                if any(hasattr(module, "base_layer") for module in visit.call.handle.module.modules()):
                    reason = "it has adapters (PEFT), whose weights are not sharded"
                self._limit(
                    name, degree // 2, f"{degree} devices cannot share one of its layers: {reason}{_hint(parts)}"
                )
                return
            # Degree 2 shows which share of activations is split, and higher degrees follow from it.
            if degree == 2:
                share = 2 * (1 - counts[0] / saved()) if saved() else 1.0
                self.costs[key] = (rehearsal.sent_bytes / rows, min(1.0, max(0.0, round(share, 3))))

    def _compare(self, visit: Visit, parts: Sequence[StyledModule]) -> None:
        """Compare the output and gradients of a layer at tensor degree 2 with those of the whole layer."""
        key = (visit.call.handle.name, visit.layer.kind)
        if not parts or key in self._tried:
            return
        self._tried.add(key)
        inputs = [leaf for leaf in tree_leaves(visit.inputs) if takes_gradient(leaf)]
        trained = [parameter for parameter in visit.layer.parameters if parameter.requires_grad]
        dims = split_dims(parts)
        values, gradients = _with_gradients(_run(visit, visit.layer.run), inputs + trained)
        rehearsal = EmulatedTensorGroup(2)

        def member(place: int) -> Any:
            with _shards(parts, 2, place) as shards, apply_styles(parts, rehearsal):
                outputs = _run(visit, visit.layer.run)
                rehearsal.is_backward = True
                return _with_gradients(
                    outputs, inputs + [shards.get(id(parameter), parameter) for parameter in trained]
                )

        try:
            results = rehearsal.run(member)
        except Exception as error:
            raise _NoShare(
                f"it does not run on a tensor group ({type(error).__name__}: {first_line(error)})"
            ) from error
        for place, (outputs, own_gradients) in enumerate(results):
            # A member has the gradients of its shards; its gradients of unsharded parameters and inputs are whole.
            expected = [
                shard_of(gradient, dims[id(of)], 2, place) if gradient is not None and id(of) in dims else gradient
                for gradient, of in zip(gradients, inputs + trained, strict=True)
            ]
            if not _close(outputs, values):
                raise _NoShare(
                    "at tensor degree 2 one of its layers gives different results; a forward that uses its own "
                    "number of heads or width (self.num_heads) must derive them from its tensors (view(..., -1, "
                    "head_dim)), and "
                    f"every colwise part needs its rowwise one{_hint(parts)}"
                )
            if not _close(own_gradients, expected):
                raise _NoShare(
                    "at tensor degree 2 one of its layers gives different gradients; a part with weights "
                    "between a colwise and a rowwise one needs the style replicated_with_grad_allreduce"
                )


def _hint(parts: Sequence[StyledModule]) -> str:
    if not any(part.sequence for part in parts):
        return ""
    return (
        "; a sequence_parallel part must take first what is to be cut, as (rows, tokens, ...), give the same first, "
        "and let tokens interact only in parts inside it that have colwise and rowwise ones"
    )


def _sharing_weights(handles: Mapping[str, ModuleHandle], styled: Sequence[StyledModule]) -> list[str]:
    """Modules that have a styled submodule, or that share weights with such a module, directly or through others."""
    weights = {name: {id(parameter) for parameter in handle.module.parameters()} for name, handle in handles.items()}
    reached = {id(parameter) for part in styled for parameter in part.module.parameters()}
    # Repeat until nothing is added: a split module passes its degree on to all modules that it shares weights with.
    related: list[str] = []
    while True:
        more = [name for name in handles if name not in related and weights[name] & reached]
        if not more:
            return related
        related += more
        reached = reached.union(*(weights[name] for name in more))


def _run(visit: Visit, run: Callable[..., Any]) -> Any:
    """Run a layer on copies of its inputs, which it may overwrite, with the same random numbers each time."""
    torch.manual_seed(_SEED)
    if visit.number:
        return run(*copied(visit.inputs))
    batch, sources = copied(visit.inputs)
    args, kwargs = visit.call.arguments(batch, *sources)
    return run(*args, **kwargs)


@contextmanager
def _shards(parts: Sequence[StyledModule], degree: int, place: int) -> Iterator[dict[int, nn.Parameter]]:
    """A context in which split parameters are a member's shards. Yields the shards by the id of the whole parameter."""
    shards: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in parts:
        for name, parameter, dim in part.split:
            if parameter.shape[dim] % degree:
                raise _NoShare(f"{part.path!r} has {parameter.shape[dim]} columns or rows, no multiple of {degree}")
            before.append((part.module, name, parameter))
            if id(parameter) not in shards:
                shard = shard_of(parameter.detach(), dim, degree, place)
                shards[id(parameter)] = nn.Parameter(shard, parameter.requires_grad)
    try:
        for module, name, parameter in before:
            module._parameters[name] = shards[id(parameter)]
        yield shards
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


def _with_gradients(values: Any, wanted: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """A layer's output, and the gradients of some sum over it."""
    leaves = tree_leaves(values)
    outputs = [leaf for leaf in leaves if takes_gradient(leaf)]
    gradients: list[Any] = [None] * len(wanted)
    if outputs and wanted:
        torch.manual_seed(_SEED)
        seeds = [torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in outputs]
        gradients = list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
    return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)], gradients


def _close(values: Sequence[Any], references: Sequence[Any]) -> bool:
    """Whether two values are equal up to the order of summation. Some gradients are zero in exact arithmetic."""
    pairs = [
        (actual, expected)
        for actual, expected in zip(values, references, strict=True)
        if actual is not None or expected is not None
    ]
    if any(actual is None or expected is None or actual.shape != expected.shape for actual, expected in pairs):
        return False
    floats = [
        (actual.double(), expected.double(), expected) for actual, expected in pairs if expected.is_floating_point()
    ]
    largest = max((float(exact.norm()) for _, exact, _ in floats), default=0.0)
    return all(
        float((actual - exact).norm()) <= tolerance * max(float(exact.norm()), 0.1 * largest)
        for actual, exact, expected in floats
        for tolerance in [
            5e-2 if torch.is_autocast_enabled(expected.device.type) else _TOLERANCES.get(expected.dtype, 5e-2)
        ]
    )


def _shape(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
