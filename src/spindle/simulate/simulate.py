"""Simulate a program: execute the same instruction lists as the runtime, with the times of a profile."""

from __future__ import annotations

import numpy as np

from spindle.errors import ProgramError
from spindle.profile import Profile
from spindle.program import Memory, Program, describe_deadlock, instances_of
from spindle.simulate.copies import with_copies
from spindle.simulate.costs import costs_of
from spindle.simulate.engine import run
from spindle.simulate.host import with_hosts
from spindle.timeline import Timeline


def simulate(program: Program, profile: Profile) -> Timeline:
    """The timeline of one step. Raises a ProgramError if the program deadlocks."""
    instances = instances_of(program)
    memory = Memory(program, profile)
    costs = costs_of(program, instances, profile, memory)
    # Hosts and copies are extra instances after the program's own; they are cut off at the end.
    timed, times = instances, costs
    if profile.host is not None:
        timed, times = with_hosts(program, instances, costs, profile.host, profile)
    timed, times = with_copies(program, timed, times, profile, memory.offloaded)
    posted, began, ended = (column[: instances.num_instances] for column in run(*timed.arrays, times.work))
    if (ended < 0).any():
        raise ProgramError(describe_deadlock(program, instances, np.flatnonzero(ended < 0)))
    return Timeline(
        instructions=program.instructions,
        num_ranks=program.num_ranks,
        rank=instances.rank,
        lane=instances.lane,
        instruction=instances.instruction,
        posted=posted,
        start=began,
        end=ended,
        bytes_at_start=costs.bytes_at_start,
        bytes_at_end=costs.bytes_at_end,
        static_bytes=costs.static_bytes,
    )
