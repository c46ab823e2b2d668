"""Further families of Hugging Face models, of small sizes: language models, encoders of text, images, videos and sound,
and whole vision- and audio-language models. Making one whose class the installed transformers lacks raises
AttributeError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from hugging_configs import (
    BOTH,
    GROUPED,
    IMAGE,
    IMAGE_TOKEN,
    STAGES,
    T5,
    TEXT,
    VISION,
    VOCABULARY,
    WAVES,
    Model,
    images,
    speech,
    two_texts,
    waves,
    with_placeholders,
    words,
)

Batch = dict[str, torch.Tensor]
VIDEO_TOKEN, VISION_START, VISION_END = 59, 58, 57
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FRAMES = 4
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 20,
}
LLAMA, QWEN2 = {"model_type": "llama", **GROUPED}, {"model_type": "qwen2", **GROUPED}


def from_config(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**settings))


def language(family: str, num_layers: int = 5, **settings: Any) -> Model:
    return Model(from_config(f"{family}ForCausalLM", f"{family}Config", **{**GROUPED, **settings}), words, num_layers)


def text(family: str, num_layers: int = 5, **settings: Any) -> Model:
    return Model(from_config(f"{family}Model", f"{family}Config", **{**TEXT, **settings}), words, num_layers)


def vision(family: str, num_layers: int = 5, **settings: Any) -> Model:
    return Model(from_config(f"{family}Model", f"{family}Config", **settings), images, num_layers)


def audio(family: str, num_layers: int, **settings: Any) -> Model:
    return Model(from_config(f"{family}Model", f"{family}Config", **{**WAVES, **settings}), waves, num_layers)


def tokens(rows: int, length: int) -> Batch:
    return {"input_ids": words(rows, length)["input_ids"]}


def videos(rows: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(rows, FRAMES, 3, IMAGE, IMAGE)}


def spectrograms(rows: int, length: int) -> Batch:
    """Frames of mel bins, with a mask."""
    num_frames = 40 + 8 * length
    return {
        "input_features": torch.randn(rows, num_frames, 16),
        "attention_mask": torch.ones(rows, num_frames, dtype=torch.long),
    }


def patches(rows: int, length: int) -> Batch:
    """Images as patches, with the shape of each."""
    return {
        "pixel_values": torch.randn(rows, 16, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        "spatial_shapes": torch.full((rows, 2), 4),
    }


def image_and_text(count: int, **more: Callable[[int, int], torch.Tensor]) -> Callable[[int, int], Batch]:
    """An image for each text, which has so many tokens for it."""
    return lambda rows, length: {
        **images(rows, length),
        **with_placeholders(rows, length, count),
        **{name: make(rows, count + length) for name, make in more.items()},
    }


def one_of_several_images(rows: int, length: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 1, 3, IMAGE, IMAGE),
        "pixel_attention_mask": torch.ones(rows, 1, IMAGE, IMAGE, dtype=torch.bool),
        **with_placeholders(rows, length, 4),
    }


def token_types(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def packed_patches(rows: int, length: int) -> Batch:
    """The patches of all images in one sequence, as Qwen-VL takes them: 4 x 4 patches, four tokens for each image."""
    plain = words(rows, length)
    ids, mask = plain["input_ids"].clamp(max=VISION_END - 1), plain["attention_mask"]
    image = torch.tensor([VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]).repeat(rows, 1)
    input_ids = torch.cat([ids[:, :2], image, ids[:, 2:]], dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.cat([mask[:, :2], torch.ones_like(image), mask[:, 2:]], dim=1),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(rows, 1),
    }


def tiles(rows: int, length: int) -> Batch:
    return {
        **words(rows, length),
        "pixel_values": torch.randn(rows, 1, 1, 3, IMAGE, IMAGE),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(rows, length, 1, 1, dtype=torch.long),
    }


def internvl() -> nn.Module:
    vision_config = {**VISION, "image_size": [IMAGE, IMAGE], "patch_size": [8, 8]}
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            vision_config=vision_config, text_config=QWEN2, image_token_id=IMAGE_TOKEN, image_seq_length=4
        )
    )


def paligemma() -> nn.Module:
    return hf.PaliGemmaForConditionalGeneration(
        hf.PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", **VISION, "projection_dim": 32},
            text_config={"model_type": "gemma", **GROUPED, "head_dim": 8},
            image_token_index=IMAGE_TOKEN,
            projection_dim=32,
            hidden_size=32,
        )
    )


def gemma3() -> nn.Module:
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config=VISION,
            text_config={**GROUPED, "head_dim": 8, "sliding_window": 4},
            mm_tokens_per_image=4,
            image_token_id=IMAGE_TOKEN,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=3,
            eoi_token_index=4,
        )
    )


def idefics(family: str) -> Callable[[], nn.Module]:
    return from_config(
        f"{family}ForConditionalGeneration",
        f"{family}Config",
        vision_config=VISION,
        text_config=LLAMA,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )


def qwen_vl(family: str, text_settings: dict[str, Any], **vision_settings: Any) -> Model:
    vision_config = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **vision_settings,
    }
    make = from_config(
        f"{family}ForConditionalGeneration",
        f"{family}Config",
        vision_config=vision_config,
        text_config={**GROUPED, **text_settings},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return Model(make, packed_patches, 1, BY_VALUES)


def blip2() -> nn.Module:
    qformer = {name: value for name, value in TEXT.items() if not name.endswith("token_id")}
    opt = {**ENCODER, "model_type": "opt", "vocab_size": VOCABULARY, "ffn_dim": 48, "word_embed_proj_dim": 32}
    del opt["intermediate_size"]
    return hf.Blip2ForConditionalGeneration(
        hf.Blip2Config(
            vision_config=VISION,
            qformer_config={**qformer, "encoder_hidden_size": 32, "cross_attention_frequency": 2},
            text_config={**opt, "max_position_embeddings": 64},
            num_query_tokens=4,
            image_token_index=IMAGE_TOKEN,
        )
    )


def qwen2_audio() -> nn.Module:
    return hf.Qwen2AudioForConditionalGeneration(
        hf.Qwen2AudioConfig(audio_config=AUDIO, text_config=QWEN2, audio_token_index=IMAGE_TOKEN)
    )


def voxtral() -> nn.Module:
    audio_config = {**ENCODER, "intermediate_size": 128, "num_mel_bins": 16, "max_source_positions": 20}
    return hf.VoxtralForConditionalGeneration(
        hf.VoxtralConfig(audio_config=audio_config, text_config=LLAMA, audio_token_id=IMAGE_TOKEN)
    )


def mllama() -> nn.Module:
    vision_config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 2,
        "attention_heads": 4,
        "image_size": IMAGE,
        "patch_size": 8,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    text_config = {**GROUPED, "cross_attention_layers": [1], "num_hidden_layers": 4}
    return hf.MllamaForConditionalGeneration(
        hf.MllamaConfig(vision_config=vision_config, text_config=text_config, image_token_index=IMAGE_TOKEN)
    )


def clap() -> nn.Module:
    audio_config = {
        "spec_size": IMAGE,
        "patch_size": 2,
        "patch_stride": (2, 2),
        "window_size": 4,
        "num_mel_bins": 8,
        "patch_embeds_hidden_size": 8,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
        "hidden_size": 16,
        "drop_path_rate": 0.0,
    }
    return hf.ClapModel(hf.ClapConfig(audio_config=audio_config, text_config=TEXT, projection_dim=16))


BY_VALUES = "values of tensors"  # sizes or branches between blocks depend on them: no shape says how it goes on

FAMILIES: dict[str, Model] = {
    # Language models.
    "BLOOM": Model(
        from_config("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
        words,
        5,
    ),
    "Cohere 2": language("Cohere2", sliding_window=4),
    "DeepSeek-V3": language(
        "DeepseekV3",
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **EXPERTS,
    ),
    "Falcon": Model(
        from_config(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        words,
        5,
    ),
    "Gemma 2": language("Gemma2", head_dim=8, sliding_window=4),
    "GLM-4": language("Glm4", head_dim=8),
    "GPT-NeoX": Model(from_config("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), words, 5),
    "GPT-OSS": language("GptOss", head_dim=8, num_local_experts=4, sliding_window=4, **EXPERTS),
    "Granite": language("Granite"),
    "LFM2": language("Lfm2", 6, num_hidden_layers=4, full_attn_idxs=[1, 3], block_multiple_of=8),
    "Llama 4": Model(
        from_config(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **GROUPED,
            intermediate_size_mlp=48,
            head_dim=8,
            num_local_experts=4,
            attention_chunk_size=8,
            experts_implementation="eager",
        ),
        words,
        5,
    ),
    "Mamba 2": Model(
        from_config(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            state_size=4,
            num_heads=4,
            head_dim=16,
            n_groups=2,
            chunk_size=8,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        tokens,
        5,
    ),
    "Mistral": language("Mistral", sliding_window=4),
    "OLMo 2": language("Olmo2"),
    "Phi-3": language("Phi3"),
    "Qwen3": language("Qwen3", head_dim=8),
    "Qwen3 MoE": language("Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=16, **EXPERTS),
    "Qwen3-Next": language(
        "Qwen3Next",
        6,
        num_hidden_layers=4,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **EXPERTS,
    ),
    "SmolLM3": language("SmolLM3"),
    "Starcoder2": language("Starcoder2"),
    # Text.
    "DistilBERT": Model(
        from_config(
            "DistilBertModel",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=32,
            hidden_dim=48,
            n_layers=3,
            n_heads=4,
            max_position_embeddings=64,
        ),
        words,
        4,
    ),
    "ELECTRA": text("Electra", 4, embedding_size=16),
    "mT5": Model(from_config("MT5ForConditionalGeneration", "MT5Config", **T5, decoder_start_token_id=0), two_texts, 9),
    "NomicBERT": text("NomicBert", 4),
    "XLM-R": text("XLMRoberta"),
    # Images and videos.
    "AIMv2": vision("Aimv2Vision", **VISION),
    "BEiT": vision("Beit", **VISION, drop_path_rate=0.0),
    "ConvNeXt V2": vision("ConvNextV2", 7, hidden_sizes=[8, 16], num_stages=2, patch_size=2, **STAGES),
    "Data2Vec vision": vision("Data2VecVision", **VISION, drop_path_rate=0.0),
    "DINOv2 with registers": vision("Dinov2WithRegisters", **VISION, mlp_ratio=2),
    "DINOv3 ConvNeXt": vision(
        "DINOv3ConvNext", hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2], image_size=IMAGE, drop_path_rate=0.0
    ),
    "Hiera": vision(
        "Hiera",
        embed_dim=8,
        image_size=[IMAGE, IMAGE],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        depths=[1, 2],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        num_query_pool=1,
        query_stride=[2, 2],
        drop_path_rate=0.0,
    ),
    "Pixtral vision": Model(
        from_config("PixtralVisionModel", "PixtralVisionConfig", **VISION),
        lambda rows, length: {**images(rows, length), "image_sizes": torch.full((rows, 2), IMAGE)},
        1,
        BY_VALUES,
    ),
    "SegFormer": vision(
        "Segformer",
        7,
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
    ),
    "SigLIP 2 vision": Model(
        from_config("Siglip2VisionModel", "Siglip2VisionConfig", **ENCODER, patch_size=8, num_patches=16),
        patches,
        1,
        BY_VALUES,
    ),
    "Swin V2": vision("Swinv2", 7, patch_size=2, embed_dim=8, num_heads=[2, 4], window_size=4, **STAGES),
    "TimeSformer": Model(
        from_config("TimesformerModel", "TimesformerConfig", **VISION, num_frames=FRAMES, drop_path_rate=0), videos, 5
    ),
    "ViViT": Model(
        from_config(
            "VivitModel", "VivitConfig", **ENCODER, image_size=IMAGE, num_frames=FRAMES, tubelet_size=[2, 8, 8]
        ),
        videos,
        5,
    ),
    "V-JEPA 2": Model(
        from_config(
            "VJEPA2Model",
            "VJEPA2Config",
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            crop_size=IMAGE,
            patch_size=8,
            frames_per_clip=FRAMES,
            mlp_ratio=2,
            pred_hidden_size=32,
            pred_num_attention_heads=4,
            pred_num_hidden_layers=2,
            drop_path_rate=0.0,
        ),
        lambda rows, length: {"pixel_values_videos": videos(rows, length)["pixel_values"]},
        8,
    ),
    # Sound.
    "CLAP": Model(
        clap,
        lambda rows, length: {**words(rows, length), "input_features": torch.randn(rows, 1, 4 * IMAGE, 8)},
        11,
    ),
    "Data2Vec audio": audio("Data2VecAudio", 16, conv_pos_kernel_size=5),
    "Moonshine": Model(
        from_config(
            "MoonshineForConditionalGeneration",
            "MoonshineConfig",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            encoder_num_hidden_layers=3,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda rows, length: {
            "input_values": torch.randn(rows, 4000 + 800 * length),
            "decoder_input_ids": words(rows, length)["input_ids"],
        },
        8,
    ),
    "Parakeet": Model(
        from_config(
            "ParakeetEncoder",
            "ParakeetEncoderConfig",
            **ENCODER,
            conv_kernel_size=5,
            subsampling_conv_channels=8,
            num_mel_bins=16,
            layerdrop=0.0,
        ),
        spectrograms,
        5,
    ),
    "Speech2Text": Model(
        from_config(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            **BOTH,
            input_feat_per_channel=16,
            conv_channels=16,
            max_source_positions=64,
            max_target_positions=64,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        lambda rows, length: {
            "input_features": torch.randn(rows, 40, 16),
            "decoder_input_ids": words(rows, length)["input_ids"],
        },
        8,
    ),
    "Wav2Vec2-BERT": Model(
        from_config(
            "Wav2Vec2BertModel",
            "Wav2Vec2BertConfig",
            **ENCODER,
            feature_projection_input_dim=16,
            apply_spec_augment=False,
            layerdrop=0.0,
            left_max_position_embeddings=8,
            right_max_position_embeddings=4,
            conv_depthwise_kernel_size=5,
        ),
        spectrograms,
        4,
    ),
    "Wav2Vec2-Conformer": audio("Wav2Vec2Conformer", 5, conv_depthwise_kernel_size=5),
    # Images or sound with text.
    "BLIP-2": Model(blip2, image_and_text(4), 13),
    "Gemma 3 VLM": Model(gemma3, image_and_text(4, token_type_ids=token_types), 9),
    "Idefics3": Model(idefics("Idefics3"), one_of_several_images, 1, BY_VALUES),
    "InternVL": Model(internvl, image_and_text(4), 9),
    "Mllama": Model(mllama, tiles, 12),
    "PaliGemma": Model(paligemma, image_and_text(16, token_type_ids=token_types), 9),
    "Qwen2-Audio": Model(
        qwen2_audio,
        lambda rows, length: {
            **speech(rows, length),
            "feature_attention_mask": torch.ones(rows, 40, dtype=torch.long),
            **with_placeholders(rows, length, 10),
        },
        9,
    ),
    "Qwen2-VL": qwen_vl(
        "Qwen2VL",
        {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}},
        embed_dim=32,
        mlp_ratio=2,
    ),
    "Qwen2.5-VL": qwen_vl(
        "Qwen2_5_VL",
        {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}},
        intermediate_size=48,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    "Qwen3-VL": qwen_vl(
        "Qwen3VL",
        {
            "head_dim": 8,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True},
        },
        intermediate_size=48,
        out_hidden_size=32,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
    "SmolVLM": Model(idefics("SmolVLM"), one_of_several_images, 1, BY_VALUES),
    "Voxtral": Model(
        voxtral,
        lambda rows, length: {**speech(rows, length), **with_placeholders(rows, length, 5)},
        9,
    ),
}
