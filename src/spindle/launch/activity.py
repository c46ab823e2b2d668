"""What a rank is doing, recorded for its watcher: the launcher or, under torchrun, another rank.

    main thread ──▶ Recorder ── every 5 s ──▶ Activity, in a file of the launcher, or in the store
    activities of all ranks ──▶ HangDetector ──▶ ranks that hang, and where they are

Ranks are watched while they train; not while they trace, measure or plan, and not between fits. In the first step of a
fit or a plan, which may compile and capture, they have more time.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spindle.launch import variables
from spindle.launch.user_code import is_users

RECORD_S = 5.0  # seconds between two records
LIMIT_VARIABLE = "SPINDLE_HUNG_S"  # seconds without progress after which a rank hangs; 0: never
LIMIT_S = 60.0
_WARM_STEPS = 20  # the first steps, which do not count in the median
_MIN_STEPS, _MEDIAN_STEPS = 5, 50  # the smallest and the largest number of steps for a median
_HUNG_FACTOR = 20  # a rank counts as hung only after this many times its longest step
# Factor on the limit: first steps compile, a callback may evaluate, and a loader may wait for a file system.
_SLOW_PHASE_FACTOR = 10
HUNG_ON_STEP_S = _SLOW_PHASE_FACTOR * LIMIT_S  # without progress, after which a rank in `on_step` counts as hung
_SLOW = 1.3  # how many times as long as predicted compute may take, relative to other ranks
ON_STEP, LOADING = USERS_PHASES = ("on_step", "reading a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a rank was doing at its last record."""

    num_records: int
    num_events: int  # grows with everything that the main thread completes
    step: int | None  # the next step; None if the rank is not watched
    longest_step_s: float
    phase: str
    waiting: str  # what it waits for from other ranks; empty if it does not
    where: str  # the line of the script that it runs
    checkpoint_every: int | None = None  # how many steps lie between checkpoints
    checkpoints: str = ""  # the folder of its checkpoints
    step_s: float | None = None  # median of its last steps, once it has taken enough of them
    num_taken: int = 0  # steps that this process has taken
    slowness: float | None = None  # measured over predicted compute of the last steps
    host: str = ""
    is_first_step: bool = False  # whether it is in the first step of a fit, or after a pause
    tasks: str = ""  # a digest of what it trains

    def __post_init__(self) -> None:
        """Validate the fields, because records are read from files."""
        for name in ("num_records", "num_events"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"not a record of a rank's activity: {self!r}")
        numbers = (self.longest_step_s, 0.0 if self.slowness is None else self.slowness)
        if not all(isinstance(number, int | float) for number in numbers) or not isinstance(self.step, int | None):
            raise ValueError(f"not a record of a rank's activity: {self!r}")
        if not isinstance(self.step_s, int | float | None) or not isinstance(self.num_taken, int):
            raise ValueError(f"not a record of a rank's activity: {self!r}")


class Recorder:
    """What the main thread of this process is doing. Only the main thread sets its attributes."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.is_watched = False
        self.phase = self.waiting = ""
        self.checkpoint_every: int | None = None
        self.checkpoints = ""
        self.slowness: float | None = None
        self.num_events = self._num_taken = 0
        self._steps_s: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._num_records = 0
        self._longest_step_s = 0.0
        self._is_first_step = False
        self._tasks = ""
        self._last_s: float | None = None
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Note that steps begin. The time of the first one is not recorded."""
        self.step, self.is_watched, self._last_s, self._longest_step_s = step, True, None, 0.0
        self._is_first_step = True

    def step_done(self, step: int) -> None:
        """Note that the steps before `step` are done."""
        now_s = time.monotonic()
        self._num_taken += 1
        if self._last_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._last_s)
            if self._num_taken > _WARM_STEPS:
                self._steps_s.append(now_s - self._last_s)
        self._last_s, self.step, self.is_watched, self._is_first_step = now_s, step, True, False
        self.num_events += 1

    def begin_tasks(self, tasks: str) -> None:
        """Note a digest of what is trained from the next step on. Step times of other tasks are dropped."""
        if tasks != self._tasks:
            self._tasks = tasks
            self._steps_s.clear()
            self._last_s = None

    def pause(self) -> None:
        """End the watch until another step begins."""
        self._last_s, self.is_watched = None, False

    def resume(self) -> None:
        """Note that a step begins, if the watch had ended."""
        if not self.is_watched:
            self.is_watched = self._is_first_step = True
            self.num_events += 1

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Name what runs inside the context."""
        before, self.phase = self.phase, phase
        self.num_events += 1
        try:
            yield
        finally:
            self.phase = before
            self.num_events += 1

    def activity(self) -> Activity:
        self._num_records += 1
        steps_s = tuple(self._steps_s)
        return Activity(
            num_records=self._num_records,
            num_events=self.num_events,
            step=self.step if self.is_watched and not _is_debugged() else None,
            longest_step_s=round(self._longest_step_s, 3),
            phase=self.phase,
            waiting=self.waiting,
            where=_place_of_main_thread(),
            checkpoint_every=self.checkpoint_every,
            checkpoints=self.checkpoints,
            step_s=statistics.median(steps_s) if len(steps_s) >= _MIN_STEPS else None,
            num_taken=self._num_taken,
            slowness=self.slowness,
            host=socket.gethostname(),
            is_first_step=self._is_first_step,
            tasks=self._tasks,
        )

    def start(self) -> None:
        """Start to write records into the launcher's folder, if there is one. May be called several times."""
        folder, rank = os.environ.get(variables.ACTIVITY), os.environ.get("RANK")
        if folder is None or rank is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._record, args=(Path(folder), rank), daemon=True)
        self._thread.start()

    def _record(self, folder: Path, rank: str) -> None:
        while True:
            with suppress(OSError):
                partial = folder / f"{rank}.part"
                partial.write_text(json.dumps(asdict(self.activity())))
                os.replace(partial, folder / f"{rank}.json")
            time.sleep(_record_s())


def _record_s() -> float:
    with suppress(ValueError):
        return max(0.1, float(os.environ.get(variables.RECORD_S, RECORD_S)))
    return RECORD_S


recorder = Recorder()  # of this process, as `sys.modules` is


def parse_activity(text: str) -> Activity | None:
    """Parse a record. None if the text is not one, because its writer may be failing."""
    with suppress(ValueError, TypeError):
        return Activity(**json.loads(text))
    return None


def read_activities(folder: Path, ranks: Iterable[int]) -> dict[int, Activity]:
    """The last record of each of these ranks, for those that have written one."""
    activities = {}
    for rank in ranks:
        with suppress(OSError):
            activity = parse_activity((folder / f"{rank}.json").read_text())
            if activity is not None:
                activities[rank] = activity
    return activities


def hung_limit_s() -> float:
    """Seconds without progress after which a rank counts as hung, before longer steps are taken into account. 0:
    never."""
    with suppress(ValueError):
        return max(0.0, float(os.environ.get(LIMIT_VARIABLE, LIMIT_S)))
    return LIMIT_S


class HangDetector:
    """Finds ranks that hang: no rank has made progress for a long time, and these ranks do not wait for others.

    The caller counts the time, not a clock, so that a job that is stopped and continued as a whole goes on. Without
    `sees_all`, there are further ranks elsewhere: if all of these wait, another one hangs.
    """

    def __init__(self, num_ranks: int, limit_s: float, *, sees_all: bool = True) -> None:
        self._num_ranks, self._limit_s, self._sees_all = num_ranks, limit_s, sees_all
        self._events: dict[int, int] = {}
        self._records: dict[int, int] = {}
        self._silent_s = 0.0
        self._unrecorded_s: dict[int, float] = {}

    def hung(self, activities: Mapping[int, Activity], elapsed_s: float) -> dict[int, str]:
        """The ranks that hang, each with a description. `elapsed_s` is the time since the last call."""
        for rank, activity in activities.items():
            is_new = self._records.get(rank) != activity.num_records
            self._records[rank] = activity.num_records
            self._unrecorded_s[rank] = 0.0 if is_new else self._unrecorded_s.get(rank, 0.0) + elapsed_s
        events = {rank: activity.num_events for rank, activity in activities.items()}
        has_all = len(activities) == self._num_ranks
        is_watched = has_all and all(activity.step is not None for activity in activities.values())
        if events != self._events or not is_watched or not self._limit_s:
            self._events, self._silent_s = events, 0.0
            return {}
        self._silent_s += elapsed_s
        longest_s = max(activity.longest_step_s for activity in activities.values())
        limit_s = max(self._limit_s, _HUNG_FACTOR * longest_s)
        mute = {rank for rank, silent_s in self._unrecorded_s.items() if silent_s > max(self._limit_s, 3 * RECORD_S)}
        busy = {rank for rank, activity in activities.items() if not activity.waiting} | mute
        is_first_step = any(activity.is_first_step for activity in activities.values())
        if is_first_step or any(activities[rank].phase in USERS_PHASES for rank in busy):
            limit_s *= _SLOW_PHASE_FACTOR
        if self._silent_s < limit_s:
            return {}
        suspects = busy or (activities if self._sees_all else ())
        return {rank: self._text(activities[rank], rank in mute) for rank in sorted(suspects)}

    def _text(self, activity: Activity, is_mute: bool) -> str:
        silence = f"has made no progress for {self._silent_s:.0f} s, in step {activity.step}"
        doing = ", ".join(filter(None, (activity.phase, activity.waiting, activity.where)))
        mute = "; its threads do not run" if is_mute else ""
        return f"{silence}{f' ({doing})' if doing else ''}{mute} ({LIMIT_VARIABLE} sets the limit)"


class SlownessDetector:
    """Finds ranks whose compute is slower than predicted, relative to the other ranks. Reports each rank once."""

    def __init__(self) -> None:
        self._reported: set[int] = set()

    def notices(self, activities: Mapping[int, Activity]) -> list[str]:
        slowness = {rank: activity.slowness for rank, activity in activities.items() if activity.slowness}
        notices = []
        for rank, own in slowness.items():
            of_others = [number for another, number in slowness.items() if another != rank]
            factor = own / statistics.median(of_others) if of_others else 1.0
            if factor > _SLOW and rank not in self._reported:
                self._reported.add(rank)
                notices.append(
                    f"rank {rank} on {activities[rank].host} computes {factor:.2f} times as long as predicted, "
                    "relative to the other ranks"
                )
        return notices


def _is_debugged() -> bool:
    """Whether the main thread is waiting in a Python debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != "bdb":
        frame = frame.f_back
    return frame is not None


def _place_of_main_thread() -> str:
    """The innermost line of user code that the main thread is running; if there is none on the stack, the innermost
    line."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
