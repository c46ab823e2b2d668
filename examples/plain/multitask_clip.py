"""Multitask-CLIP: six modalities, six contrastive tasks, one encoder for each modality, shared by its tasks.

    image_text, video_text, audio_text, motion_text, image_depth, video_audio

Encoders are Hugging Face models with random weights. The data is made here, from a seed. A scene has one of 8 colours
and one of 16 places. An image shows a square of that colour at that place, a video the square moving from there, a
depth map its tilt and place; a sound is a tone whose pitch is the colour and whose onset is the place, a motion sensor
records a jolt with that direction and onset, and a sentence names both.

    python examples/plain/multitask_clip.py

`examples/multitask_clip.py` is the same with Spindle. Letters behind a name are the tensor's dimensions: B
samples, L positions, D features, CHW of images, T frames.
"""

import argparse
import math

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Each task matches two modalities, with a batch size of its own.
BATCH_SIZES = {
    ("image", "text"): 24,
    ("video", "text"): 8,
    ("audio", "text"): 16,
    ("motion", "text"): 24,
    ("image", "depth"): 16,
    ("video", "audio"): 8,
}
SIZES = {"small": (64, 1), "base": (768, 4)}  # width, and a factor for the numbers of layers
BEGIN, END, COLOUR, PLACE, NUM_WORDS = 0, 1, 2, 10, 26  # words


def draw_square(colour: int, place: int) -> Tensor:
    """An image of 4 × 4 places; a colour is a corner of the RGB cube."""
    pixels_CHW = torch.zeros(3, 32, 32)
    row, column = divmod(place, 4)
    rgb = torch.tensor([colour >> bit & 1 for bit in range(3)])
    pixels_CHW[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = (2.0 * rgb - 1)[:, None, None]
    return pixels_CHW


def draw_video(colour: int, place: int) -> Tensor:
    return torch.stack([draw_square(colour, (place + frame) % 16) for frame in range(4)])


def draw_depth(colour: int, place: int) -> Tensor:
    """The square is tilted in one of eight directions."""
    angle = torch.tensor(colour * math.pi / 4)
    across = torch.arange(32) % 8 / 4 - 1
    return draw_square(7, place)[:1] * (1 + across * angle.cos() + across[:, None] * angle.sin())


def play(colour: int, place: int) -> Tensor:
    """The spectrogram of a tone: 32 frames of 16 bins."""
    sound_TD = torch.zeros(32, 16)
    sound_TD[2 * place :, 2 * colour] = 2 * torch.exp(-torch.arange(32 - 2 * place) / 8)
    return sound_TD


def shake(colour: int, place: int) -> Tensor:
    """A sensor of three accelerations and three rotations at 32 times: a jolt that fades."""
    motion_TD = torch.zeros(32, 6)
    motion_TD[2 * place :] = torch.exp(-torch.arange(32 - 2 * place) / 8)[:, None]
    return motion_TD * torch.tensor([2 * (colour >> axis % 3 & 1) - 1 for axis in range(6)])


def say(colour: int, place: int) -> Tensor:
    return torch.tensor([BEGIN, COLOUR + colour, PLACE + place, END])


RENDER = {
    "image": draw_square,
    "video": draw_video,
    "depth": draw_depth,
    "audio": play,
    "motion": shake,
    "text": say,
}


class Scenes(Dataset):
    """Scenes by number, in some of their modalities, with noise."""

    def __init__(self, modalities: tuple[str, ...], num_scenes: int) -> None:
        self.modalities, self.num_scenes = modalities, num_scenes

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        place, colour = divmod(int(torch.randint(16 * 8, (), generator=generator)), 8)
        sample = {modality: RENDER[modality](colour, place) for modality in self.modalities}
        for value in sample.values():
            if value.is_floating_point():
                value += 0.1 * torch.randn(value.shape, generator=generator)
        return sample


class MotionModel(nn.Module):
    """BERT over sensor readings instead of words."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(6, config.hidden_size)
        self.bert = hf.BertModel(config, add_pooling_layer=False)

    def forward(self, motion_BTD: Tensor) -> Tensor:
        return self.bert(inputs_embeds=self.embed(motion_BTD))


class Encoder(nn.Module):
    """Maps a modality to the embedding space that all modalities share."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.projection = model, nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = self.model(x).last_hidden_state
        return F.normalize(self.projection(x_BLD.mean(dim=1)), dim=1)


class Similarity(nn.Module):
    """Similarities of all pairs of samples of two modalities, at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, first_BD: Tensor, second_BD: Tensor) -> Tensor:
        return first_BD @ second_BD.T * self.log_scale.exp()


def make_encoders(size: str) -> dict[str, nn.Module]:
    width, unit = SIZES[size]

    def options(depth: int, **more: object) -> dict:
        heads = max(4, width // 64)
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth * unit}
        return {**sizes, "num_attention_heads": heads, **more}

    words = {"vocab_size": NUM_WORDS, "bos_token_id": BEGIN, "eos_token_id": END, "max_position_embeddings": 4}
    bins = {"num_mel_bins": 16, "max_length": 32, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}
    patches = {"image_size": 32, "patch_size": 8}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models = {
        "image": hf.CLIPVisionModel(hf.CLIPVisionConfig(**options(3, **patches))),
        "text": hf.CLIPTextModel(hf.CLIPTextConfig(**options(3, **words))),
        "audio": hf.ASTModel(hf.ASTConfig(**options(2, **bins))),
        "video": hf.VideoMAEModel(hf.VideoMAEConfig(**options(3, **patches, num_frames=4))),
        "depth": hf.ViTModel(hf.ViTConfig(**options(2, **patches, num_channels=1)), add_pooling_layer=False),
        "motion": MotionModel(hf.BertConfig(**options(2, **no_dropout, vocab_size=1, max_position_embeddings=32))),
    }
    return {name: Encoder(model, width) for name, model in models.items()}


def show(step: int, losses: dict[str, float]) -> None:
    print(f"step {step:3}", *(f"{name} {loss:.5f}" for name, loss in losses.items()), sep="  ", flush=True)


def make_task(first, second, encoders, similarity):
    def contrastive(batch):
        logits_BB = similarity(encoders[first](batch[first]), encoders[second](batch[second]))
        return -(logits_BB.log_softmax(0) + logits_BB.log_softmax(1)).diagonal().mean() / 2

    return contrastive


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains six contrastive tasks together.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    torch.manual_seed(0)
    encoders = make_encoders(options.size)
    similarity = Similarity()
    tasks = {f"{first}_{second}": make_task(first, second, encoders, similarity) for first, second in BATCH_SIZES}
    loaders = {
        "_".join(pair): DataLoader(Scenes(pair, options.steps * batch_size), batch_size)
        for pair, batch_size in BATCH_SIZES.items()
    }

    def make_optimizer(named_parameters):
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=options.learning_rate)

    modules = nn.ModuleDict({**encoders, "similarity": similarity})
    optimizer = make_optimizer(modules.named_parameters())
    for step, batches in enumerate(zip(*loaders.values(), strict=True)):
        losses = {name: task(batch) for (name, task), batch in zip(tasks.items(), batches, strict=True)}
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        show(step, {name: loss.item() for name, loss in losses.items()})


if __name__ == "__main__":
    main()
