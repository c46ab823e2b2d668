"""From tasks to a workload with the code behind it: tasks recorded, modules cut into layers, traced, probed and bound.

Every rank records the tasks' own functions; rank 0 cuts, traces and probes modules for all of them. What ranks derive
by themselves, they compare (`agreement`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from spindle.display import listed
from spindle.errors import WorkloadError
from spindle.graph import MetaGraph, metagraph_of
from spindle.run import OpCode, World
from spindle.train.agreement import compare, compare_attributes, task_items
from spindle.train.bind import BoundWorkload, bind, code_of, states_of
from spindle.train.config import TrainConfig
from spindle.train.header import check_first_batches
from spindle.train.probe import DOES_NOT_RUN, KEEPS, NORMALISES, Facts, probe, probe_without_weights
from spindle.train.record import handles_of, parameter_names, record_all, root_handles
from spindle.train.recording_notices import noticing
from spindle.train.same_calls import check_trials, describe_same, repeated_modules, same_calls
from spindle.train.task import TaskDefinition
from spindle.train.tensor import Sharing, find_sharing
from spindle.train.trace import HAS_ITEMS, TracedTask
from spindle.train.trace_broadcast import trace_on_rank_0

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedWorkload:
    """A workload with its graph and the code of every op. `mode` records which parameters and modules were trained."""

    bound: BoundWorkload
    graph: MetaGraph
    code: tuple[OpCode, ...]
    mode: tuple[bool, ...]
    ended_modules: frozenset[str] = frozenset()  # of tasks that have ended

    @property
    def is_switched(self) -> bool:
        """Whether modules were frozen, unfrozen or switched between train and eval mode after the tasks were traced."""
        return self.mode != _training_mode_of(self.bound)

    @property
    def reached(self) -> dict[str, frozenset[int]] | None:
        """The positions of the parameters that gradients reach, by task variant."""
        if self.bound.facts.reached is None:
            return None
        return {
            task: frozenset(number for number, parameter in enumerate(self.graph.parameters) if parameter.name in names)
            for task, names in self.bound.facts.reached.items()
        }


def analyze(
    config: TrainConfig,
    definitions: Collection[TaskDefinition],
    examples: dict[str, Any],
    world: World,
    notify: Notify,
    *,
    has_weights: bool = True,
) -> AnalyzedWorkload:
    """Analyze these task variants on the rank's device, each on its batch in `examples`.

    Modules are moved to that device. Without weights (`spindle plan script.py`), only shapes are used.
    """
    with autocast_of(config, world):
        with noticing(notify):
            recorded = record_all(list(definitions), examples)
        handles = handles_of(recorded)
        compare(world, task_items(recorded, examples))
        compare_attributes(world, handles)
        check_first_batches(examples, world)
        if has_weights:
            for handle in root_handles(handles).values():
                handle.module.to(world.device)
        with _without_warnings():
            traced = trace_on_rank_0(recorded, examples, world, notify)
    if has_weights:
        with _without_warnings():  # of code that gets fewer rows than it will
            probed = _probe(config, traced, examples, world) if world.rank == 0 else None
        facts: Facts = world.broadcast_object(probed)
    else:
        facts, unknown = probe_without_weights(traced, examples)
        if unknown and config.autocast is not None:  # without autocast, as in `_probe`
            with autocast_of(config, world, keeps_casts=False):
                facts, unknown = probe_without_weights(traced, examples)
        for name, reason in unknown.items():
            notify(
                f"planned as if module {name!r} did not couple its samples: {reason}; if it does, register it with "
                f"spindle.module({name!r}, ..., whole_batch=True)"
            )
    if config.planning.is_pipelined:
        facts = _for_pipeline(facts, traced, config.gradient_accumulation_steps, notify)
    sharing = Sharing()
    if world.size > 1 or not has_weights:
        with autocast_of(config, world):
            sharing = world.broadcast_object(
                find_sharing(traced, examples, has_values=has_weights) if world.rank == 0 else None
            )
    same = {}
    if config.is_sweep:
        check_trials(traced, facts)
        # If a task could not run on two rows, it is unknown what is random in it.
        if facts.reached is not None or not has_weights:
            same = same_calls(traced, facts)
        for name, reason in repeated_modules(traced, facts, same).items():
            notify(f"module {name!r} is frozen, and runs in each of the trials that call it: {reason}")
        for sentence in describe_same(same, traced):
            notify(sentence)
    bound = bind(config.name, traced, facts, sharing, shared_calls=same)
    if config.ema is not None:
        bound = _with_average_cost(bound)
    _notify_limits(bound, world, notify, is_planned=not has_weights, is_pipelined=config.planning.is_pipelined)
    return _analyzed(bound)


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _probe(config: TrainConfig, traced: Sequence[TracedTask], examples: dict[str, Any], world: World) -> Facts:
    """Probe tasks without autocast, unless modules need it to run: its rounding would look like coupled samples."""
    shares_items = world.size > 1 and config.planning.shares_items
    facts = probe(traced, examples, shares_items=shares_items, must_run=config.autocast is None)
    if config.autocast is not None and DOES_NOT_RUN in facts.coupled.values():
        # Modules run with and without gradients, and a cast that autocast keeps from one run is wrong in the other.
        with autocast_of(config, world, keeps_casts=False):
            facts = probe(traced, examples, shares_items=shares_items, must_run=True)
    _check_gradients(facts)
    return facts


def _check_gradients(facts: Facts) -> None:
    """Refuse losses through which nothing is trained, as `loss.backward()` does."""
    if facts.reached and not any(facts.reached.values()):
        raise WorkloadError(
            f"{listed([f'task {name!r}' for name in facts.reached])}: nothing would be trained, because no loss "
            "depends on a weight that requires a gradient (detach(), torch.no_grad(), or every module is frozen?)"
        )


def _for_pipeline(facts: Facts, traced: Sequence[TracedTask], num_micro_steps: int, notify: Notify) -> Facts:
    """What probing found, without an order of calls that change a module: a pipeline runs microbatches in an order of
    its own. A module whose outputs follow from that order is refused."""
    keeping: dict[str, list[bool]] = {}
    for task in traced:
        for call in task.recorded.calls:
            if (task.name, call.name) in facts.keeping:
                keeping.setdefault(call.handle.name, []).append(facts.keeping[task.name, call.name])
    for name, matters in keeping.items():
        num_calls = len(matters) * num_micro_steps
        if num_calls > 1 and any(matters):
            raise WorkloadError(
                f"module {name!r} is changed by each of its {num_calls} calls in a step (a queue, spectral "
                "normalisation?), and what it returns follows from the order of these calls, but a pipeline runs "
                'microbatches in an order of its own: use spindle.Planning(planner="wavefront"), which keeps it'
            )
        if num_calls > 1:
            notify(
                f"the running statistics of module {name!r} follow the microbatches of one replica, in the order in "
                "which they run"
            )
    changing = {
        (task.name, call.name) for task in traced for call in task.recorded.calls if call.handle.name in keeping
    }
    items = {call: replace(code, changes_module=call in changing) for call, code in facts.items.items()}
    return replace(facts, keeping={}, items=items)


def _with_average_cost(bound: BoundWorkload) -> BoundWorkload:
    """Add the memory of an averaged copy of each weight, at least in float32, and the memory traffic of its update."""
    numerics = bound.workload.numerics
    average_bytes = max(4, numerics.parameter_bytes)
    numerics = replace(
        numerics,
        optimizer_bytes=numerics.optimizer_bytes + average_bytes,
        update_bytes=numerics.update_bytes + 2 * average_bytes + numerics.parameter_bytes,
    )
    return replace(bound, workload=replace(bound.workload, numerics=numerics))


def _analyzed(bound: BoundWorkload) -> AnalyzedWorkload:
    graph = metagraph_of(bound.workload)
    code = tuple(code_of(bound, op) for op in graph.metaops)
    return AnalyzedWorkload(bound=bound, graph=graph, code=code, mode=_training_mode_of(bound))


def autocast_of(config: TrainConfig, world: World, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
    """The Trainer's autocast. With `keeps_casts`, it may keep casts of weights for further calls in the context."""
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(world.device.type, dtype=config.autocast, cache_enabled=keeps_casts)


def without_tasks(workload: AnalyzedWorkload, ended: Collection[str], name: str) -> AnalyzedWorkload:
    """The workload without some task variants. Nothing is traced or probed again."""
    bound = workload.bound
    facts = bound.facts
    reached = facts.reached
    if reached is not None:
        reached = {task: names for task, names in reached.items() if task not in ended}
    facts = replace(
        facts,
        coupled={key: reason for key, reason in facts.coupled.items() if key[0] not in ended},
        random_layers=frozenset(layer for layer in facts.random_layers if layer[0] not in ended),
        random_losses=facts.random_losses - frozenset(ended),
        keeping={key: matters for key, matters in facts.keeping.items() if key[0] not in ended},
        items={key: code for key, code in facts.items.items() if key[0] not in ended},
        coupled_items={key: reason for key, reason in facts.coupled_items.items() if key[0] not in ended},
        unshared_items={key: reason for key, reason in facts.unshared_items.items() if key[0] not in ended},
        reached=reached,
    )
    remaining = [traced for task, traced in bound.tasks.items() if task not in ended]
    same = same_calls(remaining, facts) if bound.shared_calls else {}
    restricted_bound = bind(name, remaining, facts, bound.sharing, parameter_names(bound.handles), same)
    remaining_workload = replace(restricted_bound.workload, numerics=bound.workload.numerics)
    restricted = _analyzed(replace(restricted_bound, workload=remaining_workload))
    ended_modules = frozenset(workload.graph.modules) - frozenset(restricted.graph.modules)
    return replace(restricted, ended_modules=ended_modules)


def _training_mode_of(bound: BoundWorkload) -> tuple[bool, ...]:
    """What the user may change and a plan depends on: which parameters require gradients, which modules are in train
    mode."""
    requires_grad = [parameter.requires_grad for parameter in bound.parameters.values()]
    training = [module.training for handle in bound.handles.values() for module in handle.module.modules()]
    return (*requires_grad, *training)


def _notify_limits(bound: BoundWorkload, world: World, notify: Notify, *, is_planned: bool, is_pipelined: bool) -> None:
    """Notify the user which modules run as one layer or on one device, and why. With `is_planned`, this one process
    stands for many ranks."""
    for handle in bound.handles.values():
        if handle.closed_reason:
            notify(f"module {handle.name!r} is not opened into its towers and other parts: {handle.closed_reason}")
        if handle.chain.reason and not handle.whole_batch and any(handle.module.children()):
            notify(f"module {handle.name!r} runs as one layer: {handle.chain.reason}")
    for name, reason in bound.sharing.reasons.items():
        largest = bound.sharing.most.get(name, 1)
        if 2 * largest <= max(2, world.size):  # other modules could not have more anyway
            notify(f"module {name!r} has tensor degrees up to {largest}: {reason}")
    ordered = states_of(list(bound.tasks.values()), bound.facts)
    for name in ordered if world.size > 1 or is_planned else ():
        notify(
            f"module {name!r} is changed by each of its calls in a step (running statistics, a queue?): they run on "
            "one device, in the order of the script, as in one process"
        )
    for name, reached in (bound.facts.reached or {}).items():
        if not reached:
            notify(f"task {name!r} trains nothing: its loss depends on no weight that requires a gradient")
    for name, traced in bound.tasks.items():
        if world.size > 1 and traced.whole_only == HAS_ITEMS and not is_pipelined:
            notify(
                f'task {name!r} runs on one device at a time: {HAS_ITEMS}; spindle.Planning(planner="colocate") '
                "encodes items on all ranks"
            )
    for (task, call_name), reason in bound.facts.coupled_items.items():
        notify(f"items of {call_name} in task {task!r} run together: {reason}")
    unshared: dict[tuple[str, str], list[str]] = {}  # calls by (task, reason)
    for (task, call_name), reason in bound.facts.unshared_items.items():
        unshared.setdefault((task, reason), []).append(call_name)
    for (task, reason), names in unshared.items():
        notify(f"items of {' and '.join(names)} in task {task!r} run on one device each: {reason}")
    coupled: dict[tuple[str, str], list[str]] = {}  # tasks by (module, reason)
    for (task, call_name), reason in bound.facts.coupled.items():
        handle = next(call for call in bound.tasks[task].recorded.calls if call.name == call_name).handle
        is_ordered = handle.name in ordered and reason.startswith((KEEPS, NORMALISES))  # said above
        is_known = handle.whole_batch or reason == HAS_ITEMS or is_ordered
        if (world.size > 1 or is_planned) and not is_known:
            coupled.setdefault((handle.name, reason), []).append(task)
    modules: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # by reason and tasks
    for (name, reason), tasks in coupled.items():
        modules.setdefault((reason, tuple(dict.fromkeys(tasks))), []).append(name)
    for (reason, where), names in modules.items():
        run = f"module {names[0]!r} runs" if len(names) == 1 else f"modules {listed(list(map(repr, names)))} run"
        notify(
            f"{run} on one device at a time in {', '.join(where)}: {reason} "
            "(spindle.module(..., whole_batch=True) marks this as intended)"
        )
