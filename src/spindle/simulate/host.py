"""The hosts of ranks, as an additional lane before the compute lane of each rank.

    host       ▐h1▌▐p1▌▐h2▌  · · · · ▐h3▌
                  ╲        ╲  ╱ message ╲
    compute      ▐ c1 ▌     ▐ c2 ▌       ▐ c3 ▌

Each instance of the compute lane (c) waits for an instance of the host lane (h), which waits for the messages that the
pass needs. A second instance (p) is what the host does afterwards for the same pass: it launches the rest of its
kernels and posts its sends. Both kinds are appended to the other instances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spindle.graph import MetaGraph
from spindle.profile import HostOverhead, Profile
from spindle.program import SYNC, TRANSFER, Column, Instances, Jagged, OptimizerStep, Program, are_compute
from spindle.simulate.costs import NS, Costs, passes_s


@dataclass(frozen=True, slots=True)
class _Edges:
    """Dependencies between instances. `place` is the position of each instance on the compute lane, or -1."""

    source: Column
    target: Column
    place: Column


def with_hosts(
    program: Program, instances: Instances, costs: Costs, overhead: HostOverhead, profile: Profile
) -> tuple[Instances, Costs]:
    """The instances and costs of a program, with those of the hosts appended."""
    computes = _launched(program, instances)
    count, first = len(computes), instances.num_instances
    rank = instances.rank[computes]
    place = np.full(first, -1)
    place[computes] = np.arange(count)
    edges = _Edges(np.repeat(np.arange(first), np.diff(instances.follower_starts)), instances.followers, place)

    start_s = _start_s(program, instances, overhead, computes, edges)
    begins = np.flatnonzero(np.diff(rank, prepend=-1))  # the first pass of each rank
    start_s[begins] += overhead.step_s + overhead.task_s * _tasks_of_ranks(program, profile.graph)[rank[begins]]
    posted, last_pass = _posted(instances, edges)
    post_s = passes_s(program, profile, launches=True)[instances.instruction[computes]]
    for lane, once_s in ((TRANSFER, overhead.send_s), (SYNC, overhead.collective_start_s)):
        post_s += once_s * np.bincount(last_pass[instances.lane[posted] == lane], minlength=count)

    posting = np.flatnonzero(post_s > 0)
    hosts = first + np.arange(count)
    posts = hosts.copy()  # the last instance of the host for each pass
    posts[posting] = first + count + np.arange(len(posting))
    is_compute = are_compute(instances.lane)
    received = ~is_compute[edges.source] & is_compute[edges.target]
    sources = [edges.source, hosts, edges.source[received], hosts[posting], posts[last_pass]]
    targets = [edges.target, computes, hosts[place[edges.target[received]]], posts[posting], posted]
    # A host launches one pass after another, and is at most `ahead` passes ahead of its GPU.
    for distance, predecessors in ((1, posts), (overhead.ahead, computes)):
        on_one_rank = np.flatnonzero(rank[distance:] == rank[: max(count - distance, 0)])
        sources.append(predecessors[on_one_rank])
        targets.append(hosts[on_one_rank + distance])
    all_sources, all_targets = np.concatenate(sources), np.concatenate(targets)
    owners = np.concatenate([computes, computes[posting]])  # of the hosts' instances
    time_s = np.concatenate([start_s, post_s[posting]])
    return (
        with_instances(instances, owners, all_sources, all_targets),
        _with_times(instances, costs, time_s, overhead),
    )


def _launched(program: Program, instances: Instances) -> Column:
    """The instances of compute lanes, rank by rank, in the order in which the host launches them."""
    computes = np.flatnonzero(are_compute(instances.lane))
    if program.plan.num_lanes == 1:
        return computes
    order_in_program = program.places[instances.instruction[computes]]
    return computes[np.lexsort((instances.instruction[computes], order_in_program, instances.rank[computes]))]


def with_instances(instances: Instances, owners: Column, sources: Column, targets: Column) -> Instances:
    """Append one instance for each owner, with a rendezvous of its own."""
    count, first, first_rendezvous = len(owners), instances.num_instances, instances.num_rendezvous
    followers = Jagged.group_by(sources, targets, first + count)
    return replace(
        instances,
        instruction=np.concatenate([instances.instruction, instances.instruction[owners]]),
        rank=np.concatenate([instances.rank, instances.rank[owners]]),
        lane=np.concatenate([instances.lane, np.zeros(count, dtype=np.int64)]),
        num_needs=np.bincount(targets, minlength=first + count),
        follower_starts=followers.starts,
        followers=followers.values,
        rendezvous_starts=_with_single_entries(instances.rendezvous_starts, count),
        rendezvous_ids=np.concatenate([instances.rendezvous_ids, first_rendezvous + np.arange(count)]),
        member_starts=_with_single_entries(instances.member_starts, count),
        members=np.concatenate([instances.members, first + np.arange(count)]),
        rendezvous_instruction=np.concatenate([instances.rendezvous_instruction, instances.instruction[owners]]),
    )


def _with_times(instances: Instances, costs: Costs, time_s: np.ndarray, overhead: HostOverhead) -> Costs:
    """Append the times of the hosts' instances."""
    # the measured latency of a link includes the work of both hosts, which is simulated separately here
    is_transfer = instances.lane[instances.members[instances.member_starts[:-1]]] == TRANSFER
    host_ns = round((overhead.send_s + overhead.receive_s + overhead.pass_s) * NS)
    delay_ns = np.where(is_transfer, np.maximum(costs.delay_ns - host_ns, 0), costs.delay_ns)
    count = len(time_s)
    return replace(
        costs,
        delay_ns=np.concatenate([delay_ns, np.zeros(count, dtype=np.int64)]),
        fixed_ns=np.concatenate([costs.fixed_ns, np.round(time_s * NS).astype(np.int64)]),
        entry_starts=np.concatenate([costs.entry_starts, np.full(count, costs.entry_starts[-1])]),
    )


def _with_single_entries(starts: Column, count: int) -> Column:
    """The starts of a jagged list to which `count` rows of one entry are appended."""
    return np.concatenate([starts, starts[-1] + 1 + np.arange(count)])


def _start_s(
    program: Program, instances: Instances, overhead: HostOverhead, computes: Column, edges: _Edges
) -> np.ndarray:
    """Host time before each instance of the compute lane starts, including receiving its inputs."""
    updates = np.array([isinstance(instruction, OptimizerStep) for instruction in program.instructions])
    is_update = updates[instances.instruction[computes]]
    time_s = np.where(is_update, overhead.optimizer_s, overhead.pass_s).astype(np.float64)
    for lane, receive_s in ((TRANSFER, overhead.receive_s), (SYNC, overhead.collective_finish_s)):
        received = (instances.lane[edges.source] == lane) & are_compute(instances.lane[edges.target])
        time_s += receive_s * np.bincount(edges.place[edges.target[received]], minlength=len(computes))
    return time_s


def _posted(instances: Instances, edges: _Edges) -> tuple[Column, Column]:
    """Transfers and collectives that need a pass, and the position of the last pass that each of them needs."""
    is_compute = are_compute(instances.lane)
    is_needed = is_compute[edges.source] & ~is_compute[edges.target]
    last = np.full(instances.num_instances, -1)
    np.maximum.at(last, edges.target[is_needed], edges.place[edges.source[is_needed]])
    posted = np.flatnonzero(last >= 0)
    return posted, last[posted]


def _tasks_of_ranks(program: Program, graph: MetaGraph) -> Column:
    """The number of tasks that each rank takes part in."""
    tasks: list[set[str]] = [set() for _ in range(program.num_ranks)]
    for shape in program.slots:
        for rank in shape.ranks.tolist():
            tasks[rank].add(graph.metaops[shape.op].task)
    return np.array([len(names) for names in tasks])
