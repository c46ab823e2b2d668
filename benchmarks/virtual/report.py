"""Tables and a figure from what `run` measured: python benchmarks/virtual/report.py FILE.json... [--folder FOLDER]

Later files add to earlier ones. Writes `virtual.md` and `virtual.png`; the files given are the raw results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from spindle.artifact import write_atomically
from spindle.planners import step_bound_s
from spindle.profile import read_profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, markdown

OURS = "wavefront"
BASELINES = ("sequential", "distmm", "task-level")
PLANNERS = (OURS, *BASELINES, "paper")
VARIANTS = (*PLANNERS, "ddp-eager", "ddp-graphed")
COLOURS = dict(
    zip(VARIANTS, ("#1f6fb4", "#9ec5e8", "#a3d9a0", "#c9b4de", "#3a9a4a", "#fbc98c", "#f28e2b"), strict=True)
)
PROFILES = Path(__file__).resolve().parent.parent / "profiles"
BATCH_SIZES = (16, 32, 64)
CLIPS = (4, 7, 10)
_NOTABLE = 0.02  # a measured difference below it orders nothing
_GIB = 1 << 30


class Results:
    """Cells by workload and variant."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.about: dict[str, Any] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.cells: dict[str, dict[str, Any]] = {}
        for path in paths:
            data = json.loads(path.read_text(encoding="utf-8"))
            self.about |= data["about"]
            self.facts |= data["workloads"]
            self.cells |= data["cells"]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.partition("/")[0] for cell in self.cells if not cell.endswith("/prepare")))

    def cell(self, workload: str, variant: str) -> dict[str, Any] | None:
        """A cell that was measured without an error."""
        cell = self.cells.get(f"{workload}/{variant}")
        return None if cell is None or "error" in cell else cell

    def time_s(self, workload: str, variant: str) -> float | None:
        cell = self.cell(workload, variant)
        return None if cell is None else float(cell["median_s"])

    @property
    def sharing(self) -> str:
        """What must stand beside every number."""
        return (
            f"The {self.about['ranks']} devices are shares of one {self.about['device']}: they share its power, its L2 "
            "cache and its memory bandwidth, so one runs faster while others idle, and what they send each other goes "
            "through one memory, not over NVLink or a network."
        )

    def at_other_commits(self) -> dict[str, list[str]]:
        """Workloads with the variants that were measured at a commit other than that of the rest, by commit."""
        lines: dict[str, dict[str, list[str]]] = {}
        for cell, result in self.cells.items():
            if "commit" in result:
                workload, _, variant = cell.partition("/")
                lines.setdefault(result["commit"], {}).setdefault(workload, []).append(variant)
        return {
            commit: [f"{workload} ({', '.join(variants)})" for workload, variants in by_workload.items()]
            for commit, by_workload in lines.items()
        }

    def errors(self) -> list[tuple[str, str]]:
        return [(cell, result["error"]) for cell, result in self.cells.items() if "error" in result]


def times_table(results: Results) -> str:
    """Measured milliseconds of every variant beside the bound."""
    rows = []
    for workload in results.workloads:
        times = {variant: results.time_s(workload, variant) for variant in VARIANTS}
        best_s = min((time_s for time_s in times.values() if time_s is not None), default=None)
        bound_s = results.facts.get(workload, {}).get("bound_s")
        shown = [_marked(_ms(time_s), time_s is not None and time_s == best_s) for time_s in times.values()]
        rows.append([workload, _ms(bound_s), _ms(_step_bound_s(workload)), *shown])
    return markdown(["ms", "compute bound", "with update", *VARIANTS], rows)


def _step_bound_s(workload: str) -> float | None:
    """The bound with the optimizer's update, from the profile that was measured with the cells."""
    path = PROFILES / f"h200x8-{workload}.json"
    return step_bound_s(read_profile(path)) if path.exists() else None


def predictions_table(results: Results) -> str:
    """Predicted beside measured for every plan."""
    rows = []
    for workload in results.workloads:
        for variant in PLANNERS:
            cell = results.cell(workload, variant)
            if cell is not None:
                rows.append([workload, variant, *_prediction(cell)])
    header = ["workload", "plan", "measured ms", "predicted ms", "error", "compute", "optimizer", "sync", "waiting"]
    return markdown([*header, "idle", "peak GiB", "rounds", "recomputed"], rows)


def _prediction(cell: dict[str, Any]) -> list[str]:
    predicted, measured = cell["predicted"], cell["measured"]
    peak = [_gib(max(cell["peak_bytes"][side], default=None)) for side in ("predicted", "measured")]
    return [
        _ms(cell["median_s"]),
        _ms(cell["predicted_s"]),
        f"{100 * _error(cell):+.1f} %",
        *(
            f"{_ms(predicted[part])} / {_ms(measured and measured[part])}"
            for part in ("compute_s", "optimizer_s", "sync_s", "wait_s")
        ),
        f"{100 * predicted['idle']:.0f} / {100 * measured['idle']:.0f} %" if measured else "",
        " / ".join(peak),
        str(cell["num_rounds"]),
        str(len(cell["recomputed"])),
    ]


def _error(cell: dict[str, Any]) -> float:
    """How far the prediction is off, as a share of what was measured."""
    return float(cell["predicted_s"] / cell["median_s"] - 1)


def speedups_table(results: Results) -> str:
    """How many times faster our plans are: geometric means over CLIP-4, 7 and 10."""
    baselines = {
        f"best of {', '.join(BASELINES)}": BASELINES,
        "paper": ("paper",),
        "ddp-eager": ("ddp-eager",),
        "ddp-graphed": ("ddp-graphed",),
    }
    rows = []
    for name, variants in baselines.items():
        row = [name]
        for size in BATCH_SIZES:
            ratios = [_ratio(results, f"clip-{count}-{size}", variants) for count in CLIPS]
            row.append(_mean_ratio([ratio for ratio in ratios if ratio is not None]))
        for workload in results.workloads:
            if not workload.startswith("clip-"):
                ratio = _ratio(results, workload, variants)
                row.append("" if ratio is None else f"{ratio:.2f}")
        rows.append(row)
    rest = [workload for workload in results.workloads if not workload.startswith("clip-")]
    return markdown([f"{OURS} over", *(f"CLIP at {size}" for size in BATCH_SIZES), *rest], rows)


def _ratio(results: Results, workload: str, variants: Sequence[str]) -> float | None:
    """The best of some variants over ours; None unless all were tried. One that does not run is not the best."""
    tried = all(f"{workload}/{variant}" in results.cells for variant in variants)
    ours, theirs = results.time_s(workload, OURS), [results.time_s(workload, variant) for variant in variants]
    known = [time_s for time_s in theirs if time_s is not None]
    return min(known) / ours if tried and known and ours is not None else None


def _mean_ratio(ratios: list[float]) -> str:
    if not ratios:
        return ""
    missing = f" ({len(ratios)} of {len(CLIPS)})" if len(ratios) < len(CLIPS) else ""
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}{missing}"


def prediction_sentences(results: Results) -> list[str]:
    """How good the predictions are, in words."""
    cells = {
        (workload, plan): cell
        for workload in results.workloads
        for plan in PLANNERS
        if (cell := results.cell(workload, plan))
    }
    if not cells:
        return []
    errors = {key: abs(_error(cell)) for key, cell in cells.items()}
    worst = max(errors, key=errors.__getitem__)
    sentences = [
        f"Step time: mean error {100 * statistics.fmean(errors.values()):.1f} % over {len(errors)} plans, largest "
        f"{100 * errors[worst]:.1f} % ({' '.join(worst)})."
    ]
    peaks = [
        abs(max(cell["peak_bytes"]["predicted"]) / max(cell["peak_bytes"]["measured"]) - 1)
        for cell in cells.values()
        if cell["peak_bytes"]["measured"]
    ]
    if peaks:
        sentences.append(
            f"Peak memory of the fullest device: mean error {100 * statistics.fmean(peaks):.1f} %, largest "
            f"{100 * max(peaks):.1f} %."
        )
    return [*sentences, *_order_sentences(results), *_loss_sentences(results)]


def _order_sentences(results: Results) -> list[str]:
    in_order = num_pairs = 0
    wrong = []
    complete = [workload for workload in results.workloads if all(results.cell(workload, plan) for plan in PLANNERS)]
    for workload in complete:
        cells = {plan: results.cells[f"{workload}/{plan}"] for plan in PLANNERS}
        by_predicted, by_measured = (
            sorted(PLANNERS, key=lambda plan: cells[plan][key]) for key in ("predicted_s", "median_s")
        )
        in_order += by_predicted == by_measured
        for first, second in combinations(by_predicted, 2):
            num_pairs += 1
            excess = cells[first]["median_s"] / cells[second]["median_s"] - 1
            if excess > _NOTABLE:
                wrong.append(f"{workload}: {second} before {first} by {100 * excess:.1f} %")
    if not complete:
        return []
    text = (
        f"Order of the five plans: as predicted in {in_order} of {len(complete)} workloads; of {num_pairs} pairs, "
        f"{len(wrong)} are measured the other way round by more than {100 * _NOTABLE:.0f} %"
    )
    return [text + (f" ({'; '.join(wrong)})." if wrong else ".")]


def _loss_sentences(results: Results) -> list[str]:
    """Whether all plans trained alike: they start from the same weights."""
    spreads = []
    for workload in results.workloads:
        losses = [cell["losses"] for plan in PLANNERS if (cell := results.cell(workload, plan))]
        spreads += [
            (max(by_task[task] for by_task in losses) - min(by_task[task] for by_task in losses)) / abs(losses[0][task])
            for task in (losses[0] if len(losses) > 1 else ())
        ]
    return [f"Losses of the last step differ by at most {100 * max(spreads):.2g} % between plans."] if spreads else []


def draw(results: Results, path: Path) -> None:
    """Bars of measured step times; a mark for each prediction, a line for the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {f"CLIP, {size} samples per task": [f"clip-{count}-{size}" for count in CLIPS] for size in BATCH_SIZES}
    groups["OFASys and QWen-VAL"] = [workload for workload in results.workloads if not workload.startswith("clip-")]
    groups = {
        title: [workload for workload in names if workload in results.workloads] for title, names in groups.items()
    }
    groups = {title: names for title, names in groups.items() if names}
    rows = -(-len(groups) // 2)
    figure, panels = pyplot.subplots(
        rows, 2, figsize=(12, 0.6 + 3.6 * rows), squeeze=False, gridspec_kw={"hspace": 0.32, "wspace": 0.18}
    )
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, (title, names) in zip(panels.flat, groups.items(), strict=False):
        _draw_group(panel, results, names)
        panel.set_title(title, fontsize=11, loc="left")
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles, loc="lower center", bbox_to_anchor=(0.5, 0.93), ncols=5, frameon=False, fontsize=9
    )
    figure.text(0.5, -0.04, _wrapped(results.sharing, 150), ha="center", fontsize=8, color="#4b5563")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _draw_group(panel: Any, results: Results, names: list[str]) -> None:
    width = 0.8 / len(VARIANTS)
    for number, variant in enumerate(VARIANTS):
        places = [place + (number - (len(VARIANTS) - 1) / 2) * width for place in range(len(names))]
        heights = [1e3 * (results.time_s(name, variant) or 0.0) for name in names]
        for place, name in zip(places, names, strict=True):
            if f"{name}/{variant}" in results.cells and results.cell(name, variant) is None:
                panel.text(place, 0, "does not run", rotation=90, fontsize=7, ha="center", va="bottom", zorder=3)
        panel.bar(places, heights, width * 0.92, color=COLOURS[variant], label=variant, zorder=2)
        cells = [results.cell(name, variant) for name in names]
        known = [(place, 1e3 * cell["predicted_s"]) for place, cell in zip(places, cells, strict=True) if _has(cell)]
        if known:
            panel.plot(*zip(*known, strict=True), "D", ms=3.5, mfc="white", mec="#111827", label="predicted", zorder=3)
    for place, name in enumerate(names):
        bound_s = results.facts.get(name, {}).get("bound_s")
        if bound_s:
            ends = (place - 0.42, place + 0.42)
            panel.hlines(1e3 * bound_s, *ends, color="#c23b3e", lw=1.4, label="compute bound", zorder=4)
    panel.set_xticks(range(len(names)), names)
    panel.set_ylabel("ms per step")
    panel.grid(axis="y", color="#e5e7eb", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)


def _has(cell: dict[str, Any] | None) -> bool:
    return cell is not None and "predicted_s" in cell


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _ms(time_s: float | None) -> str:
    return "" if time_s is None else f"{time_s * 1e3:.1f}"


def _gib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / _GIB:.1f}"


def _marked(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def text_of(results: Results) -> str:
    """The whole report."""
    about = results.about
    share = f", {about['multiprocessors_per_rank']} SMs each" if "multiprocessors_per_rank" in about else ""
    parts = [
        f"Measured on {about['device']} as {about['ranks']} devices{share}; torch {about['torch']}, commit "
        f"{about['commit']}, {about['date']}. Medians; optimizer included. {results.sharing}",
        times_table(results),
        speedups_table(results),
        "\n".join(f"- {sentence}" for sentence in prediction_sentences(results)),
        "Pairs are predicted / measured; parts of the step are milliseconds, means over devices: inside layers, inside "
        "the optimizer, waiting right before it, other waiting. Peak is the fullest device's.",
        predictions_table(results),
    ]
    if by_commit := results.at_other_commits():
        lines = [f"- {commit}: {'; '.join(cells)}" for commit, cells in by_commit.items()]
        parts.append("Cells that were measured at another commit:\n\n" + "\n".join(lines))
    if results.errors():
        lines = [f"- {cell}: {error.splitlines()[0]}" for cell, error in results.errors()]
        parts.append("Cells without a result:\n\n" + "\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Tables and a figure from raw results.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = Results(options.files)
    text = text_of(results)
    write_atomically(options.folder / "virtual.md", text)
    draw(results, options.folder / "virtual.png")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
