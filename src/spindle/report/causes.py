"""What each span waited for, from the dependencies of the program in a timeline.

A span starts once everything that it needs is done: the previous span on its lane, and the spans that produce its data.
If several ranks work together (a message, a collective, a group of devices), all of them must have what they need. The
last of these to end determined its start. Following these spans back from the end of the step gives the critical path.

Left out: contention for links, and the time that a host takes to launch work; they appear as a gap between a span and
the span that it waited for.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import ProgramError
from spindle.program import Instances, Program, instances_of
from spindle.timeline import Column, Timeline


def last_needs(timeline: Timeline, program: Program) -> Column:
    """For each span, the last span that it waited for; -1 if there is none."""
    instances = instances_of(program)
    same = len(timeline.rank) == instances.num_instances and all(
        np.array_equal(of_one, of_other)
        for of_one, of_other in (
            (timeline.rank, instances.rank),
            (timeline.lane, instances.lane),
            (timeline.instruction, instances.instruction),
        )
    )
    if not same:
        raise ProgramError("this timeline is of another program than the one it is explained by")
    return _last_need_of_members(timeline, instances, _last_need_on_rank(timeline, instances))


def _last_need_on_rank(timeline: Timeline, instances: Instances) -> Column:
    """For each span, the one with the latest end among those that it needs on its own rank; on ties, the last one."""
    source = np.repeat(np.arange(instances.num_instances), np.diff(instances.follower_starts))
    return _last_by(instances.followers, source, timeline.end[source], instances.num_instances)


def _last_need_of_members(timeline: Timeline, instances: Instances, own: Column) -> Column:
    """For each span, the latest of the needs of all spans that start together with it."""
    ends = np.where(own >= 0, timeline.end[own], -1)
    rendezvous = np.repeat(np.arange(instances.num_rendezvous), np.diff(instances.member_starts))
    need_of = _last_by(rendezvous, own[instances.members], ends[instances.members], instances.num_rendezvous)
    # Back from a rendezvous to its members, beside what each needs itself: where both end together, its own.
    span = np.concatenate([instances.members, np.arange(len(own))])
    need = np.concatenate([need_of[rendezvous], own])
    end = np.where(need >= 0, timeline.end[need], -1)
    return _last_by(span, need, end, len(own))


def _last_by(key: Column, value: Column, end: Column, num_keys: int) -> Column:
    """For each key, the value with the latest end; on ties, the last in the list. -1 for a key without values."""
    order = np.lexsort((np.arange(len(key)), end, key))
    last = np.flatnonzero(np.diff(key[order], append=num_keys))
    result = np.full(num_keys, -1, dtype=np.int64)
    result[key[order][last]] = value[order][last]
    return result
