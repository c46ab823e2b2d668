"""Which samples influence each other, what is random, and which parameters get a gradient: tried on two rows.

Each call runs on two rows of the first batch, then on each row beside a copy of itself: if a row's output changes,
samples are coupled (batch normalisation, a loss inside a module), and the call must run on its whole batch at once;
likewise if that of the copy differs, because then it depends on its position. Random numbers are the same each time, so
that dropout does not look like coupling. The output of a module run layer by layer is compared with that of the whole
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spindle.errors import WorkloadError
from spindle.models import ChainLayer, ModuleSnapshot, ModuleStates, RandomWeights, device_of, without_caches
from spindle.run import Axes, ItemCode, cut, cut_leaf, pytree_meta, takes_gradient
from spindle.train.draws import generator_states, has_drawn_since
from spindle.train.index_checks import IndexChecks
from spindle.train.item_probe import probe_items
from spindle.train.record import RecordedCall, handles_of, parameter_names
from spindle.train.sequence_probe import probe_sequences
from spindle.train.task_errors import line_of, named_call
from spindle.train.trace import TracedTask, Visit, walk
from spindle.train.unchanged import unchanged

# Why a call is taken to couple its samples.
KEEPS = "it keeps something of the samples it sees"
INFLUENCE = "its samples influence each other"
NORMALISES = "it normalises over its batch"
DOES_NOT_RUN = "it does not run on two samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Results of probing, by task and call."""

    coupled: dict[tuple[str, str], str] = field(default_factory=dict)  # with the reason
    random_layers: frozenset[tuple[str, str, int]] = frozenset()
    random_losses: frozenset[str] = frozenset()
    # Calls that change their modules, and whether outputs may follow from that: they do not from running statistics.
    keeping: dict[tuple[str, str], bool] = field(default_factory=dict)
    # Names of parameters that a gradient may reach, by task; None if that could not be determined.
    reached: dict[str, frozenset[str]] | None = None
    items: dict[tuple[str, str], ItemCode] = field(default_factory=dict)
    coupled_items: dict[tuple[str, str], str] = field(default_factory=dict)  # why items do not run apart
    unshared_items: dict[tuple[str, str], str] = field(default_factory=dict)  # why one device runs an item


def probe(
    tasks: Sequence[TracedTask], batches: dict[str, Any], *, shares_items: bool = False, must_run: bool = False
) -> Facts:
    """Run the tasks on two rows of their first batches, and restore modules and random state. With `shares_items`, try
    whether several devices can share an item, too. With `must_run`, the error of a task that runs neither on two rows
    nor on its batch is raised."""
    coupled: dict[tuple[str, str], str] = {}
    random_layers: set[tuple[str, str, int]] = set()
    random_losses: set[str] = set()
    reached: dict[str, frozenset[str]] | None = {}
    items: dict[tuple[str, str], ItemCode] = {}
    coupled_items: dict[tuple[str, str], str] = {}
    unshared_items: dict[tuple[str, str], str] = {}
    keeping: dict[tuple[str, str], bool] = {}
    handles = handles_of([task.recorded for task in tasks])
    names = parameter_names(handles)
    on_gpu = device_of(list(batches.values())).type == "cuda"
    checks: AbstractContextManager[Any] = IndexChecks() if on_gpu else nullcontext()  # type: ignore[no-untyped-call]
    with unchanged([handle.module for handle in handles.values()]), checks:
        for task in tasks:
            coupled.update(_coupled_by_shape(task))
            parameters = _probe_task(task, batches[task.name], coupled, random_layers, random_losses, keeping)
            if parameters is None and must_run:
                _run(task, batches[task.name])
            if parameters is None or reached is None:
                reached = None
            else:
                reached[task.name] = frozenset(names[parameter] for parameter in parameters)
            is_random = {call for name, call, _ in random_layers if name == task.name}
            codes, reasons = probe_items(task, batches[task.name], is_random)
            if shares_items:
                shared, unshared = probe_sequences(task, batches[task.name], codes, is_random)
                codes |= shared
                unshared_items |= {(task.name, call): reason for call, reason in unshared.items()}
            items |= {(task.name, call): code for call, code in codes.items()}
            coupled_items |= {(task.name, call): reason for call, reason in reasons.items()}
    return Facts(
        coupled=coupled,
        random_layers=frozenset(random_layers),
        random_losses=frozenset(random_losses),
        keeping=keeping,
        reached=reached,
        items=items,
        coupled_items=coupled_items,
        unshared_items=unshared_items,
    )


def _coupled_by_shape(task: TracedTask) -> Iterator[tuple[tuple[str, str], str]]:
    sources = {call.name: call.sources for call in task.recorded.calls}
    for call, layers in task.layers.items():
        if task.whole_only:
            yield (task.name, call), task.whole_only
        elif not task.uneven.isdisjoint((call, *sources[call])):
            yield (task.name, call), "its samples have different numbers of rows"
        elif any(layer.mixes for layer in layers):
            yield (task.name, call), "it does not work on each sample by itself"


def _probe_task(
    task: TracedTask,
    batch: Any,
    coupled: dict[tuple[str, str], str],
    random_layers: set[tuple[str, str, int]],
    random_losses: set[str],
    all_keeping: dict[tuple[str, str], bool],
) -> set[int] | None:
    """Probe one task. Returns the ids of parameters that a gradient may reach, or None if that failed."""
    rows = task.recorded.definition.batch_size
    few = 1 if task.whole_only else min(rows, 2)
    pair = batch  # where it does not run on part of a batch
    if not task.whole_only or rows == 1:
        pair = _rows(batch, task.batch_axes, rows, [0, _other_row(batch, task.batch_axes, rows)][:few])
        pair = _different(pair, task)
    outputs: dict[str, Any] = {}
    visits: list[Visit] = []
    keeping: dict[str, bool] = {}  # calls that change their modules
    # Where two rows cannot be tried: calls whose first run has set attributes of their modules.
    changing: list[RecordedCall] = []
    try:
        for visit in walk(task.recorded, pair, outputs):
            before = _Buffers(visit.layer)
            if few == 1 and visit.number == 0:
                states = ModuleStates(visit.call.handle.module.modules())
            with _drawing() as drawn:
                visit.values = visit.run()
            if changed := before.changed():
                matters = not changed <= _running_statistics(visit.call)
                keeping[visit.call.name] = keeping.get(visit.call.name, False) or matters
                coupled.setdefault((task.name, visit.call.name), _normalises(visit.call) or KEEPS)
            elif few == 1 and visit.number == len(visit.call.chain.layers) - 1 and states.changed_modules():
                changing.append(visit.call)
            if drawn():
                random_layers.add((task.name, visit.call.name, visit.number))
            visits.append(visit)
        with _drawing() as drawn:
            result = task.recorded.loss(pair, *(outputs[source] for source in task.recorded.loss_sources))
        if task.recorded.metrics:
            result, _ = result
        if drawn():
            random_losses.add(task.name)
        loss = result[0] / result[1] if task.recorded.is_mean else result
        parameters = [parameter for call in task.recorded.calls for parameter in call.handle.module.parameters()]
        reached: set[int] | None = set()
        if loss.requires_grad:
            # First the parameters that the loss reaches.
            loss.backward(retain_graph=True)
            reached = {id(parameter) for parameter in parameters if parameter.grad is not None}
            # A parameter that was not used at all (an expert without samples) may be used in a step.
            values = [leaf for visit in visits for leaf in tree_leaves(visit.values) if takes_gradient(leaf)]
            used = _ids_in_graphs(values)
            if used is None:
                torch.autograd.backward(values, [torch.zeros_like(value) for value in values])
                used = {id(parameter) for parameter in parameters if parameter.grad is not None}
            reached |= {id(parameter) for parameter in parameters} - used
        for parameter in parameters:
            parameter.grad = None
    except Exception:  # the user's code may fail on two rows; a step runs it on whole batches
        reached = None
    if few == 2:
        is_random = {call for name, call, _ in random_layers if name == task.name}
        for call, reason in _coupled_calls(task, pair, outputs, is_random, keeping):
            coupled.setdefault((task.name, call), reason)
    for changing_call in changing:
        if changing_call.name not in keeping and _differs_again(changing_call, pair, outputs):
            keeping[changing_call.name] = True
    all_keeping.update({(task.name, call): matters for call, matters in keeping.items()})
    return reached


def _differs_again(call: RecordedCall, batch: Any, outputs: dict[str, Any]) -> bool:
    """Whether a call sets attributes of its module each time, and returns something else then."""
    returned = []
    try:
        with torch.no_grad():
            for _ in range(2):
                states = ModuleStates(call.handle.module.modules())
                torch.manual_seed(_SEED)
                args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
                returned.append(call.chain(*args, **kwargs))
    except Exception:  # the user's code, on fewer rows than it may expect
        return False
    return bool(states.changed_modules()) and not _alike(*returned)


def _running_statistics(call: RecordedCall) -> set[int]:
    """Ids of buffers that a module in training mode updates and does not read."""
    normalisations = (module for module in call.handle.module.modules() if isinstance(module, _NormBase))
    return {id(buffer) for module in normalisations if module.training for buffer in module.buffers()}


def _normalises(call: RecordedCall) -> str:
    """Which module of a call normalises over its batch; empty if none does."""
    for name, module in call.handle.module.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{NORMALISES} ({name}, a {type(module).__name__})" if name else NORMALISES
    return ""


def _run(task: TracedTask, batch: Any) -> None:
    """Run a task on a whole batch, for its errors."""
    outputs: dict[str, Any] = {}
    try:
        with torch.no_grad():
            for visit in walk(task.recorded, batch, outputs):
                with named_call(visit.call.line, visit.call.handle.name):
                    visit.values = visit.run()
            task.recorded.loss(batch, *(outputs[source] for source in task.recorded.loss_sources))
    except (torch.OutOfMemoryError, MemoryError):  # a step may run it on several devices
        return


def _ids_in_graphs(values: Sequence[torch.Tensor]) -> set[int] | None:
    """The ids of leaves that autograd graphs of these values have; None if a graph has a function written in Python
    (`torch.utils.checkpoint`, a compiled layer), which may use others."""
    ids = {id(value) for value in values if value.grad_fn is None}
    nodes: list[Any] = list(dict.fromkeys(value.grad_fn for value in values if value.grad_fn is not None))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        if hasattr(node, "variable"):
            ids.add(id(node.variable))
        following = [function for function, _ in node.next_functions if function is not None and function not in seen]
        seen.update(following)
        nodes += following
    return ids


def _coupled_calls(
    task: TracedTask, pair: Any, outputs: dict[str, Any], is_random: set[str], keeping: dict[str, bool]
) -> Iterator[tuple[str, str]]:
    """Run each call on both rows, and on each with a copy of itself. Adds calls to `keeping` that change attributes of
    their modules and their next outputs with them."""
    axes = {call: layers[-1].axes for call, layers in task.layers.items()}
    for call in task.recorded.calls:
        if call.name not in outputs:
            yield call.name, DOES_NOT_RUN
            continue

        def rows(wanted: list[int], call: RecordedCall = call) -> tuple[Any, Any]:
            """The outputs of these two rows."""
            torch.manual_seed(_SEED)
            sources = (_rows(outputs[source], axes[source], 2, wanted) for source in call.sources)
            args, kwargs = call.arguments(_rows(pair, task.batch_axes, 2, wanted), *sources)
            output = call.chain(*args, **kwargs)
            return cut(output, axes[call.name], 2, 0, 1), cut(output, axes[call.name], 2, 1, 2)

        if call.name not in is_random and call.name not in keeping:
            _compare_whole(task, call, pair, outputs)
        try:
            with torch.no_grad():
                pair_of_rows = rows([0, 1])
                states = ModuleStates(call.handle.module.modules())
                reason = _coupling(rows, pair_of_rows, is_random=call.name in is_random)
        except Exception as error:
            yield call.name, f"it does not run on part of a batch ({type(error).__name__})"
            continue
        if reason == INFLUENCE and states.changed_modules():
            keeping.setdefault(call.name, True)
            yield call.name, KEEPS
        elif reason:
            yield call.name, reason


def _coupling(rows: Callable[[list[int]], tuple[Any, Any]], pair: tuple[Any, Any], *, is_random: bool) -> str:
    """Why two rows are coupled; empty if they are not. `rows` runs on two given rows, `pair` is its output for both.

    If the output of a row changes next to a copy of itself, it depended on the other row; if the output of the copy
    differs, it depends on the position in the batch.
    """
    first, second = pair
    first_again, copy = rows([0, 0])
    if not (_alike(first, first_again) and _alike(second, rows([1, 1])[1])):
        return INFLUENCE
    if not is_random and not _alike(first, copy):
        return "what it does with a sample depends on its place in the batch"
    return ""


def _compare_whole(task: TracedTask, call: RecordedCall, pair: Any, outputs: dict[str, Any]) -> None:
    """Check that the layers compute what the module does: this detects code that recording missed."""
    if not call.chain.is_recorded or any(layer.writes_input for layer in task.layers[call.name]):
        return
    try:
        args, kwargs = call.arguments(pair, *(outputs[source] for source in call.sources))
        with torch.no_grad(), without_caches(call.handle.module):
            whole = call.handle.module(*args, **kwargs)
    except Exception:  # the user's code on two rows; the layers ran
        return
    if not _all_close(outputs[call.name], whole) and not _is_alike_from_one_state(call, args, kwargs):
        raise WorkloadError(
            f"task {task.name!r}: {call.name} gives different results layer by layer than as a whole, so its code "
            "does something that cannot be recorded; register it with "
            f"spindle.module({call.handle.name!r}, ..., split=False)"
        )


def _all_close(split: Any, whole: Any) -> bool:
    actual, expected = tree_leaves(split), tree_leaves(whole)
    return len(actual) == len(expected) and all(map(_close, actual, expected))


def _is_alike_from_one_state(call: RecordedCall, args: Any, kwargs: Any) -> bool:
    """Whether the layers compute what the module does where both begin with what earlier calls have left on it."""
    module = call.handle.module
    before = ModuleSnapshot([module])
    with torch.no_grad(), without_caches(module):
        split = call.chain(*args, **kwargs)
        before.restore()
        whole = module(*args, **kwargs)
        before.restore()
    return _all_close(split, whole)


def _close(split: Any, whole: Any) -> bool:
    """Whether results are equal up to the rounding of different kernels."""
    if not isinstance(split, torch.Tensor) or not split.is_floating_point():
        return _alike_leaves(split, whole)
    tolerance = 1e-9 if split.dtype == torch.float64 else 1e-2
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    return torch.allclose(split, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


_SEED = 20240611


def _alike(first: Any, second: Any) -> bool:
    return all(map(_alike_leaves, tree_leaves(first), tree_leaves(second)))


def _alike_leaves(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor):
        return bool(first == second)
    if not first.is_floating_point():
        return torch.equal(first, second)
    scale = float(first.abs().max()) if first.numel() else 0.0
    tolerance = 1e-9 if first.dtype == torch.float64 else 1e-4
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _other_row(batch: Any, axes: Axes, rows: int) -> int:
    """The row that differs most from the first."""

    def differences(row: int) -> int:
        leaves = zip(tree_leaves(batch), axes, strict=True)
        return sum(axis is not None and not torch.equal(leaf[0], leaf[row]) for leaf, axis in leaves)

    return max(range(1, rows), key=differences, default=0)


def _different(pair: Any, task: TracedTask) -> Any:
    """Two rows, with different values in the second where a tensor has equal ones in both."""
    leaves, spec = tree_flatten(pair)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        for number, (leaf, axis) in enumerate(zip(leaves, task.batch_axes, strict=True)):
            if axis is not None and leaf.is_floating_point() and len(leaf) == 2 and torch.equal(leaf[0], leaf[1]):
                noise = torch.rand(leaf[1].shape, device=leaf.device).to(leaf.dtype)
                leaves[number] = torch.stack([leaf[0], leaf[1] + noise])
    return tree_unflatten(leaves, spec)


def _rows(nest: Any, axes: Axes, num_rows: int, wanted: list[int]) -> Any:
    """These rows of a nest, in this order."""
    leaves, spec = tree_flatten(nest)
    chosen = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is None or not isinstance(leaf, torch.Tensor):
            chosen.append(cut_leaf(leaf, axis, num_rows, 0, len(wanted)))
            continue
        each = leaf.shape[axis] // num_rows
        chosen.append(torch.cat([leaf.narrow(axis, row * each, each) for row in wanted], dim=axis))
    return tree_unflatten(chosen, spec)


@contextmanager
def _drawing() -> Iterator[Any]:
    """Whether random numbers were drawn inside."""
    before = generator_states()
    yield lambda: has_drawn_since(before)


# Without weights.

_MAX_LAYER_BYTES = 1 << 30  # of the weights of one layer
_MAX_FLOPS = 2e11  # of a layer on two samples, which is run three times


def probe_without_weights(tasks: Sequence[TracedTask], batches: dict[str, Any]) -> tuple[Facts, dict[str, str]]:
    """What `probe` finds, of modules whose weights are on `meta`: layers run one at a time on two rows, with random
    weights that are dropped again; of layers that do the same, one. And which modules could not be run, and why."""
    coupled: dict[tuple[str, str], str] = {}
    keeping: dict[tuple[str, str], bool] = {}
    unknown: dict[str, str] = {}
    handles = handles_of([task.recorded for task in tasks])
    with unchanged([handle.module for handle in handles.values()]), torch.no_grad():
        torch.manual_seed(_SEED)
        for task in tasks:
            coupled.update(_coupled_by_shape(task))
            if task.recorded.definition.batch_size > 1 and not task.whole_only:
                _probe_layers(task, batches[task.name], coupled, unknown)
    for task in tasks:
        for call in task.recorded.calls:
            key = (task.name, call.name)
            if _running_statistics(call):
                keeping[key] = False
            elif coupled.get(key) == KEEPS:
                keeping[key] = True
            if reason := _normalises(call):
                coupled[key] = reason
    known = {call.handle.name for task in tasks for call in task.recorded.calls if (task.name, call.name) in coupled}
    unknown = {name: reason for name, reason in unknown.items() if name not in known}
    return Facts(coupled=coupled, keeping=keeping), unknown


def _probe_layers(task: TracedTask, batch: Any, coupled: dict[tuple[str, str], str], unknown: dict[str, str]) -> None:
    """Fill in which calls of a task couple samples, and which modules could not be run."""
    rows = task.recorded.definition.batch_size
    pair = _different(_rows(batch, task.batch_axes, rows, [0, _other_row(batch, task.batch_axes, rows)]), task)
    outputs: dict[str, Any] = {}
    axes = {call: layers[-1].axes for call, layers in task.layers.items()}
    for call in task.recorded.calls:
        name = call.handle.name
        if any(source not in outputs for source in call.sources):
            unknown.setdefault(name, "its input is not known")
            continue

        def first_inputs(wanted: list[int], call: RecordedCall = call) -> Any:
            sources = (_rows(outputs[source], axes[source], 2, wanted) for source in call.sources)
            return call.arguments(_rows(pair, task.batch_axes, 2, wanted), *sources)

        values: Any = None
        seen: dict[Any, Any] = {}  # outputs of layers, by what they compute
        for number, (layer, traced) in enumerate(zip(call.chain.layers, task.layers[call.name], strict=True)):
            key = (layer.settings, repr(pytree_meta(values, 0))) if number and layer.settings else None
            if key is not None and key in seen:
                values = seen[key]
                continue
            num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters)
            if num_bytes > _MAX_LAYER_BYTES or 2 * traced.forward_flops / rows > _MAX_FLOPS:
                unknown.setdefault(name, f"a layer of it is too large to try here ({num_bytes / 2**30:.1f} GiB)")
                break
            inputs = first_inputs
            if number:
                inputs = partial(_inner_inputs, values, task.layers[call.name][number - 1].axes)
            try:
                with RandomWeights(call.handle.module, layer.parameters):
                    values, reason = _tried_layer(layer, inputs, traced.axes)
            except Exception as error:  # the user's code, on two rows
                unknown.setdefault(name, f"trying it on two samples failed ({_what_failed(error, call)})")
                break
            if reason:
                coupled.setdefault((task.name, call.name), reason)
            if key is not None:
                seen[key] = values
        else:
            outputs[call.name] = values[0]


def _what_failed(error: Exception, call: RecordedCall) -> str:
    """The line and torch's first sentence: it may be a mistake in the task, which training would meet, too."""
    said = str(error).strip().split("\n")[0]
    return ": ".join(filter(None, (line_of(error) or call.line, type(error).__name__, said)))


def _inner_inputs(values: Any, axes: Axes, wanted: list[int]) -> Any:
    return _rows(values, axes, 2, wanted), {}


def _tried_layer(layer: ChainLayer, inputs: Callable[[list[int]], Any], axes: Axes) -> tuple[Any, str]:
    """A layer's output for two rows, and why they are coupled, if they are."""

    def outputs(wanted: list[int]) -> tuple[Any, Any]:
        """The outputs of these two rows, with the same random numbers each time."""
        torch.manual_seed(_SEED)
        args, kwargs = inputs(wanted)
        both = layer.run(*args, **kwargs)
        return cut(both, axes, 2, 0, 1), cut(both, axes, 2, 1, 2)

    before = _Buffers(layer)
    args, kwargs = inputs([0, 1])
    torch.manual_seed(_SEED)
    with _drawing() as drawn:
        both = layer.run(*args, **kwargs)
    if before.changed():
        return both, KEEPS
    pair = cut(both, axes, 2, 0, 1), cut(both, axes, 2, 1, 2)
    return both, _coupling(outputs, pair, is_random=drawn())


class _Buffers:
    """The buffers of a layer at the time of construction, and those that it has changed or replaced since."""

    def __init__(self, layer: ChainLayer) -> None:
        self._layer, self._buffers = layer, layer.buffers  # held, so that no other tensor gets their ids
        self._versions = self._current()

    def changed(self) -> set[int]:
        """Ids of the buffers that are not what they were."""
        return {buffer for buffer, _ in self._versions ^ self._current()}

    def _current(self) -> set[tuple[int, int]]:
        return {(id(buffer), buffer._version) for buffer in self._layer.buffers}
