"""Four tasks over images, sounds and sentences, trained together on shared towers.

    image_text     contrastive                     vision, text, head
    audio_text     contrastive                     audio, text, head
    image_audio    contrastive                     vision, audio, head
    captioning     next word, a mean over words    vision, decoder

The data is made here, from a seed. A scene is a square of some colour at some place, on a background of some colour. An
image shows it. Its sound is a hum for the background and a tone for the square, whose pitch is the colour and whose
onset is the place. Its sentence names all three, after a varying number of filler words. Images and sounds are noisy.

    python examples/four_tasks.py                          # one process
    spindle launch -n 4 examples/four_tasks.py             # four processes on this machine
    torchrun --nproc-per-node 4 examples/four_tasks.py     # the same, started by torchrun

Letters behind a name are the tensor's dimensions: B samples, L positions, D features, CHW of images, T frames, F bins.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

import spindle

# Words: four special ones, then 8 grounds, 8 colours and 9 places.
PAD, BEGIN, END, FILLER, GROUND, COLOUR, PLACE, NUM_WORDS = 0, 1, 2, 3, 4, 12, 20, 29
MOST_FILLERS, LENGTH = 4, 9  # of a sentence
WIDTH = 96  # of the output features of towers


def make_scenes(num_scenes: int, seed: int) -> dict[str, Tensor]:
    """Images, sounds and sentences of scenes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(num_scenes, 4, generator=generator) * torch.tensor([8, 8, 9, MOST_FILLERS + 1])).long()
    ground_B1, colour_B1, place_B1, fillers_B1 = drawn.split(1, dim=1)

    # Image: 3 × 3 places for a square of half its side. Colours are corners of the RGB cube, those of grounds are dull.
    row_BH, column_BW = torch.arange(32) // 8 - place_B1 // 3, torch.arange(32) // 8 - place_B1 % 3
    inside_BHW = (row_BH // 2 == 0)[:, :, None] & (column_BW // 2 == 0)[:, None, :]
    square_BC, ground_BC = (2.0 * (code_B1 >> torch.arange(3) & 1) - 1.0 for code_B1 in (colour_B1, ground_B1))
    pixels_BCHW = torch.where(inside_BHW[:, None], square_BC[:, :, None, None], 0.5 * ground_BC[:, :, None, None])
    pixels_BCHW += 0.3 * torch.randn(pixels_BCHW.shape, generator=generator)

    # Sound: a tone that sets in and fades in the lower bins, a hum in the upper ones.
    since_BT = torch.arange(16) - place_B1
    loudness_BT = torch.exp(-since_BT / 6) * (since_BT >= 0)
    tone_BF, hum_BF = torch.arange(32) == 2 * colour_B1, torch.arange(32) == 2 * ground_B1 + 16
    sound_BTF = loudness_BT[:, :, None] * tone_BF[:, None] + hum_BF[:, None]
    sound_BTF += 0.3 * torch.randn(sound_BTF.shape, generator=generator)

    # Sentence: BEGIN, fillers, ground, colour, place, END, and padding.
    words_BL = torch.where(torch.arange(LENGTH) <= fillers_B1, FILLER, PAD)
    words_BL[:, 0] = BEGIN
    sentence = torch.cat(
        [GROUND + ground_B1, COLOUR + colour_B1, PLACE + place_B1, torch.full_like(place_B1, END)], dim=1
    )
    words_BL.scatter_(1, 1 + fillers_B1 + torch.arange(4), sentence)
    return {"pixels": pixels_BCHW, "sound": sound_BTF, "words": words_BL}


class DecoderBlock(nn.TransformerDecoderLayer):
    def forward(self, x_BLD: Tensor, features_BLD: Tensor) -> Tensor:
        causal_LL = nn.Transformer.generate_square_subsequent_mask(x_BLD.shape[1], x_BLD.device, x_BLD.dtype)
        return super().forward(x_BLD, features_BLD, tgt_mask=causal_LL)


class Tower(nn.Module):
    """Features of every position of a sequence: patches of an image, frames of a sound, words."""

    block = nn.TransformerEncoderLayer

    def __init__(self, stem: nn.Module, length: int, width: int, depth: int, out: int = WIDTH) -> None:
        super().__init__()
        self.stem, self.position_LD = stem, nn.Parameter(0.02 * torch.randn(length, width))
        options = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(self.block(width, **options) for _ in range(depth))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = self.stem(x) + self.position_LD
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.out(x_BLD)


class Decoder(Tower):
    """The logits of each next word, given the words before it and an image."""

    block = DecoderBlock

    def forward(self, words_BL: Tensor, features_BLD: Tensor) -> Tensor:
        x_BLD = self.stem(words_BL) + self.position_LD
        for block in self.blocks:
            x_BLD = block(x_BLD, features_BLD)
        return self.out(x_BLD)


class Similarity(nn.Module):
    """Similarities of all pairs of samples of two modalities, at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, first_BD: Tensor, second_BD: Tensor) -> Tensor:
        return F.normalize(first_BD, dim=1) @ F.normalize(second_BD, dim=1).T * self.log_scale.exp()


torch.manual_seed(0)
vision = spindle.module("vision", Tower(nn.Linear(192, 96), length=16, width=96, depth=5))
audio = spindle.module("audio", Tower(nn.Linear(32, 64), length=16, width=64, depth=4))
text = spindle.module("text", Tower(nn.Embedding(NUM_WORDS, 64), length=LENGTH, width=64, depth=4))
decoder = spindle.module("decoder", Decoder(nn.Embedding(NUM_WORDS, 96), LENGTH - 1, width=96, depth=3, out=NUM_WORDS))
head = spindle.module("head", Similarity(), whole_batch=True)  # each sample is compared with all others


def see(batch):
    """Features of an image's patches. Code between modules is ordinary PyTorch."""
    return vision(F.unfold(batch["pixels"], 8, stride=8).transpose(1, 2))


def contrastive(first_BLD, second_BLD):
    """Each sample should be most similar to its partner, among all samples of the batch."""
    logits_BB = head(first_BLD.mean(1), second_BLD.mean(1))
    return -(logits_BB.log_softmax(0) + logits_BB.log_softmax(1)).diagonal().mean() / 2


@spindle.task(batch_size=24)
def image_text(batch):
    return contrastive(see(batch), text(batch["words"]))


@spindle.task(batch_size=32)
def audio_text(batch):
    return contrastive(audio(batch["sound"]), text(batch["words"]))


@spindle.task(batch_size=16)
def image_audio(batch):
    return contrastive(see(batch), audio(batch["sound"]))


@spindle.task(batch_size=16)
def captioning(batch):
    given_BL, next_BL = batch["words"][:, :-1], batch["words"][:, 1:]
    logits_BDL = decoder(given_BL, see(batch)).transpose(1, 2)
    total = F.cross_entropy(logits_BDL, next_BL, ignore_index=PAD, reduction="sum")
    return spindle.mean(total, (next_BL != PAD).sum())  # each batch has its own number of words


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains four tasks together.")
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    tasks = [image_text, audio_text, image_audio, captioning]
    scenes = StackDataset(**make_scenes(2048, seed=0))
    loaders = {}
    for seed, task in enumerate(tasks):
        order = torch.Generator().manual_seed(seed)  # every process reads the same batches
        loaders[task.name] = DataLoader(scenes, task.batch_size, shuffle=True, drop_last=True, generator=order)

    trainer = spindle.Trainer(tasks, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
    result = trainer.fit(loaders, steps=steps)
    result.print()


if __name__ == "__main__":
    main()
