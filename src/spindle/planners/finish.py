"""From a plan to a finished one: simulated, checked and verified, with its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spindle.plan import Plan, Slot, check, setting_of, spans
from spindle.plan.assemble import label_waves
from spindle.profile import Profile
from spindle.program import lower, refuse_overfull, verify
from spindle.simulate import simulate

MOST_CUTS = 3  # the number of parts of a slot that waits for its parameters


def cut_for_gathers(plan: Plan, profile: Profile) -> Plan:
    """Cut slots that start while a sharded optimizer's parameters are still being gathered.

    A forward pass waits for the parameters of all its layers. So the first part has one layer, and each further part as
    many as are gathered while the part before it runs.
    """
    graph, setting, cluster = profile.graph, setting_of(plan, profile), profile.cluster
    if not plan.shard_optimizer or any(slot.not_before_s for slot in plan.slots):
        return plan
    rate = min(min(island.link.bytes_per_s, island.uplink.bytes_per_s) for island in cluster.islands)
    element_s = graph.numerics.parameter_bytes / rate
    gather_s = sum(parameter.num_elements for parameter in graph.parameters if parameter.trainable) * element_s
    slots: list[tuple[float, Slot]] = []
    for slot, span in zip(plan.slots, spans(plan, profile), strict=True):
        op = graph.positions[slot.op]
        elements = [
            sum(graph.parameters[parameter].num_elements for parameter in layer)
            for layer in graph.metaops[op].parameters[slot.first : slot.last]
        ]
        cuts = [slot.first]
        if span.start_s < gather_s and len(slot.devices) > setting.tensor_degrees[op] and any(elements):
            forward_s, _ = profile.curve(op, setting).times_s(len(slot.devices))
            layer_s = sum(elements) / len(elements) / setting.tensor_degrees[op] * element_s
            num_layers = 1
            while cuts[-1] + num_layers < slot.last and len(cuts) <= MOST_CUTS:
                cuts.append(cuts[-1] + num_layers)
                num_layers = max(1, int(num_layers * forward_s / layer_s))
        folded_s = (span.end_s - span.start_s) / slot.num_layers
        slots += [
            (span.start_s + (first - slot.first) * folded_s, replace(slot, first=first, last=last, wave=-1))
            for first, last in zip(cuts, [*cuts[1:], slot.last], strict=True)
        ]
    if len(slots) == len(plan.slots):
        return plan
    slots.sort(key=lambda entry: entry[0])
    return replace(plan, slots=tuple(label_waves(profile, [slot for _, slot in slots])))


def simulated(plan: Plan, profile: Profile) -> tuple[Plan, NDArray[np.int64]]:
    """The plan with its simulated time, and the peak bytes of each rank, which need not fit."""
    timeline = simulate(lower(plan, profile), profile)
    return replace(plan, makespan_s=timeline.makespan_s), timeline.peak_bytes()


def scored(plan: Plan, profile: Profile) -> Plan:
    """The plan with its simulated time. Refuses a plan whose memory does not fit after all."""
    timed, peak_bytes = simulated(plan, profile)
    refuse_overfull(peak_bytes, profile)
    return timed


def finished(plan: Plan, profile: Profile, bound_s: float, is_draft: bool = False) -> Plan:
    """The plan with its bound, after `check` and `verify` unless it is a draft."""
    if not is_draft:
        check(plan, profile)
        verify(lower(plan, profile), profile)
    return replace(plan, bound_s=bound_s)
