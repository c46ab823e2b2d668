"""What does it take to plan one training step after another, and which part takes it? Used by `planning_time.py`.

As in training: the layout is chosen once, on a small batch; then every step has other lengths, and what the planning
process sends first is planned from them. CPU time of all threads, warm, exclusive of what is listed by itself.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Any
from unittest import mock

from common import markdown
from spindle.plan import check
from spindle.planners import Job, Layout, PlanOptions, choose_colocation, choose_layout, owning_ranks_in
from spindle.planners.colocate import columns, order
from spindle.planners.pipeline import search, stages
from spindle.planners.pipeline.bound import pipeline_bound_s
from spindle.planners.pipeline.worker import natural_answer
from spindle.profile import Profile, Semu
from spindle.program import instances_of, lower, posted_peaks, verify
from spindle.recipes import MODELS, batch_profile, batches, emulator, parts_profile, step_of
from spindle.recipes.multimodal import PART_TOKENS
from spindle.recipes.step import BatchOptions
from spindle.simulate import simulate
from spindle.workload import Microbatch

MODEL = "vlm-m"
SIZES = {"colocate": (22, 50), "pipeline": (19, 42)}  # microbatches of a step: about 900 and about 2,000 slots
LAYOUT_MICROBATCHES = 8  # of the batch on which the layout is chosen
STEPS = 5
PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "costs of stages": (columns.replicas_of, stages.batches_of, columns.activation_budgets),
    "items to devices": (columns.assigned_parts,),
    "order": (columns.passes_of, order.ordered, search.search),
    "plan": (columns.plan_of_orders, stages.plan_of),
    "check": (check,),
    "bound": (pipeline_bound_s,),
    "lower": (lower,),
    "simulate": (simulate,),
    "memory": (posted_peaks,),
    "verify": (verify,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Steps of one planner, of so many microbatches."""

    planner: str
    num_microbatches: int


class Parts:
    """CPU seconds by part, each without those inside it that are listed by themselves."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            self._inside.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                took = time.process_time() - began
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return call

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, the functions of all parts are timed, wherever they are called."""
        modules = [module for name, module in sys.modules.items() if name.startswith("spindle.")]
        patches = []
        for name, functions in PARTS.items():
            for function in functions:
                timed = self.timed(name, function)
                patches += [
                    mock.patch.object(module, attribute, timed)
                    for module in modules
                    for attribute, value in list(vars(module).items())
                    if value is function
                ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def layout_of(planner: str, semu: Semu) -> tuple[Layout, Callable[[Sequence[Microbatch]], Profile]]:
    """The layout of all steps, and how microbatches become a profile under it."""
    model = MODELS[MODEL]
    step = step_of(model, model.cluster, BatchOptions(num_microbatches=LAYOUT_MICROBATCHES))
    assert step.pipeline_ranks is not None
    if planner == "colocate":
        in_parts = step.part_profiles()
        chosen, layout = choose_colocation(planner, in_parts, [], step.pipeline_ranks)
        size = (None, *PART_TOKENS)[next(number for number, each in enumerate(in_parts) if each is chosen)]
        return layout, lambda microbatches: parts_profile(model, microbatches, size, model.cluster, semu)
    split = step.split_profiles()
    chosen, layout = choose_layout(split, step.pipeline_ranks)
    sizes = step.sizes[next(number for number, each in enumerate(split) if each is chosen)]
    return layout, lambda microbatches: batch_profile(model, microbatches, sizes, model.cluster, semu)


def measured(kind: Kind) -> dict[str, Any]:
    """Median CPU seconds of a step by part, and how much there is of it: the least that has to be looked at."""
    model = MODELS[MODEL]
    semu = emulator(model.cluster)
    layout, profile_of = layout_of(kind.planner, semu)
    rows: list[dict[str, float]] = []
    counts: dict[str, int] = {}
    for number, microbatches in enumerate(islice(batches(model, kind.num_microbatches, 1), STEPS + 1)):
        known = profile_of(microbatches)  # what training derives from measured times, here from the emulator's
        owning_ranks = owning_ranks_in(known.graph, layout)  # in training, once
        parts = Parts()
        with parts.measured():
            graph = parts.timed("graph", replace)(known.graph)
            profile = parts.timed("graph", replace)(known, graph=graph)
            job = Job(
                number=number,
                profile=profile,
                owning_ranks=owning_ranks,
                options=PlanOptions(layouts=(layout,)),
                planner=kind.planner,
            )
            gc.disable()  # the planning process collects garbage between steps
            began = time.process_time()
            answer = natural_answer(job)
            total = time.process_time() - began
            gc.enable()
        assert answer.program is not None, answer.error
        parts.seconds["rest"] = total - sum(time_s for name, time_s in parts.seconds.items() if name != "graph")
        parts.seconds["sum"] = total + parts.seconds["graph"]
        began = time.process_time()
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        parts.seconds["to bytes"] = time.process_time() - began
        began = time.process_time()
        pickle.loads(data)
        parts.seconds["from bytes"] = time.process_time() - began
        if number:  # the first step warms up
            rows.append(dict(parts.seconds))
            instances = instances_of(answer.program)
            counts = {
                "slots": len(answer.program.slots),
                "links": len(answer.program.links),
                "instructions": len(answer.program.instructions),
                "instances": instances.num_instances,
                "dependencies": len(instances.followers),
                "rendezvous": instances.num_rendezvous,
                "bytes": len(data),
            }
    seconds = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}
    return {"planner": kind.planner, "num_microbatches": kind.num_microbatches, "seconds": seconds, "counts": counts}


def steps_table(cells: Sequence[dict[str, Any]]) -> str:
    """The parts of each kind of step in milliseconds, and the counts of the last one."""
    header = ["CPU ms", *(f"{cell['planner']}, {cell['counts']['slots']} slots" for cell in cells)]
    names = ["sum", *(name for name in PARTS), "graph", "rest", "to bytes", "from bytes"]
    rows = [[name, *(f"{1e3 * cell['seconds'].get(name, 0.0):.0f}" for cell in cells)] for name in names]
    rows += [[name, *(f"{cell['counts'][name]:,}" for cell in cells)] for name in cells[0]["counts"]]
    return markdown(header, rows)


def kinds() -> list[Kind]:
    return [Kind(planner=planner, num_microbatches=count) for planner, counts in SIZES.items() for count in counts]
