"""All planners on one workload, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import lower
from spindle.simulate import simulate
from spindle.timeline import Measures, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """The simulated step of one planner; `speedup` is over the reference planner, if that has a plan.

    Shares are of all devices' time. `over_bound` is the simulated step divided by the plan's bound, which counts
    neither transfers nor synchronisation. `mfu` is the model FLOPs utilization, if the model's FLOPs are known. For a
    pipeline, `settings` says what its planner chose, and the shares of recomputed and offloaded layers are given.
    """

    planner: str
    makespan_s: float
    folded_s: float
    speedup: float | None
    idle_share: float
    transfer_share: float
    sync_share: float
    peak_bytes: int
    bound_s: float
    over_bound: float
    mfu: float | None = None
    settings: str = ""
    recomputed_share: float = 0.0
    offloaded_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPlan:
    """A planner that found no plan, and why."""

    planner: str
    refusal: str


CompareRow = ComparedPlan | RefusedPlan
REFERENCE = {False: "sequential", True: "vpp"}  # what speedups are over: is it a pipeline?


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows from the fastest to the slowest plan, then refusals."""

    workload: str
    cluster: str
    num_devices: int
    rows: tuple[CompareRow, ...]

    @property
    def plans(self) -> tuple[ComparedPlan, ...]:
        return tuple(row for row in self.rows if isinstance(row, ComparedPlan))


_MIN_SPEEDUP = 1.02  # times as fast: less is no reason to leave plain data parallel


def conclusion(comparison: Comparison, reference: str) -> str:
    """A sentence: which planner is fastest and by how much, or that the reference is as good."""
    if not comparison.plans:
        return ""
    best, *slower = comparison.plans
    plain = next((row for row in comparison.plans if row.planner == reference), None)
    what = "Plain data parallel" if reference == REFERENCE[False] else "The usual schedule"
    if plain is not None and plain.makespan_s <= _MIN_SPEEDUP * best.makespan_s:
        faster = f"{best.planner} is {_faster(plain, best)} faster" if best is not plain else "no planner is faster"
        return f"{what} ({reference}) is as good here: {faster}."
    slower = [row for row in slower if row is not plain]
    parts = [] if plain is None else [f"{_faster(plain, best)} faster than {what.lower()} ({reference})"]
    parts += [f"{_faster(slower[0], best)} faster than the next best ({slower[0].planner})"] if slower else []
    return f"{best.planner} is best: {', '.join(parts)}." if parts else f"Only {best.planner} has a plan."


def _faster(slower: ComparedPlan, faster: ComparedPlan) -> str:
    return f"{100 * (slower.makespan_s / faster.makespan_s - 1):.1f} %"


def simulated(plan: Plan, profile: Profile) -> Measures:
    """The measures of a plan's simulated step."""
    return measure(simulate(lower(plan, profile), profile))


def compared(
    plans: Iterable[tuple[Plan, Profile]],
    profile: Profile,
    refusals: dict[str, str],
    *,
    reference: str,
    model_s: float | None = None,
) -> Comparison:
    """Compare finished plans of one workload, each with the profile it was made from.

    `model_s` is the time that the model's FLOPs would take at the peak of all devices.
    """
    measured = [(plan, simulated(plan, planned_from)) for plan, planned_from in plans]
    reference_s = next((measures.makespan_s for plan, measures in measured if plan.planner == reference), None)
    rows = [
        ComparedPlan(
            planner=plan.planner,
            makespan_s=measures.makespan_s,
            folded_s=plan.folded_s,
            speedup=None if reference_s is None else reference_s / measures.makespan_s,
            idle_share=measures.idle_share,
            transfer_share=measures.transfer_share,
            sync_share=measures.sync_share,
            peak_bytes=measures.peak_bytes,
            bound_s=plan.bound_s,
            over_bound=measures.makespan_s / plan.bound_s,
            mfu=None if model_s is None else model_s / measures.makespan_s,
            settings=plan.settings,
            recomputed_share=sum(slot.recomputed for slot in plan.slots) / sum(slot.num_layers for slot in plan.slots),
            offloaded_share=sum(slot.offloaded for slot in plan.slots) / sum(slot.num_layers for slot in plan.slots),
        )
        for plan, measures in measured
    ]
    return Comparison(
        workload=profile.graph.name,
        cluster=profile.cluster.name,
        num_devices=profile.cluster.num_devices,
        rows=(
            *sorted(rows, key=lambda row: row.makespan_s),
            *(RefusedPlan(planner=planner, refusal=refusal) for planner, refusal in refusals.items()),
        ),
    )
