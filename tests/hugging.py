"""Hugging Face models of small sizes with random weights, batches for them, and workloads made of them.

Nothing is downloaded. `hugging_models.json` has for each model its class and configuration, the parts of its batches,
and into how many layers it is to be cut; of a model that stays whole, `reason` is part of what the chain says why.
`models` are those that were asked for first, `families` further ones. Making one whose class the installed transformers
lacks raises AttributeError. Dropout is off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from spindle.train import mean, module, packed, task
from zoo import Workload

hf.logging.set_verbosity_error()
_float = torch.Tensor.float


def _float_unless_double(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """Transformers computes losses in float32, whose rounding would hide errors of other kinds: there, and only there,
    float64 stays as it is. Except in tables of rotary embeddings, which multiply frequencies by positions: float64 by
    float32 in versions that round both."""
    caller = sys._getframe(1)
    is_kept = caller.f_globals.get("__name__", "").startswith("transformers.")
    is_kept &= "RotaryEmbedding.forward" not in caller.f_code.co_qualname
    return tensor if tensor.dtype == torch.float64 and is_kept else _float(tensor, **options)


torch.Tensor.float = _float_unless_double
Batch = dict[str, torch.Tensor]
IMAGE_TOKEN, VISION_START, VISION_END = 60, 58, 57  # of a vocabulary of 61
IMAGE, FRAMES = 32, 4
_FILE = json.loads((Path(__file__).parent / "hugging_models.json").read_text(encoding="utf-8"))


def config_of(settings: Any) -> Any:
    """A configuration, or its settings where it has no class: those of its `base`, and its own."""
    if not isinstance(settings, dict):
        return settings
    bases = settings.get("base", [])
    resolved: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        resolved |= config_of(_FILE["bases"][base])
    resolved |= {name: config_of(value) for name, value in settings.items() if name not in ("base", "class")}
    return getattr(hf, settings["class"])(**resolved) if "class" in settings else resolved


TEXT, GROUPED, VISION, BOTH = (config_of(_FILE["bases"][name]) for name in ("text", "grouped", "vision", "both"))


# Parts of batches, of so many rows; texts have a length and so many tokens for images.


def words(rows: int, length: int, image_tokens: int = 0) -> Batch:
    """Tokens, padded at their ends, with tokens for images behind the first two."""
    lengths = length - torch.arange(rows) % 3
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    ids = torch.randint(3, VISION_END, (rows, length)) * mask
    image = torch.full((rows, image_tokens), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([ids[:, :2], image, ids[:, 2:]], dim=1),
        "attention_mask": torch.cat([mask[:, :2], torch.ones_like(image), mask[:, 2:]], dim=1),
    }


def two_texts(rows: int, length: int) -> Batch:
    return {**words(rows, length), "decoder_input_ids": words(rows, length - 2)["input_ids"]}


def spectrograms(rows: int, length: int) -> Batch:
    """Frames of mel bins, with a mask."""
    num_frames = 40 + 8 * length
    return {
        "input_features": torch.randn(rows, num_frames, 16),
        "attention_mask": torch.ones(rows, num_frames, dtype=torch.long),
    }


def packed_patches(rows: int, length: int) -> Batch:
    """The patches of all images in one sequence, as Qwen-VL takes them: 4 x 4 patches, four tokens for each image."""
    text = words(rows, length)
    ids, mask = text["input_ids"], text["attention_mask"]
    image = torch.tensor([VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]).repeat(rows, 1)
    input_ids = torch.cat([ids[:, :2], image, ids[:, 2:]], dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.cat([mask[:, :2], torch.ones_like(image), mask[:, 2:]], dim=1),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(rows, 1),
    }


def packed_images(rows: int, length: int, declared: bool = True) -> dict[str, Any]:
    """As `packed_patches`, with images of different sizes, one to three in a sample, as `spindle.packed` declares."""
    grids = iter([[1, 4, 4], [1, 4, 8], [1, 8, 4], [1, 8, 8], [1, 4, 4]] * rows)
    samples = []
    for row in range(rows):
        images = [next(grids) for _ in range(1 + (row + length // 2) % 3)]
        sequence = torch.randint(3, VISION_END, (length + row % 2,)).tolist()
        for _, height, width in images:
            sequence[2:2] = [VISION_START, *[IMAGE_TOKEN] * (height * width // 4), VISION_END]
        samples.append((sequence, images[::-1]))
    longest = max(len(sequence) for sequence, _ in samples)
    input_ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence, _ in samples])
    num_patches = [sum(height * width for _, height, width in images) for _, images in samples]
    grid = torch.tensor([image for _, images in samples for image in images])
    patches = torch.randn(sum(num_patches), 3 * 2 * 4 * 4)
    num_images = [len(images) for _, images in samples]
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).long(),
        "pixel_values": packed(patches.double(), num_patches) if declared else patches.double(),
        "image_grid_thw": packed(grid, num_images) if declared else grid,
    }


def ones(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


PARTS: dict[str, Callable[[int, int, int], Batch]] = {
    "words": words,
    "tokens": lambda rows, length, _: {"input_ids": words(rows, length)["input_ids"]},
    "decoder_words": lambda rows, length, _: {"decoder_input_ids": words(rows, length)["input_ids"]},
    "short_decoder_words": lambda rows, length, _: {"decoder_input_ids": words(rows, length - 2)["input_ids"]},
    "token_types": lambda rows, length, count: {"token_type_ids": 0 * ones(rows, length + count)},
    "images": lambda rows, *_: {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE)},
    "single_images": lambda rows, *_: {
        "pixel_values": torch.randn(rows, 1, 3, IMAGE, IMAGE),
        "pixel_attention_mask": ones(rows, 1, IMAGE, IMAGE, dtype=torch.bool),
    },
    "anyres_images": lambda rows, *_: {
        "pixel_values": torch.randn(rows, 2, 3, IMAGE, IMAGE),
        "image_sizes": torch.full((rows, 2), IMAGE),
    },
    "image_sizes": lambda rows, *_: {"image_sizes": torch.full((rows, 2), IMAGE)},
    "points": lambda rows, *_: {
        "input_points": torch.rand(rows, 1, 1, 2) * (IMAGE - 1),
        "input_labels": ones(rows, 1, 1),
    },
    "patches": lambda rows, *_: {
        "pixel_values": torch.randn(rows, 16, 3 * 8 * 8),
        "pixel_attention_mask": ones(rows, 16),
        "spatial_shapes": torch.full((rows, 2), 4),
    },
    "packed_patches": lambda rows, length, _: packed_patches(rows, length),
    "tiles": lambda rows, length, _: {
        "pixel_values": torch.randn(rows, 1, 1, 3, IMAGE, IMAGE),
        "aspect_ratio_ids": ones(rows, 1),
        "aspect_ratio_mask": ones(rows, 1, 1),
        "cross_attention_mask": ones(rows, length, 1, 1),
    },
    "videos": lambda rows, *_: {"pixel_values": torch.randn(rows, FRAMES, 3, IMAGE, IMAGE)},
    "video_mask": lambda rows, *_: {  # of 2 x 4 x 4 patches, the same number in each video
        "bool_masked_pos": torch.stack([torch.randperm(32) < 16 for _ in range(rows)]),
    },
    "pixel_values_videos": lambda rows, *_: {"pixel_values_videos": torch.randn(rows, FRAMES, 3, IMAGE, IMAGE)},
    "waves": lambda rows, length, _: {"input_values": torch.randn(rows, 100 + 20 * length)},
    "long_waves": lambda rows, length, _: {"input_values": torch.randn(rows, 4000 + 800 * length)},
    "speech": lambda rows, *_: {"input_features": torch.randn(rows, 16, 40)},
    "speech_mask": lambda rows, *_: {"feature_attention_mask": ones(rows, 40)},
    "spectrograms": lambda rows, length, _: spectrograms(rows, length),
    "mel_frames": lambda rows, *_: {"input_features": torch.randn(rows, 40, 16)},
    "mel_images": lambda rows, *_: {"input_values": torch.randn(rows, 40, 16)},
    "fused_features": lambda rows, *_: {"input_features": torch.randn(rows, 1, 4 * IMAGE, 8)},
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the file."""

    entry: Mapping[str, Any]

    def make(self) -> nn.Module:
        model = getattr(hf, self.entry["model"])(config_of(self.entry["config"]))
        return getattr(model, self.entry["part"]) if "part" in self.entry else model

    def batch(self, rows: int, length: int) -> Batch:
        batch: Batch = {}
        for part in self.entry["batch"]:
            batch |= PARTS[part](rows, length, self.entry.get("image_tokens", 0))
        return batch

    @property
    def num_layers(self) -> int:
        return self.entry["layers"]

    @property
    def reason(self) -> str:
        return self.entry.get("reason", "")


MODELS, FAMILIES, COMPOSITES = (
    {name: Model(entry) for name, entry in _FILE[group].items()} for group in ("models", "families", "composites")
)
ALL_MODELS = {**MODELS, **FAMILIES, **COMPOSITES}


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in training mode, without dropout."""
    torch.manual_seed(0)
    return without_dropout(ALL_MODELS[name].make().to(dtype).train())


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
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
    return lambda step: {each.name: batch_of(name, each.batch_size, 7 + 2 * (step % 3)) for each in tasks}


def token_loss(logits: torch.Tensor, ids: torch.Tensor) -> Any:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    mask = ids[:, 1:] != 0
    return mean((losses * mask).sum(), mask.sum())


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
        return token_loss(model(**batch).logits, batch["input_ids"])

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
        return token_loss(out.logits, batch["input_ids"])

    return Workload(tasks=[describe], batches=_batches([describe], "LLaVA"))


def translation(name: str) -> Workload:
    """An encoder and a decoder in one module; words of both and logits share a table."""
    model = module("translator", made(name))

    @task(batch_size=ROWS)
    def translate(batch):
        return token_loss(model(**batch).logits, batch["decoder_input_ids"])

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


def labelled(name: str, batch: Batch) -> dict[str, Any]:
    """A batch with what a model needs to compute its loss."""
    if name in ("AltCLIP", "CLIP", "CLAP", "SigLIP", "SigLIP 2"):
        return {**batch, "return_loss": True}
    if name == "ViLT":
        return {**batch, "labels": torch.rand(ROWS, 3, dtype=torch.float64)}
    if name == "CLIPSeg":
        return {**batch, "labels": torch.randint(0, 2, (ROWS, IMAGE, IMAGE)).double()}
    if name == "Wav2Vec2 CTC":
        return {**batch, "labels": torch.randint(1, 19, (ROWS, 4))}
    if "bool_masked_pos" in batch:
        return batch
    if "decoder_input_ids" in batch:
        batch = dict(batch)
        return {"labels": batch.pop("decoder_input_ids"), **batch}
    labels = batch["input_ids"].clone()
    labels[(labels == 0) | (labels >= VISION_END)] = -100
    return {**batch, "labels": labels}


def composite(name: str) -> Workload:
    """A model that is given labels and returns its loss, as `CLIP` or, with adapters, `LoRA LLaVA`; in `counted Llama`
    the batch says by how many tokens the loss is divided; in `packed Qwen2.5-VL` samples have different images; in
    `routed Mixtral` the loss has a term over the router logits of all blocks."""
    kinds = ("LoRA ", "counted ", "packed ", "routed ")
    kind, _, model_name = name.partition(" ") if name.startswith(kinds) else ("", "", name)
    network = made(model_name)
    if kind == "routed":
        config = network.config.get_text_config()
        network.config.output_router_logits = config.output_router_logits = True
        config.router_aux_loss_coef = network.router_aux_loss_coef = 0.5  # as large as the other term
    if kind == "LoRA":
        peft = import_module("peft")
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules=r".*(q_proj|v_proj|qkv)", init_lora_weights=False)
        network = peft.get_peft_model(network, adapters).double()
    model = module("model", network)

    @task(batch_size=ROWS)
    def train(batch):
        return model(**batch).loss

    def batches(step: int) -> dict[str, Any]:
        length = 7 + 2 * (step % 3)
        if kind == "packed":
            torch.manual_seed(step)
            return {"train": labelled(model_name, packed_images(ROWS, length))}
        batch = labelled(model_name, batch_of(model_name, ROWS, length))
        return {
            "train": {**batch, "num_items_in_batch": (batch["labels"] != -100).sum()} if kind == "counted" else batch
        }

    return Workload(tasks=[train], batches=batches)


def workload_named(name: str) -> Workload:
    """One of `WORKLOADS`, or `hf composite CLIP`: a model of the file that computes its own loss."""
    _, is_composite, model = name.partition("composite ")
    return composite(model) if is_composite else WORKLOADS[name]()
