"""A fit in a few lines: losses, the predicted and measured step, and what differs most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from spindle.display import figures
from spindle.report.predicted_vs_measured import Pair, StepComparison

_MAX_TASKS = 8
_MIN_SHARE = 0.02  # of a step
_NUM_DIFFERENCES = 2


def loss_table(losses: Sequence[Mapping[str, float]], max_tasks: int | None = _MAX_TASKS) -> Table:
    """Losses of some steps from first to last, by task."""
    table = Table(title=f"Losses over {len(losses)} steps", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("task")
    count = min(5, len(losses))
    shown = [round(number * (len(losses) - 1) / max(1, count - 1)) for number in range(count)]
    for step in shown:
        table.add_column(f"step {step}", justify="right")
    names = list(dict.fromkeys(name for step in losses for name in step))
    for name in names[:max_tasks]:
        table.add_row(name, *(loss_text(losses[step][name]) if name in losses[step] else "–" for step in shown))
    if max_tasks is not None and len(names) > max_tasks:
        table.add_row(f"and {len(names) - max_tasks} more")
    return table


def loss_text(loss: float) -> str:
    """A loss with three decimals, or with four significant digits if it is small."""
    return f"{loss:.3f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.4g}"


def largest_differences(comparison: StepComparison) -> list[str]:
    """A sentence for each of the one or two parts of a device's step that differ most from the prediction."""
    totals, num_ranks = comparison.totals, comparison.num_ranks
    waiting = totals.idle + totals.transfer + totals.sync
    parts = [
        ("A device waits", "(idle, sending, receiving, synchronising)", waiting),
        ("The optimizer takes", "", totals.optimizer),
        *((f"{module.module} computes", "", _per_device(module.both, num_ranks)) for module in comparison.modules),
    ]
    least_s = _MIN_SHARE * totals.step.predicted_s
    parts.sort(key=lambda part: -abs(part[2].difference_s))
    sentences = [_sentence(*part) for part in parts[:_NUM_DIFFERENCES] if abs(part[2].difference_s) >= least_s]
    return sentences or [f"Every part of a device's step is as predicted, to within {_MIN_SHARE:.0%} of the step."]


def _per_device(pair: Pair, num_ranks: int) -> Pair:
    return Pair(predicted_s=pair.predicted_s / num_ranks, measured_s=pair.measured_s / num_ranks)


def _sentence(what: str, more: str, pair: Pair) -> str:
    direction = "longer" if pair.difference_s > 0 else "less"
    difference = f"{figures(abs(pair.difference_s) * 1e3)} ms {direction} than predicted"
    times = f"{figures(pair.measured_s * 1e3)} instead of {figures(pair.predicted_s * 1e3)} ms"
    return " ".join(filter(None, (what, f"{difference}:", times, more))) + "."
