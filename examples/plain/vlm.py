"""A vision-language model like LLaVA, and a text-only task on the same language model.

    describe    next word of a caption, given the image    vision, projector, words, language
    read        next word of a text                        words, language

Vision encoder (CLIP) and language model (Llama) are Hugging Face models with random weights. The data is made here,
from a seed. An image shows a square of one of 8 colours at one of 16 places; its caption names both, after a varying
number of filler words. A text counts modulo 29, with a start, a step and a length that vary.

    python examples/plain/vlm.py

`examples/vlm.py` is the same with Spindle. Letters behind a name are the tensor's dimensions: B samples, L
positions, D features, CHW of images.
"""

import argparse

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Words: five special ones, then 8 colours and 16 places, or 29 numbers.
PAD, BEGIN, END, IMAGE, FILLER, COLOUR, PLACE, NUMBER, NUM_WORDS = 0, 1, 2, 3, 4, 5, 13, 29, 58
NUM_PATCHES = 16
SIZES = {"small": (64, 64, 3), "base": (768, 1024, 12)}  # widths of vision and language, layers of each


class Pictures(Dataset):
    """Images with captions. The features of a patch replace each IMAGE token of a caption."""

    def __init__(self, num_pictures: int) -> None:
        self.num_pictures = num_pictures

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        place, colour, num_fillers = (
            int(torch.randint(choices, (), generator=generator)) for choices in (NUM_PATCHES, 8, 4)
        )
        pixels_CHW = 0.1 * torch.randn(3, 32, 32, generator=generator)
        row, column = divmod(place, 4)
        rgb = torch.tensor([colour >> bit & 1 for bit in range(3)])
        pixels_CHW[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += (2.0 * rgb - 1)[:, None, None]
        caption = [*[FILLER] * num_fillers, COLOUR + colour, PLACE + place, END, *[PAD] * (3 - num_fillers)]
        return {"pixels": pixels_CHW, "words": torch.tensor([BEGIN, *[IMAGE] * NUM_PATCHES, *caption])}


class Texts(Dataset):
    """Texts of numbers."""

    def __init__(self, num_texts: int) -> None:
        self.num_texts = num_texts

    def __len__(self) -> int:
        return self.num_texts

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        start, step, length = (int(torch.randint(choices, (), generator=generator)) for choices in (29, 4, 6))
        numbers = [NUMBER + (start + step * count) % 29 for count in range(8 + length)]
        return {"words": torch.tensor([BEGIN, *numbers, END, *[PAD] * (5 - length)])}


def make_modules(size: str) -> dict[str, nn.Module]:
    vision_width, width, depth = SIZES[size]

    def options(width: int) -> dict:
        heads = {"num_hidden_layers": depth, "num_attention_heads": max(4, width // 64)}
        return {"hidden_size": width, "intermediate_size": 4 * width, **heads}

    words = {"vocab_size": NUM_WORDS, "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
    language = hf.LlamaForCausalLM(hf.LlamaConfig(**options(width), **words))
    return {
        "vision": hf.CLIPVisionModel(hf.CLIPVisionConfig(**options(vision_width), image_size=32, patch_size=8)),
        "projector": nn.Sequential(nn.Linear(vision_width, width), nn.GELU(), nn.Linear(width, width)),
        "words": language.get_input_embeddings(),
        "language": language,
    }


def show(step: int, losses: dict[str, float]) -> None:
    print(f"step {step:3}", *(f"{name} {loss:.5f}" for name, loss in losses.items()), sep="  ", flush=True)


def make_tasks(modules):
    vision, projector, words, language = modules.values()

    def next_word(embedded_BLD, words_BL):
        """The mean loss over words that are neither padding nor IMAGE."""
        logits_BLD = language(inputs_embeds=embedded_BLD, attention_mask=(words_BL != PAD).long()).logits
        next_BL = words_BL[:, 1:].masked_fill(words_BL[:, 1:] == IMAGE, PAD)
        total = F.cross_entropy(logits_BLD[:, :-1].transpose(1, 2), next_BL, ignore_index=PAD, reduction="sum")
        return total / (next_BL != PAD).sum()

    def describe(batch):
        features_BLD = projector(vision(batch["pixels"]).last_hidden_state[:, 1:])
        places_BL1 = (batch["words"] == IMAGE).unsqueeze(-1)
        return next_word(words(batch["words"]).masked_scatter(places_BL1, features_BLD), batch["words"])

    def read(batch):
        return next_word(words(batch["words"]), batch["words"])

    return {"describe": describe, "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a vision-language model on images and on texts.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    torch.manual_seed(0)
    modules = make_modules(options.size)
    tasks = make_tasks(modules)
    loaders = {
        "describe": DataLoader(Pictures(16 * options.steps), batch_size=16),
        "read": DataLoader(Texts(24 * options.steps), batch_size=24),
    }

    def make_optimizer(named_parameters):
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=options.learning_rate)

    optimizer = make_optimizer(nn.ModuleDict(modules).named_parameters())
    for step, batches in enumerate(zip(*loaders.values(), strict=True)):
        losses = {name: task(batch) for (name, task), batch in zip(tasks.items(), batches, strict=True)}
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        show(step, {name: loss.item() for name, loss in losses.items()})


if __name__ == "__main__":
    main()
