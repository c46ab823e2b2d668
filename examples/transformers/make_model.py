"""Writes a tiny LLaVA with random weights and its processor into a folder, as `from_pretrained` reads them.

python examples/transformers/make_model.py tiny-llava
"""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

WORDS = ["<pad>", "<unk>", "<image>", "the", "colour", "is", "red", "green", "blue", "white"]

torch.manual_seed(0)
words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=["<image>"]
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlavaConfig(
    vision_config=CLIPVisionConfig(**sizes, image_size=32, patch_size=8),
    text_config=LlamaConfig(**sizes, vocab_size=len(WORDS), pad_token_id=0),
    image_token_id=WORDS.index("<image>"),
)
LlavaForConditionalGeneration(config).save_pretrained(sys.argv[1])
LlavaProcessor(
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    tokenizer,
    patch_size=8,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
).save_pretrained(sys.argv[1])
