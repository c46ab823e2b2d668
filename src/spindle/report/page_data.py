"""The data of the report's page: everything that it shows, in one versioned value. The page is a function of it alone.

It consists of a JSON header and columns (`spindle.timeline.columns`). `page/types.d.ts` describes the header; its
`kind` says which page it is for, because other reports (of a fleet) have pages of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from spindle.display import count_of, seconds
from spindle.plan import Plan, setting_of
from spindle.profile import Profile
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.report.causes import last_needs
from spindle.report.palette import COLOURS, group_of
from spindle.report.sums import CLASSES, recompute_shares
from spindle.report.trace import instruction_name
from spindle.timeline import Column, Timeline, pack, time_columns

VERSION = 2
KINDS = ("forward", "backward", "transfer", "sync", "gather", "optimizer")
_MAX_CURVES = 8  # of one module
_UNLIMITED = 1 << 60  # bytes: memory of devices of no particular kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTimeline:
    """A named timeline of the report: simulated, or measured in a run."""

    name: str
    timeline: Timeline
    program: Program
    profile: Profile
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The content of a report of steps. The first two timelines are compared when it opens. `steps` are lines of a
    run's `steps.jsonl`."""

    title: str
    timelines: tuple[ShownTimeline, ...]
    steps: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()
    attachments: tuple[str, ...] = ()


def step_page_data(report: StepReport) -> bytes:
    """The packed data of a page of kind `step`. The same report gives the same bytes."""
    groups = list(module_names(report))
    tasks = list(dict.fromkeys(op.task for shown in report.timelines for op in shown.profile.graph.metaops))
    columns: dict[str, Column] = {}
    programs: list[tuple[Program, Profile]] = []
    timelines = []
    for number, shown in enumerate(report.timelines):
        place = next((place for place, (program, _) in enumerate(programs) if program is shown.program), None)
        if place is None:
            place = len(programs)
            programs.append((shown.program, shown.profile))
        timelines.append(_timeline_header(shown, place))
        columns |= {f"{number}.{name}": column for name, column in _span_columns(shown).items()}
    header = {
        "spindle": "report",
        "version": VERSION,
        "kind": "step",
        "unit": 1e-9,
        "title": report.title,
        "kinds": KINDS,
        "classes": CLASSES,
        "groups": groups,
        "tasks": tasks,
        "colours": COLOURS,
        "programs": [_program_header(*program, groups, tasks) for program in programs],
        "timelines": timelines,
        "curves": module_curves(report),
        "steps": _steps(report.steps),
        "assumptions": _assumptions(report),
        "attachments": list(report.attachments),
    }
    return pack(header, columns)


def module_names(report: StepReport) -> dict[str, str]:
    """The modules of a report with their colours."""
    names = dict.fromkeys(group_of(op) for shown in report.timelines for op in shown.profile.graph.metaops)
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _timeline_header(shown: ShownTimeline, program: int) -> dict[str, Any]:
    plan, profile = shown.program.plan, shown.profile
    limits = [island.kind.memory_bytes for island in profile.cluster.islands]
    return {
        "name": shown.name,
        "measured": shown.measured,
        "program": program,
        "planner": plan.planner,
        "workload": plan.workload,
        "cluster": profile.cluster.name,
        "numRanks": shown.timeline.num_ranks,
        "numSpans": len(shown.timeline.rank),
        "makespan": shown.timeline.makespan_ns,
        "bound": round(plan.bound_s * 1e9),
        "memoryLimit": min(limits) if min(limits) < _UNLIMITED else 0,
        "settings": plan.settings,
    }


def _span_columns(shown: ShownTimeline) -> dict[str, Column]:
    """Columns in the order of the page's rows: by rank, lane and start. `after` is the distance back to the span that a
    span waited for, which may be negative; 0 for none."""
    timeline = shown.timeline
    needs = last_needs(timeline, shown.program)
    order = np.lexsort((timeline.end, timeline.start, timeline.lane, timeline.rank))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    needs = needs[order]
    after = np.where(needs >= 0, np.arange(len(order)) - place[needs], 0)
    ordered = Timeline(
        instructions=timeline.instructions,
        num_ranks=timeline.num_ranks,
        rank=timeline.rank[order],
        lane=timeline.lane[order],
        instruction=timeline.instruction[order],
        posted=timeline.posted[order],
        start=timeline.start[order],
        end=timeline.end[order],
        bytes_at_start=timeline.bytes_at_start[order],
        bytes_at_end=timeline.bytes_at_end[order],
        static_bytes=timeline.static_bytes,
    )
    return {**time_columns(ordered), "after": after, "static_bytes": timeline.static_bytes}


def _program_header(program: Program, profile: Profile, groups: list[str], tasks: list[str]) -> dict[str, Any]:
    """For each instruction, its name, its kind, and the numbers of its module and task (-1 if it has none)."""
    metaops = profile.graph.metaops
    group_number = {name: number for number, name in enumerate(groups)}
    task_number = {name: number for number, name in enumerate(tasks)}
    names, kinds, of_group, of_task, details = [], [], [], [], []
    for instruction in program.instructions:
        names.append(instruction_name(instruction, program))
        kinds.append(KINDS.index(_kind(instruction)))
        details.append(_details(instruction, program))
        if isinstance(instruction, Forward | Backward):
            op = metaops[program.slots[instruction.slot].op]
            of_group.append(group_number[group_of(op)])
            of_task.append(task_number[op.task])
        else:
            of_group.append(-1)
            of_task.append(-1)
    return {
        "names": names,
        "kinds": kinds,
        "groups": of_group,
        "tasks": of_task,
        "details": details,
        "recompute": recompute_shares(program, profile).tolist(),
    }


def _kind(instruction: Instruction) -> str:
    match instruction:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case Exchange():
            return "transfer"
        case SyncGradients():
            return "sync"
        case GatherParameters():
            return "gather"
        case OptimizerStep():
            return "optimizer"
        case _:
            assert_never(instruction)


def _details(instruction: Instruction, program: Program) -> str:
    """The details that a span shows in addition to its name."""
    match instruction:
        case Forward(slot=number) | Backward(slot=number):
            slot = program.plan.slots[number]
            parts = [f"slot {number} of wave {slot.wave}", f"on {count_of(len(slot.devices), 'device')}"]
            parts += [f"microbatch {slot.microbatch}"] if program.plan.passes else []
            parts += [f"{slot.recomputed} of {slot.num_layers} layers recomputed"] if slot.recomputed else []
            parts += [f"{slot.offloaded} layers offloaded"] if slot.offloaded else []
            if isinstance(instruction, Backward) and instruction.part != "backward":
                parts.append(f"gradients of {instruction.part}s only")
            return ", ".join(parts)
        case Exchange(link=number, backward=backward):
            link = program.links[number]
            flows = link.backward if backward else link.forward
            total = float((flows.last - flows.first).sum()) * link.bytes_per_row
            return f"{count_of(len(flows.source), 'message')}, {total / 1e6:,.2f} MB in all"
        case SyncGradients(bucket=number) | GatherParameters(bucket=number):
            ranks = len(program.buckets[number].ranks)
            return f"{program.buckets[number].num_bytes / 1e6:,.2f} MB over {count_of(ranks, 'device')}"
        case OptimizerStep():
            return ""
        case _:
            assert_never(instruction)


def module_curves(report: StepReport) -> list[dict[str, Any]]:
    """Module → forward and backward seconds of one layer on n devices, and the numbers of devices that plans chose."""
    modules: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    programs = {id(shown.program): (shown.program, shown.profile) for shown in report.timelines}
    for program, profile in programs.values():
        setting = setting_of(program.plan, profile)
        chosen: dict[int, set[int]] = {}
        for shape in program.slots:
            chosen.setdefault(shape.op, set()).add(len(shape.ranks))
        for position, op in enumerate(profile.graph.metaops):
            curve = profile.curve(position, setting)
            key = (curve.num_devices, curve.forward_s, curve.backward_s, curve.tensor_degree, curve.measured)
            entry = modules.setdefault(group_of(op), {}).setdefault(
                key,
                {
                    "name": op.name,
                    "degree": curve.tensor_degree,
                    "devices": list(curve.num_devices),
                    "seconds": [sum(pair) for pair in zip(curve.forward_s, curve.backward_s, strict=True)],
                    "measured": list(curve.measured),
                    "chosen": [],
                    "ops": 0,
                },
            )
            entry["ops"] += 1
            entry["chosen"] = sorted({*entry["chosen"], *chosen.get(position, ())})
    return [
        {"module": module, "curves": list(curves.values())[:_MAX_CURVES], "more": max(0, len(curves) - _MAX_CURVES)}
        for module, curves in modules.items()
    ]


def _steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The series of a run by step, with nulls for missing values; and its plans."""
    steps = [line for line in lines if "loss" in line]
    plans = [line for line in lines if "plan" in line]
    if not steps:
        return None
    tags = dict.fromkeys(tag for line in steps for tag in line if tag not in ("time", "step"))
    return {
        "steps": [line["step"] for line in steps],
        "series": {tag: [_number(line.get(tag)) for line in steps] for tag in tags},
        "plans": [
            {"step": line["step"], "planner": str(line["plan"]), "predicted": _number(line.get("predicted_s"))}
            for line in plans
        ],
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _assumptions(report: StepReport) -> list[str]:
    """What predictions assume and leave out, each sentence once."""
    lines: dict[str, None] = {}
    for shown in report.timelines:
        profile, plan = shown.profile, shown.program.plan
        where = f"measured on {profile.measured_on}" if profile.measured_on else "computed, not measured"
        lines[f"Times of layers of {profile.graph.name} on {profile.cluster.name}: {where}."] = None
        lines |= dict.fromkeys(f"Simulated steps leave out {text}." for text in profile.leaves_out)
        lines |= dict.fromkeys(_plan_lines(plan))
        if shown.measured:
            lines["Clocks of several hosts may differ in measured steps."] = None
            if shown.timeline.static_bytes.any():
                lines[
                    "Memory of measured steps was read after each instruction of another step of the same plan, "
                    "because reading takes time. It is that of tensors alone."
                ] = None
            else:
                lines["Memory of measured steps was not measured; it is shown where it is predicted."] = None
    lines["A gap is explained by the program's dependencies; contention for links and launches are not among them."] = (
        None
    )
    lines |= dict.fromkeys(report.notes)
    return list(lines)


def _plan_lines(plan: Plan) -> Iterable[str]:
    if plan.bound_s:
        kind = "plan of this batch" if plan.passes else "plan that runs each layer over its whole batch at once"
        yield f"Bound: {seconds(plan.bound_s)}. No {kind} is faster than that, by the curves alone."
    if plan.settings:
        yield f"Planner {plan.planner} chose: {plan.settings}."
    if plan.cut_s is not None:
        yield f"Planner {plan.planner} was cut off after {seconds(plan.cut_s)}."
