"""Hugging Face models of small sizes with random weights, batches for them, and workloads made of them.

Nothing is downloaded. `MODELS` has for each model how it is made, `batch(rows, length)`, and how many layers it is to
be cut into; `ALL_MODELS` has those of `hugging_families`, too. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hugging_configs import (
    BOTH,
    GROUPED,
    IMAGE,
    IMAGE_TOKEN,
    MODERN,
    STAGES,
    T5,
    TEXT,
    VISION,
    VOCABULARY,
    WAVES,
    WHISPER,
    Model,
    images,
    images_in_words,
    speech,
    two_texts,
    waves,
    words,
)
from hugging_families import FAMILIES
from spindle.train import mean, module, task
from zoo import Workload


def llava() -> nn.Module:
    vision, text = hf.CLIPVisionConfig(**VISION), hf.LlamaConfig(**GROUPED)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=16)
    )


def detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", out_features=["stage2"]
    )
    return hf.DetrModel(hf.DetrConfig(**BOTH, use_timm_backbone=False, backbone_config=backbone, num_queries=5))


def sam() -> nn.Module:
    vision = {
        **VISION,
        "output_channels": 16,
        "window_size": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 48,
        "num_pos_feats": 8,
    }
    prompt = {"hidden_size": 16, "image_size": IMAGE, "patch_size": 8, "image_embedding_size": 4}
    masks = {"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 16}
    return hf.SamModel(hf.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=masks))


MODELS: dict[str, Model] = {
    "CLIP vision": Model(lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)), images, 5),
    "CLIP text": Model(lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), words, 5),
    "CLIP": Model(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)),
        lambda rows, length: {**words(rows, length), **images(rows, length)},
        9,
    ),
    "SigLIP vision": Model(lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)), images, 5),
    "SigLIP text": Model(lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**TEXT)), words, 5),
    "ViT": Model(lambda: hf.ViTModel(hf.ViTConfig(**VISION)), images, 5),
    "DINOv2": Model(lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION, mlp_ratio=2)), images, 5),
    "Whisper encoder": Model(lambda: hf.WhisperModel(hf.WhisperConfig(**WHISPER)).encoder, speech, 5),
    "Whisper": Model(
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        lambda rows, length: {**speech(rows, length), "decoder_input_ids": words(rows, length)["input_ids"]},
        8,
    ),
    "Wav2Vec2": Model(lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**WAVES)), waves, 4),
    "BERT": Model(lambda: hf.BertModel(hf.BertConfig(**TEXT)), words, 5),
    "GPT-2": Model(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
            )
        ),
        words,
        5,
    ),
    "Llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), words, 5),
    "Qwen2": Model(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, tie_word_embeddings=True)), words, 5),
    "T5": Model(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), two_texts, 9),
    "BART": Model(lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BOTH)), two_texts, 8),
    "LLaVA": Model(llava, images_in_words, 9),
    # Not on the list that this was made for.
    "ALBERT": Model(lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)), words, 5),
    "AST": Model(
        lambda: hf.ASTModel(
            hf.ASTConfig(
                **{**VISION, "patch_size": 4}, max_length=40, num_mel_bins=16, frequency_stride=4, time_stride=4
            )
        ),
        lambda rows, length: {"input_values": torch.randn(rows, 40, 16)},
        5,
    ),
    "CLAP audio": Model(
        lambda: hf.ClapAudioModel(
            hf.ClapAudioConfig(
                spec_size=IMAGE,
                patch_size=2,
                patch_stride=(2, 2),
                window_size=4,
                num_mel_bins=8,
                patch_embeds_hidden_size=8,
                depths=[2, 2],
                num_attention_heads=[2, 4],
                hidden_size=16,
                drop_path_rate=0.0,
            )
        ),
        lambda rows, length: {"input_features": torch.randn(rows, 1, 4 * IMAGE, 8)},
        7,
    ),
    "ConvNeXt": Model(
        lambda: hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[8, 16], num_stages=2, patch_size=2, **STAGES)),
        images,
        7,
    ),
    "DeBERTa": Model(
        lambda: hf.DebertaV2Model(
            hf.DebertaV2Config(**TEXT, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"])
        ),
        words,
        4,
    ),
    "DETR": Model(detr, images, 16),
    "DINOv3": Model(lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VISION, pos_embed_rescale=None)), images, 5),
    "Gemma 3": Model(
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4)), words, 5
    ),
    "HuBERT": Model(lambda: hf.HubertModel(hf.HubertConfig(**WAVES)), waves, 4),
    "Mamba": Model(
        lambda: hf.MambaModel(hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=4)),
        lambda rows, length: {"input_ids": words(rows, length)["input_ids"]},
        5,
    ),
    # Its forward loops over a set of strings, whose order differs from process to process.
    "ModernBERT": Model(lambda: hf.ModernBertModel(hf.ModernBertConfig(**MODERN)), words, 6),
    "Mixtral": Model(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, experts_implementation="eager")),
        words,
        5,
    ),
    "OPT": Model(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=64,
                word_embed_proj_dim=32,
            )
        ),
        words,
        5,
    ),
    "Qwen2 MoE": Model(
        lambda: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(
                **GROUPED,
                num_experts=4,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                experts_implementation="eager",
            )
        ),
        words,
        5,
    ),
    "ResNet": Model(
        lambda: hf.ResNetModel(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
        ),
        images,
        9,
    ),
    "SAM": Model(
        sam,
        lambda rows, length: {
            **images(rows, length),
            "input_points": torch.rand(rows, 1, 1, 2) * (IMAGE - 1),
            "input_labels": torch.ones(rows, 1, 1, dtype=torch.long),
        },
        13,
    ),
    "Swin": Model(
        lambda: hf.SwinModel(hf.SwinConfig(patch_size=2, embed_dim=8, num_heads=[2, 4], window_size=4, **STAGES)),
        images,
        7,
    ),
    "VideoMAE": Model(
        lambda: hf.VideoMAEModel(hf.VideoMAEConfig(**VISION, num_frames=4)),
        lambda rows, length: {"pixel_values": torch.randn(rows, 4, 3, IMAGE, IMAGE)},
        4,
    ),
    "WavLM": Model(lambda: hf.WavLMModel(hf.WavLMConfig(**WAVES)), waves, 4),
    "XLNet": Model(
        lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=4, d_inner=48)),
        words,
        5,
    ),
}


ALL_MODELS = {**MODELS, **FAMILIES}


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in training mode, without dropout."""
    torch.manual_seed(0)
    return without_dropout(ALL_MODELS[name].make().to(dtype).train())


def without_dropout(model: nn.Module) -> nn.Module:
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
        for name in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(one, name, None), float):
                setattr(one, name, 0.0)
    return model


def without_cache(model: nn.Module) -> nn.Module:
    """The model itself, without the cache that decoders make for generation."""
    for part in model.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config.use_cache = False
    return model


def batch_of(name: str, rows: int, length: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows * 100 + length)
    return {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in ALL_MODELS[name].batch(rows, length).items()
    }


# Workloads: tasks that train such models.

ROWS = 4


def _batches(tasks: list[Any], name: str) -> Callable[[int], dict]:
    """The length changes from step to step."""
    return lambda step: {one.name: batch_of(name, one.batch_size, 7 + 2 * (step % 3)) for one in tasks}


def _token_loss(logits: torch.Tensor, ids: torch.Tensor) -> Any:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    kept = ids[:, 1:] != 0
    return mean((losses * kept).sum(), kept.sum())


def contrastive() -> Workload:
    """Vision and text as two modules whose outputs are taken by name."""
    vision, text = module("vision", made("CLIP vision")), module("text", made("CLIP text"))

    @task(batch_size=ROWS)
    def pairs(batch):
        a = vision(batch["pixel_values"]).pooler_output
        b = text(batch["input_ids"], attention_mask=batch["attention_mask"])["pooler_output"]
        scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * 5
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))

    return Workload(tasks=[pairs], batches=_batches([pairs], "CLIP"))


def language_and_images() -> Workload:
    """LLaVA as one module."""
    model = module("llava", made("LLaVA"))

    @task(batch_size=ROWS)
    def describe(batch):
        return _token_loss(model(**batch).logits, batch["input_ids"])

    return Workload(tasks=[describe], batches=_batches([describe], "LLaVA"))


def language_and_images_in_parts() -> Workload:
    """LLaVA as a vision encoder, a projector, the words' table and a language model; table and logits are tied."""
    torch.manual_seed(3)
    vision = module("vision", made("CLIP vision"))
    projector = module("projector", nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).double())
    model = made("Qwen2")
    table, language = module("words", model.get_input_embeddings()), module("language", model)

    @task(batch_size=ROWS)
    def describe(batch):
        seen = projector(vision(batch["pixel_values"]).last_hidden_state[:, 1:])
        places = (batch["input_ids"] == IMAGE_TOKEN).unsqueeze(-1)
        embedded = table(batch["input_ids"]).masked_scatter(places, seen)
        out = language(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
        return _token_loss(out.logits, batch["input_ids"])

    return Workload(tasks=[describe], batches=_batches([describe], "LLaVA"))


def translation(name: str) -> Workload:
    """An encoder and a decoder in one module; words of both and logits share a table."""
    model = module("translator", made(name))

    @task(batch_size=ROWS)
    def translate(batch):
        return _token_loss(model(**batch).logits, batch["decoder_input_ids"])

    return Workload(tasks=[translate], batches=_batches([translate], name))


def loss_inside() -> Workload:
    """A model that is given labels and returns its loss, which is a mean over the batch."""
    model = module("language", made("Llama"))

    @task(batch_size=ROWS)
    def predict(batch):
        return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    return Workload(tasks=[predict], batches=_batches([predict], "Llama"))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "hf contrastive": contrastive,
    "hf llava": language_and_images,
    "hf llava in parts": language_and_images_in_parts,
    "hf T5": lambda: translation("T5"),
    "hf BART": lambda: translation("BART"),
    "hf loss inside": loss_inside,
}
