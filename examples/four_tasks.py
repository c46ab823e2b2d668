"""Four tasks over images, sounds and sentences, trained together on shared towers.

    image_text     contrastive                     vision, text, head
    audio_text     contrastive                     audio, text, head
    image_audio    contrastive                     vision, audio, head
    captioning     next word, a mean over words    vision, decoder

The data is made here, from a seed. A scene is a square of some colour at some place on a ground of some colour. Its
image shows that; its sound is a hum for the ground and a tone for the square, whose pitch is the colour and whose onset
is the place; its sentence names the three behind a varying number of filler words. Images and sounds are noisy.

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

# Words: four special ones, then 8 grounds, 8 colours and 9 places.
PAD, BEGIN, END, FILLER, GROUND, COLOUR, PLACE, NUM_WORDS = 0, 1, 2, 3, 4, 12, 20, 29
MOST_FILLERS, NUM_POSITIONS = 4, 9  # of a sentence
WIDTH = 96  # of what a tower gives


def make_scenes(num_scenes: int, seed: int) -> dict[str, Tensor]:
    """The fields of some scenes, a row for each."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.tensor([8, 8, 9, MOST_FILLERS + 1])
    drawn = (torch.rand(num_scenes, 4, generator=generator) * limits).long()
    ground_B1, colour_B1, place_B1, fillers_B1 = drawn.split(1, dim=1)

    # Image: places are 3 × 3, the square covers a quarter. Colours are corners of the RGB cube, the ground's are pale.
    row_BH, column_BW = torch.arange(32) // 8 - place_B1 // 3, torch.arange(32) // 8 - place_B1 % 3
    inside_BHW = (row_BH // 2 == 0)[:, :, None] & (column_BW // 2 == 0)[:, None, :]
    square_BC, ground_BC = (2.0 * (one >> torch.arange(3) & 1) - 1.0 for one in (colour_B1, ground_B1))
    pixels_BCHW = torch.where(inside_BHW[:, None], square_BC[:, :, None, None], 0.5 * ground_BC[:, :, None, None])

    # Sound: the lower bins hold a tone that sets in and fades, the upper ones a hum.
    since_BT = torch.arange(16) - place_B1
    loudness_BT = torch.exp(-since_BT / 6) * (since_BT >= 0)
    tone_BF, hum_BF = torch.arange(32) == 2 * colour_B1, torch.arange(32) == 2 * ground_B1 + 16
    sound_BTF = loudness_BT[:, :, None] * tone_BF[:, None] + 1.0 * hum_BF[:, None]

    # Sentence: BEGIN, fillers, ground, colour, place, END, and padding.
    words_BL = torch.full((num_scenes, NUM_POSITIONS), PAD)
    words_BL[torch.arange(NUM_POSITIONS) <= fillers_B1] = FILLER
    words_BL[:, 0] = BEGIN
    said = torch.cat([GROUND + ground_B1, COLOUR + colour_B1, PLACE + place_B1, torch.full_like(place_B1, END)], dim=1)
    words_BL.scatter_(1, 1 + fillers_B1 + torch.arange(4), said)

    noisy = {"pixels": pixels_BCHW, "sound": sound_BTF}
    noisy = {name: field + 0.3 * torch.randn(field.shape, generator=generator) for name, field in noisy.items()}
    return {**noisy, "words": words_BL}


class Fields(Dataset):
    """Scenes as samples, with the fields that a task reads."""

    def __init__(self, scenes: dict[str, Tensor], names: tuple[str, ...]) -> None:
        self.fields = {name: scenes[name] for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: field[number] for name, field in self.fields.items()}


class Patches(nn.Conv2d):
    """The patches of an image as a sequence."""

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return super().forward(pixels_BCHW).flatten(2).transpose(1, 2)


class EncoderBlock(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class DecoderBlock(nn.TransformerDecoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x_BLD: Tensor, seen_BLD: Tensor) -> Tensor:
        causal_LL = nn.Transformer.generate_square_subsequent_mask(x_BLD.shape[1], x_BLD.device, x_BLD.dtype)
        return super().forward(x_BLD, seen_BLD, tgt_mask=causal_LL)


class Tower(nn.Module):
    """Features of every position of a sequence: the patches of an image, the frames of a sound."""

    def __init__(self, stem: nn.Module, num_positions: int, blocks: list[nn.Module], width: int, out: int) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)
        self.position_LD = nn.Parameter(0.02 * torch.randn(num_positions, width))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = self.stem(x) + self.position_LD
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.out(x_BLD)


class TextTower(Tower):
    """Features of a sentence, read off its first word; padding is not seen."""

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD, padding_BL = self.stem(words_BL) + self.position_LD, words_BL == PAD
        for block in self.blocks:
            x_BLD = block(x_BLD, src_key_padding_mask=padding_BL)
        return self.out(x_BLD[:, 0])


class Decoder(Tower):
    """Logits of the word that follows each word, given what is seen."""

    def forward(self, words_BL: Tensor, seen_BLD: Tensor) -> Tensor:
        x_BLD = self.stem(words_BL) + self.position_LD
        for block in self.blocks:
            x_BLD = block(x_BLD, seen_BLD)
        return self.out(x_BLD)
