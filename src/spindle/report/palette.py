"""One colour for each module and one letter for each op, the same in every chart of a workload."""

from __future__ import annotations

from dataclasses import dataclass

from spindle.graph import MetaGraph, MetaOp

# Ten strong colours and their ten light companions; neighbours differ in hue and in lightness.
_COLOURS = (
    "#1f6fb4",
    "#f28e2b",
    "#3a9a4a",
    "#c23b3e",
    "#8a63b5",
    "#8c5b45",
    "#d873b4",
    "#b5a62a",
    "#2ba7b8",
    "#6b7280",
    "#9ec5e8",
    "#fbc98c",
    "#a3d9a0",
    "#f0a09c",
    "#c9b4de",
    "#c9a896",
    "#f2b8d9",
    "#dedb8c",
    "#a0dbe3",
    "#c3c7cd",
)
# Letters that have a small form, so that forward and backward can differ, and that no two scripts share.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "ΓΔΘΛΞΠΣΦΨΩ" + "БДЖЗИЙЛЦЧШЩЪЫЭЮЯ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """By op position: its letter, what the letter stands for, its colour.

    Ops of one module have one colour. Where there are more ops than letters, ops of one module share a letter too.
    """

    letters: tuple[str, ...]
    labels: tuple[str, ...]
    colours: tuple[str, ...]


def group_of(op: MetaOp) -> str:
    """What an op has its colour from: its module, or itself where there is none."""
    return op.name if op.module is None else op.module


def palette_of(graph: MetaGraph) -> Palette:
    """The palette of a workload; it follows the order of the graph alone."""
    groups = {name: number for number, name in enumerate(dict.fromkeys(group_of(op) for op in graph.metaops))}
    each = len(graph.metaops) <= len(_LETTERS)
    return Palette(
        letters=tuple(
            _LETTERS[(position if each else groups[group_of(op)]) % len(_LETTERS)]
            for position, op in enumerate(graph.metaops)
        ),
        labels=tuple(op.name if each else group_of(op) for op in graph.metaops),
        colours=tuple(_COLOURS[groups[group_of(op)] % len(_COLOURS)] for op in graph.metaops),
    )


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour (relative luminance of the W3C)."""
    red, green, blue = (_linear(int(colour[start : start + 2], 16) / 255) for start in (1, 3, 5))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.28 else "#ffffff"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def darker(colour: str, share: float = 0.4) -> str:
    """The colour with some black in it: backward beside forward."""
    return "#" + "".join(f"{round(int(colour[start : start + 2], 16) * (1 - share)):02x}" for start in (1, 3, 5))
