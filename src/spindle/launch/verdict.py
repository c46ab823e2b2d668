"""Find the rank that failed first, and explain the failure, from exit codes and reports.

A pure function: it knows neither processes nor files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from spindle.launch.failure import Failure

# How late the launcher may notice that a rank has ended. A killed rank reports nothing, while its peers can report lost
# connections before the launcher polls again; without this allowance, they would seem to be the cause.
SEEN_LATE_NS = 100_000_000
# A killed process takes down the processes that share its GPU through MPS, and the driver delays its own exit.
KILLED_LATE_NS = 5_000_000_000
_CUDA_ERROR = "CUDA error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the process of a rank ended, and when the launcher saw it."""

    rank: int
    code: int  # as in subprocess: negative for a signal
    time_ns: int  # time.monotonic_ns
    was_signalled: bool  # whether the launcher had asked it to end before that
    killed_because: str | None = None  # of a rank that the launcher killed: "was stopped (SIGSTOP) for 8 s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to print, with the first cause on top, and the exit code of the job.

    `rank` is the rank that failed first: by an error of its own in `step`, or because it was lost.
    """

    text: str
    code: int
    rank: int
    is_lost: bool
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFailure:
    """A rank that failed or died."""

    rank: int
    time_ns: int
    outcome: str  # "failed: ValueError: boom", "was killed by SIGKILL"
    text: str | None  # details to print below; None if the rank did not report
    is_lost: bool = False  # whether it ended without a report
    step: int | None = None


def verdict(endings: Sequence[Ending], failures: Sequence[Failure], log_end: Callable[[int], str]) -> Verdict:
    """Explain a failed job. `log_end` returns the last lines of a rank's output, for ranks that died without a report.

    The cause is the earliest failure of a rank's own, or death without a report. Only if there is none of these, the
    cause is a rank that ended without an error while others needed it, or else one that lost its peers.
    """
    codes = {ending.rank: ending.code for ending in endings}
    failed = {ending.rank: ending for ending in endings if ending.code != 0}
    reports: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda failure: failure.time_ns):
        if failure.rank in failed and failure.kind != "exits":
            reports.setdefault(failure.rank, failure)
    # ranks that ended without a report and without being asked to: killed, or crashed outside of Python
    died = [ending for ending in failed.values() if ending.rank not in reports and not ending.was_signalled]
    killed_ns = [ending.time_ns for ending in died if ending.code == -signal.SIGKILL]
    own = [_dated_after_kill(report, killed_ns) for report in reports.values() if report.kind == "own"]
    causes = [*map(_reported, own), *map(_died, died)]
    followers = [_reported(report) for report in reports.values() if report.kind == "follows"]
    left = [] if causes else _left_early(endings, failures)
    first = min(causes or left or followers, key=_in_order)
    later = sorted((failure for failure in causes if failure is not first), key=_in_order)
    ended_well = [ending.rank for ending in endings if ending.code == 0 and not ending.was_signalled]

    lines = [f"error: rank {first.rank} {first.outcome}"]
    if first.text:
        lines.append(first.text)
    elif first.text is None and (end := log_end(first.rank)):
        lines += ["the end of its output:", end]
    lines += _later_failures(first, later)
    mentioned = {first.rank, *ended_well, *(failure.rank for failure in later)}
    if stopped := [ending.rank for ending in endings if ending.rank not in mentioned]:
        lines.append(f"{_ranks(stopped)} stopped because of it")
    code = codes[first.rank]
    return Verdict(
        text="\n".join(lines),
        code=code if code > 0 else 1,
        rank=first.rank,
        is_lost=first.is_lost or not causes,
        step=first.step,
    )


def _left_early(endings: Iterable[Ending], failures: Iterable[Failure]) -> list[_RankFailure]:
    """The ranks that ended without an error, before others that lost them: by sys.exit(), or because their script was
    over."""
    exits = {failure.rank: failure for failure in failures if failure.kind == "exits"}
    left = []
    for ending in endings:
        report = exits.get(ending.rank)
        if report is None and (ending.code != 0 or ending.was_signalled):
            continue
        step = None if report is None else report.step
        how = "" if report is None else f" by {report.summary}" + ("" if step is None else f" in step {step}")
        time_ns = ending.time_ns if report is None else report.time_ns
        outcome = f"ended without an error{how}, while other ranks needed it"
        text = "call fit(...) on all ranks, and end it early with trainer.stop()"
        left.append(_RankFailure(rank=ending.rank, time_ns=time_ns, outcome=outcome, text=text, step=step))
    return left


def _dated_after_kill(report: Failure, killed_ns: Iterable[int]) -> Failure:
    """Date a CUDA error after the end of a killed rank that was noticed soon afterwards, because the kill is the
    cause."""
    kills_ns = [time_ns for time_ns in killed_ns if 0 < time_ns - report.time_ns < KILLED_LATE_NS]
    return replace(report, time_ns=min(kills_ns)) if kills_ns and _CUDA_ERROR in report.summary else report


def _in_order(failure: _RankFailure) -> tuple[int, int]:
    return failure.time_ns, failure.rank


def _reported(failure: Failure) -> _RankFailure:
    text = failure.text.removeprefix(failure.summary).lstrip("\n") if failure.text else None
    return _RankFailure(
        rank=failure.rank, time_ns=failure.time_ns, outcome=f"failed: {failure.summary}", text=text, step=failure.step
    )


def _died(ending: Ending) -> _RankFailure:
    time_ns = ending.time_ns - SEEN_LATE_NS
    return _RankFailure(rank=ending.rank, time_ns=time_ns, outcome=_death(ending), text=None, is_lost=True)


def _death(ending: Ending) -> str:
    code = ending.code
    if ending.killed_because is not None:
        return ending.killed_because
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _later_failures(first: _RankFailure, later: Iterable[_RankFailure]) -> list[str]:
    """One line for the ranks that failed like the first one, and one for each other outcome."""
    ranks_by_outcome: dict[str, list[int]] = {}
    for failure in later:
        ranks_by_outcome.setdefault(failure.outcome, []).append(failure.rank)
    same = ranks_by_outcome.pop(first.outcome, [])
    lines = [f"{_ranks(same)} failed the same way"] if same else []
    for outcome, ranks in ranks_by_outcome.items():
        plural = outcome.replace("was ", "were ", 1) if len(ranks) > 1 else outcome
        lines.append(f"then {_ranks(ranks)} {plural}")
    return lines


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 2"; "ranks 0, 1 and 3"."""
    *leading, last = map(str, sorted(ranks))
    return f"ranks {', '.join(leading)} and {last}" if leading else f"rank {last}"
