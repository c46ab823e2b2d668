"""The Plan: which layers run where, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.display import count_of, facts, html_of, seconds
from spindle.errors import PlanError
from spindle.graph import MetaGraph
from spindle.profile import Profile, Setting

FORWARD, BACKWARD, INPUT, WEIGHT = PASS_KINDS = ("forward", "backward", "input", "weight")

DeviceLane = tuple[int, int]  # a device, and one of its compute streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Layers `[first, last)` of one op on these devices, forward and backward.

    The i-th device, or the i-th group of as many as the module's tensor degree, works on the i-th share of the batch.
    `microbatch` is that of the op; slots on different lanes (compute streams) of a device run at the same time. With a
    `weight_lane`, weight gradients run on that lane, chunk by chunk behind the input gradients. The
    first `recomputed` layers run again in backward instead of keeping activations; those of the next `offloaded` wait
    on the host. With a `sequence_degree` s, every s neighbouring groups share their rows by tokens: each has a slice of
    the tokens of every row, and all weights; unlike a tensor degree it may differ from slot to slot. `not_before_s` is
    a start in folded time later than data and devices ask for: the barriers of planner `paper`, for which no rank
    waits.
    """

    op: str
    first: int
    last: int
    devices: tuple[int, ...]
    wave: int
    microbatch: int = 0
    lane: int = 0
    weight_lane: int | None = None
    round: int = 0
    recomputed: int = 0
    offloaded: int = 0
    not_before_s: float = 0.0
    sequence_degree: int = 1

    @property
    def num_layers(self) -> int:
        return self.last - self.first

    @property
    def has_weight_lane(self) -> bool:
        """Whether its weight gradients run on another lane than the rest of it."""
        return self.weight_lane is not None and self.weight_lane != self.lane

    @property
    def lane_of_weights(self) -> int:
        return self.lane if self.weight_lane is None else self.weight_lane

    @property
    def lanes(self) -> tuple[DeviceLane, ...]:
        """The lane that this slot takes on each of its devices."""
        return tuple((device, self.lane) for device in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a slot: forward; backward; or the two halves of a split backward: the gradients of inputs, which
    other slots wait for, and those of weights, which only the end of the step waits for."""

    slot: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in PASS_KINDS:
            raise PlanError(f"a pass is one of {', '.join(PASS_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """An order of passes on each device: slots, and `passes` where backward does not mirror forward.

    Slots are listed in the order in which their forward passes start. `passes`, if there are any, are all passes in an
    order that respects the flows; `order` gives it for every plan. Rounds run one after another, forward and backward
    each. With `shard_optimizer`, each of the devices that hold a parameter keeps and updates a part of it: gradients
    are reduced into these parts, and the next step begins by gathering the updated parameters. `quotas` are the SMs of
    each lane, which no other lane uses; empty where lanes share all SMs of their device.

    A plan stores no times of slots: `spans` derives them. `folded_s` is the length of the step by curves alone, forward
    and backward of mirrored slots together; `makespan_s` the simulated step with transfers, synchronisation and
    optimizer; `bound_s` what no plan of this kind can beat (both 0 until they are known). `evaluations` is what the
    search spent; `cut_s` is set when a time limit ended it early; `settings` lists, as text, the choices of a
    pipeline's planner.
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
    quotas: tuple[int, ...] = ()
    folded_s: float = 0.0
    makespan_s: float = 0.0
    bound_s: float = 0.0
    seed: int = 0
    evaluations: int = 0
    cut_s: float | None = None
    settings: str = ""

    @property
    def num_rounds(self) -> int:
        return 1 + max(slot.round for slot in self.slots)

    @property
    def num_lanes(self) -> int:
        """Compute lanes of the device that has most."""
        return 1 + max(max(slot.lane, slot.lane_of_weights) for slot in self.slots)

    @property
    def order(self) -> tuple[Pass, ...]:
        """All passes; each lane of a device runs its own in this order."""
        if self.passes:
            return self.passes
        order: list[Pass] = []
        for round_number in sorted({slot.round for slot in self.slots}):
            slots = [number for number, slot in enumerate(self.slots) if slot.round == round_number]
            order += [Pass(slot=number, kind=FORWARD) for number in slots]
            for number in reversed(slots):
                kinds = (INPUT, WEIGHT) if self.slots[number].has_weight_lane else (BACKWARD,)
                order += [Pass(slot=number, kind=kind) for kind in kinds]
        return tuple(order)

    def __repr__(self) -> str:
        step = f", step {seconds(self.makespan_s)}" if self.makespan_s else ""
        slots = count_of(len(self.slots), "slot")
        return f"Plan({self.workload!r} on {self.cluster!r}, planner {self.planner!r}, {slots}{step})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        bound = f", {self.makespan_s / self.bound_s:.3f} × the bound" if self.bound_s else ""
        rows = [
            ("workload", f"{self.workload} on {self.cluster}"),
            ("planner", self.planner),
            ("step, simulated", f"{seconds(self.makespan_s)}{bound}"),
            ("slots", f"{len(self.slots)} in {count_of(len({slot.wave for slot in self.slots}), 'wave')}"),
        ]
        return html_of(facts(rows))


def setting_of(plan: Plan, profile: Profile) -> Setting:
    """The setting a plan was made under."""
    return profile.setting(dict(plan.tensor_degrees), frozenset(plan.recompute), plan.shard_optimizer)


def write_plan(path: Path, plan: Plan) -> None:
    write_artifact(path, "plan", plan)


def read_plan(path: Path, graph: MetaGraph) -> Plan:
    """Read a plan; refuse one that was made for another workload."""
    plan = read_artifact(path, "plan", Plan)
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"{path}: this plan was made for another workload: {plan.workload!r} (fingerprint {plan.fingerprint}), "
            f"expected {graph.name!r} ({graph.fingerprint}); plan this workload again"
        )
    return plan
