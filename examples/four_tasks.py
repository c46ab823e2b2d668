"""Four tasks over images, sounds and sentences, trained together on shared towers.

    image_text     contrastive                     vision, text, head
    audio_text     contrastive                     audio, text, head
    image_audio    contrastive                     vision, audio, head
    captioning     next word, a mean over words    vision, decoder

The data is made here. A scene has one of 1,024 concepts: a colour, a pattern and a place. Its image shows stripes of
that colour and direction at that place; its sound has a pitch, a spacing of harmonics and an onset for the three; its
sentence names them behind a varying number of filler words. Images and sounds are noisy.

    python examples/four_tasks.py                          # one process
    spindle launch -n 4 examples/four_tasks.py             # four processes on this machine
    torchrun --nproc-per-node 4 examples/four_tasks.py     # the same, started by torchrun

Letters behind a tensor's name are its dimensions: B samples, L positions, D features, C channels, H and W pixels,
T frames of a sound, F bins of a frame.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import spindle

# Words: four special ones, then 8 colours, 8 patterns and 16 places.
PAD, BEGIN, END, FILLER, COLOUR, PATTERN, PLACE, NUM_WORDS = 0, 1, 2, 3, 4, 12, 20, 36
MOST_FILLERS, SENTENCE = 6, 11
WIDTH = 96  # of the features that towers give


def make_scenes(num_scenes: int, seed: int) -> dict[str, Tensor]:
    """The fields of some scenes, a row for each."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.tensor([8, 8, 16, MOST_FILLERS + 1])
    drawn = (torch.rand(num_scenes, 4, generator=generator) * limits).long()
    colour_B1, pattern_B1, place_B1, fillers_B1 = drawn.split(1, dim=1)

    # Image: one of 4 × 4 cells of 8 × 8 pixels holds stripes. A colour is a corner of the RGB cube.
    angle_B11 = pattern_B1[:, None] * math.pi / 8
    side = torch.arange(8) - 3.5
    stripes_BHW = torch.cos(1.6 * (side * angle_B11.cos() + side[:, None] * angle_B11.sin())) > 0
    rgb_BC = 2.0 * (colour_B1 >> torch.arange(3) & 1) - 1.0
    cells = torch.zeros(num_scenes, 3, 4, 8, 4, 8)
    row, column = place_B1[:, 0] // 4, place_B1[:, 0] % 4
    cells[torch.arange(num_scenes), :, row, :, column] = rgb_BC[:, :, None, None] * stripes_BHW[:, None]
    pixels_BCHW = cells.reshape(num_scenes, 3, 32, 32)

    # Sound: a tone with harmonics that sets in and fades.
    above_BF = torch.arange(32) - colour_B1
    tone_BF = (above_BF >= 0) & (above_BF % (pattern_B1 + 2) == 0)
    since_BT = torch.arange(16) - place_B1
    loudness_BT = torch.exp(-since_BT / 3) * (since_BT >= 0)
    sound_BTF = loudness_BT[:, :, None] * tone_BF[:, None, :]

    # Sentence: BEGIN, fillers, colour, pattern, place, END, and padding.
    words_BL = torch.full((num_scenes, SENTENCE), PAD)
    words_BL[:, 0] = BEGIN
    words_BL[:, 1:][torch.arange(SENTENCE - 1) < fillers_B1] = FILLER
    said = torch.cat([COLOUR + colour_B1, PATTERN + pattern_B1, PLACE + place_B1, torch.full_like(place_B1, END)], 1)
    words_BL.scatter_(1, 1 + fillers_B1 + torch.arange(4), said)

    noisy = {"pixels": pixels_BCHW, "sound": sound_BTF}
    noisy = {name: field + 0.3 * torch.randn(field.shape, generator=generator) for name, field in noisy.items()}
    return {**noisy, "words": words_BL}


class Fields(Dataset):
    """Some fields of the scenes."""

    def __init__(self, scenes: dict[str, Tensor], *names: str) -> None:
        self.fields = {name: scenes[name] for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: field[number] for name, field in self.fields.items()}


def encoder_block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class DecoderBlock(nn.TransformerDecoderLayer):
    """A word sees the words before it and all of the context."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x_BLD: Tensor, context_BLD: Tensor) -> Tensor:
        later_LL = torch.ones(x_BLD.shape[1], x_BLD.shape[1], dtype=torch.bool, device=x_BLD.device).triu(1)
        return super().forward(x_BLD, context_BLD, tgt_mask=later_LL)


class Patches(nn.Conv2d):
    """Patches of an image as a sequence."""

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return super().forward(pixels_BCHW).flatten(2).transpose(1, 2)


class Tower(nn.Module):
    """Features of every position of a sequence: patches of an image, frames of a sound."""

    def __init__(self, stem: nn.Module, num_positions: int, width: int, blocks: list[nn.Module], out: int) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)
        self.position = nn.Parameter(0.02 * torch.randn(num_positions, width))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = self.stem(x) + self.position
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.out(x_BLD)


class TextTower(Tower):
    """Features of a sentence, read at its first word; padding is not looked at."""

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD, padding_BL = self.stem(words_BL) + self.position, words_BL == PAD
        for block in self.blocks:
            x_BLD = block(x_BLD, src_key_padding_mask=padding_BL)
        return self.out(x_BLD[:, 0])


class Decoder(Tower):
    """Logits of the word after each, given an image's features."""

    def forward(self, words_BL: Tensor, context_BLD: Tensor) -> Tensor:
        x_BLD = self.stem(words_BL) + self.position
        for block in self.blocks:
            x_BLD = block(x_BLD, context_BLD)
        return self.out(x_BLD)


class Similarity(nn.Module):
    """How alike each sample of one kind is to each of another, over a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, one_BD: Tensor, other_BD: Tensor) -> Tensor:
        return F.normalize(one_BD, dim=1) @ F.normalize(other_BD, dim=1).T * self.log_scale.exp()


torch.manual_seed(0)
vision = spindle.module("vision", Tower(Patches(3, 128, 8, stride=8), 16, 128, [encoder_block(128) for _ in range(4)], WIDTH))
audio = spindle.module("audio", Tower(nn.Linear(32, 64), 16, 64, [encoder_block(64) for _ in range(4)], WIDTH))
text = spindle.module("text", TextTower(nn.Embedding(NUM_WORDS, 64), SENTENCE, 64, [encoder_block(64) for _ in range(4)], WIDTH))
decoder = spindle.module("decoder", Decoder(nn.Embedding(NUM_WORDS, 96), SENTENCE - 1, 96, [DecoderBlock(96) for _ in range(3)], NUM_WORDS))
head = spindle.module("head", Similarity(), whole_batch=True)  # a sample's loss depends on the others


def contrastive(logits_BB: Tensor) -> Tensor:
    """Each sample should find its partner among all of the batch, both ways."""
    return -(logits_BB.log_softmax(0) + logits_BB.log_softmax(1)).diagonal().mean() / 2


@spindle.task(batch_size=24)
def image_text(batch):
    return contrastive(head(vision(batch["pixels"]).mean(1), text(batch["words"])))


@spindle.task(batch_size=32)
def audio_text(batch):
    return contrastive(head(audio(batch["sound"]).mean(1), text(batch["words"])))


@spindle.task(batch_size=24)
def image_audio(batch):
    return contrastive(head(vision(batch["pixels"]).mean(1), audio(batch["sound"]).mean(1)))


@spindle.task(batch_size=16)
def captioning(batch):
    logits_BLD = decoder(batch["words"][:, :-1], vision(batch["pixels"]))
    next_BL = batch["words"][:, 1:]
    total = F.cross_entropy(logits_BLD.transpose(1, 2), next_BL, ignore_index=PAD, reduction="sum")
    return spindle.mean(total, (next_BL != PAD).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    tasks = [image_text, audio_text, image_audio, captioning]
    fields = [("pixels", "words"), ("sound", "words"), ("pixels", "sound"), ("pixels", "words")]
    scenes = make_scenes(2048, seed=0)
    loaders = {}
    for number, (task, names) in enumerate(zip(tasks, fields, strict=True)):
        order = torch.Generator().manual_seed(number)  # every process reads the same batches
        loaders[task.name] = DataLoader(Fields(scenes, *names), task.batch_size, shuffle=True, drop_last=True, generator=order)

    trainer = spindle.Trainer(tasks, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
    trainer.fit(loaders, steps=steps).print()


if __name__ == "__main__":
    main()
