"""OFASys: an encoder-decoder language model that every task shares, behind one adaptor for each modality (§5).

The adaptors of a task's inputs feed the encoder, the encoder feeds the decoder; a target that is not text passes
through an adaptor of its own into the decoder. The embedding lookup of text targets is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle.recipes.transformer import Tower, call_name, call_of, module_of, parameters_of
from spindle.workload import Task, Workload

VOCABULARY = 59457  # OFA's words, image codes and places

# The language model has the sizes of OFA-large; the adaptors' sizes are ours, for 0.66B in all.
TOWERS = {
    tower.name: tower
    for tower in (
        Tower(name="text", num_layers=0, width=1024, num_heads=16, vocabulary=VOCABULARY, has_embedding=True),
        Tower(name="vision", num_layers=12, width=768, num_heads=12),
        Tower(name="audio", num_layers=12, width=768, num_heads=12),
        Tower(name="motion", num_layers=6, width=768, num_heads=12),
        Tower(name="structure", num_layers=2, width=1024, num_heads=16),
        Tower(name="box", num_layers=1, width=1024, num_heads=16),
        Tower(name="encoder", num_layers=12, width=1024, num_heads=16),
        Tower(
            name="decoder",
            num_layers=12,
            width=1024,
            num_heads=16,
            cross_attention=True,
            vocabulary=VOCABULARY,
            has_head=True,
            table="text.table",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Tokens per sample of each input's adaptor and of the decoder, and the target's adaptor if it is not text."""

    inputs: tuple[tuple[str, int], ...]
    target_tokens: int
    target: str = ""


# Tasks and token counts are ours: the paper gives the modalities and "up to 7 tasks".
SHAPES = {
    "summarization": _Shape(inputs=(("text", 512),), target_tokens=128),
    "captioning": _Shape(inputs=(("vision", 576), ("text", 16)), target_tokens=32),
    "grounding": _Shape(inputs=(("vision", 576), ("text", 32)), target_tokens=8, target="box"),
    "speech": _Shape(inputs=(("audio", 400), ("text", 16)), target_tokens=64),
    "question": _Shape(inputs=(("vision", 576), ("text", 64)), target_tokens=16),
    "table": _Shape(inputs=(("structure", 512), ("text", 64)), target_tokens=64),
    "motion": _Shape(inputs=(("text", 64),), target_tokens=256, target="motion"),
}
TASKS = tuple(SHAPES)


def ofasys_workload(name: str, batch_sizes: Mapping[str, int]) -> Workload:
    """The workload of the tasks that have a batch size. It has all modules of the model, used or not."""
    return Workload(
        name=name,
        modules=tuple(module_of(tower) for tower in TOWERS.values()),
        parameters=tuple(parameter for tower in TOWERS.values() for parameter in parameters_of(tower)),
        tasks=tuple(_task(task, SHAPES[task], batch_size) for task, batch_size in batch_sizes.items()),
    )


def _task(name: str, shape: _Shape, batch_size: int) -> Task:
    input_tokens = sum(tokens for _, tokens in shape.inputs)
    calls = [call_of(TOWERS[modality], tokens) for modality, tokens in shape.inputs]
    flows = [(call_name(modality), call_name("encoder")) for modality, _ in shape.inputs]
    if shape.target:
        calls.append(call_of(TOWERS[shape.target], shape.target_tokens))
        flows.append((call_name(shape.target), call_name("decoder")))
    calls.append(call_of(TOWERS["encoder"], input_tokens))
    calls.append(call_of(TOWERS["decoder"], shape.target_tokens, memory_tokens=input_tokens))
    flows.append((call_name("encoder"), call_name("decoder")))
    return Task(name=name, batch_size=batch_size, calls=tuple(calls), flows=tuple(flows))
