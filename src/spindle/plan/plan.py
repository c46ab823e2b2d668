"""The Plan: which layers run where, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from spindle.display import count_of, facts, html_of, seconds
from spindle.errors import PlanError
from spindle.profile import Profile, Setting

FORWARD, BACKWARD, INPUT, WEIGHT = PASS_KINDS = ("forward", "backward", "input", "weight")

DeviceLane = tuple[int, int]  # a device, and one of its compute streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Layers `[first, last)` of one op on these devices, forward and backward.

    - `devices`: the i-th device (with a tensor degree, the i-th group of that many) has the i-th share of the batch.
    - `lane`: slots on different lanes (compute streams) of a device run at the same time.
    - `weight_lane`: weight gradients run on this lane, each chunk after its input gradients.
    - `recomputed`, `offloaded`: the first `recomputed` layers run forward again in backward instead of keeping their
      activations; the activations of the next `offloaded` layers are copied to the host and back.
    - `sequence_degree`: that many neighbouring groups share their rows by tokens; each has a slice of the tokens of
      every row, and all weights. Unlike a tensor degree, it may differ from slot to slot.
    - `not_before_s`: a start in folded time that is later than data and devices require: the barriers of planner
      `paper`, which count in `Plan.folded_s`, but for which no rank waits.
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
        """Whether its weight gradients run on a different lane from its other passes."""
        return self.weight_lane is not None and self.weight_lane != self.lane

    @property
    def lane_of_weights(self) -> int:
        return self.lane if self.weight_lane is None else self.weight_lane

    @property
    def lanes(self) -> tuple[DeviceLane, ...]:
        """For each of its devices, the lane that the slot runs on."""
        return tuple((device, self.lane) for device in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a slot: forward, backward, or one half of a split backward: input gradients, which other slots wait
    for, or weight gradients, which only the end of the step waits for."""

    slot: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in PASS_KINDS:
            raise PlanError(f"a pass is one of {', '.join(PASS_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Which layers run where, and the order of passes on each device.

    Slots are listed in the order in which their forward passes start. If backward does not mirror forward, `passes`
    lists all passes in an order that respects the flows; `order` gives the order of passes for every plan. Rounds run
    one after another, each with its forward and backward. With `shard_optimizer`, each device that holds a parameter
    updates a part of it (as ZeRO does): gradients are reduce-scattered into these parts, and the next step begins by
    gathering the updated parameters. `quotas` are the SMs of each lane; if empty, lanes share all SMs of their device.

    A plan stores no times of slots: `spans` derives them. `folded_s` is the length of the step by curves alone, with
    forward and backward of mirrored slots counted together; `makespan_s` is the simulated step with transfers,
    synchronisation and optimizer; `bound_s` is a lower bound for plans of this kind (both 0 until computed).
    `evaluations` counts the schedules that the search has tried; `cut_s` is set if a time limit ended it early;
    `settings` lists, as text, what a pipeline planner chose.
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
        """The number of compute lanes of a device; the largest number if devices differ."""
        lanes = {slot.lane for slot in self.slots} | {slot.weight_lane for slot in self.slots}
        return 1 + max(lane for lane in lanes if lane is not None)

    @property
    def order(self) -> tuple[Pass, ...]:
        """All passes, in the order in which each lane of a device runs its own."""
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
    """The setting (tensor degrees, recomputation, optimizer sharding) that the plan was made with."""
    return profile.setting(dict(plan.tensor_degrees), frozenset(plan.recompute), plan.shard_optimizer)
