"""Small fleets and jobs for tests of the fleet scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from spindle.cluster import Cluster, DeviceKind, Island, Link
from spindle.fleet import (
    Action,
    Cell,
    Estimate,
    Event,
    Fleet,
    Job,
    Plan,
    SchedulerOptions,
    Started,
    State,
    Stop,
    Submitted,
    Team,
    Ticked,
    schedule,
)

_LINK = Link(bytes_per_s=1e9)


def fleet(nodes: Mapping[str, Iterable[int]], teams: tuple[Team, ...] = ()) -> Fleet:
    """Nodes by kind: {"big": [4, 4], "small": [2]}."""
    islands = []
    for name, sizes in nodes.items():
        kind = DeviceKind(name=name, peak_flops=1e12, memory_bytes=1 << 34, memory_bytes_per_s=1e12)
        islands += [Island(kind=kind, num_devices=size, link=_LINK, uplink=_LINK) for size in sizes]
    return Fleet(cluster=Cluster(name="test", islands=tuple(islands)), teams=teams)


def submitted(
    name: str, times: Mapping[tuple[str, int], float], time_s: float = 0.0, grade: str = "planned", **fields: object
) -> Submitted:
    """A job with step times by kind and count."""
    estimates = tuple(
        Estimate(cell=Cell(kind=kind, num_devices=count), step_s=step_s, grade=grade)
        for (kind, count), step_s in times.items()
    )
    kind, count = next(iter(times))
    given = {"num_steps": 100_000, "requested_kind": kind, "requested_devices": count, **fields}
    return Submitted(time_s=time_s, job=Job(name=name, **given), estimates=estimates)  # type: ignore[arg-type]


def new_state(machines: Fleet, **options: object) -> State:
    return State(fleet=machines, options=SchedulerOptions(**{"realloc_s": 60.0, **options}))  # type: ignore[arg-type]


def after(state: State, *events: Event) -> tuple[State, list[Action]]:
    """The state after events, with all actions; attempts start at once."""
    actions: list[Action] = []
    for event in events:
        state, answer = schedule(state, event)
        actions += answer
        for action in answer:
            if not isinstance(action, Stop | Plan):
                state, _ = schedule(state, Started(time_s=event.time_s, job=action.job, attempt=action.attempt))
    return state, actions


def at(time_s: float, state: State) -> tuple[State, list[Action]]:
    """A round at a time, or as soon after it as one is due."""
    due_s = state.next_round_s if state.next_round_s is not None else time_s
    return after(state, Ticked(time_s=max(time_s, due_s)))


def cells(state: State) -> dict[str, str]:
    """What every job has: `4 x big`, or nothing."""
    return {job.name: job.allocation.cell.text if job.allocation else "" for job in state.jobs}


def check_allocation(state: State) -> None:
    """No device twice, none of a lost node, and every cell one that its job accepts, on the fewest nodes."""
    used: Counter[str] = Counter()
    machines = state.fleet
    for job in state.jobs:
        if job.allocation is None:
            continue
        cell = job.allocation.cell
        (estimate,) = [
            estimate
            for estimate in job.estimates
            if (estimate.cell.kind, estimate.cell.num_devices) == (cell.kind, cell.num_devices)
        ]
        assert estimate.fits
        assert estimate.grade != "bound"
        assert job.job.accepts(cell.kind, cell.num_devices)
        kind = machines.kind_number(cell.kind)
        assert sum(share.num_devices for share in job.allocation.nodes) == cell.num_devices
        assert len(job.allocation.nodes) == -(-cell.num_devices // machines.node_size(kind))
        for share in job.allocation.nodes:
            node = machines.node_number(share.node)
            assert machines.kind_of_node[node] == kind
            assert share.node not in state.unavailable
            used[share.node] += share.num_devices
    for name, count in used.items():
        assert count <= state.num_usable(machines.node_number(name))
    for team in machines.teams:
        for limit in team.limits:
            total = sum(
                job.allocation.cell.num_devices
                for job in state.jobs
                if job.allocation and job.job.team == team.name and job.allocation.cell.kind == limit.kind
            )
            assert total <= limit.num_devices


def fit_on_nodes(state: State, cells: Iterable[Cell]) -> bool:
    """Whether there is any way to place all these cells on nodes that the fleet may use now: by trying all."""
    machines = state.fleet
    left = sorted(cells, key=lambda cell: -cell.num_devices)

    def fit(first: int, free: tuple[int, ...]) -> bool:
        if first == len(left):
            return True
        cell, kind = left[first], machines.kind_number(left[first].kind)
        size, nodes = machines.node_size(kind), [n for n, of in enumerate(machines.kind_of_node) if of == kind]
        if cell.num_devices > size:
            whole = [node for node in nodes if free[node] == size][: cell.num_devices // size]
            if len(whole) * size < cell.num_devices:
                return False
            return fit(first + 1, tuple(0 if node in whole else count for node, count in enumerate(free)))
        return any(
            fit(first + 1, (*free[:node], free[node] - cell.num_devices, *free[node + 1 :]))
            for node in nodes
            if free[node] >= cell.num_devices
        )

    return fit(0, tuple(state.num_usable(node) for node in range(len(machines.node_names))))
