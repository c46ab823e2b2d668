"""How long the steps of a fit took, with the timelines of some of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spindle.launch import recorder
from spindle.plan import setting_of
from spindle.profile import Profile
from spindle.program import Backward, Forward, Program
from spindle.run import HeldBytes, StepTimer, World, timeline_of
from spindle.simulate import simulate
from spindle.timeline import Timeline
from spindle.train.result import FitResult

_NUM_TIMELINES = 9  # how many timelines are kept at most
_STEPS_PER_TIMELINE = 8  # of a short fit
_SLOW_STEPS = 50  # how many steps the median of a rank's slowness is taken over
# extra steps that are timed, so that idle time is known early
_EARLY_TIMED = frozenset(3 * 10**power for power in range(9))


@dataclass(frozen=True, slots=True)
class _PredictedCompute:
    """The instructions of a program in which one rank computes without waiting for another, with their seconds by the
    curves."""

    program: Program
    positions: frozenset[int]
    time_s: float


def _predicted_compute(program: Program, profile: Profile, rank: int) -> _PredictedCompute:
    plan, graph, setting = program.plan, profile.graph, setting_of(program.plan, profile)
    slots, total_s = set(), 0.0
    for number, slot in enumerate(plan.slots):
        op = graph.positions[slot.op]
        cost, curve = graph.metaops[op].cost, profile.curve(op, setting)
        if rank not in slot.devices or curve.tensor_degree > 1 or (cost is not None and cost.gang):
            continue
        forward_s, backward_s = curve.times_s(len(slot.devices))
        num_recomputed = slot.num_layers if setting.recompute[op] else slot.recomputed
        total_s += (slot.num_layers + num_recomputed) * forward_s + slot.num_layers * backward_s
        slots.add(number)
    positions = [
        number
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, Forward | Backward) and instruction.slot in slots
    ]
    return _PredictedCompute(program, frozenset(positions), total_s)


class StepTimes:
    """The step times of one rank. All ranks keep the timelines of the same steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._step_s: list[float] = []
        self._ends_s: list[float] = []  # when this rank finished each step, since the fit began
        self._num_samples: list[int] = []
        self._timelines: list[tuple[int, StepTimer, Program, Profile]] = []  # timelines with their steps
        self._held: tuple[HeldBytes, Program] | None = None  # memory, read in a step that is not timed
        self._num_planned = 0  # the number of steps that the fit was asked for
        self._timed: tuple[int, StepTimer] | None = None  # a timed step that a GPU may not have finished
        self._sampled: frozenset[int] = frozenset()
        self._predicted: _PredictedCompute | None = None  # for the last program
        self._slowness: list[float] = []  # measured over predicted compute, step by step
        self.busy_share = math.nan  # the share of the last timed step in which this rank computed
        self.changes_s: list[float] = []  # how long each change of the configuration took

    def start(self, steps: int) -> None:
        """Choose the steps of a fit whose timelines are kept: a few in its second half, because the first steps warm
        up."""
        self._num_planned = steps
        count = min(_NUM_TIMELINES, max(1, steps // _STEPS_PER_TIMELINE))
        self._sampled = frozenset(steps - 1 - (steps // 2) * number // count for number in range(count))

    def is_timed(self, step: int) -> bool:
        """Whether the step that is about to run is timed."""
        return self._is_sampled or step in _EARLY_TIMED

    @property
    def _is_sampled(self) -> bool:
        return len(self._step_s) in self._sampled

    def keep(self, step: int, timer: StepTimer, program: Program, profile: Profile) -> None:
        """Keep the times of the step that has just run."""
        self._timed = (step, timer)
        if self._is_sampled:
            self._timelines.append((step, timer, program, profile))

    def wants_memory(self, step: int) -> bool:
        """Whether memory is to be read in the step that is about to run. Under each plan, one step of the second half
        that is not timed, because reading memory takes time."""
        is_late = len(self._step_s) >= self._num_planned // 2
        return is_late and self._held is None and not self.is_timed(step)

    def keep_memory(self, timer: StepTimer, program: Program) -> None:
        """Keep the memory of the step that has just run."""
        if timer.held is not None:
            self._held = timer.held, program

    def compare_compute(self, timer: StepTimer, program: Program, profile: Profile) -> None:
        """Compare the compute of the step that has just run with its prediction, for the process that watches the
        ranks. Not on a GPU, where only some steps are timed."""
        if self._world.device.type == "cuda":
            return
        if self._predicted is None or self._predicted.program is not program:
            self._predicted = _predicted_compute(program, profile, self._world.rank)
        if self._predicted.time_s > 0:
            self._slowness.append(timer.busy_s(self._predicted.positions) / self._predicted.time_s)
        if len(self._slowness) == _SLOW_STEPS:
            recorder.slowness = statistics.median(self._slowness)
            self._slowness.clear()

    def end_step(self, step_s: float, num_samples: int) -> float:
        self._step_s.append(step_s)
        self._ends_s.append(step_s + (self._ends_s[-1] if self._ends_s else 0.0))
        self._num_samples.append(num_samples)
        return step_s

    @property
    def num_steps(self) -> int:
        """The number of steps that have run."""
        return len(self._step_s)

    def end_s(self, number: int) -> float:
        """When this rank finished a step of this fit, since the fit began."""
        return self._ends_s[number]

    @property
    def last_step_s(self) -> float | None:
        return self._step_s[-1] if self._step_s else None

    def read_busy_share(self, last_done: int) -> None:
        """Read the last timed step, if a GPU has finished it. The GPU has finished all steps before `last_done`."""
        if self._timed is not None and self._timed[0] < last_done:
            self.busy_share, self._timed = self._timed[1].busy_share(), None

    def forget(self, *, keep_watched: bool = False) -> None:
        """Drop the timelines of an earlier plan."""
        self._timelines.clear()
        self._held = None
        if not keep_watched:
            self._timed = None

    def result(
        self,
        program: Program,
        profile: Profile,
        losses: Sequence[dict[str, float]],
        metrics: Sequence[dict[str, float]],
        notices: Sequence[str],
        peak_bytes: int,
    ) -> FitResult:
        """The result of a fit. `program` and `profile` are those of the current plan, used if the fit has no timelines.
        The measured timeline is that of a typical step, on rank 0."""
        world = self._world
        oversubscribed = min(profile.host_rates, default=1.0) < 1
        spans = world.gather_objects([timer.spans() for _, timer, _, _ in self._timelines])
        held = world.gather_objects(None if self._held is None else self._held[0])
        has_memory = all(of_rank is not None for of_rank in held)
        measured = None
        measured_steps: dict[int, Timeline] = {}
        sampled_s: tuple[tuple[float, float], ...] = ()
        # In a pipeline, each step has its own program, so the compared step must be one of the program that is shown.
        if self._timelines:
            _, _, program, profile = self._timelines[-1]
        if world.rank == 0 and self._timelines:
            timelines = [
                (
                    timeline_of(
                        step_program,
                        spans_of_ranks,
                        held if has_memory and self._held is not None and self._held[1] is step_program else (),
                    ),
                    step_program,
                    step_profile,
                )
                for spans_of_ranks, (_, _, step_program, step_profile) in zip(
                    zip(*spans, strict=True), self._timelines, strict=True
                )
            ]
            # The typical step is the median one.
            by_time = sorted(timelines, key=lambda entry: entry[0].makespan_ns)
            measured, program, profile = by_time[len(by_time) // 2]
            measured_steps = {
                step: timeline
                for (step, *_), (timeline, step_program, _) in zip(self._timelines, timelines, strict=True)
                if step_program is program
            }
            sampled_s = tuple(
                (simulate(step_program, step_profile).makespan_s, timeline.makespan_s)
                for timeline, step_program, step_profile in timelines
            )
        return FitResult(
            rank=world.rank,
            losses=tuple(losses),
            metrics=tuple(metrics),
            step_s=self._step_times_of_job(),
            num_samples=tuple(self._num_samples),
            plan=program.plan,
            program=program,
            profile=profile,
            predicted=simulate(program, profile),
            measured=measured,
            peak_bytes=tuple(world.gather_objects(peak_bytes)) if peak_bytes else (),
            changes_s=tuple(self.changes_s),
            sampled_s=sampled_s,
            measured_steps=measured_steps,
            notices=tuple(notices),
            oversubscribed=oversubscribed,
        )

    def _step_times_of_job(self) -> tuple[float, ...]:
        """The times of steps until the last rank finished them. A rank with little work may be a step or two ahead, so
        its own times are not those of the job."""
        ends = self._world.broadcast_object(self._world.gather_objects(self._ends_s))
        last = [0.0, *(max(rank) for rank in zip(*ends, strict=True))]
        return tuple(end - begin for begin, end in pairwise(last))
