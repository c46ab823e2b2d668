"""The towers of the recipes as PyTorch modules: stem, equal blocks, end.

Sizes are those of `spindle.recipes`, but for QWen-VAL, which is scaled to fit an eighth of one H200. Inputs other than
words are ready-made features of patches or frames: no convolution stands before the towers. There is no dropout, and
positions are learned tables, in the language model too.

    CLIP       six encoders of ImageBind-huge                                                      1.20 B parameters
    OFASys     five adaptors, the words, encoder and decoder of OFA-large; decoder and words share a table    0.67 B
    QWen-VAL   ViT-L/14 (24 layers of 1024), Whisper-medium's encoder (24 of 1024), and Qwen1.5-0.5B (24 of 1024, gated
               to 2816, 151,936 words, one table for words and logits)                                        1.07 B

Letters behind a name are dimensions: B samples, L positions, M positions of an encoder, N positions with a target,
D channels, H heads, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spindle.recipes import clip, ofasys
from spindle.recipes.transformer import Tower as Sizes

SHARED_WIDTH = 1024  # of the space in which CLIP compares modalities
FEATURES = {"vision": 588, "audio": 256, "depth": 256, "thermal": 256, "motion": 96, "structure": 64, "box": 64}
POOLED = 4  # neighbouring positions of an encoder that become one of QWen-VAL's language model
LONGEST = 640  # positions of OFASys's and QWen-VAL's tables
QWEN_VAL = {
    sizes.name: sizes
    for sizes in (
        Sizes(name="vision", num_layers=24, width=1024, num_heads=16),
        Sizes(name="audio", num_layers=24, width=1024, num_heads=16),
        Sizes(name="language", num_layers=24, width=1024, num_heads=16, mlp_width=2816, gated=True, vocabulary=151936),
    )
}
SMALL_VOCABULARY = 101


def small_sizes(sizes: Sizes) -> Sizes:
    """A tower of the same shape that a CPU runs in no time."""
    return Sizes(
        name=sizes.name,
        num_layers=min(sizes.num_layers, 3 if sizes.num_layers > 12 else 2),
        width=32 if sizes.width > 768 else 16,
        num_heads=2,
        gated=sizes.gated,
        cross_attention=sizes.cross_attention,
        vocabulary=SMALL_VOCABULARY if sizes.vocabulary else 0,
    )


class Attention(nn.Module):
    """Of a sequence to itself, or to another one."""

    def __init__(self, width: int, num_heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.mix, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        query, key, value = (_heads(part, self.num_heads) for part in self.mix(x_BLD).chunk(3, dim=-1))
        return self.out(_joined(F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)))


class CrossAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.mix, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor) -> Tensor:
        key, value = (_heads(part, self.num_heads) for part in self.mix(memory_BMD).chunk(2, dim=-1))
        return self.out(_joined(F.scaled_dot_product_attention(_heads(self.query(x_BLD), self.num_heads), key, value)))


def _heads(x_BLD: Tensor, num_heads: int) -> Tensor:
    return x_BLD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _joined(x_BHLD: Tensor) -> Tensor:
    return x_BHLD.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A layer of an encoder: attention and a feed-forward part, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(sizes.width), Attention(sizes.width, sizes.num_heads)
        self.feed = _feed(sizes)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm(x_BLD))
        return x_BLD + self.feed(x_BLD)


class DecoderBlock(nn.Module):
    """A layer that sees earlier positions and all of an encoder's."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.num_heads, causal=True)
        self.cross_norm, self.cross = nn.LayerNorm(sizes.width), CrossAttention(sizes.width, sizes.num_heads)
        self.feed = _feed(sizes)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm(x_BLD))
        x_BLD = x_BLD + self.cross(self.cross_norm(x_BLD), memory_BMD)
        return x_BLD + self.feed(x_BLD)


class GatedBlock(nn.Module):
    """A layer of a language model: causal, root-mean-square norms, a gate in the feed-forward part, no biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.num_heads, causal=True, bias=False)
        self.widen = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.narrow = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm(x_BLD))
        gate, value = self.widen(self.feed_norm(x_BLD)).chunk(2, dim=-1)
        return x_BLD + self.narrow(F.silu(gate) * value)


def _feed(sizes: Sizes) -> nn.Sequential:
    width, hidden = sizes.width, sizes.hidden
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class FeatureStem(nn.Module):
    """Ready-made features of patches or frames, with positions."""

    def __init__(self, num_features: int, length: int, width: int) -> None:
        super().__init__()
        self.project, self.position_LD = nn.Linear(num_features, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, x_BLF: Tensor) -> Tensor:
        return self.project(x_BLF) + self.position_LD[: x_BLF.shape[1]]


class Words(nn.Module):
    """Words with positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.table, self.position_LD = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, words_BL: Tensor) -> Tensor:
        return self.table(words_BL) + self.position_LD[: words_BL.shape[1]]


class Pooled(nn.Module):
    """One vector of the shared space for each sample."""

    def __init__(self, width: int, width_out: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, width_out, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.project(self.norm(x_BLD).mean(1))


class Projected(nn.Module):
    """Every position, or the mean of every few neighbours, for the model behind."""

    def __init__(self, width: int, width_out: int, pooled: int = 1) -> None:
        super().__init__()
        self.pooled, self.norm, self.project = pooled, nn.LayerNorm(width), nn.Linear(width, width_out)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.norm(x_BLD)
        if self.pooled > 1:
            x_BLD = x_BLD.unflatten(1, (-1, self.pooled)).mean(2)
        return self.project(x_BLD)


class TokenLoss(nn.Module):
    """What each target costs at the last positions: logits over the words of a table, which is another module's too.

    It is a tower's end because logits are a hundred times larger than what goes into them: one number for each target
    leaves. Logits are not computed in chunks: QWen-VAL's take 370 MB a sample at most, 150 of them until its backward.
    """

    def __init__(self, norm: nn.Module, table: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.weight = norm, table.weight

    def forward(self, x_BLD: Tensor, target_BN: Tensor) -> Tensor:
        logits = F.linear(self.norm(x_BLD[:, -target_BN.shape[1] :]), self.weight)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), target_BN.flatten(), reduction="none")
        return losses.view_as(target_BN)


class Encoder(nn.Module):
    def __init__(self, stem: nn.Module, sizes: Sizes, end: nn.Module) -> None:
        super().__init__()
        self.stem, self.end = stem, end
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class Decoder(nn.Module):
    """What each target costs, given the targets before it (embedded) and what an encoder saw."""

    def __init__(self, sizes: Sizes, table: nn.Embedding) -> None:
        super().__init__()
        self.stem = nn.LayerNorm(sizes.width)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.num_layers))
        self.end = TokenLoss(nn.LayerNorm(sizes.width), table)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor, target_BN: Tensor) -> Tensor:
        x_BLD = self.stem(x_BLD)
        for block in self.blocks:
            x_BLD = block(x_BLD, memory_BMD)
        return self.end(x_BLD, target_BN)


class Language(nn.Module):
    """What each target costs, given all positions before it."""

    def __init__(self, sizes: Sizes, table: nn.Embedding) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock(sizes) for _ in range(sizes.num_layers))
        self.end = TokenLoss(nn.RMSNorm(sizes.width), table)

    def forward(self, x_BLD: Tensor, target_BN: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.end(x_BLD, target_BN)


def clip_towers(names: set[str], small: bool) -> dict[str, nn.Module]:
    """Encoders into one shared space."""
    towers: dict[str, nn.Module] = {}
    for name, full in clip.TOWERS.items():
        if name in names:
            sizes, length = (small_sizes(full) if small else full), clip.TOKENS[name]
            stem = Words(sizes.vocabulary, length, sizes.width) if name == "text" else _stem(name, length, sizes)
            towers[name] = Encoder(stem, sizes, Pooled(sizes.width, 16 if small else SHARED_WIDTH))
    return towers


def ofasys_towers(names: set[str], small: bool) -> dict[str, nn.Module]:
    """Adaptors, words, encoder and decoder."""
    all_sizes = {name: small_sizes(full) if small else full for name, full in ofasys.TOWERS.items()}
    width = all_sizes["encoder"].width
    towers: dict[str, nn.Module] = {"text": Words(all_sizes["text"].vocabulary, LONGEST, width)}
    for name in all_sizes:
        if name in names - {"text", "encoder", "decoder"}:
            sizes = all_sizes[name]
            towers[name] = Encoder(_stem(name, LONGEST, sizes), sizes, Projected(sizes.width, width))
    towers["encoder"] = Encoder(nn.LayerNorm(width), all_sizes["encoder"], nn.LayerNorm(width))
    towers["decoder"] = Decoder(all_sizes["decoder"], towers["text"].table)
    return towers


def qwen_val_towers(small: bool) -> dict[str, nn.Module]:
    """Two encoders, the words, and the language model that reads all of them."""
    all_sizes = {name: small_sizes(full) if small else full for name, full in QWEN_VAL.items()}
    width = all_sizes["language"].width
    towers: dict[str, nn.Module] = {}
    for name in ("vision", "audio"):
        sizes = all_sizes[name]
        towers[name] = Encoder(_stem(name, LONGEST, sizes), sizes, Projected(sizes.width, width, pooled=POOLED))
    words = Words(all_sizes["language"].vocabulary, LONGEST, width)
    return towers | {"words": words, "language": Language(all_sizes["language"], words.table)}


def _stem(name: str, length: int, sizes: Sizes) -> FeatureStem:
    return FeatureStem(FEATURES[name], length, sizes.width)


@torch.no_grad()
def initialise(towers: dict[str, nn.Module], seed: int) -> None:
    """Gives every parameter the value that follows from the seed, whatever it was before."""
    generator: torch.Generator | None = None
    for tower in towers.values():
        for path, parameter in tower.named_parameters():
            generator = generator or torch.Generator(parameter.device).manual_seed(seed)
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:  # a bias, or the scale of a norm
                parameter.fill_(0.0 if path.endswith("bias") else 1.0)


def num_parameters(towers: dict[str, nn.Module]) -> int:
    """How many numbers are trained; a shared table counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(towers.values()).parameters())
