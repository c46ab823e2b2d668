"""From a schedule to a finished plan: devices, memory, program, simulated time.

Every planner is a function from a Problem to timed pieces; here it is tried under the settings that memory asks for:
as it is, then with tensor parallelism, then with recomputation, then in rounds. The first of these stages with a plan
that fits decides, by simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.plan import Plan, assemble, check
from spindle.planners.bounds import graph_bound_s
from spindle.planners.placement import place
from spindle.planners.problem import Problem, Timed, problem_of
from spindle.profile import Profile, Setting, state_bytes
from spindle.program import lower, verify
from spindle.simulate import simulate

Scheduler = Callable[[Problem], list[Timed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Settings to choose among, and how many rounds to run the tasks in."""

    settings: tuple[Setting, ...]
    num_rounds: int


def build(profile: Profile, planner: str, schedule: Scheduler) -> Plan:
    """The best plan of a scheduler at the first stage at which one fits."""
    return best_over_stages(
        profile,
        lambda setting, num_rounds: scored(
            realise(profile, setting, planner, in_rounds(profile, setting, num_rounds, schedule)), profile
        ),
    )


def best_over_stages(profile: Profile, attempt: Callable[[Setting, int], Plan]) -> Plan:
    """Runs `attempt` stage by stage until one fits; the fastest of that stage, finished and checked."""
    refusal: DoesNotFitError | None = None
    for stage in stages(profile):
        plans = []
        for setting in stage.settings:
            try:
                plans.append(attempt(setting, stage.num_rounds))
            except DoesNotFitError as error:
                refusal = error
        if plans:
            return finished(min(plans, key=lambda plan: plan.makespan_s), profile)
    raise DoesNotFitError(
        f"{refusal}, even in {stage.num_rounds} rounds with recomputation and the largest tensor degrees; "
        "use more devices, devices with more memory, or smaller batches"
    )


def stages(profile: Profile) -> Iterator[Stage]:
    """From the fastest to the most frugal."""
    graph = profile.graph
    plain = profile.default_setting
    everything = frozenset(op.name for op in graph.metaops)
    sharded = _sharded_degrees(profile)
    first = [plain]
    if any(op.batch_size is not None and op.batch_size < profile.cluster.num_devices for op in graph.metaops):
        # Data parallelism alone cannot use all devices; tensor parallelism may.
        first += [profile.setting(degrees) for degrees in sharded]
    yield Stage(settings=tuple(dict.fromkeys(first)), num_rounds=1)
    if not graph.parameters and not any(op.cost for op in graph.metaops):
        return
    if sharded:
        yield Stage(settings=tuple(profile.setting(degrees) for degrees in sharded), num_rounds=1)
    frugal = [plain, *(profile.setting(degrees) for degrees in sharded)]
    recomputing = [replace(setting, recompute=profile.setting({}, everything).recompute) for setting in frugal]
    yield Stage(settings=tuple(recomputing), num_rounds=1)
    for num_rounds in range(2, len(graph.tasks) + 1):
        yield Stage(settings=tuple(frugal), num_rounds=num_rounds)
        yield Stage(settings=tuple(recomputing), num_rounds=num_rounds)


def _sharded_degrees(profile: Profile) -> list[dict[str, int]]:
    """Tensor degrees worth trying: 2, 4, 8 for the modules whose state weighs on a device, the others as they are."""
    graph = profile.graph
    weight: dict[str, int] = {}
    for module in graph.modules:
        parameters = {p for op in graph.metaops if op.module == module for layer in op.parameters for p in layer}
        weight[module] = sum(state_bytes(graph, parameter) for parameter in parameters)
    heavy = [module for module in graph.modules if weight[module] > profile.cluster.kind.memory_bytes / 8]
    result = []
    for degree in (2, 4, 8):
        degrees = {module: max(d for d in profile.degrees_of(module) if d <= degree) for module in heavy}
        if any(value > 1 for value in degrees.values()) and degrees not in result:
            result.append(degrees)
    return result


def in_rounds(profile: Profile, setting: Setting, num_rounds: int, schedule: Scheduler) -> list[Timed]:
    """The schedule of all tasks at once, or of balanced groups of tasks one after another."""
    if num_rounds == 1:
        return schedule(problem_of(profile, setting))
    timed: list[Timed] = []
    start_s = 0.0
    for number, tasks in enumerate(_balanced_tasks(profile, setting, num_rounds)):
        part = schedule(problem_of(profile, setting, tasks))
        waves = 1 + max((one.wave or 0 for one in timed), default=-1)
        timed += [
            replace(
                one,
                start_s=one.start_s + start_s,
                end_s=one.end_s + start_s,
                round=number,
                wave=None if one.wave is None else one.wave + waves,
            )
            for one in part
        ]
        start_s = max(one.end_s for one in timed)
    return timed


def _balanced_tasks(profile: Profile, setting: Setting, num_groups: int) -> list[frozenset[str]]:
    """Tasks in groups of about equal activations, heaviest first to the lightest group."""
    weight: dict[str, float] = dict.fromkeys(profile.graph.tasks, 0.0)
    for op in profile.graph.metaops:
        if op.cost is not None and op.batch_size is not None:
            weight[op.task] += op.num_layers * op.batch_size * op.cost.saved_bytes
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    loads = [0.0] * num_groups
    for task in sorted(weight, key=lambda task: -weight[task]):
        lightest = loads.index(min(loads))
        groups[lightest].append(task)
        loads[lightest] += weight[task]
    return [frozenset(group) for group in groups if group]


def realise(
    profile: Profile, setting: Setting, planner: str, timed: Sequence[Timed], seed: int = 0, evaluations: int = 0
) -> Plan:
    """Places timed pieces on devices."""
    in_order = sorted(timed, key=lambda one: (one.round, one.start_s))
    return assemble(profile, setting, planner, place(profile, setting, in_order), seed, evaluations)


def scored(plan: Plan, profile: Profile) -> Plan:
    """The plan with its simulated time; refuses one whose memory does not fit after all."""
    timeline = simulate(lower(plan, profile), profile)
    if profile.graph.parameters or any(op.cost for op in profile.graph.metaops):
        peaks = timeline.peak_bytes()
        device = int(np.argmax(peaks))
        limit = profile.cluster.kind.memory_bytes
        if peaks[device] > limit:
            raise DoesNotFitError(
                f"{plan.workload} does not fit: device {device} would need {peaks[device] / 2**30:.1f} GiB "
                f"of the {limit / 2**30:.1f} GiB there ({int(peaks[device]) - limit:,} bytes too many)"
            )
    return replace(plan, makespan_s=timeline.makespan_s)


def finished(plan: Plan, profile: Profile) -> Plan:
    """The plan with its bound, after `check` and `verify`."""
    check(plan, profile)
    verify(lower(plan, profile), profile)
    return replace(plan, bound_s=graph_bound_s(profile))
