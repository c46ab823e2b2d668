"""A training script of ten billion parameters, which `planned_script` plans: a language model that reads and sees."""

import torch
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2ForCausalLM

import spindle

WORDS = 152064
reader = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=WORDS,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
).bfloat16()
eyes = CLIPVisionModel(
    CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
).bfloat16()
language, vision = spindle.module("language", reader), spindle.module("vision", eyes)
embed = spindle.module("embed", reader.get_input_embeddings())
project = spindle.module("project", torch.nn.Linear(1024, 4096).bfloat16())


@spindle.task(batch_size=16, per_sample_mean=True)
def text(batch):
    logits = language(inputs_embeds=embed(batch["words"])).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["words"][:, 1:].reshape(-1))


@spindle.task(batch_size=16, per_sample_mean=True)
def caption(batch):
    seen = project(vision(pixel_values=batch["pixels"]).last_hidden_state)
    return F.cross_entropy(language(inputs_embeds=seen).logits.reshape(-1, WORDS), batch["words"].reshape(-1))


trainer = spindle.Trainer(
    [text, caption], optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named])
)
texts = [{"words": torch.randint(0, WORDS, (16, 512))}]
images = [{"pixels": torch.randn(16, 3, 336, 336).bfloat16(), "words": torch.randint(0, WORDS, (16, 577))}]
trainer.fit({"text": texts, "caption": images}, steps=1)
