"""From tasks to a workload with the code behind it: tasks recorded, modules cut into layers, traced, probed and bound.

Every rank records the tasks' own functions; rank 0 cuts, traces and probes modules for all of them. What ranks derive
by themselves, they compare (`agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from spindle.graph import MetaGraph, metagraph_of
from spindle.run import OpCode, World
from spindle.train.agreement import compare, compare_attributes, task_items
from spindle.train.bind import Bound, bind, code_of
from spindle.train.config import TrainConfig
from spindle.train.header import check_first_batches
from spindle.train.probe import Facts, probe, probe_without_weights
from spindle.train.record import handles_of, parameter_names, record_all, root_handles
from spindle.train.recording_notices import noticing
from spindle.train.task import TaskDefinition
from spindle.train.tensor import Sharing, find_sharing
from spindle.train.trace import HAS_ITEMS
from spindle.train.trace_broadcast import trace_on_rank_0

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedWorkload:
    """A workload with its graph and the code of every op. `mode` is which parameters and modules were trained."""

    bound: Bound
    graph: MetaGraph
    code: tuple[OpCode, ...]
    mode: tuple[bool, ...]
    ended_modules: frozenset[str] = frozenset()  # of tasks that have ended

    @property
    def is_switched(self) -> bool:
        """Whether modules were frozen, unfrozen or switched between train and eval mode since the tasks were traced."""
        return self.mode != _mode_of(self.bound)

    @property
    def reached(self) -> dict[str, frozenset[int]] | None:
        """By task variant: the positions of parameters that gradients reach."""
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
    """The workload of these task variants, of which `examples` has a batch each, on the rank's device.

    Modules are moved to that device. Without weights (`spindle plan script.py`) only shapes are used.
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
        traced = trace_on_rank_0(recorded, examples, world, notify)
    if has_weights:
        shares_items = world.size > 1 and config.planning.shares_items
        facts: Facts = world.broadcast_object(
            probe(traced, examples, shares_items=shares_items) if world.rank == 0 else None
        )
    else:
        facts, unknown = probe_without_weights(traced, examples)
        for name, reason in unknown.items():
            notify(
                f"planned as if module {name!r} did not couple its samples: {reason}; if it does, register it with "
                f"spindle.module({name!r}, ..., whole_batch=True)"
            )
    sharing = Sharing()
    if world.size > 1 or not has_weights:
        with autocast_of(config, world):
            sharing = world.broadcast_object(
                find_sharing(traced, examples, has_values=has_weights) if world.rank == 0 else None
            )
    bound = bind(config.name, traced, facts, sharing)
    if config.ema is not None:
        bound = _with_average(bound)
    _explain(bound, world, notify, is_planned=not has_weights, is_pipelined=config.planning.is_pipelined)
    return _analyzed(bound)


def _with_average(bound: Bound) -> Bound:
    """Count the memory of an average for each weight, at least in float32, and the memory traffic of its update."""
    numerics = bound.workload.numerics
    average_bytes = max(4, numerics.parameter_bytes)
    numerics = replace(
        numerics,
        optimizer_bytes=numerics.optimizer_bytes + average_bytes,
        update_bytes=numerics.update_bytes + 2 * average_bytes + numerics.parameter_bytes,
    )
    return replace(bound, workload=replace(bound.workload, numerics=numerics))


def _analyzed(bound: Bound) -> AnalyzedWorkload:
    graph = metagraph_of(bound.workload)
    code = tuple(code_of(bound, op) for op in graph.metaops)
    return AnalyzedWorkload(bound=bound, graph=graph, code=code, mode=_mode_of(bound))


def autocast_of(config: TrainConfig, world: World) -> AbstractContextManager[Any]:
    return nullcontext() if config.autocast is None else torch.autocast(world.device.type, dtype=config.autocast)


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
        items={key: code for key, code in facts.items.items() if key[0] not in ended},
        coupled_items={key: reason for key, reason in facts.coupled_items.items() if key[0] not in ended},
        unshared_items={key: reason for key, reason in facts.unshared_items.items() if key[0] not in ended},
        reached=reached,
    )
    remaining = [traced for task, traced in bound.tasks.items() if task not in ended]
    restricted_bound = bind(name, remaining, facts, bound.sharing, parameter_names(bound.handles))
    remaining_workload = replace(restricted_bound.workload, numerics=bound.workload.numerics)
    restricted = _analyzed(replace(restricted_bound, workload=remaining_workload))
    ended_modules = frozenset(workload.graph.modules) - frozenset(restricted.graph.modules)
    return replace(restricted, ended_modules=ended_modules)


def _mode_of(bound: Bound) -> tuple[bool, ...]:
    """What a plan depends on and a user may change: which parameters require gradients, and which modules train."""
    requires_grad = [parameter.requires_grad for parameter in bound.parameters.values()]
    training = [module.training for handle in bound.handles.values() for module in handle.module.modules()]
    return (*requires_grad, *training)


def _explain(bound: Bound, world: World, notify: Notify, *, is_planned: bool, is_pipelined: bool) -> None:
    """Notify the user which modules run as one layer, or on one device, and why; with `is_planned`, this one process
    stands for many."""
    for handle in bound.handles.values():
        if handle.closed_reason:
            notify(f"module {handle.name!r} is not opened into its towers and other parts: {handle.closed_reason}")
        if handle.chain.reason and not handle.whole_batch and any(handle.module.children()):
            notify(f"module {handle.name!r} runs as one layer: {handle.chain.reason}")
    for name, reason in bound.sharing.reasons.items():
        largest = bound.sharing.most.get(name, 1)
        if 2 * largest <= max(2, world.size):  # else it could not have more anyway
            notify(f"module {name!r} has tensor degrees up to {largest}: {reason}")
    calls = [call.handle.name for task in bound.tasks.values() for call in task.recorded.calls]
    for name, handle in bound.handles.items():
        tracking = [
            module
            for module in handle.module.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]
        if world.size > 1 and tracking and handle.module.training and calls.count(name) > 1:
            notify(
                f"module {name!r} is called {calls.count(name)} times in a step: the running statistics of its "
                "batch normalisation follow one of these calls alone"
            )
    for name, traced in bound.tasks.items():
        if world.size > 1 and traced.whole_only == HAS_ITEMS and not is_pipelined:
            notify(
                f'task {name!r} runs on one device at a time: {HAS_ITEMS}; spindle.Planning(planner="colocate") '
                "encodes items on all ranks"
            )
    for (task, call_name), reason in bound.facts.coupled_items.items():
        notify(f"items of {call_name} in task {task!r} run together: {reason}")
    unshared: dict[tuple[str, str], list[str]] = {}  # calls, by task and reason
    for (task, call_name), reason in bound.facts.unshared_items.items():
        unshared.setdefault((task, reason), []).append(call_name)
    for (task, reason), names in unshared.items():
        notify(f"items of {' and '.join(names)} in task {task!r} run on one device each: {reason}")
    coupled: dict[tuple[str, str], list[str]] = {}  # tasks, by module and reason
    for (task, call_name), reason in bound.facts.coupled.items():
        handle = next(call for call in bound.tasks[task].recorded.calls if call.name == call_name).handle
        if (world.size > 1 or is_planned) and not handle.whole_batch and reason != HAS_ITEMS:
            coupled.setdefault((handle.name, reason), []).append(task)
    for (name, reason), tasks in coupled.items():
        notify(
            f"module {name!r} runs on one device at a time in {', '.join(dict.fromkeys(tasks))}: {reason} "
            "(spindle.module(..., whole_batch=True) marks this as intended)"
        )
