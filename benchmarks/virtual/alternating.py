"""Small towers on a shared GPU, whose text has one length in one step and another in the next: predicted and measured.

    spindle launch --virtual-devices 4 benchmarks/virtual/alternating.py [--output FILE.json]

Three Hugging Face towers from configs, three contrastive tasks, bfloat16. Steps are so short that launching kernels one
by one would take longer than running them; each length has CUDA graphs of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spindle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import circumstances
from one_gpu import audio_text, contrast, image_text, mean_of, pixels, small_towers, words

ROWS, LENGTHS, STEPS = 8, (64, 48), 40


def image_audio(modules: Any, batch: Any) -> torch.Tensor:
    seen, heard = modules["vision"](pixel_values=batch["pixels"]), modules["audio"](input_features=batch["sound"])
    return contrast(mean_of(seen), mean_of(heard))


def batches(lengths: tuple[int, ...]) -> dict[str, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(1)
    sound = {"sound": torch.randn(ROWS, 100, 32)}
    return {
        "image_text": [pixels(ROWS, 224) | words(ROWS, length) for length in lengths],
        "audio_text": [sound | words(ROWS, length) for length in lengths],
        "image_audio": [pixels(ROWS, 224) | sound for _ in lengths],
    }


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-5, fused=torch.cuda.is_available())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"measured_on": circumstances()}
    for name, lengths in (("one length", LENGTHS[:1]), ("two lengths in turn", LENGTHS)):
        torch.manual_seed(0)
        handles = {key: spindle.module(key, module) for key, module in small_towers().items()}
        tasks = [
            spindle.task(batch_size=ROWS, name=loss.__name__)(
                lambda batch, loss=loss, handles=handles: loss(handles, batch)
            )
            for loss in (image_text, audio_text, image_audio)
        ]
        trainer = spindle.Trainer(tasks, optimizer=make_optimizer, autocast=torch.bfloat16)
        result = trainer.fit(batches(lengths), steps=STEPS, progress=False)
        if trainer.rank == 0:
            tail = result.step_s[STEPS // 2 :]
            predicted = [predicted_s for predicted_s, _ in result.sampled_s]
            measured = [measured_s for _, measured_s in result.sampled_s]
            results[name] = {
                "step_s": result.step_s,
                "sampled_s": result.sampled_s,
                "notices": result.notices,
                "captured": result.num_captured_slots,
            }
            print(
                f"{name}: {statistics.median(tail) * 1e3:.1f} ms a step, sampled "
                f"{', '.join(f'{time_s * 1e3:.1f}' for time_s in measured)} ms, predicted {predicted[0] * 1e3:.1f} ms",
                *result.notices,
                sep="\n  ",
                flush=True,
            )
    if arguments.output is not None and trainer.rank == 0:
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
