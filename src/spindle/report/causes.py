"""What did each span wait for? Follows the dependencies of the program through a timeline.

A span begins once what it needs is done: the span before it on its lane, and those that produce its data; and, where
several ranks work together (a message, a collective, a group of devices), once all of them have what they need. The
last of these to end made it as late as it was. Following that back from the end of the step gives the critical path.

Left out: contention for links, and the time in which a host launches work; they show as a distance between a span and
what it waited for.
"""

from __future__ import annotations

import numpy as np

from spindle.errors import ProgramError
from spindle.program import Instances, Program, instances_of
from spindle.timeline import Column, Timeline


def last_needs(timeline: Timeline, program: Program) -> Column:
    """Of each span, the span that it waited for last; -1 where it waited for none."""
    instances = instances_of(program)
    same = len(timeline.rank) == instances.num_instances and all(
        np.array_equal(ours, theirs)
        for ours, theirs in (
            (timeline.rank, instances.rank),
            (timeline.lane, instances.lane),
            (timeline.instruction, instances.instruction),
        )
    )
    if not same:
        raise ProgramError("this timeline is of another program than the one it is explained by")
    return _joined(timeline, instances, _own_needs(timeline, instances))


def _own_needs(timeline: Timeline, instances: Instances) -> Column:
    """Of each span, the last of those that it needs on its own rank, by end; by number where several end together."""
    source = np.repeat(np.arange(instances.num_instances), np.diff(instances.follower_starts))
    return _last_by(instances.followers, source, timeline.end[source], instances.num_instances)


def _joined(timeline: Timeline, instances: Instances, own: Column) -> Column:
    """Of each span, the last need of all spans that begin together with it."""
    ends = np.where(own >= 0, timeline.end[own], -1)
    rendezvous = np.repeat(np.arange(instances.num_rendezvous), np.diff(instances.member_starts))
    need_of = _last_by(rendezvous, own[instances.members], ends[instances.members], instances.num_rendezvous)
    # Back from a rendezvous to its members, beside what each needs itself: where both end together, its own.
    span = np.concatenate([instances.members, np.arange(len(own))])
    need = np.concatenate([need_of[rendezvous], own])
    end = np.where(need >= 0, timeline.end[need], -1)
    return _last_by(span, need, end, len(own))


def _last_by(key: Column, value: Column, end: Column, num_keys: int) -> Column:
    """For each key the value with the latest end; of equal ones the last in the list. -1 for a key without values."""
    order = np.lexsort((np.arange(len(key)), end, key))
    last = np.flatnonzero(np.diff(key[order], append=num_keys))
    result = np.full(num_keys, -1, dtype=np.int64)
    result[key[order][last]] = value[order][last]
    return result


def critical_path(timeline: Timeline, needs: Column) -> list[int]:
    """Spans from the first to the one that ends last, each waiting for the one before it."""
    if not len(needs):
        return []
    path = [int(np.argmax(timeline.end))]
    while needs[path[-1]] >= 0:
        path.append(int(needs[path[-1]]))
    return path[::-1]
