"""Modules that tensor groups share, and trainings of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spindle.models import builtin_tp_plan
from spindle.train import mean, module, task
from trainings import Fit, Training
from zoo import Tower, Workload

WIDTH, HEAD, WORDS, ROWS, LENGTH = 16, 4, 24, 5, 6


class Attention(nn.Module):
    """Heads are counted by their size alone, so some of them do as well."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(HEAD)

    def forward(self, x):
        query, key, value = (
            linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.norm(query), self.norm(key), value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.after(x))))


class RecomputingDecoder(Decoder):
    """Recomputes itself, whatever the plan says."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Language(nn.Module):
    """A table of words, which the logits share, and blocks in between."""

    def __init__(self, block: type[Decoder] = Decoder) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=WORDS - 1)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, seen):
        x = self.words(ids) + seen.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "words": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE_PLAN = {**PLAN, "blocks.*": "sequence_parallel"}


def own(seed: int = 0, block: type[Decoder] = Decoder, **options: Any) -> Workload:
    return workload_over(own_modules(seed, block, **options))


def own_modules(seed: int = 0, block: type[Decoder] = Decoder, **options: Any) -> dict[str, Any]:
    """A language model of our own with a user's plan, beside a vision tower without one."""
    torch.manual_seed(seed)
    language = module("language", Language(block).double(), **{"tensor_parallel": PLAN, **options})
    return {"language": language, "vision": module("vision", Tower(WIDTH, WIDTH, 2).double())}


def workload_over(handles: Mapping[str, Any]) -> Workload:
    language, vision = handles["language"], handles["vision"]

    @task(batch_size=ROWS)
    def describe(batch):
        logits = language(batch["ids"], vision(batch["seen"]))
        losses = F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
        return mean((losses * batch["mask"]).sum(), batch["mask"].sum())

    @task(batch_size=3, per_sample_mean=True)
    def guess(batch):
        return language(batch["ids"], batch["seen"]).square().mean()

    def batches(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        result = {}
        for definition in (describe, guess):
            rows = definition.batch_size
            mask = (torch.rand(rows, LENGTH, generator=generator) > 0.3).double()
            mask[:, 0] = 1.0
            result[definition.name] = {
                "ids": torch.randint(WORDS, (rows, LENGTH), generator=generator),
                "seen": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
                "mask": mask,
            }
        return result

    return Workload(tasks=[describe, guess], batches=batches, handles=handles)


def hugging_face(name: str, seed: int = 0, cuts: bool = False, **changes: Any) -> Workload:
    """A model with its own plan, with sequences cut or not."""
    hf: Any = import_module("transformers")
    hugging: Any = import_module("hugging")
    torch.manual_seed(seed)
    config = {**hugging.GROUPED, "vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4, **changes}
    encodes = name == "EuroBert"
    kind = getattr(hf, f"{name}Model" if encodes else f"{name}ForCausalLM")
    model = hugging.without_dropout(kind(getattr(hf, f"{name}Config")(**config)).double().train())
    plan = {**builtin_tp_plan(model), "model.layers.*": "sequence_parallel"} if cuts else None
    language = module("language", model, tensor_parallel=plan)

    @task(batch_size=4)
    def predict(batch):
        out = language(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        if encodes:
            return mean(out.last_hidden_state.square().sum(), batch["attention_mask"].sum())
        return hugging.token_loss(out.logits, batch["input_ids"])

    def batches(step: int) -> dict[str, Any]:
        torch.manual_seed(step)
        return {"predict": hugging.words(4, 7 + step % 2)}

    return Workload(tasks=[predict], batches=batches, handles={"language": language})


def workload(name: str, seed: int = 0) -> Workload:
    """`own cut recomputing`, or a Hugging Face model with its settings: `Qwen2 tied`."""
    kind, *words = name.split()
    cuts, block = "cut" in words, RecomputingDecoder if "recomputing" in words else Decoder
    if kind == "own":
        return own(seed, block, tensor_parallel=SEQUENCE_PLAN if cuts else PLAN)
    return hugging_face(kind, seed, cuts, **({"tie_word_embeddings": True} if "tied" in words else {}))


def sharing(name: str, *fits: Fit, **options: Any) -> Training:
    """A training of modules that tensor groups share."""
    return Training(workload=partial(workload, name), fits=fits, sharing=name, own_weights=True, **options)
