"""How long the steps of a fit took, with the timelines of some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from spindle.profile import Profile
from spindle.program import Program
from spindle.run import Watch, World, timeline_of
from spindle.simulate import simulate
from spindle.train.loss_history import LossHistory
from spindle.train.result import FitResult

_NUM_TIMELINES = 9  # that are kept
# Steps that are timed besides, so that idle time is known early.
_EARLY_TIMED = frozenset(3 * 10**power for power in range(9))


class StepTimes:
    """One rank's. The steps of which it keeps timelines are the same on all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._step_s: list[float] = []
        self._ends_s: list[float] = []  # since the fit began
        self._num_samples: list[int] = []
        self._timelines: list[tuple[Watch, Program, Profile]] = []
        self._watched: tuple[int, Watch] | None = None  # a timed step that a GPU may still be at
        self._sampled: frozenset[int] = frozenset()
        self.busy_share = math.nan  # of the last timed step, in which this rank computed
        self.changes_s: list[float] = []  # how long each change of the configuration took

    def start(self, steps: int) -> None:
        """Choose the steps of a fit whose timelines are kept: a few in its second half; the first ones warm up."""
        count = min(_NUM_TIMELINES, max(1, steps // 8))
        self._sampled = frozenset(steps - 1 - (steps // 2) * number // count for number in range(count))

    def is_timed(self, step: int) -> bool:
        """Whether the step that is about to run is timed."""
        return self._is_sampled or step in _EARLY_TIMED

    @property
    def _is_sampled(self) -> bool:
        return len(self._step_s) in self._sampled

    def keep(self, step: int, watch: Watch, program: Program, profile: Profile) -> None:
        """Keep the times of the step that has just run."""
        self._watched = (step, watch)
        if self._is_sampled:
            self._timelines.append((watch, program, profile))

    def end_step(self, step_s: float, num_samples: int) -> float:
        self._step_s.append(step_s)
        self._ends_s.append(step_s + (self._ends_s[-1] if self._ends_s else 0.0))
        self._num_samples.append(num_samples)
        return step_s

    @property
    def num_steps(self) -> int:
        """The steps that have run."""
        return len(self._step_s)

    def end_s(self, number: int) -> float:
        """When this rank was through with a step of this fit, since it began."""
        return self._ends_s[number]

    @property
    def last_step_s(self) -> float | None:
        return self._step_s[-1] if self._step_s else None

    def read_busy_share(self, last_done: int) -> None:
        """Read the last timed step, if a GPU is through with it: with all steps before `last_done`."""
        if self._watched is not None and self._watched[0] < last_done:
            self.busy_share, self._watched = self._watched[1].busy_share(), None

    def forget(self, *, keep_watched: bool = False) -> None:
        """Drop the timelines of an earlier plan."""
        self._timelines.clear()
        if not keep_watched:
            self._watched = None

    def result(
        self,
        program: Program,
        profile: Profile,
        history: LossHistory,
        notices: Sequence[str],
        peak_bytes: int,
    ) -> FitResult:
        """What a fit gives: `program` and `profile` are those of the current plan, for a fit without timelines. The
        measured timeline is rank 0's, of a typical step."""
        world = self._world
        oversubscribed = min(profile.host_rates, default=1.0) < 1
        spans = world.gather_objects([watch.spans() for watch, _, _ in self._timelines])
        measured = None
        sampled_s: tuple[tuple[float, float], ...] = ()
        if self._timelines:
            _, program, profile = self._timelines[-1]
        if world.rank == 0 and self._timelines:
            timelines = [
                (timeline_of(step_program, spans_of_ranks), step_program, step_profile)
                for spans_of_ranks, (_, step_program, step_profile) in zip(
                    zip(*spans, strict=True), self._timelines, strict=True
                )
            ]
            by_time = sorted(timelines, key=lambda entry: entry[0].makespan_ns)
            measured, program, profile = by_time[len(by_time) // 2]
            sampled_s = tuple(
                (simulate(step_program, step_profile).makespan_s, timeline.makespan_s)
                for timeline, step_program, step_profile in timelines
            )
        return FitResult(
            rank=world.rank,
            losses=tuple(history.by_step),
            metrics=tuple(history.metrics),
            step_s=self._until_last_rank(),
            num_samples=tuple(self._num_samples),
            plan=program.plan,
            program=program,
            profile=profile,
            predicted=simulate(program, profile),
            measured=measured,
            peak_bytes=tuple(world.gather_objects(peak_bytes)) if peak_bytes else (),
            changes_s=tuple(self.changes_s),
            sampled_s=sampled_s,
            notices=tuple(notices),
            oversubscribed=oversubscribed,
        )

    def _until_last_rank(self) -> tuple[float, ...]:
        """Times of steps until the last rank was through. A rank with little to do may be a step or two ahead, so its
        own times are not those of the job."""
        ends = self._world.broadcast_object(self._world.gather_objects(self._ends_s))
        last = [0.0, *(max(rank) for rank in zip(*ends, strict=True))]
        return tuple(end - begin for begin, end in pairwise(last))
