"""One colour for each module and one letter for each op, the same in every chart of a workload."""

from __future__ import annotations

from dataclasses import dataclass

from spindle.graph import MetaGraph, MetaOp

# Okabe and Ito's eight, which people tell apart whatever they see of red, green and blue, in an order in which
# neighbours differ most; then the same lighter, then darker.
_OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#1a1a1a")


def _mixed(colour: str, other: str, share: float) -> str:
    pairs = ((int(colour[start : start + 2], 16), int(other[start : start + 2], 16)) for start in (1, 3, 5))
    return "#" + "".join(f"{round(first * (1 - share) + second * share):02x}" for first, second in pairs)


COLOURS = (
    *_OKABE_ITO,
    *(_mixed(colour, "#ffffff", 0.5) for colour in _OKABE_ITO),
    *(_mixed(colour, "#404040", 0.5) for colour in _OKABE_ITO),
)
# Letters that have a small form, so that forward and backward can differ, and that no two scripts share.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "ΓΔΘΛΞΠΣΦΨΩ" + "БДЖЗИЙЛЦЧШЩЪЫЭЮЯ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """By op position: its letter, what the letter stands for, and its colour.

    Ops of one module have the same colour. If there are more ops than letters, they also share a letter.
    """

    letters: tuple[str, ...]
    labels: tuple[str, ...]
    colours: tuple[str, ...]


def group_of(op: MetaOp) -> str:
    """The name that determines an op's colour: its module, or its own name if it has no module."""
    return op.name if op.module is None else op.module


def palette_of(graph: MetaGraph) -> Palette:
    """The palette of a workload; it depends on the order of the graph alone."""
    groups = {name: number for number, name in enumerate(dict.fromkeys(group_of(op) for op in graph.metaops))}
    each = len(graph.metaops) <= len(_LETTERS)
    return Palette(
        letters=tuple(
            _LETTERS[(position if each else groups[group_of(op)]) % len(_LETTERS)]
            for position, op in enumerate(graph.metaops)
        ),
        labels=tuple(op.name if each else group_of(op) for op in graph.metaops),
        colours=tuple(COLOURS[groups[group_of(op)] % len(COLOURS)] for op in graph.metaops),
    )


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour (relative luminance of the W3C)."""
    red, green, blue = (_linear(int(colour[start : start + 2], 16) / 255) for start in (1, 3, 5))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def darker(colour: str, share: float = 0.3) -> str:
    """A darker shade of a colour, for backward beside forward; black becomes lighter instead."""
    is_black = all(int(colour[start : start + 2], 16) < 60 for start in (1, 3, 5))
    return _mixed(colour, "#ffffff", 0.25) if is_black else _mixed(colour, "#000000", share)
