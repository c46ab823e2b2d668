"""Which tasks take part in a step? Drawn from the seed and the step alone, so that all ranks agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from spindle.errors import TrainingError
from spindle.run import seed_of

SamplingWeight = float | Callable[[int], float]  # a number, or a function of the step


def check_sampling_weights(weights: Mapping[str, SamplingWeight], names: Sequence[str], tasks_per_step: int) -> None:
    """Refuse sampling weights that do not match these tasks."""
    if sorted(weights) != sorted(names):
        raise TrainingError(
            f"Trainer(sampling_weights=...): expected a weight for each task ({', '.join(names)}), "
            f"got {', '.join(weights)}"
        )
    if not 1 <= tasks_per_step <= len(names):
        raise TrainingError(
            f"Trainer(tasks_per_step={tasks_per_step}): must be from 1 to {len(names)}, the number of tasks"
        )


def tasks_in_step(
    sampling_weights: Mapping[str, SamplingWeight] | None,
    names: Sequence[str],
    tasks_per_step: int,
    seed: int,
    step: int,
) -> list[str]:
    """The tasks of a step, in the order of `names`: `tasks_per_step` of them, drawn without replacement; without
    weights, all."""
    if sampling_weights is None:
        return list(names)
    weights = {name: weight(step) if callable(weight) else weight for name, weight in sampling_weights.items()}
    candidates = {name: weights[name] for name in names if weights[name] > 0}
    if min(weights.values()) < 0 or len(candidates) < tasks_per_step:
        raise TrainingError(
            f"Trainer(sampling_weights=...): step {step} needs {tasks_per_step} tasks with weights above 0 and none "
            "below, got " + ", ".join(f"{name} {weight}" for name, weight in weights.items())
        )
    generator = random.Random(seed_of(seed, "tasks", step))
    drawn: set[str] = set()
    while len(drawn) < tasks_per_step:
        (name,) = generator.choices(list(candidates), list(candidates.values()))
        drawn.add(name)
        del candidates[name]
    return [name for name in names if name in drawn]
