"""Which tasks have a part in a step? Drawn by seed and step alone, so all ranks agree without asking."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from spindle.errors import TrainingError
from spindle.run import seed_of

Share = float | Callable[[int], float]  # may follow the step


def check_sampling(sampling: Mapping[str, Share], names: Sequence[str], tasks_per_step: int) -> None:
    """Refuses weights that are not of these tasks."""
    if sorted(sampling) != sorted(names):
        raise TrainingError(
            f"Trainer(sampling=...): expected a weight for each task ({', '.join(names)}), got {', '.join(sampling)}"
        )
    if not 1 <= tasks_per_step <= len(names):
        raise TrainingError(f"Trainer(tasks_per_step={tasks_per_step}): must be from 1 to {len(names)}, the tasks")


def tasks_in_step(
    sampling: Mapping[str, Share] | None, names: Sequence[str], tasks_per_step: int, seed: int, step: int
) -> list[str]:
    """So many tasks, drawn by their weights and none twice, in the order of `names`; all of them without weights."""
    if sampling is None:
        return list(names)
    weights = {name: share(step) if callable(share) else share for name, share in sampling.items()}
    left = {name: weights[name] for name in names if weights[name] > 0}
    if min(weights.values()) < 0 or len(left) < tasks_per_step:
        raise TrainingError(
            f"Trainer(sampling=...): step {step} needs {tasks_per_step} tasks with weights above 0 and none below, got "
            + ", ".join(f"{name} {weight}" for name, weight in weights.items())
        )
    choose = random.Random(seed_of(seed, "tasks", step))
    drawn: set[str] = set()
    while len(drawn) < tasks_per_step:
        (name,) = choose.choices(list(left), list(left.values()))
        drawn.add(name)
        del left[name]
    return [name for name in names if name in drawn]
