"""Which rank failed first, and what do we tell people? From how the processes ended and what they reported.

A pure function: it knows neither processes nor files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from spindle.launch.failure import Failure

# How much later than it happened an end may be seen. A rank that is killed says nothing, while its neighbours can
# report their lost connections before the launcher looks again; without this they would stand as the cause.
SEEN_LATE_NS = 100_000_000
# A process that is killed takes those down that share its GPU through MPS, and the driver holds it back before its end
# can be seen.
KILLED_LATE_NS = 5_000_000_000
_CUDA_ERROR = "CUDA error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one rank's process ended, and when that was seen."""

    rank: int
    code: int  # as subprocess gives it: below 0 for a signal
    time_ns: int  # time.monotonic_ns
    told: bool  # whether the launcher had already told it to end
    stopped_s: float | None = None  # how long it had been stopped (SIGSTOP) when the launcher killed it for that


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to print, first cause on top, and the exit code of the job."""

    text: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mishap:
    """One rank that did not end well by itself."""

    rank: int
    time_ns: int
    happened: str  # "failed: ValueError: boom", "was killed by SIGKILL"
    text: str | None  # what there is to read below that, if anything; none from a rank that did not say why


def verdict(endings: Sequence[Ending], failures: Sequence[Failure], log_end: Callable[[int], str]) -> Verdict:
    """The story of a failed job. `log_end` gives the last lines that a rank wrote, for those that died without a word.

    The cause is what came first among the failures that ranks call their own and the deaths without a report. A rank
    that only lost its peers is the cause when there is nothing better.
    """
    failed = {ending.rank: ending for ending in endings if ending.code != 0}
    reports: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda failure: failure.time_ns):
        if failure.rank in failed:
            reports.setdefault(failure.rank, failure)
    died = [ending for ending in failed.values() if ending.rank not in reports and not ending.told]
    killed_ns = [ending.time_ns for ending in died if ending.code == -signal.SIGKILL]
    own = [_behind_kill(report, killed_ns) for report in reports.values() if report.kind == "own"]
    causes = [*map(_reported, own), *map(_died, died)]
    followers = [_reported(report) for report in reports.values() if report.kind == "follows"]
    first = min(causes or followers, key=_in_order)
    others = sorted((mishap for mishap in causes if mishap is not first), key=_in_order)
    ended_well = [ending.rank for ending in endings if ending.code == 0 and not ending.told]

    lines = [f"error: rank {first.rank} {first.happened}"]
    if first.text:
        lines.append(first.text)
    elif first.text is None and (end := log_end(first.rank)):
        lines += ["the end of its output:", end]
    lines += _about_others(first, others)
    mentioned = {first.rank, *ended_well, *(mishap.rank for mishap in others)}
    if stopped := [ending.rank for ending in endings if ending.rank not in mentioned]:
        lines.append(f"{_ranks(stopped)} stopped because of it")
    if not causes and ended_well:
        lines.append(f"{_ranks(ended_well)} had already ended without an error")
    code = failed[first.rank].code
    return Verdict(text="\n".join(lines), code=code if code > 0 else 1)


def _behind_kill(report: Failure, killed_ns: Iterable[int]) -> Failure:
    """A CUDA error as if it came when the end of a killed rank was seen, if that was soon afterwards."""
    kills_ns = [time_ns for time_ns in killed_ns if 0 < time_ns - report.time_ns < KILLED_LATE_NS]
    return replace(report, time_ns=min(kills_ns)) if kills_ns and _CUDA_ERROR in report.summary else report


def _in_order(mishap: _Mishap) -> tuple[int, int]:
    return mishap.time_ns, mishap.rank


def _reported(failure: Failure) -> _Mishap:
    text = failure.text.removeprefix(failure.summary).lstrip("\n") if failure.text else None
    return _Mishap(rank=failure.rank, time_ns=failure.time_ns, happened=f"failed: {failure.summary}", text=text)


def _died(ending: Ending) -> _Mishap:
    return _Mishap(rank=ending.rank, time_ns=ending.time_ns - SEEN_LATE_NS, happened=_death(ending), text=None)


def _death(ending: Ending) -> str:
    code = ending.code
    if ending.stopped_s is not None:
        return f"was stopped (SIGSTOP) for {ending.stopped_s:.0f} s"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _about_others(first: _Mishap, others: Iterable[_Mishap]) -> list[str]:
    """One line for the ranks that failed as the first did, and one for each other thing that happened."""
    ranks: dict[str, list[int]] = {}
    for mishap in others:
        ranks.setdefault(mishap.happened, []).append(mishap.rank)
    same = ranks.pop(first.happened, [])
    lines = [f"{_ranks(same)} failed the same way"] if same else []
    for happened, those in ranks.items():
        plural = happened.replace("was ", "were ", 1) if len(those) > 1 else happened
        lines.append(f"then {_ranks(those)} {plural}")
    return lines


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 2"; "ranks 0, 1 and 3"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
