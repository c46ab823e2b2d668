"""QWen-VAL: a large language model over the outputs of a vision and an audio encoder (§5).

Three tasks: vision-language (VL), audio-language (AL), and both (VAL). The encoders flow into the language model.
"""

from __future__ import annotations

from collections.abc import Mapping

from spindle.recipes.transformer import Tower, call_name, call_of, module_of, parameters_of
from spindle.workload import Numerics, Task, Workload

VISION = Tower(name="vision", num_layers=48, width=1664, num_heads=16, mlp_width=8192, max_tensor_degree=8)
AUDIO = Tower(name="audio", num_layers=32, width=1280, num_heads=20, max_tensor_degree=4)


def _language(num_layers: int, width: int, num_heads: int, mlp_width: int, num_key_heads: int = 0) -> Tower:
    return Tower(
        name="language",
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        mlp_width=mlp_width,
        gated=True,
        num_key_heads=num_key_heads,
        vocabulary=151936,
        has_embedding=True,
        has_head=True,
        max_tensor_degree=8,
    )


# By total size: Qwen-7B; Qwen1.5-32B's layer 56 times, for 30B with the encoders; Qwen-72B.
LANGUAGE = {
    "9b": _language(32, 4096, 32, 11008),
    "30b": _language(56, 5120, 40, 27392, num_key_heads=8),
    "70b": _language(80, 8192, 64, 24576),
}

# Tokens per sample, ours: an image of 448 pixels has 1024 patches, 30 s of audio 1500 frames; text fills the language
# model's sequence.
VISION_TOKENS, AUDIO_TOKENS = 1024, 1500
LANGUAGE_TOKENS = {"VL": 2048, "AL": 2048, "VAL": 2048}
BATCH_SIZES = {"VL": 16, "AL": 16, "VAL": 8}

# The optimizer's 12 bytes over 32 replicas of a tensor group of 8 in 256 devices (ZeRO-1), rounded up: without ZeRO-1
# neither of the large models fits into 80 GB.
SHARDED = Numerics(optimizer_bytes=1, update_bytes=1)


def qwen_val_workload(name: str, size: str, batch_sizes: Mapping[str, int]) -> Workload:
    """The workload of the tasks that have a batch size, around a language model of this size."""
    towers = (VISION, AUDIO, LANGUAGE[size])
    return Workload(
        name=name,
        modules=tuple(module_of(tower) for tower in towers),
        parameters=tuple(parameter for tower in towers for parameter in parameters_of(tower)),
        tasks=tuple(_task(task, LANGUAGE[size], batch_size) for task, batch_size in batch_sizes.items()),
        numerics=Numerics() if size == "9b" else SHARDED,
    )


def _task(name: str, language: Tower, batch_size: int) -> Task:
    calls = []
    if "V" in name:
        calls.append(call_of(VISION, VISION_TOKENS))
    if "A" in name:
        calls.append(call_of(AUDIO, AUDIO_TOKENS))
    flows = tuple((call.name, call_name(language.name)) for call in calls)
    calls.append(call_of(language, LANGUAGE_TOKENS[name]))
    return Task(name=name, batch_size=batch_size, calls=tuple(calls), flows=flows)
