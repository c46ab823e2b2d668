"""From a schedule to a finished plan: devices, memory, program, simulated time.

A scheduler is a function from a Problem to timed pieces; here it is tried under the settings that memory requires:
as it is, then with tensor parallelism or rounds or some recomputation, then with several of these. The first of these
stages with a plan that fits decides, by simulated time, unless that plan is far from the bound. Each is tried with a
sharded optimizer and without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, assemble
from spindle.planners.bounds import lp_bound, step_bound_s
from spindle.planners.finish import cut_for_gathers, finished, scored
from spindle.planners.options import PlanOptions, Progress
from spindle.planners.placement import place
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.profile import Profile, Setting, bytes_text, saved_bytes, state_bytes
from spindle.program import counts_bytes, refuse_overfull

_TIE = 1e-6  # steps that differ by less count as equal: the simulator rounds to nanoseconds
# Times the bound: a plan within it ends the search for one that saves memory in another way.
GOOD_ENOUGH = 1.25
# On one H200 as eight devices, nine plans with a sharded optimizer took 3 to 15 % longer than simulated, the same plans
# without one 0 to 5 % (experiments/LOG.md).
SHARDED_MARGIN = 1.09

Scheduler = Callable[[Problem], list[Timed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A setting, and the number of rounds in which tasks run. Each attempt is tried with and without a sharded
    optimizer."""

    setting: Setting
    num_rounds: int = 1


def plan_with(
    planner: str, schedule: Scheduler, profile: Profile, options: PlanOptions, progress: Progress | None = None
) -> Plan:
    """Make the best plan of a scheduler over the settings that memory requires."""

    def plan_for(attempt: Attempt) -> Plan:
        timed = in_rounds(profile, attempt.setting, attempt.num_rounds, schedule)
        plans: list[Plan] = []
        refusals: list[DoesNotFitError] = []
        for setting in optimizer_settings(profile, attempt.setting, options.shard_optimizer):
            try:
                plans += with_cuts(realise(profile, setting, planner, timed), profile)
            except DoesNotFitError as error:
                refusals.append(error)
        if not plans:
            raise closest_of(refusals)
        return fastest(plans, profile)

    return best_over_stages(profile, plan_for)


def with_cuts(plan: Plan, profile: Profile) -> list[Plan]:
    """The plan with its simulated time, and the same plan with slots cut for gathers, if that makes a difference."""
    cut = cut_for_gathers(plan, profile)
    return [scored(plan, profile), *([scored(cut, profile)] if cut is not plan else [])]


def optimizer_settings(profile: Profile, setting: Setting, shard_optimizer: bool | None) -> list[Setting]:
    """The setting with a sharded optimizer, which needs less memory, and without one. Only one of them if
    `shard_optimizer` decides, or if there is nothing to shard."""
    if shard_optimizer is None and profile.graph.parameters and profile.cluster.num_devices > 1:
        return [replace(setting, shard_optimizer=True), replace(setting, shard_optimizer=False)]
    return [replace(setting, shard_optimizer=shard_optimizer is True)]


def best_over_stages(profile: Profile, plan_for: Callable[[Attempt], Plan], most_degrees: int | None = None) -> Plan:
    """Try settings stage by stage until a plan fits and is close to the bound. Returns the fastest plan, finished.

    A plan may fit at an early stage only because pieces were packed one after another, and be far slower than a plan of
    a later stage. So a plan that is far from the bound does not end the search once memory has refused anything.
    """
    refusals: list[DoesNotFitError] = []
    plans: list[Plan] = []
    bound_s = step_bound_s(profile)
    for stage in stages(profile, most_degrees):
        for attempt in stage:
            try:
                refuse_hopeless(profile, attempt)
                plans.append(plan_for(attempt))
            except DoesNotFitError as error:
                refusals.append(error)
        best = fastest(plans, profile) if plans else None
        if best is not None and (not refusals or best.makespan_s <= GOOD_ENOUGH * bound_s):
            break
    if plans:
        return finished(fastest(plans, profile), profile, bound_s)
    closest = closest_of(refusals)
    enough = f"{'more than ' if closest.is_bound else ''}{bytes_text(closest.needed_bytes)}"
    raise DoesNotFitError(
        f"{closest}; this was the closest attempt (tried: a sharded optimizer, every task in a round of its own, "
        f"recomputation, the largest tensor degrees). Use devices with {enough}, more devices, or smaller batches",
        closest.needed_bytes,
    )


def closest_of(refusals: Sequence[DoesNotFitError]) -> DoesNotFitError:
    """The refusal that comes closest to fitting. Refusals of real plans come before refusals by bounds."""
    return min(refusals, key=lambda refusal: (refusal.is_bound, refusal.needed_bytes))


def fastest(plans: Sequence[Plan], profile: Profile) -> Plan:
    """The plan with the shortest simulated step; if several are equally fast, the one with the least folded time.

    With measured times, a sharded optimizer must win by a margin, because its gathers slow down concurrent compute by
    more than was measured.
    """

    def step_s(plan: Plan) -> float:
        return plan.makespan_s * (SHARDED_MARGIN if plan.shard_optimizer and profile.measured_on else 1.0)

    shortest_s = min(map(step_s, plans))
    as_short = [plan for plan in plans if step_s(plan) <= shortest_s * (1 + _TIE)]
    return min(as_short, key=lambda plan: (plan.folded_s, plan.makespan_s, plan.shard_optimizer))


def time_of(plan: Plan) -> tuple[float, float, bool]:
    """Sort key of plans: the simulated step, then folded time, then without a sharded optimizer."""
    return (plan.makespan_s, plan.folded_s, plan.shard_optimizer)


def stages(profile: Profile, most_degrees: int | None = None) -> Iterator[list[Attempt]]:
    """Attempts by stage, from the fastest to the most frugal: unchanged, with one way of saving memory, with several.

    `most_degrees` limits how many choices of tensor degrees are tried, in the order of their bounds.
    """
    graph = profile.graph
    plain = profile.default_setting
    tensor_parallel = [profile.setting(degrees) for degrees in _tensor_degrees(profile)]
    if most_degrees is not None and len(tensor_parallel) > most_degrees:
        tensor_parallel = sorted(tensor_parallel, key=lambda setting: _promise_s(profile, setting))[:most_degrees]
    first = [plain]
    if any(op.batch_size is not None and op.batch_size < profile.cluster.num_devices for op in graph.metaops):
        # Data parallelism alone cannot use all devices; tensor parallelism may.
        first += tensor_parallel
    yield [Attempt(setting=setting) for setting in first]
    if not counts_bytes(profile):
        return
    most = len(set(graph.task_groups.values()))
    rounds = range(2, most + 1)
    yield [
        *(Attempt(setting=setting) for setting in tensor_parallel if setting not in first),
        *(Attempt(setting=plain, num_rounds=count) for count in rounds[:2]),
        *(Attempt(setting=_recomputing(profile, plain, share)) for share in (0.25, 0.5, 0.75)),
    ]
    frugal = [plain, *tensor_parallel]
    yield [
        Attempt(setting=_recomputing(profile, setting, share), num_rounds=count)
        for setting in frugal
        for share, count in ((0.0, 2), (0.0, 4), (0.5, 1), (0.5, 2), (1.0, 1))
        if count <= most
    ]
    yield [Attempt(setting=_recomputing(profile, setting, 1.0), num_rounds=most) for setting in frugal]


def _promise_s(profile: Profile, setting: Setting) -> float:
    """The bound under a setting, with an even part of the optimizer's update."""
    graph = profile.graph
    used = {parameter for op in graph.metaops for layer in op.parameters for parameter in layer}
    elements = sum(graph.parameters[parameter].num_elements for parameter in used) / profile.cluster.num_devices
    update_s = elements * graph.numerics.update_bytes / profile.cluster.kind.memory_bytes_per_s
    return lp_bound(problem_of(profile, setting)).bound_s + update_s


def refuse_hopeless(profile: Profile, attempt: Attempt) -> None:
    """Refuse an attempt whose bytes would not fit even if they were spread evenly over all devices.

    Counts the state of every parameter once, which any attempt needs, with or without sharding.
    """
    graph, setting = profile.graph, attempt.setting
    if not counts_bytes(profile):
        return
    used = {parameter for op in graph.metaops for layer in op.parameters for parameter in layer}
    state = sum(state_bytes(graph, parameter) for parameter in used)
    activations: dict[str, float] = dict.fromkeys(graph.tasks, 0.0)
    for position, op in enumerate(graph.metaops):
        num_bytes = saved_bytes(op, op.batch_size or 1, op.num_layers, 1, setting.recompute[position])
        activations[op.task] += num_bytes
    rounds = balanced_tasks(profile, attempt.num_rounds)
    most = max(sum(activations[task] for task in tasks) for tasks in rounds)
    # as if every device held an equal part of everything
    try:
        refuse_overfull(np.array([int((state + most) / profile.cluster.num_devices)]), profile)
    except DoesNotFitError as error:
        raise DoesNotFitError(str(error), error.needed_bytes, is_bound=True) from None


def _recomputing(profile: Profile, setting: Setting, share: float) -> Setting:
    """The setting that recomputes those ops that free most bytes per second, up to this share of all activations."""
    freed: list[tuple[float, float, int]] = []
    for position, op in enumerate(profile.graph.metaops):
        if op.cost is not None and op.batch_size is not None and not setting.recompute[position]:
            num_bytes = op.num_layers * op.batch_size * max(0.0, op.cost.saved_bytes - op.cost.output_bytes)
            curve = profile.curve(position, setting)
            seconds = op.num_layers * curve.forward_s[0] * curve.num_devices[0]
            freed.append((num_bytes / seconds, num_bytes, position))
    goal = share * sum(num_bytes for _, num_bytes, _ in freed)
    recompute = list(setting.recompute)
    for _, num_bytes, position in sorted(freed, reverse=True):
        if goal <= 0:
            break
        recompute[position] = True
        goal -= num_bytes
    return replace(setting, recompute=tuple(recompute))


def _tensor_degrees(profile: Profile) -> list[dict[str, int]]:
    """The tensor degrees worth trying: 2, 4 and 8 for the heaviest module, and at most as much for others.

    A module is worth splitting if its state takes much of a device's memory, or if its batch is too small for all
    devices.
    """
    graph = profile.graph
    weight: dict[str, int] = {}
    for module in graph.modules:
        parameters = {p for op in graph.metaops if op.module == module for layer in op.parameters for p in layer}
        weight[module] = sum(state_bytes(graph, parameter) for parameter in parameters)
    narrow = {op.module for op in graph.metaops if (op.batch_size or 0) < profile.cluster.num_devices}
    heavy = [
        module for module in graph.modules if weight[module] > profile.cluster.kind.memory_bytes / 8 or module in narrow
    ]
    largest = max(heavy, key=lambda module: weight[module], default="")
    result: list[dict[str, int]] = []
    for degree in (2, 4, 8):
        for rest in (degree, degree // 2, max(1, degree // 4)):
            wanted = {module: degree if module == largest else rest for module in heavy}
            allowed = {module: profile.degrees_of(module) for module in heavy}
            degrees = {
                module: max((d for d in allowed[module] if d <= wanted[module]), default=allowed[module][0])
                for module in heavy
            }
            if any(value > 1 for value in degrees.values()) and degrees not in result:
                result.append(degrees)
    return result


def in_rounds(profile: Profile, setting: Setting, num_rounds: int, schedule: Scheduler) -> list[Timed]:
    """Schedule all tasks at once, or balanced groups of tasks one round after another."""
    if num_rounds == 1:
        return schedule(problem_of(profile, setting))
    timed: list[Timed] = []
    start_s = 0.0
    for number, tasks in enumerate(balanced_tasks(profile, num_rounds)):
        part = schedule(problem_of(profile, setting, tasks))
        waves = 1 + max((piece.wave or 0 for piece in timed), default=-1)
        timed += [
            replace(
                piece,
                start_s=piece.start_s + start_s,
                end_s=piece.end_s + start_s,
                round=number,
                wave=None if piece.wave is None else piece.wave + waves,
            )
            for piece in part
        ]
        start_s = max(piece.end_s for piece in timed)
    return timed


def balanced_tasks(profile: Profile, num_groups: int) -> list[frozenset[str]]:
    """Tasks in groups with about equal activations: heaviest task first, to the lightest group. Tasks that exchange
    data stay together."""
    first_of = profile.graph.task_groups
    weight: dict[str, float] = dict.fromkeys(first_of.values(), 0.0)
    for op in profile.graph.metaops:
        if op.cost is not None and op.batch_size is not None:
            weight[first_of[op.task]] += op.num_layers * op.batch_size * op.cost.saved_bytes
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    loads = [0.0] * num_groups
    for task in sorted(weight, key=lambda task: -weight[task]):
        lightest = loads.index(min(loads))
        groups[lightest].append(task)
        loads[lightest] += weight[task]
    return [frozenset(task for task, first in first_of.items() if first in group) for group in groups if group]


def realise(profile: Profile, setting: Setting, planner: str, timed: Sequence[Timed], seed: int = 0) -> Plan:
    """Place timed pieces on devices."""
    in_order = sorted(timed, key=lambda piece: (piece.round, piece.start_s))
    return assemble(profile, setting, planner, place(profile, setting, in_order), seed)
