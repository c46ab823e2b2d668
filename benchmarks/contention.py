"""Pressure and fill of a layer in short and in long bursts: python benchmarks/contention.py -o contention.json

A GPU that four copies of a layer fill may reach its power limit and lower its clock, which a burst of some milliseconds
does not show. For layers of ImageBind-huge's sizes (bfloat16, forward and backward in CUDA graphs), at several batch
sizes: pressure and fill of both passes, by the length of a burst.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from spindle.measure import contention
from spindle.measure.timing import Work

LAYERS = {"vision": (1280, 16, 257), "audio": (768, 12, 229)}  # width, heads, tokens
NUM_LAYERS = 3  # behind each other, as a profile times them


def copy_of(name: str, batch: int) -> Work:
    width, heads, tokens = LAYERS[name]
    layers = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(NUM_LAYERS)
        )
    ).to("cuda", torch.bfloat16)
    rows = torch.randn(batch, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return Work(
        run=lambda: layers(rows),
        leaves=(rows,),
        parameters=tuple(layers.parameters()),
        device=torch.device("cuda", 0),
        is_graphed=True,
        copies_gradients=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--batches", default="16,8,32,4")
    parser.add_argument("--bursts", default="0.02,0.2")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    options = parser.parse_args()
    began = time.monotonic()
    cells = json.loads(options.output.read_text()) if options.output.exists() else {}
    for batch in map(int, options.batches.split(",")):
        for name in LAYERS:
            copies: list[Work] = []
            for burst_s in map(float, options.bursts.split(",")):
                key = f"{name}/{batch}/{burst_s:g}"
                if key in cells or time.monotonic() - began > options.budget_s:
                    continue
                copies = copies or [copy_of(name, batch) for _ in range(contention.NUM_COPIES)]
                with mock.patch.multiple(contention, _BUSY_S=burst_s, _MAX_REPEATS=100_000):
                    measured, _ = contention.measure_contention(copies)
                cells[key] = {"forward": measured.forward, "backward": measured.backward}
                options.output.write_text(json.dumps(cells, indent=1))
                (p, f), (bp, bf) = measured.forward, measured.backward
                print(
                    f"{time.monotonic() - began:5.0f} s  {key:18s} forward: pressure {p:.3f}, fill {f:.3f}; backward: "
                    f"{bp:.3f}, {bf:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
