"""Reports of runs: predicted and measured steps side by side, and several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spindle.report.page_data import ShownTimeline, StepReport
from spindle.report.run_folder import Run


def run_report(runs: Mapping[str, Run]) -> StepReport:
    """The report of one run, with its predicted step and the median of its measured steps first. For several runs,
    named after their folders, a typical step of each comes first."""
    if len(runs) == 1:
        ((folder, run),) = runs.items()
        typical = _typical(run)
        others = tuple(shown for shown in _measured(run) if shown.timeline is not typical.timeline)
        timelines = (_predicted(run), *(() if typical.timeline is run.predicted else (typical,)), *others)
        return StepReport(
            title=folder,
            timelines=timelines,
            steps=run.steps,
            notes=_notes(run),
            attachments=run.profiler_traces,
        )
    firsts = tuple(_with_prefix(name, _typical(run)) for name, run in runs.items())
    rest = tuple(_with_prefix(name, _predicted(run)) for name, run in runs.items() if run.measured)
    return StepReport(
        title=" and ".join(runs),
        timelines=firsts + rest,
        steps=_joined_steps(runs),
        notes=tuple(dict.fromkeys(note for run in runs.values() for note in _notes(run))),
    )


def _predicted(run: Run) -> ShownTimeline:
    return ShownTimeline(name="predicted", timeline=run.predicted, program=run.program, profile=run.profile)


def _measured(run: Run) -> list[ShownTimeline]:
    return [
        ShownTimeline(
            name=f"measured, step {step}", timeline=timeline, program=run.program, profile=run.profile, measured=True
        )
        for step, timeline in run.measured.items()
    ]


def _typical(run: Run) -> ShownTimeline:
    """The measured step of median length; the predicted step if none was measured."""
    by_time = sorted(_measured(run), key=lambda shown: shown.timeline.makespan_ns)
    return by_time[len(by_time) // 2] if by_time else _predicted(run)


def _with_prefix(name: str, shown: ShownTimeline) -> ShownTimeline:
    return replace(shown, name=f"{name}: {shown.name}")


def _notes(run: Run) -> tuple[str, ...]:
    return tuple(f"The run said: {notice.rstrip('.')}." for notice in run.notices)


def _joined_steps(runs: Mapping[str, Run]) -> Sequence[Mapping[str, Any]]:
    """Lines of all runs by step, with the loss and the step time of each run under its name."""
    lines: dict[int, dict[str, Any]] = {}
    for name, run in runs.items():
        for entry in run.steps:
            if "loss" in entry:
                line = lines.setdefault(entry["step"], {"step": entry["step"], "loss": entry["loss"]})
                line[f"losses/{name}"] = entry["loss"]
                if name == next(iter(runs)) and "step_s" in entry:
                    line["step_s"] = entry["step_s"]
    return [lines[step] for step in sorted(lines)]
