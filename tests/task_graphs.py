"""Trainings of tasks that call modules in any order, as often as they like: what a task calls is data.

A task is a list of calls (module, feeders): the module reads the sum of what these calls gave, each times a factor of
its own, or the batch where there are none. The loss is the mean square of what nothing reads, added up with factors of
changing signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import spindle
from trainings import Fit, Trained, Training, train
from zoo import Workload

WIDTH = 4
Calls = Sequence[tuple[str, Sequence[int]]]


def train_task_graph(
    rank: int, num_ranks: int, num_layers: Mapping[str, int], tasks: Sequence[Calls], plan: str = "pipeline"
) -> Trained:
    training = Training(workload=partial(workload_of, num_layers, tasks), fits=(Fit(steps=2),))
    return train(rank, num_ranks, training, plan)


def workload_of(num_layers: Mapping[str, int], tasks: Sequence[Calls]) -> Workload:
    torch.manual_seed(3)
    called = {module for calls in tasks for module, _ in calls}
    modules = {
        name: nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(count)))
        for name, count in num_layers.items()
        if name in called
    }
    handles = {name: spindle.module(name, module) for name, module in modules.items()}
    definitions = [task_of(f"t{number}", calls, handles) for number, calls in enumerate(tasks)]
    return Workload(
        tasks=definitions,
        batches=lambda number: {task.name: batch_of(task.name, number) for task in definitions},
        handles=handles,
    )


def task_of(name: str, calls: Calls, handles: Mapping[str, Any]) -> Any:
    used = {feeder for _, feeders in calls for feeder in feeders}

    def loss(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for module, feeders in calls:
            read = batch["x"]
            if feeders:
                read = sum((place + 1) * outputs[feeder] for place, feeder in enumerate(feeders))
            outputs.append(handles[module](read))
        ends = [output for number, output in enumerate(outputs) if number not in used]
        return sum((-1) ** number * (number + 1) * end for number, end in enumerate(ends)).square().mean()

    return spindle.task(batch_size=4, name=name)(loss)


def batch_of(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * int(task[1:]) + number)
    return {"x": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)}
