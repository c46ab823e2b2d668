"""Does every batch have a plan? python benchmarks/seeds.py [--seeds N] [--microbatches M] [--minutes T]

Batches of each multimodal model, drawn with seeds 0 to N-1, under every planner of pipelines, with the fewest
evaluations: this asks whether there is a plan, not how good it is. Every plan is checked, verified and simulated as it
is made. A batch may be refused with a reason (it does not fit, or the planner does not support such a model); any other
error is a failure, and is listed.

All models see a seed before the next one comes, so that a run that `--minutes` cuts has the same seeds of each.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from common import markdown, publish
from spindle.errors import DoesNotFitError
from spindle.planners import PLANNERS, PlanOptions, make_plan, planners_of
from spindle.recipes import BatchOptions, step_of
from spindle.recipes.multimodal import MODELS

PLANNED, REFUSED, FAILED = "planned", "refused", "failed"


def outcomes(name: str, seed: int, num_microbatches: int) -> dict[str, tuple[str, str]]:
    """By planner: whether it has a plan for a batch, and why not."""
    batch = BatchOptions(num_microbatches=num_microbatches, seed=seed)
    step = step_of(MODELS[name], MODELS[name].cluster, batch)
    options = PlanOptions(evaluations=1, pipeline_ranks=step.pipeline_ranks)
    profiles = {False: step.whole, True: step.profile(step.sizes[-1])}
    results = {}
    for planner in planners_of(is_pipeline=True):
        try:
            make_plan(profiles[PLANNERS[planner].splits_microbatches], planner, options)
        except DoesNotFitError as error:
            results[planner] = REFUSED, str(error)
        except Exception as error:  # what this benchmark looks for
            results[planner] = FAILED, f"{type(error).__name__}: {error}"
        else:
            results[planner] = PLANNED, ""
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--result", default="seeds", help="the name of the result files")
    given = parser.parse_args()
    began = time.monotonic()
    counts: dict[str, dict[str, Counter[str]]] = {
        name: {planner: Counter() for planner in planners_of(is_pipeline=True)} for name in MODELS
    }
    reasons: dict[str, dict[str, str]] = {}  # by model and planner: the first refusal
    failures: list[dict[str, str | int]] = []
    num_seeds = 0
    for seed in range(given.seeds):
        if time.monotonic() - began > 60 * given.minutes:
            break
        for name in MODELS:
            for planner, (outcome, reason) in outcomes(name, seed, given.microbatches).items():
                counts[name][planner][outcome] += 1
                if outcome == REFUSED:
                    reasons.setdefault(name, {}).setdefault(planner, reason)
                elif outcome == FAILED:
                    failures.append({"model": name, "planner": planner, "seed": seed, "error": reason})
                    print(failures[-1], flush=True)
        num_seeds = seed + 1
    rows = [
        [name, *(f"{count[PLANNED]} / {count[REFUSED]} / {count[FAILED]}" for count in of_model.values())]
        for name, of_model in counts.items()
    ]
    header = [f"seeds 0 to {num_seeds - 1}: planned / refused / failed", *planners_of(is_pipeline=True)]
    publish(
        given.result,
        {
            "num_seeds": num_seeds,
            "num_microbatches": given.microbatches,
            "minutes": (time.monotonic() - began) / 60,
            "counts": counts,
            "refusals": reasons,
            "failures": failures,
        },
        markdown(header, rows) + f"\n\nBatches of {given.microbatches} microbatches.",
    )


if __name__ == "__main__":
    main()
