"""The Plan: which layers run where, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.errors import PlanError
from spindle.graph import MetaGraph
from spindle.profile import Profile, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Layers `[first, last)` of one op on these devices: forward, and backward mirrored.

    The i-th device, or the i-th group of as many as the module's tensor degree, works on the i-th share of the batch.
    Times are folded: forward and backward together.
    """

    op: str
    first: int
    last: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    wave: int
    round: int = 0

    @property
    def num_layers(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Slots in start order; on each device they run in this order.

    `folded_s` is when the last slot ends in folded time, `makespan_s` the simulated step with transfers,
    synchronisation and optimizer, `bound_s` what no plan of this kind can beat (both 0 until they are known).
    Rounds run one after another, forward and backward each. With `shard_optimizer`, each of the devices that hold a
    parameter keeps and updates a part of it: gradients are summed into these parts, and the next step begins with
    gathering what they have become. `evaluations` is what the search spent; `cut_s` is set when
    a time limit ended it early.
    """

    workload: str
    fingerprint: str
    cluster: str
    num_devices: int
    planner: str
    slots: tuple[Slot, ...]
    tensor_degrees: tuple[tuple[str, int], ...] = ()
    recompute: tuple[str, ...] = ()
    shard_optimizer: bool = False
    folded_s: float = 0.0
    makespan_s: float = 0.0
    bound_s: float = 0.0
    seed: int = 0
    evaluations: int = 0
    cut_s: float | None = None

    @property
    def num_rounds(self) -> int:
        return 1 + max(slot.round for slot in self.slots)


def setting_of(plan: Plan, profile: Profile) -> Setting:
    """The setting a plan was made under."""
    return profile.setting(dict(plan.tensor_degrees), frozenset(plan.recompute), plan.shard_optimizer)


def write_plan(path: Path, plan: Plan) -> None:
    write_artifact(path, "plan", plan)


def read_plan(path: Path, graph: MetaGraph) -> Plan:
    """Reads a plan and refuses one that was made for another workload."""
    plan = read_artifact(path, "plan", Plan)
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"{path}: this plan was made for another workload: {plan.workload!r} (fingerprint {plan.fingerprint}), "
            f"expected {graph.name!r} ({graph.fingerprint}); plan this workload again"
        )
    return plan
