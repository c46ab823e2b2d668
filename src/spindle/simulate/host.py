"""The hosts of a program's ranks, as a lane before their compute lanes.

    host       ▐h1▌▐p1▌▐h2▌  · · · · ▐h3▌
                  ╲        ╲  ╱ message ╲
    compute      ▐ c1 ▌     ▐ c2 ▌       ▐ c3 ▌

Each instance of the compute lane waits for one of the host lane (h), which waits for the messages that it needs. What a
host does before it turns to the next pass, as launching the rest of its kernels and posting what it sends, is another
one behind it (p). Both kinds stand behind all other instances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spindle.graph import MetaGraph
from spindle.profile import HostOverhead, Profile
from spindle.program import Instances, OptimizerStep, Program
from spindle.program.instances import cut_by
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.program.program import Column
from spindle.simulate.costs import NS, Costs, passes_s


@dataclass(frozen=True, slots=True)
class _Edges:
    """Dependencies between instances, with the place of each instance among those of the compute lane (-1: none)."""

    source: Column
    target: Column
    place: Column


def with_hosts(
    program: Program, instances: Instances, costs: Costs, overhead: HostOverhead, profile: Profile
) -> tuple[Instances, Costs]:
    """Instances and costs with the hosts' behind them."""
    computes = np.flatnonzero(instances.lane == COMPUTE)  # rank by rank, in the order of their programs
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
    posts = hosts.copy()  # the last thing that the host does for each pass
    posts[posting] = first + count + np.arange(len(posting))
    received = (instances.lane[edges.source] != COMPUTE) & (instances.lane[edges.target] == COMPUTE)
    sources = [edges.source, hosts, edges.source[received], hosts[posting], posts[last_pass]]
    targets = [edges.target, computes, hosts[place[edges.target[received]]], posts[posting], posted]
    for distance, makers in ((1, posts), (overhead.ahead, computes)):
        on_one_rank = np.flatnonzero(rank[distance:] == rank[: max(count - distance, 0)])
        sources.append(makers[on_one_rank])
        targets.append(hosts[on_one_rank + distance])
    all_sources, all_targets = np.concatenate(sources), np.concatenate(targets)
    owners = np.concatenate([computes, computes[posting]])  # of the hosts' instances
    time_s = np.concatenate([start_s, post_s[posting]])
    return (
        _with_instances(instances, owners, all_sources, all_targets),
        _with_times(instances, costs, time_s, overhead),
    )


def _with_instances(instances: Instances, owners: Column, sources: Column, targets: Column) -> Instances:
    """The instances with one more for each owner, which stands for itself alone."""
    count, first, first_meeting = len(owners), instances.num_instances, instances.num_meetings
    follower_starts, followers = cut_by(sources, targets, first + count)
    return replace(
        instances,
        instruction=np.concatenate([instances.instruction, instances.instruction[owners]]),
        rank=np.concatenate([instances.rank, instances.rank[owners]]),
        lane=np.concatenate([instances.lane, np.zeros(count, dtype=np.int64)]),
        num_needs=np.bincount(targets, minlength=first + count),
        follower_starts=follower_starts,
        followers=followers,
        meeting_starts=_one_more_each(instances.meeting_starts, count),
        meetings=np.concatenate([instances.meetings, first_meeting + np.arange(count)]),
        member_starts=_one_more_each(instances.member_starts, count),
        members=np.concatenate([instances.members, first + np.arange(count)]),
        meeting_instruction=np.concatenate([instances.meeting_instruction, instances.instruction[owners]]),
    )


def _with_times(instances: Instances, costs: Costs, time_s: np.ndarray, overhead: HostOverhead) -> Costs:
    # The latency of a link was measured with both hosts at work, which are simulated here.
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


def _one_more_each(starts: Column, count: int) -> Column:
    return np.concatenate([starts, starts[-1] + 1 + np.arange(count)])


def _start_s(
    program: Program, instances: Instances, overhead: HostOverhead, computes: Column, edges: _Edges
) -> np.ndarray:
    """The host's time before each instance of the compute lane begins, and to receive what it needs."""
    updates = np.array([isinstance(instruction, OptimizerStep) for instruction in program.instructions])
    is_update = updates[instances.instruction[computes]]
    time_s = np.where(is_update, overhead.optimizer_s, overhead.pass_s).astype(np.float64)
    for lane, receive_s in ((TRANSFER, overhead.receive_s), (SYNC, overhead.collective_finish_s)):
        received = (instances.lane[edges.source] == lane) & (instances.lane[edges.target] == COMPUTE)
        time_s += receive_s * np.bincount(edges.place[edges.target[received]], minlength=len(computes))
    return time_s


def _posted(instances: Instances, edges: _Edges) -> tuple[Column, Column]:
    """Transfers and collectives that need a pass, and the place of the last pass that each of them needs."""
    made = (instances.lane[edges.source] == COMPUTE) & (instances.lane[edges.target] != COMPUTE)
    last = np.full(instances.num_instances, -1)
    np.maximum.at(last, edges.target[made], edges.place[edges.source[made]])
    posted = np.flatnonzero(last >= 0)
    return posted, last[posted]


def _tasks_of_ranks(program: Program, graph: MetaGraph) -> Column:
    """How many tasks each rank has a part in."""
    tasks: list[set[str]] = [set() for _ in range(program.num_ranks)]
    for shape in program.slots:
        for rank in shape.ranks.tolist():
            tasks[rank].add(graph.metaops[shape.op].task)
    return np.array([len(names) for names in tasks])
