"""The papers' workloads as values: sizes from their §5, everything else chosen by us.

`RECIPES` are the Spindle paper's, fitted to its DeepSpeed times. `MODELS` are the DIP paper's and those like
MegaScale-Omni's, whose batches differ, timed by SEMU. `step_of` gives the profile of a step of either.
`docs/recipes.md` says what is from the papers and what is ours.
"""

from __future__ import annotations

from functools import partial

from spindle.recipes import clip, ofasys, qwen_val
from spindle.recipes.layers import Lengths
from spindle.recipes.multimodal import MODELS as DIP_MODELS
from spindle.recipes.multimodal import (
    Chain,
    MultimodalModel,
    batch_profile,
    emulator,
    model_flops,
    parts_profile,
    sub_microbatch_sizes,
)
from spindle.recipes.omni import OMNI_DATA, OMNI_MODELS, OmniData, omni_sequences, parse_mix, slowest_replica
from spindle.recipes.recipe import Fit, Fits, FittedCell, Recipe
from spindle.recipes.step import BatchOptions, Step, batches, step_of

_BATCHES = "batch sizes"


def _clip(num_tasks: int) -> Recipe:
    name = f"clip-{num_tasks}"
    chosen_tasks = list(clip.BATCH_SIZES)[4:num_tasks]
    return Recipe(
        name=name,
        description=f"{num_tasks} contrastive tasks, each over two of the six encoders of ImageBind-huge (1.19B).",
        chosen=(
            _BATCHES,
            *([f"the tasks {', '.join(chosen_tasks)}"] if chosen_tasks else []),
            "no loss, no patch stems",
        ),
        batch_sizes=tuple(clip.BATCH_SIZES.items())[:num_tasks],
        build=partial(clip.clip_workload, name),
        fitted_as=name,
    )


def _ofasys(num_tasks: int) -> Recipe:
    name = f"ofasys-{num_tasks}"
    return Recipe(
        name=name,
        description=f"{num_tasks} tasks through light adaptors into one encoder-decoder language model (0.66B).",
        chosen=(
            _BATCHES,
            f"the tasks {', '.join(ofasys.TASKS[:num_tasks])} and their token counts",
            "the adaptors' sizes",
        ),
        batch_sizes=tuple((task, 256) for task in ofasys.TASKS[:num_tasks]),
        build=partial(ofasys.ofasys_workload, name),
        fitted_as=name,
    )


def _qwen_val(name: str, size: str, total: str, batch_factor: int = 1) -> Recipe:
    return Recipe(
        name=name,
        description=f"Vision-language, audio-language and both, into one large language model ({total}).",
        chosen=(
            _BATCHES,
            "token counts",
            "one table for embedding and head",
            *(["the language model's size", "the optimizer sharded over replicas"] if size != "9b" else []),
        ),
        batch_sizes=tuple((task, size_of_batch * batch_factor) for task, size_of_batch in qwen_val.BATCH_SIZES.items()),
        build=partial(qwen_val.qwen_val_workload, name, size),
        fitted_as="qwen-val-3",
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _clip(4),
        _clip(7),
        _clip(10),
        _ofasys(4),
        _ofasys(7),
        _qwen_val("qwen-val-3", "9b", "9.57B"),
        _qwen_val("qwen-val-30b", "30b", "30.3B", batch_factor=2),
        _qwen_val("qwen-val-70b", "70b", "73.5B", batch_factor=2),
    )
}

MODELS: dict[str, MultimodalModel] = {**DIP_MODELS, **OMNI_MODELS}

__all__ = [
    "MODELS",
    "OMNI_DATA",
    "OMNI_MODELS",
    "RECIPES",
    "BatchOptions",
    "Chain",
    "Fit",
    "Fits",
    "FittedCell",
    "Lengths",
    "MultimodalModel",
    "OmniData",
    "Recipe",
    "Step",
    "batch_profile",
    "batches",
    "emulator",
    "model_flops",
    "omni_sequences",
    "parse_mix",
    "parts_profile",
    "slowest_replica",
    "step_of",
    "sub_microbatch_sizes",
]
