"""Tables for people: rich renderables, each a pure function of what it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rich import box
from rich.table import Table
from rich.text import Text

from spindle.checkpoint import checkpoint_bytes
from spindle.display import count_of, facts, figures, listed, milliseconds, num_bytes, percent, seconds
from spindle.plan import Plan, slots_per_op
from spindle.planners import PipelineBound
from spindle.profile import Profile
from spindle.program import counts_bytes, lower
from spindle.report.bound import BoundReport
from spindle.report.compare import ComparedPlan, Comparison, RefusedPlan
from spindle.simulate import simulate
from spindle.timeline import Measures


def memory(peak_bytes: int, profile: Profile) -> str:
    if not counts_bytes(profile):
        return "not known for an abstract graph"
    limit = profile.cluster.kind.memory_bytes
    return f"{num_bytes(peak_bytes)} of {num_bytes(limit)} ({percent(peak_bytes / limit)}) on the fullest device"


def plan_facts(plan: Plan, measures: Measures, profile: Profile) -> Table:
    """The main facts about a plan."""
    rows = [
        ("workload", f"{plan.workload} on {plan.cluster}"),
        ("planner", _planner(plan)),
        ("step, simulated", f"{seconds(measures.makespan_s)}, {times_bound(measures.makespan_s, plan.bound_s)}"),
        ("bound", f"{seconds(plan.bound_s)}; no plan of this kind can be faster"),
        ("idle", percent(measures.idle_share)),
        ("slots", f"{len(plan.slots)} in {_waves(plan)}, {slots_per_op(plan):.2f} per op"),
        *([("chosen", plan.settings)] if plan.settings else []),
        *([("passes", _passes_text(plan))] if plan.passes else []),
        ("peak memory", memory(measures.peak_bytes, profile)),
    ]
    if counts_bytes(profile):
        shares = f"{percent(measures.transfer_share)} send and receive, {percent(measures.sync_share)} synchronisation"
        rows.insert(5, ("exposed", shares))
    if profile.graph.parameters:
        rows.append(("checkpoint", _checkpoint(plan, profile)))
    num_used = len({device for slot in plan.slots for device in slot.devices})
    if num_used < plan.num_devices:
        rows.insert(1, ("devices", _unused(num_used, plan.num_devices)))
    sharded = [f"{module} {degree}" for module, degree in plan.tensor_degrees if degree > 1]
    if sharded:
        rows.append(("tensor degree", ", ".join(sharded)))
    if plan.recompute:
        everything = len(plan.recompute) == len(profile.graph.metaops)
        rows.append(("recomputed", "every op" if everything else listed(plan.recompute, at_most=8)))
    if plan.shard_optimizer:
        rows.append(("optimizer", "sharded: each device that holds a parameter updates a part of it"))
    if plan.num_rounds > 1:
        rows.append(("rounds", f"{plan.num_rounds}, one after another, to save memory"))
    if plan.recompute or plan.shard_optimizer or plan.num_rounds > 1:
        rows.append(("without these", memory(_unsaved_bytes(plan, profile), profile)))
    return facts(rows)


def _checkpoint(plan: Plan, profile: Profile) -> str:
    """The size of a checkpoint, and how long the device that writes most of it takes to copy it to its host."""
    num_bytes_of = checkpoint_bytes(lower(plan, profile), profile.graph)
    largest, rate = max(num_bytes_of.values(), default=0), profile.cluster.kind.host_bytes_per_s
    copied = f", copied in {seconds(largest / rate)}" if rate else ""
    return f"{num_bytes(sum(num_bytes_of.values()))}, at most {num_bytes(largest)} from one device{copied}"


def _unused(num_used: int, num_devices: int) -> str:
    """A sentence about unused devices and what would use them: an op cannot use more devices than its batch has
    rows."""
    factor = math.ceil(num_devices / num_used * 100) / 100
    return f"{num_used:,} of {num_devices:,} are used; batches {factor:g} times as large could use all of them"


def _unsaved_bytes(plan: Plan, profile: Profile) -> int:
    """Peak memory of the fullest device without rounds, recomputation and optimizer sharding."""
    slots = tuple(replace(slot, round=0) for slot in plan.slots)
    wanted = tuple(op.name for op in profile.graph.metaops if op.cost is not None and op.cost.recompute)
    whole = replace(plan, slots=slots, recompute=wanted, shard_optimizer=False)
    return int(simulate(lower(whole, profile), profile).peak_bytes().max(initial=0))


def _planner(plan: Plan) -> str:
    searched = f", {plan.evaluations:,} schedules tried, seed {plan.seed}" if plan.evaluations else ""
    cut = "" if plan.cut_s is None else f", cut at {seconds(plan.cut_s)}"
    return plan.planner + searched + cut


def _passes_text(plan: Plan) -> str:
    """The number of passes, and the share of layers that are recomputed and offloaded."""
    layers = sum(slot.num_layers for slot in plan.slots)
    shares = [
        f"{percent(count / layers)} of layers {what}"
        for what, count in (
            ("recomputed", sum(slot.recomputed for slot in plan.slots)),
            ("offloaded", sum(slot.offloaded for slot in plan.slots)),
        )
        if count
    ]
    return ", ".join([f"{len(plan.passes):,} in an order of their own", *shares])


def _waves(plan: Plan) -> str:
    return count_of(len({slot.wave for slot in plan.slots}), "wave")


def times_bound(time_s: float, bound_s: float) -> str:
    return f"{time_s / bound_s:.3f} × the bound"


def measure_facts(plan: Plan, measures: Measures, profile: Profile, bound_s: float) -> Table:
    """The main facts about a simulated step, and the bound on this cluster, which may differ from the planned one."""
    known_bound = f", {times_bound(measures.makespan_s, bound_s)}" if bound_s else ""  # not of a pipeline's text
    return facts(
        [
            ("workload", f"{plan.workload} on {profile.cluster.name}"),
            ("plan", f"{plan.planner}, {count_of(len(plan.slots), 'slot')} in {_waves(plan)}"),
            ("step", f"{seconds(measures.makespan_s)}{known_bound}"),
            ("compute", percent(measures.compute_share)),
            ("send, receive", f"{percent(measures.transfer_share)} that compute does not hide"),
            ("synchronise", f"{percent(measures.sync_share)} that compute does not hide"),
            ("idle", percent(measures.idle_share)),
            ("peak memory", memory(measures.peak_bytes, profile)),
        ]
    )


def comparison_table(comparison: Comparison, profile: Profile, reference: str, narrow: bool = False) -> Table:
    """A table of planners, fastest first; if narrow, only with times and what they are compared with. If the model's
    FLOPs are known, it is a table of pipelines."""
    if any(row.mfu is not None for row in comparison.plans):
        return _pipelines_table(comparison, reference)
    title = f"{comparison.workload} on {comparison.cluster}: one step"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("planner", no_wrap=True)
    details = ("idle %", "send/\nrecv %", "sync %", "peak GiB")
    for name in ("ms", "speedup", *(() if narrow else details), "× bound"):
        table.add_column(name, justify="right")

    def add_row(planner: str, ms: str, speedup: str, detail: list[str], over_bound: str, style: str = "") -> None:
        table.add_row(planner, ms, speedup, *([] if narrow else detail), over_bound, style=style)

    unknown = ["-"] * len(details)
    for row in comparison.rows:
        match row:
            case ComparedPlan():
                shares = [f"{100 * share:.1f}" for share in (row.idle_share, row.transfer_share, row.sync_share)]
                peak = f"{row.peak_bytes / 2**30:.1f}" if counts_bytes(profile) else "-"
                speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
                add_row(row.planner, milliseconds(row.makespan_s), speedup, [*shares, peak], f"{row.over_bound:.3f}")
            case RefusedPlan():
                add_row(row.planner, "none", "-", unknown, "-", style="dim")
    if comparison.plans:
        table.add_section()
        bound = comparison.plans[0].bound_s
        slow = next((row for row in comparison.plans if row.planner == reference), None)
        allowed = "-" if slow is None else f"{slow.makespan_s / bound:.2f}"
        add_row("LP bound", milliseconds(bound), allowed, unknown, "1.000", style="dim")
    return table


def _pipelines_table(comparison: Comparison, reference: str) -> Table:
    """Planners as rows, fastest first."""
    title = f"{comparison.workload} on {comparison.cluster}: one iteration"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("planner", no_wrap=True)
    for name in ("s", f"over\n{reference}", "bubble %", "peak GiB", "MFU %", "× bound"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        match row:
            case ComparedPlan():
                bubble = row.idle_share + row.transfer_share + row.sync_share
                table.add_row(
                    row.planner,
                    f"{row.makespan_s:.2f}",
                    "-" if row.speedup is None else f"{row.speedup - 1:+.1%}".replace("%", " %"),
                    f"{100 * bubble:.1f}",
                    f"{row.peak_bytes / 2**30:.1f}",
                    "-" if row.mfu is None else f"{100 * row.mfu:.1f}",
                    f"{row.over_bound:.3f}",
                )
            case RefusedPlan():
                table.add_row(row.planner, "none", *["-"] * 5, style="dim")
    return table


def settings_lines(comparison: Comparison) -> list[Text]:
    """The settings that pipeline planners chose by simulation."""
    lines = []
    for row in comparison.plans:
        if row.settings:
            shares = (("recomputed", row.recomputed_share), ("offloaded", row.offloaded_share))
            parts = [row.settings, *(f"{percent(share)} of layers {what}" for what, share in shares if share)]
            lines.append(Text.assemble((row.planner, "bold"), f": {'; '.join(parts)}"))
    return lines


def refusal_lines(comparison: Comparison) -> list[Text]:
    """Why planners have no plan, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        if isinstance(row, RefusedPlan):
            reasons.setdefault(row.refusal, []).append(row.planner)
    return [
        Text.assemble((listed(planners), "bold"), f" {'has' if len(planners) == 1 else 'have'} no plan: {reason}")
        for reason, planners in reasons.items()
    ]


def bound_facts(report: BoundReport) -> Table:
    """The bounds, one under the other."""
    levels = " + ".join(figures(level * 1e3) for level in report.level_s[:8])
    more = f" + {len(report.level_s) - 8} more" if len(report.level_s) > 8 else ""
    by_level = f" = {levels}{more} ms, level by level" if len(report.level_s) > 1 else ", of its only level"
    return facts(
        [
            ("workload", f"{report.workload} on {report.cluster}"),
            ("LP bound", f"{seconds(report.lp_s)} for the whole graph, folded"),
            ("paper's C*", f"{seconds(report.paper_s)}{by_level}"),
        ]
    )


def pipeline_bound_facts(bound: PipelineBound, profile: Profile, sizes: Mapping[str, int]) -> Table:
    """The bound of a batch over all pipelines, and its components."""
    split = ", ".join(f"up to {size} for {module}" for module, size in sizes.items()) or "none, microbatches are whole"
    return facts(
        [
            ("workload", f"{profile.graph.name} on {profile.cluster.name}"),
            (
                "bound",
                f"{seconds(bound.bound_s)}, over every size of sub-microbatches, layout, order and memory choice",
            ),
            ("work", f"{seconds(bound.work_s)}: all passes and optimizer steps, spread evenly over the ranks"),
            ("longest layer", f"{seconds(bound.layer_s)}: all its passes on one rank"),
            ("longest path", f"{seconds(bound.path_s)}: one microbatch, forward and backward"),
            ("sub-microbatches", f"{split}; the size with the least bound"),
        ]
    )
