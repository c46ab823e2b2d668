"""Small sizes and batches for Hugging Face models, as `hugging` and `hugging_families` use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers as hf
from torch import nn

hf.logging.set_verbosity_error()
VOCABULARY = 61
IMAGE_TOKEN = 60
IMAGE = 32

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Weights are large and windows small, so that full attention in the place of sliding attention shows.
MODERN = {
    **TEXT,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
    "local_attention": 2,
    "initializer_range": 0.5,
    "attn_implementation": "sdpa",
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
WAVES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
WHISPER = {**BOTH, "max_source_positions": 20, "num_mel_bins": 16}
STAGES = {"depths": [2, 2], "drop_path_rate": 0.0, "image_size": IMAGE}


def words(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens, padded at their ends."""
    lengths = length - torch.arange(rows) % 3
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    return {"input_ids": torch.randint(3, IMAGE_TOKEN, (rows, length)) * mask, "attention_mask": mask}


def images(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE)}


def waves(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(rows, 100 + 20 * length)}


def two_texts(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {**words(rows, length), "decoder_input_ids": words(rows, length - 2)["input_ids"]}


def speech(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(rows, 16, 40)}


def with_placeholders(rows: int, length: int, count: int) -> dict[str, torch.Tensor]:
    """So many image tokens behind the first two of a text."""
    text = words(rows, length)
    ids, mask = text["input_ids"], text["attention_mask"]
    placeholders = torch.full((rows, count), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([ids[:, :2], placeholders, ids[:, 2:]], dim=1),
        "attention_mask": torch.cat([mask[:, :2], torch.ones_like(placeholders), mask[:, 2:]], dim=1),
    }


def images_in_words(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {**images(rows, length), **with_placeholders(rows, length, 16)}


class Model(NamedTuple):
    """A model by how it is made, its batches, and how many layers it is cut into; of a model that stays whole, `reason`
    is part of what the chain says why."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, torch.Tensor]]
    num_layers: int
    reason: str = ""
