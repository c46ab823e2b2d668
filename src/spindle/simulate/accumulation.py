"""Steps that accumulate gradients: the passes of a plan once per micro-step, then one update."""

from __future__ import annotations

from dataclasses import replace

from spindle.graph import microbatch_name
from spindle.plan import Pass, Plan
from spindle.profile import Profile
from spindle.program import lower
from spindle.simulate.simulate import simulate
from spindle.timeline import Timeline

_MOST_SIMULATED = 4  # micro-steps; each further one takes as long as the last of these


def simulate_step(plan: Plan, profile: Profile, num_micro_steps: int) -> tuple[float, int]:
    """The seconds of a step that runs the passes of a plan `num_micro_steps` times, and its peak bytes.

    As in training, parameters are gathered before the first micro-step, and gradients are reduced and parameters
    updated in the last one. A device may begin a micro-step while others are still in the one before.
    """

    def simulated(count: int) -> Timeline:
        repeated, profile_of_step = accumulated(plan, profile, count) if count > 1 else (plan, profile)
        return simulate(lower(repeated, profile_of_step), profile_of_step)

    few = min(num_micro_steps, _MOST_SIMULATED)
    timeline = simulated(few)
    step_s = timeline.makespan_s
    if num_micro_steps > few:
        step_s += (num_micro_steps - few) * (step_s - simulated(few - 1).makespan_s)
    return step_s, int(timeline.peak_bytes().max(initial=0))


def accumulated(plan: Plan, profile: Profile, num_micro_steps: int) -> tuple[Plan, Profile]:
    """A plan that repeats the passes of a plan in rounds of their own, and the profile of its graph, in which each
    micro-step is a microbatch."""
    numbers, num_waves = range(num_micro_steps), 1 + max(slot.wave for slot in plan.slots)
    repeated = profile.repeated(num_micro_steps)
    slots = tuple(
        replace(
            slot,
            op=microbatch_name(slot.op, number),
            microbatch=number,
            wave=number * num_waves + slot.wave,
            round=number * plan.num_rounds + slot.round,
        )
        for number in numbers
        for slot in plan.slots
    )
    passes = tuple(
        Pass(slot=number * len(plan.slots) + pass_.slot, kind=pass_.kind) for number in numbers for pass_ in plan.passes
    )
    recompute = tuple(microbatch_name(op, number) for number in numbers for op in plan.recompute)
    fingerprint = repeated.graph.fingerprint
    return replace(plan, fingerprint=fingerprint, slots=slots, passes=passes, recompute=recompute), repeated
