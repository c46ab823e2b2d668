"""The Plan: which layers run where, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.errors import PlanError, ProfileError
from spindle.graph import MetaGraph
from spindle.profile import Curve, Profile, Setting

FORWARD, BACKWARD, INPUT, WEIGHT = PASS_KINDS = ("forward", "backward", "input", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Layers `[first, last)` of one op on these devices: forward, and backward mirrored unless the plan has passes.

    The i-th device, or the i-th group of as many as the module's tensor degree, works on the i-th share of the batch.
    Times are folded: forward and backward together; in a plan with passes they are those of the forward pass. The first
    `recomputed` layers run again in backward instead of keeping activations; those of the next `offloaded` wait on the
    host.
    """

    op: str
    first: int
    last: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    wave: int
    round: int = 0
    recomputed: int = 0
    offloaded: int = 0

    @property
    def num_layers(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a slot: forward, or backward, as a whole or its two parts apart: the gradients of inputs, which other
    slots wait for, and those of weights, which only the end of the step waits for."""

    slot: int
    kind: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if self.kind not in PASS_KINDS:
            raise PlanError(f"a pass is one of {', '.join(PASS_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Slots in start order; on each device they run in this order, forward and then mirrored, or as `passes` say, which
    stand in start order, too, and then have all of them.

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
    passes: tuple[Pass, ...] = ()
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


def pass_s(slot: Slot, kind: str, curve: Curve, recompute: bool = False) -> float:
    """How long a pass of a slot takes by its curve; `recompute` says that all of its layers run again."""
    forward_s, backward_s = curve.times_s(len(slot.devices))
    if kind == FORWARD:
        return slot.num_layers * forward_s
    again_s = forward_s * (slot.num_layers if recompute else slot.recomputed)
    if kind == BACKWARD:
        return slot.num_layers * backward_s + again_s
    weight_s = curve.weight_time_s(len(slot.devices))
    if weight_s is None:
        raise ProfileError(f"{slot.op}: nothing is known of which part of its backward pass makes weights' gradients")
    return slot.num_layers * weight_s if kind == WEIGHT else slot.num_layers * (backward_s - weight_s) + again_s


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
