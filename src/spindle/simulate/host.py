"""The hosts of a program's ranks, as a lane before their compute lanes.

    host       ▐h1▌▐h2▌  · · · · ▐h3▌
                  ╲   ╲    ╱ message ╲
    compute      ▐ c1 ▌▐ c2 ▌         ▐ c3 ▌

Each instance of the compute lane gets one of the host lane that it waits for. These stand behind all other instances.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spindle.graph import MetaGraph
from spindle.profile import HostOverhead, Profile
from spindle.program import Instances, OptimizerStep, Program
from spindle.program.instances import cut_by
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.program.program import Column
from spindle.simulate.costs import NS, Costs, passes_s


def with_hosts(
    program: Program, instances: Instances, costs: Costs, overhead: HostOverhead, profile: Profile
) -> tuple[Instances, Costs]:
    """Instances and costs with the hosts' behind them."""
    computes = np.flatnonzero(instances.lane == COMPUTE)  # rank by rank, in the order of their programs
    count, first_host, first_rendezvous = len(computes), instances.num_instances, instances.num_rendezvous
    hosts = first_host + np.arange(count)
    rank = instances.rank[computes]
    source = np.repeat(np.arange(first_host), np.diff(instances.follower_starts))
    target = instances.followers
    received = (instances.lane[source] != COMPUTE) & (instances.lane[target] == COMPUTE)

    place = np.full(first_host, -1)  # of an instance among those of the compute lane
    place[computes] = np.arange(count)
    sources, targets = [source, hosts, source[received]], [target, computes, hosts[place[target[received]]]]
    for distance, makers in ((1, hosts), (overhead.ahead, computes)):
        on_one_rank = np.flatnonzero(rank[distance:] == rank[: max(count - distance, 0)])
        sources.append(makers[on_one_rank])
        targets.append(hosts[on_one_rank + distance])
    all_sources, all_targets = np.concatenate(sources), np.concatenate(targets)
    follower_starts, followers = cut_by(all_sources, all_targets, first_host + count)

    time_s = _overhead_s(program, instances, overhead, computes, place, source, target)
    begins = np.flatnonzero(np.diff(rank, prepend=-1))  # the first pass of each rank
    time_s[begins] += overhead.step_s + overhead.task_s * _tasks_of_ranks(program, profile.graph)[rank[begins]]
    # A pass starts with the first of its kernels, and the host goes on to the next pass when it has launched the last.
    launch_s = passes_s(program, profile, launches=True)[instances.instruction[computes]]
    time_s[1:] += np.where(np.diff(rank) == 0, launch_s[:-1], 0.0)
    nothing = np.zeros(count, dtype=np.int64)
    widened = replace(
        instances,
        instruction=np.concatenate([instances.instruction, instances.instruction[computes]]),
        rank=np.concatenate([instances.rank, rank]),
        lane=np.concatenate([instances.lane, nothing]),
        num_needs=np.bincount(all_targets, minlength=first_host + count),
        follower_starts=follower_starts,
        followers=followers,
        rendezvous_starts=_one_more_each(instances.rendezvous_starts, count),
        rendezvous_ids=np.concatenate([instances.rendezvous_ids, first_rendezvous + np.arange(count)]),
        member_starts=_one_more_each(instances.member_starts, count),
        members=np.concatenate([instances.members, hosts]),
        rendezvous_instruction=np.concatenate([instances.rendezvous_instruction, instances.instruction[computes]]),
    )
    return widened, replace(
        costs,
        delay_ns=np.concatenate([costs.delay_ns, nothing]),
        fixed_ns=np.concatenate([costs.fixed_ns, np.round(time_s * NS).astype(np.int64)]),
        entry_starts=np.concatenate([costs.entry_starts, np.full(count, costs.entry_starts[-1])]),
    )


def _one_more_each(starts: Column, count: int) -> Column:
    return np.concatenate([starts, starts[-1] + 1 + np.arange(count)])


def _overhead_s(
    program: Program,
    instances: Instances,
    overhead: HostOverhead,
    computes: Column,
    place: Column,
    source: Column,
    target: Column,
) -> np.ndarray:
    """The host's time for each instance of the compute lane. What is sent or synchronised behind a pass is launched
    before the next one."""
    count, rank = len(computes), instances.rank[computes]
    updates = np.array([isinstance(instruction, OptimizerStep) for instruction in program.instructions])
    time_s = np.where(updates[instances.instruction[computes]], overhead.optimizer_s, overhead.pass_s).astype(
        np.float64
    )
    for lane, launch_s, take_s in (
        (TRANSFER, overhead.send_s, overhead.receive_s),
        (SYNC, overhead.collective_start_s, overhead.collective_finish_s),
    ):
        taken = (instances.lane[source] == lane) & (instances.lane[target] == COMPUTE)
        time_s += take_s * np.bincount(place[target[taken]], minlength=count)
        made = (instances.lane[source] == COMPUTE) & (instances.lane[target] == lane)
        last = np.full(instances.num_instances, -1)  # of the passes that it needs
        np.maximum.at(last, target[made], place[source[made]])
        behind = last[last >= 0] + 1
        behind = behind[behind < count]
        behind = behind[rank[behind] == rank[behind - 1]]
        time_s += launch_s * np.bincount(behind, minlength=count)
    return time_s


def _tasks_of_ranks(program: Program, graph: MetaGraph) -> Column:
    """How many tasks each rank has a part in."""
    tasks: list[set[str]] = [set() for _ in range(program.num_ranks)]
    for shape in program.slots:
        for rank in shape.ranks.tolist():
            tasks[rank].add(graph.metaops[shape.op].task)
    return np.array([len(names) for names in tasks])
