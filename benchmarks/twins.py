"""What Spindle costs a Hugging Face model on one process: python benchmarks/twins.py

The same model, batches and optimizer in a plain loop, a few steps of one after a few steps of the other, in one run:
the ratio of the medians of each pair; the median of all pairs, and their spread. Models are built from configs, and
Spindle cuts them into layers by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import spindle
from common import markdown, publish

PAIRS, STEPS_OF_A_PAIR, BATCH, LENGTH, WORDS = 20, 5, 8, 64, 1000
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}

Modules = dict[str, Callable[..., Any]]
Loss = Callable[[Modules, Any], Tensor]
Made = tuple[dict[str, nn.Module], Loss]


def bert() -> Made:
    config = BertConfig(**SIZES, vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def loss(modules: Modules, batch: Any) -> Tensor:
        hidden = modules["encoder"](input_ids=batch["words"], attention_mask=batch["mask"]).last_hidden_state
        return F.cross_entropy(modules["head"](hidden[:, 0]), batch["label"])

    return {"encoder": BertModel(config, add_pooling_layer=False), "head": nn.Linear(256, 10)}, loss


def llama() -> Made:
    config = LlamaConfig(**SIZES, vocab_size=WORDS, use_cache=False)

    def loss(modules: Modules, batch: Any) -> Tensor:
        logits = modules["decoder"](input_ids=batch["words"]).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["words"][:, 1:])

    return {"decoder": LlamaForCausalLM(config)}, loss


def clip() -> Made:
    vision = CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=64, patch_size=8))
    text = CLIPTextModel(CLIPTextConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=LENGTH, eos_token_id=2))

    def loss(modules: Modules, batch: Any) -> Tensor:
        images = modules["vision"](pixel_values=batch["pixels"]).pooler_output
        texts = modules["text"](input_ids=batch["words"]).pooler_output
        return F.cross_entropy(images @ texts.T / 16, torch.arange(images.shape[0]))

    return {"vision": vision, "text": text}, loss


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "words": torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator),
            "mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
            "label": torch.randint(10, (BATCH,), generator=generator),
            "pixels": torch.randn(BATCH, 3, 64, 64, generator=generator),
        }
        for _ in range(STEPS_OF_A_PAIR)
    ]


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4)


def pairs_of(
    make: Callable[[], Made],
) -> list[dict[str, float]]:
    """Medians of a few plain steps and of a few steps with Spindle, alternating."""
    torch.manual_seed(0)
    modules, loss = make()
    handles: Modules = {name: spindle.module(name, module) for name, module in modules.items()}
    task = spindle.task(batch_size=BATCH, name="task")(lambda batch: loss(handles, batch))
    trainer = spindle.Trainer([task], optimizer=make_optimizer, planning=spindle.Planning(planner="sequential"))
    torch.manual_seed(0)
    plain, plain_loss = make()
    optimizer = make_optimizer([named for module in plain.values() for named in module.named_parameters()])

    def plain_step(batch: dict[str, Tensor]) -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        value = plain_loss(plain, batch)  # type: ignore[arg-type]
        value.backward()
        optimizer.step()
        value.item()
        return time.perf_counter() - begin

    data, pairs = batches(), []
    for number in range(PAIRS + 2):
        seconds = {}
        for turn in (number % 2, 1 - number % 2):
            if turn:
                seconds["spindle"] = statistics.median(
                    trainer.fit({"task": data}, steps=STEPS_OF_A_PAIR, progress=False).step_s
                )
            else:
                seconds["plain"] = statistics.median(plain_step(batch) for batch in data)
        if number >= 2:  # the first pairs warm up
            pairs.append(seconds)
    return pairs


def main() -> None:
    rows, pairs_by_model = [], {}
    for make in (bert, llama, clip):
        pairs = pairs_by_model[make.__name__] = pairs_of(make)
        ratios = sorted(pair["spindle"] / pair["plain"] for pair in pairs)
        rows.append(
            [
                make.__name__,
                f"{statistics.median(pair['plain'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(pair['spindle'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
            ]
        )
    table = markdown(["model", "plain", "Spindle", f"ratio, median of {PAIRS} pairs", "middle half"], rows)
    publish("twins", {"pairs": pairs_by_model, "steps_of_a_pair": STEPS_OF_A_PAIR}, table)


if __name__ == "__main__":
    main()
