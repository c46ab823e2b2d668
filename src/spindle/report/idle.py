"""Why devices are idle: which modules run meanwhile, and why these do not use the idle devices.

At every moment, idle device time is attributed to the modules that run on other devices, in equal shares. What
remains is time in which nothing computes: transfers, gradient synchronisation, the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from spindle.display import count_of, listed, percent, seconds
from spindle.graph import MetaOp
from spindle.plan import setting_of
from spindle.profile import Profile
from spindle.program import COMPUTE, SYNC, TRANSFER, Backward, Forward, Program
from spindle.timeline import Timeline, busy_intervals

IDLE_LIMIT = 0.2  # of all devices' time: above it, idle time is explained
_MIN_SHARE = 0.02
_SCALES_WELL = 0.85  # an op scales well if more devices reduce its time to this share or less
_LOSS = "loss."  # modules that stand for the losses of tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """Idle time of other devices while a module runs, as a share of all devices' time. If `module` is empty: while
    nothing computes. `reason` continues a sentence that begins with the module's name, `advice` is a sentence or
    empty."""

    module: str
    share: float
    reason: str
    advice: str = ""


def idle_causes(
    timeline: Timeline,
    program: Program,
    profile: Profile,
    busy_lanes: Collection[int] = (COMPUTE, TRANSFER, SYNC),
) -> tuple[IdleCause, ...]:
    """The causes of idle time, largest first. A device is busy while any of `busy_lanes` is."""
    metaops = profile.graph.metaops
    slot_of = np.array(
        [
            instruction.slot if isinstance(instruction, Forward | Backward) else -1
            for instruction in program.instructions
        ],
        dtype=np.int64,
    )
    times = np.unique(np.concatenate([timeline.start, timeline.end, [0]]))
    idle = np.full(len(times), program.num_ranks)  # devices, from each time to the next
    for intervals in busy_intervals(timeline, busy_lanes):
        np.subtract.at(idle, _covered(times, intervals), 1)
    idle_ns = np.zeros(len(times))
    idle_ns[:-1] = idle[:-1] * np.diff(times)

    # Which modules run when: an instruction runs from its first start to its last end.
    slots = slot_of[timeline.instruction]
    computes = slots >= 0
    names = [_name(op) for op in metaops]
    modules = list(dict.fromkeys(names))
    number_of = np.array([modules.index(name) for name in names], dtype=np.int64)
    op_of_slot = np.array([slot.op for slot in program.slots], dtype=np.int64)
    spans = np.stack([timeline.start, timeline.end], axis=1)[computes]
    module_of_span = number_of[op_of_slot[slots[computes]]]
    running = np.zeros((len(modules), len(times)), dtype=bool)
    for number in range(len(modules)):
        running[number, _covered(times, spans[module_of_span == number])] = True
    num_running = running.sum(0)
    idle_beside_ns = (running * np.divide(idle_ns, np.maximum(num_running, 1))).sum(1)
    whole_ns = max(1, timeline.makespan_ns * program.num_ranks)

    # The slot of a module during which most of this time passes gives the reason.
    idle_before = np.concatenate([[0.0], np.cumsum(idle_ns)])
    idle_beside_slot: dict[int, float] = defaultdict(float)
    for slot, (start, end) in zip(slots[computes].tolist(), np.searchsorted(times, spans), strict=True):
        idle_beside_slot[slot] += float(idle_before[end] - idle_before[start]) / len(program.slots[slot].ranks)
    causes = [
        IdleCause(
            module="",
            share=float(idle_ns[num_running == 0].sum()) / whole_ns,
            reason="nothing computes: data is sent, gradients are synchronised, or weights are updated",
            advice="Larger batches, or more of them before a step (gradient_accumulation_steps), send less per sample.",
        )
    ]
    for number, module in enumerate(modules):
        candidates = [slot for slot in idle_beside_slot if number_of[op_of_slot[slot]] == number]
        if candidates:
            slot = max(candidates, key=lambda candidate: idle_beside_slot[candidate])
            reason, advice = _reason_and_advice(program, profile, slot)
            closed = next((remark.closed for remark in profile.graph.remarks if remark.module == module), "")
            if closed:
                reason = f"{reason}; it is one module, not its towers and other parts, because {closed}"
            share = float(idle_beside_ns[number]) / whole_ns
            causes.append(IdleCause(module=module, share=share, reason=reason, advice=advice))
    return tuple(sorted((cause for cause in causes if cause.share > 0), key=lambda cause: -cause.share))


def idle_sentences(causes: Sequence[IdleCause], at_most: int = 4) -> list[str]:
    """Sentences that say why devices are idle and what to do, if more than a fifth of all devices' time is idle."""
    idle = sum(cause.share for cause in causes)
    if idle <= IDLE_LIMIT:
        return []
    shown = [cause for cause in causes if cause.share >= _MIN_SHARE][:at_most] or list(causes[:1])
    lines = [f"Why {percent(idle)} of device time is idle:"]
    for cause in shown:
        text = f"beside {cause.module}, which {cause.reason}" if cause.module else f"while {cause.reason}"
        lines.append(f"- {percent(cause.share)} {text}.")
    rest = [cause for cause in causes[len(shown) :] if cause.module]
    if sum(cause.share for cause in rest) >= _MIN_SHARE:
        names = listed([cause.module for cause in rest], at_most=3)
        lines.append(f"- {percent(sum(cause.share for cause in rest))} beside {names}.")
    advice = list(dict.fromkeys(cause.advice for cause in shown if cause.advice))
    return [*lines, *advice[: max(1, at_most - 1)]]


def _covered(times: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """The positions of times inside any of these intervals, which may overlap; each position once."""
    change = np.zeros(len(times) + 1, dtype=np.int64)
    first, last = np.searchsorted(times, intervals[:, 0]), np.searchsorted(times, intervals[:, 1])
    np.add.at(change, first, 1)
    np.add.at(change, last, -1)
    return np.flatnonzero(np.cumsum(change)[:-1] > 0)


def _name(op: MetaOp) -> str:
    """The module of an op, the task whose loss it is, or the op of an abstract graph."""
    if op.module is None:
        return op.name
    return f"the loss of {op.task}" if op.module.startswith(_LOSS) else op.module


def _reason_and_advice(program: Program, profile: Profile, slot: int) -> tuple[str, str]:
    """Why the op of a slot does not use more devices, and what would help."""
    graph, plan = profile.graph, program.plan
    position, num_devices = program.slots[slot].op, len(program.slots[slot].ranks)
    op, total = graph.metaops[position], program.num_ranks
    remark = next((remark for remark in graph.remarks if remark.module == op.module), None)
    one_layer = "" if remark is None else remark.one_layer
    one_device = "" if remark is None else remark.one_device
    where = f"runs on {count_of(num_devices, 'device')} of {total}"
    if plan.passes:
        layers = f"runs as one layer ({one_layer})" if one_layer else "runs a stage at a time"
        return f"{layers}, while other stages wait for its output", (
            "More microbatches in a step shorten the share of time in which a pipeline fills and drains."
        )
    if op.cost is not None and op.cost.whole_batch:
        if op.module is not None and op.module.startswith(_LOSS):
            return "is computed over its whole batch, on one device", (
                "A loss that is a mean over samples or tokens is split if the task returns spindle.mean(total, count) "
                "or has per_sample_mean=True."
            )
        why = f" ({one_device})" if one_device else ""
        if one_layer:
            return f"is not split, because {one_layer}, and couples its samples{why}", (
                "Register the parts of such a module (towers, projector, head) as modules of their own."
            )
        return f"couples its samples{why}, so it {where}", (
            "Put what couples samples (a normalisation over the batch, a loss) into a module of its own or into the "
            "task: the rest is then divided."
        )
    if num_devices == total:
        return "runs on all devices, which do not start and end it at the same time", ""
    setting = setting_of(plan, profile)
    curve = profile.curve(position, setting)
    more = [count for count in curve.num_devices if num_devices < count <= total]
    if not more:
        if op.cost is None:
            return f"{where}, the most that it has a time for", ""
        return f"has {count_of(op.batch_size or 1, 'sample')} to divide, so it {where}", (
            "Larger batches could use more devices."
        )
    layer_s = curve.layer_s(num_devices, setting.recompute[position])
    fastest = min(more, key=lambda count: curve.layer_s(count, setting.recompute[position]))
    fastest_s = curve.layer_s(fastest, setting.recompute[position])
    if fastest_s > _SCALES_WELL * layer_s:
        return (
            f"is too small to divide: a layer takes {seconds(layer_s)} on {count_of(num_devices, 'device')} and "
            f"{seconds(fastest_s)} on {fastest}"
        ), "Larger batches or more tasks in a step would use what is idle; fewer devices would be about as fast."
    waiting = _waiting_for(profile, position)
    waits = f"; {listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it" if waiting else ""
    return f"{where} for {seconds(op.num_layers * layer_s)}{waits}", (
        "More tasks in a step would run beside what others wait for."
    )


def _waiting_for(profile: Profile, position: int) -> list[str]:
    """The other modules that use the output of an op, directly or through later ops of its module."""
    graph = profile.graph
    name, reached, names = _name(graph.metaops[position]), [position], dict[str, None]()
    for producer in reached:
        for consumer in graph.successors[producer]:
            if _name(graph.metaops[consumer]) != name:
                names[_name(graph.metaops[consumer])] = None
            elif consumer not in reached:
                reached.append(consumer)
    return list(names)
