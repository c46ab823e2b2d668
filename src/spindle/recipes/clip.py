"""Multitask-CLIP: contrastive tasks over the six encoders of ImageBind-huge (§5 of the Spindle paper).

A task has two encoders without a flow between them; their loss is left out (it is small and has no layers).
"""

from __future__ import annotations

from collections.abc import Mapping

from spindle.recipes.transformer import Tower, call_of, module_of, parameters_of
from spindle.workload import Task, Workload

TOWERS = {
    tower.name: tower
    for tower in (
        Tower(name="vision", num_layers=32, width=1280, num_heads=16),
        Tower(name="text", num_layers=24, width=1024, num_heads=16, vocabulary=49408),
        Tower(name="audio", num_layers=12, width=768, num_heads=12),
        Tower(name="depth", num_layers=12, width=384, num_heads=8),
        Tower(name="thermal", num_layers=12, width=768, num_heads=12),
        Tower(name="motion", num_layers=6, width=512, num_heads=8),
    )
}
TOKENS = {"vision": 257, "text": 77, "audio": 229, "depth": 197, "thermal": 197, "motion": 251}

# Named after their pairs. The first four are the paper's; the others, and which come at 7 and at 10 tasks, are ours.
# Batch sizes are all ours.
BATCH_SIZES = {
    "text-audio": 256,
    "vision-depth": 512,
    "audio-thermal": 256,
    "motion-thermal": 256,
    "vision-text": 128,
    "vision-motion": 256,
    "audio-motion": 128,
    "text-thermal": 128,
    "depth-thermal": 128,
    "depth-motion": 128,
}


def clip_workload(name: str, batch_sizes: Mapping[str, int]) -> Workload:
    """The workload of the tasks that have a batch size."""
    tasks = tuple(
        Task(
            name=task,
            batch_size=batch_size,
            calls=tuple(call_of(TOWERS[modality], TOKENS[modality]) for modality in task.split("-")),
        )
        for task, batch_size in batch_sizes.items()
    )
    used = {call.module for task in tasks for call in task.calls}
    towers = [tower for tower in TOWERS.values() if tower.name in used]
    return Workload(
        name=name,
        modules=tuple(module_of(tower) for tower in towers),
        parameters=tuple(parameter for tower in towers for parameter in parameters_of(tower)),
        tasks=tasks,
    )
