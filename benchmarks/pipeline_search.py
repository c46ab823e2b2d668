"""How fast and how good is the search of planner `pipeline`? python benchmarks/pipeline_search.py [SECONDS]

On the reference document's load of vision and language (section 4.3: 192 segments, 4 ranks, 64 tokens), times in
nanoseconds. Rates are evaluations per second of one thread's CPU time, which other work on the machine does not change
much; the memory choices beside them are three per stage. `quality`: what a search of a second on two cores finds,
beside one of SECONDS (60 unless given); both as budgets of evaluations, from the measured rate. `stuck`: random orders
that did not end, of 10,000 under each cap.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from common import ROOT, markdown, publish
from spindle.planners.bounds import bound_ns
from spindle.planners.pipeline.evaluate import Load, bases_of, evaluate, load_of, scratch_of
from spindle.planners.pipeline.gates import ADMISSION, NONE, SAFE, limits_of
from spindle.planners.pipeline.search import search
from spindle.planners.pipeline.segments import Column, Segments

sys.path.insert(0, str(ROOT / "tests"))
import pipelines

CAPS = (None, 32, 24, 20, 16, 12, 10, 9)
NAMES = {NONE: "no gate", ADMISSION: "admission", SAFE: "safe"}


def with_choices(segments: Segments) -> Segments:
    """Three memory choices per stage: all recomputed, half, and nothing (three times the memory, a forward less)."""
    forward, backward, memory = (column.reshape(-1, 1) for column in columns_of(segments))
    return replace(
        segments,
        choice_forward_ns=np.repeat(forward, 3, axis=1),
        choice_backward_ns=np.hstack([backward, backward - forward // 4, backward - forward // 2]),
        choice_memory=np.hstack([memory, 2 * memory, 3 * memory]),
        choice_count=np.full(len(forward), 3),
    )


def columns_of(segments: Segments) -> tuple[Column, Column, Column]:
    return segments.forward_ns, segments.backward_ns, segments.memory


def random_orders(segments: Segments, count: int) -> list[Column]:
    random = np.random.default_rng(0)
    return [random.permutation(2 * segments.num_groups) for _ in range(count)]


def rate(segments: Segments, load: Load, base: int, count: int = 1500) -> float:
    scratch = scratch_of(segments)
    orders = random_orders(segments, count)
    evaluate(load, base, orders[0], scratch)
    began = time.thread_time()
    for order in orders:
        evaluate(load, base, order, scratch)
    return count / (time.thread_time() - began)


def rates(segments: Segments) -> list[dict[str, object]]:
    cells: list[dict[str, object]] = []
    lean = np.zeros((segments.num_pairs, segments.num_ranks), dtype=np.int64)
    rich = with_choices(segments)
    for cap in CAPS:
        limits = limits_of(segments, None if cap is None else cap * pipelines.UNIT)
        for gate in (NONE,) if cap is None else (ADMISSION, SAFE):
            plain = rate(segments, load_of(segments, limits, [(gate, lean)]), 0)
            with_choice = rate(rich, load_of(rich, limits, [(gate, lean)]), 0)
            cells.append({"cap": cap, "gate": NAMES[gate], "rate": plain, "rate_with_memory_choice": with_choice})
    return cells


def quality(segments: Segments, seconds: float) -> list[dict[str, object]]:
    cells: list[dict[str, object]] = []
    bound = bound_ns(segments)
    for cap in (None, 24, 16, 12):
        limits = limits_of(segments, None if cap is None else cap * pipelines.UNIT)
        load = load_of(segments, limits, bases_of(segments, limits))
        per_second = 2 * rate(segments, load, 0, 500)
        short = search(segments, limits, evaluations=int(per_second))
        long = search(segments, limits, evaluations=int(seconds * per_second), seed=1)
        cells.append(
            {
                "cap": cap,
                "evaluations": [short.evaluations, long.evaluations],
                "natural": short.natural_ns / bound,
                "one_second": short.schedule.makespan_ns / bound,
                "long": long.schedule.makespan_ns / bound,
                "excess": short.schedule.makespan_ns / long.schedule.makespan_ns - 1,
            }
        )
    return cells


def deadlocks(segments: Segments, count: int = 10_000) -> dict[str, int]:
    stuck = {}
    scratch = scratch_of(segments)
    for cap in CAPS[1:]:
        assert cap is not None
        limits = limits_of(segments, cap * pipelines.UNIT)
        load = load_of(segments, limits, bases_of(segments, limits))
        stuck[str(cap)] = 0
        for order in random_orders(segments, count):
            for base in range(len(load.base_gate)):
                makespan = evaluate(load, base, order, scratch)
                stuck[str(cap)] += bool(makespan < 0 or (scratch.peak > limits).any())
    return stuck


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    segments = pipelines.vision_language()
    speed, good, stuck = rates(segments), quality(segments, seconds), deadlocks(segments)
    data = {"num_segments": 2 * segments.num_pairs, "rates": speed, "seconds": seconds, "quality": good}
    table = markdown(
        ["cap", "gate", "evaluations/s and core", "with memory choice"],
        [
            [str(cell["cap"] or "none"), str(cell["gate"])]
            + [f"{cell[name]:,.0f}" for name in ("rate", "rate_with_memory_choice")]
            for cell in speed
        ],
    )
    beside = markdown(
        ["cap", "natural / bound", "a second on two cores", f"{seconds:.0f} seconds", "excess"],
        [
            [str(cell["cap"] or "none")]
            + [f"{cell[name]:.4f}" for name in ("natural", "one_second", "long")]
            + [f"{cell['excess']:.2%}"]
            for cell in good
        ],
    )
    text = f"{table}\n\n{beside}\n\nOf 10,000 random orders under each cap, on every base: {sum(stuck.values())} stuck."
    publish("pipeline_search", data | {"stuck": stuck}, text)


if __name__ == "__main__":
    main()
