"""Which samples influence each other, what is random, which parameters get a gradient? Tried out on two rows.

Each call runs on two rows of the first batch, then again with the second row replaced by the first: where the first
row's output changes, samples are coupled (batch normalisation, a loss inside a module), and the call must see its whole
batch at once. Random numbers are drawn alike in both, so dropout does not look like coupling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spindle.run.rows import Axes, cut
from spindle.train.record import handles_of, parameter_names
from spindle.train.trace import TracedTask, Visit, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found, by task and call. `reached` names nothing when it could not be found out."""

    coupled: dict[tuple[str, str], str] = field(default_factory=dict)  # with the reason
    random_layers: frozenset[tuple[str, str, int]] = frozenset()
    random_losses: frozenset[str] = frozenset()
    reached: frozenset[str] | None = None  # names of parameters that get a gradient


def probe(tasks: Sequence[TracedTask], batches: dict[str, Any]) -> Facts:
    """Tries the tasks on two rows of their first batches. Modules and random state are as before afterwards."""
    coupled: dict[tuple[str, str], str] = {}
    random_layers: set[tuple[str, str, int]] = set()
    random_losses: set[str] = set()
    reached: set[int] | None = set()
    handles = handles_of([task.recorded for task in tasks])
    names = parameter_names(handles)
    with _unchanged([handle.module for handle in handles.values()]):
        for task in tasks:
            for call, layers in task.layers.items():
                if task.whole_only:
                    coupled[task.name, call] = task.whole_only
                elif any(layer.mixes for layer in layers):
                    coupled[task.name, call] = "what it gives is not one part for each sample"
            found = _probe_task(task, batches[task.name], coupled, random_layers, random_losses)
            reached = None if reached is None or found is None else reached | found
    return Facts(
        coupled=coupled,
        random_layers=frozenset(random_layers),
        random_losses=frozenset(random_losses),
        reached=None if reached is None else frozenset(names[parameter] for parameter in reached),
    )


def _probe_task(
    task: TracedTask,
    batch: Any,
    coupled: dict[tuple[str, str], str],
    random_layers: set[tuple[str, str, int]],
    random_losses: set[str],
) -> set[int] | None:
    """Fills in what one task shows; the ids of parameters that got a gradient, None when that failed."""
    rows = task.recorded.definition.batch_size
    other = _other_row(batch, task.batch_axes, rows)
    few = 1 if other is None else 2
    pair = _rows(batch, task.batch_axes, rows, [0] if other is None else [0, other])
    outputs: dict[str, Any] = {}
    visits: list[Visit] = []
    try:
        for visit in walk(task.recorded, pair, outputs):
            with _drawing() as drawn:
                visit.values = visit.run()
            if drawn():
                random_layers.add((task.name, visit.call.name, visit.number))
            visits.append(visit)
        with _drawing() as drawn:
            result = task.recorded.loss(pair, *(outputs[source] for source in task.recorded.loss_sources))
        if drawn():
            random_losses.add(task.name)
        loss = result[0] / result[1] if task.recorded.is_mean else result
        parameters = [one for call in task.recorded.calls for one in call.handle.module.parameters()]
        found: set[int] | None = set()
        if loss.requires_grad:
            loss.backward()
            found = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for parameter in parameters:
            parameter.grad = None
    except Exception:  # the user's code on two rows; the step itself has its whole batch
        found = None
    if few == 2:
        for call, reason in _coupled_calls(task, pair, outputs):
            coupled.setdefault((task.name, call), reason)
    return found


def _coupled_calls(task: TracedTask, pair: Any, outputs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Runs each call with its second row replaced by the first."""
    same = _rows(pair, task.batch_axes, 2, [0, 0])
    axes = {call: layers[-1].axes for call, layers in task.layers.items()}
    for call in task.recorded.calls:
        if call.name not in outputs:
            return
        sources = [_rows(outputs[source], axes[source], 2, [0, 0]) for source in call.sources]
        try:
            with torch.no_grad():
                torch.manual_seed(_SEED)
                args, kwargs = call.arguments(pair, *(outputs[source] for source in call.sources))
                before = call.handle.chain(*args, **kwargs)
                torch.manual_seed(_SEED)
                args, kwargs = call.arguments(same, *sources)
                after = call.handle.chain(*args, **kwargs)
        except Exception as error:
            yield call.name, f"it does not run on part of a batch ({type(error).__name__})"
            continue
        first = [cut(nest, axes[call.name], 2, 0, 1) for nest in (before, after)]
        if not all(_alike(one, two) for one, two in zip(*map(tree_leaves, first), strict=True)):
            yield call.name, "its samples influence each other"


_SEED = 20240611


def _alike(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == two)
    if not one.is_floating_point():
        return torch.equal(one, two)
    scale = float(one.abs().max()) if one.numel() else 0.0
    tolerance = 1e-9 if one.dtype == torch.float64 else 1e-4
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _other_row(batch: Any, axes: Axes, rows: int) -> int | None:
    """A row that is not like the first."""
    for row in range(1, rows):
        for leaf, axis in zip(tree_leaves(batch), axes, strict=True):
            if axis is not None and not torch.equal(leaf[0], leaf[row]):
                return row
    return None


def _rows(nest: Any, axes: Axes, num_rows: int, wanted: list[int]) -> Any:
    """These rows of a nest, in this order."""
    leaves, spec = tree_flatten(nest)
    chosen = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is None or not isinstance(leaf, torch.Tensor):
            chosen.append(leaf)
            continue
        each = leaf.shape[axis] // num_rows
        chosen.append(torch.cat([leaf.narrow(axis, row * each, each) for row in wanted], dim=axis))
    return tree_unflatten(chosen, spec)


@contextmanager
def _drawing() -> Iterator[Any]:
    """Whether random numbers were drawn inside."""
    before = _generators()
    yield lambda: any(not torch.equal(one, two) for one, two in zip(before, _generators(), strict=True))


def _generators() -> list[torch.Tensor]:
    """The states of the generators that layers draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


@contextmanager
def _unchanged(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Buffers, gradients and random state are put back."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
