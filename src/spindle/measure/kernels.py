"""What do kernels reach of a GPU's peaks? GEMM, attention and memory-bound kernels, each at many sizes, as a table.

    python -m spindle.measure.kernels -o kernels.json

Times are those of a busy GPU: a large GEMM runs before each group of repeats, so that launches are ahead of the GPU and
its clock is that of sustained work; operands are random numbers from far apart, so that none waits in a cache. Medians
of several groups. The shapes are those of the recipes' models at their tensor degrees, and a grid around them.

Left out: several kernels at once, links, and kernels other than torch's own (cuBLAS, the faster of its flash and cuDNN
attention).
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spindle.artifact import write_artifact
from spindle.cluster import PRESETS, DeviceKind
from spindle.errors import ProfileError
from spindle.profile import Attention, AttentionTable, Efficiencies, Gemm, GemmColumn, MemoryTable, Operator
from spindle.profile.efficiency import KIND
from spindle.profile.operators import Pass
from spindle.recipes.layers import Lengths
from spindle.recipes.multimodal import MODELS, Chain

_DEVICE = torch.device("cuda")
_GROUPS = 3
_GROUP_S, _MOST_REPEATS = 1e-3, 48
_FILLER = 8192  # of a GEMM that takes about a millisecond
_POOL = 1 << 31  # elements that operands are taken from
_LAUNCH_S = 1.5e-6  # a guess for choosing repeats; it is measured

_GRID = tuple(1 << power for power in range(7, 15))  # of outputs and inputs
_GRID_TOKENS = tuple(1 << power for power in range(7, 17))
_PASSES: tuple[Pass, ...] = ("forward", "input", "weight")
_IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
_CLIPS = tuple(1 << power for power in range(10, 18))
_CLIP_TEXT = (128, 512, 1024, 2048, 4096, 8192)

# Head width, mask, planes, lengths. A ViT of width 1792 has heads of 112; 2704 are the patches of an image.
_ATTENTION = (
    (112, False, (2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 2704, 8192)),
    (128, False, (2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 2704, 4096, 8192, 16384)),
    (128, True, (2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192, 16384)),
)
_MOST_ATTENTION_FLOPS = 1.2e13
_MEMORY_BYTES = tuple(1 << power for power in range(20, 32))


@dataclass(slots=True)
class _Bench:
    """One GPU with its filler, its pools of random numbers and a place in them."""

    kind: DeviceKind
    pools: list[torch.Tensor] = field(default_factory=list)
    filler: list[torch.Tensor] = field(default_factory=list)
    place: int = 0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for _ in range(3):
            pool = torch.empty(_POOL, device=_DEVICE, dtype=torch.bfloat16)
            for start in range(0, _POOL, _POOL // 8):
                pool[start : start + _POOL // 8].normal_()
            self.pools.append(pool)
        self.filler = [torch.randn(_FILLER, _FILLER // 2, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        one = torch.zeros(1, device=_DEVICE)
        self.launch_s = self.seconds([lambda: one.add_(1.0)] * _MOST_REPEATS)

    def operand(self, pool: int, *shape: int) -> torch.Tensor:
        """Random numbers that no kernel has touched for long."""
        size = math.prod(shape)
        if self.place + size > _POOL:
            self.place = 0
        return self.pools[pool][self.place : self.place + size].view(*shape)

    def step(self, elements: int) -> None:
        self.place = (self.place + -(-elements // 512) * 512) % _POOL

    def num_repeats(self, flops: float, num_bytes: float) -> int:
        roofline_s = max(flops / self.kind.peak_flops, num_bytes / self.kind.memory_bytes_per_s)
        return max(1, min(_MOST_REPEATS, round(_GROUP_S / (1.6 * roofline_s + _LAUNCH_S))))

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        """Seconds of each of these calls, one straight behind another."""
        calls[0]()
        marks = []
        for _ in range(_GROUPS):
            torch.mm(self.filler[0], self.filler[1].t())
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for call in calls:
                call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in marks)) / len(calls) / 1e3

    def efficiency(self, flops: float, num_bytes: float, seconds: float) -> float:
        roofline_s = max(flops / self.kind.peak_flops, num_bytes / self.kind.memory_bytes_per_s)
        return float(f"{min(1.99, roofline_s / max(seconds - self.launch_s, 2e-7)):.4g}")


def _gemm(bench: _Bench, gemm: Gemm) -> float:
    tokens, outputs, inputs = gemm.tokens, gemm.outputs, gemm.inputs
    result = {
        "forward": (tokens, outputs),
        "input": (tokens, inputs),
        "weight": (outputs, inputs),
    }[gemm.pass_]
    out = torch.empty(result, device=_DEVICE, dtype=torch.bfloat16)
    largest = max(tokens * outputs, tokens * inputs, outputs * inputs)

    def call() -> Callable[[], object]:
        bench.step(largest)
        x, dy, w = (
            bench.operand(0, tokens, inputs),
            bench.operand(1, tokens, outputs),
            bench.operand(2, outputs, inputs),
        )
        match gemm.pass_:
            case "forward":
                return lambda: torch.mm(x, w.t(), out=out)
            case "input":
                return lambda: torch.mm(dy, w, out=out)
            case "weight":
                return lambda: torch.mm(dy.t(), x, out=out)

    repeats = bench.num_repeats(gemm.flops, gemm.memory_bytes)
    return bench.efficiency(gemm.flops, gemm.memory_bytes, bench.seconds([call() for _ in range(repeats)]))


def _column(bench: _Bench, outputs: int, inputs: int, tokens: Iterable[int]) -> GemmColumn:
    sizes = tuple(sorted(set(tokens)))
    by_pass = [
        tuple(_gemm(bench, Gemm(tokens=count, outputs=outputs, inputs=inputs, pass_=pass_)) for count in sizes)
        for pass_ in _PASSES
    ]
    return GemmColumn(
        outputs=outputs, inputs=inputs, tokens=sizes, forward=by_pass[0], input=by_pass[1], weight=by_pass[2]
    )


def recipe_shapes() -> dict[tuple[int, int], set[int]]:
    """The shapes of weights in the recipes' models at their tensor degrees, each with numbers of tokens."""
    shapes: dict[tuple[int, int], set[int]] = {}
    for model in MODELS.values():
        for chain in model.chains:
            for operator in _operators(chain, model.tensor_degree):
                if isinstance(operator, Gemm):
                    shapes.setdefault((operator.outputs, operator.inputs), set()).add(operator.tokens)
    return shapes


def _operators(chain: Chain, degree: int) -> Iterable[Operator]:
    lengths: list[tuple[Lengths, Lengths]]
    if chain.tower.cross_attention:
        lengths = [(((count, 1),), ((text, 1),)) for count in _CLIPS for text in _CLIP_TEXT]
    elif chain.before == "patches":
        lengths = [(((2704, count),), ()) for count in _IMAGES]
    else:
        lengths = [(((count, 1),), ()) for count in _SEQUENCES]
    for own, context in lengths:
        for _, shape, _ in chain.shapes(own, context):
            yield from shape.operators(degree).forward


def _attention_table(
    bench: _Bench, head_width: int, causal: bool, planes: tuple[int, ...], lengths: tuple[int, ...], deadline: float
) -> AttentionTable:
    """A row for each number of planes; what is too much work for a table has the efficiency of half the planes."""
    forward: list[tuple[float, ...]] = []
    backward: list[tuple[float, ...]] = []
    for count in planes:
        rows: tuple[list[float], list[float]] = ([], [])
        for position, length in enumerate(lengths):
            attention = Attention(
                count=1,
                queries=length,
                keys=length,
                heads=count,
                key_heads=count,
                head_width=head_width,
                causal=causal,
            )
            if attention.flops > _MOST_ATTENTION_FLOPS and forward:
                found = forward[-1][position], backward[-1][position]
            else:
                found = _attention(bench, attention, deadline)
            for row, value in zip(rows, found, strict=True):
                row.append(value)
        forward.append(tuple(rows[0]))
        backward.append(tuple(rows[1]))
    return AttentionTable(
        head_width=head_width,
        causal=causal,
        planes=planes,
        lengths=lengths,
        forward=tuple(forward),
        backward=tuple(backward),
    )


def _attention(bench: _Bench, attention: Attention, deadline: float) -> tuple[float, float]:
    """Forward and backward efficiency, of the backend that is faster in both together."""
    shape = (1, attention.heads, attention.queries, attention.head_width)
    again = replace(attention, backward=True)
    best: tuple[float, float, float] | None = None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if best is not None and time.monotonic() > deadline:
            break
        try:
            with sdpa_kernel(backend):
                found = _attention_s(bench, attention, again, shape)
        except RuntimeError as error:
            print(f"{backend.name}: no attention of {shape}: {str(error)[:80]}", file=sys.stderr)
            continue
        if best is None or sum(found) < best[0]:
            best = (sum(found), *found)
    if best is None:
        raise ProfileError(f"no attention kernel of torch runs {shape}")
    return (
        bench.efficiency(attention.flops, attention.memory_bytes, best[1]),
        bench.efficiency(again.flops, again.memory_bytes, best[2]),
    )


def _attention_s(bench: _Bench, attention: Attention, again: Attention, shape: tuple[int, ...]) -> tuple[float, float]:
    repeats = max(1, min(12, bench.num_repeats(2 * attention.flops, attention.memory_bytes)))

    def inputs() -> list[torch.Tensor]:
        bench.step(math.prod(shape))
        return [bench.operand(number, *shape).detach().requires_grad_() for number in range(3)]

    sets = [inputs() for _ in range(repeats)]

    def run(one: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(one[0], one[1], one[2], is_causal=attention.causal)

    with torch.no_grad():
        forward_s = bench.seconds([lambda one=one: run(one) for one in sets])  # type: ignore[misc]
    outputs = [run(one) for one in sets]
    gradient = torch.randn_like(outputs[0])

    def back(one: list[torch.Tensor], output: torch.Tensor) -> object:
        return torch.autograd.grad(output, one, gradient, retain_graph=True)

    backward_s = bench.seconds(
        [lambda one=one, output=output: back(one, output) for one, output in zip(sets, outputs, strict=True)]  # type: ignore[misc]
    )
    return forward_s, backward_s


def _memory_tables(bench: _Bench) -> tuple[MemoryTable, ...]:
    width, vocabulary = 4096, 32_768
    weight, bias = (torch.randn(width, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2))
    table = bench.pools[2][: 131_072 * width].view(-1, width)

    def kernel(kind: str, elements: int) -> tuple[Callable[[], object], float]:
        """A call over so many elements, and its bytes as the operators count them."""
        bench.step(elements)
        rows = elements // width
        x, y = (bench.operand(pool, rows, width) for pool in range(2))
        match kind:
            case "norm":
                return lambda: F.layer_norm(x, (width,), weight, bias), 4 * elements
            case "norm_backward":
                _, mean, deviation = torch.native_layer_norm(x, (width,), weight, bias, 1e-5)
                return (
                    lambda: torch.ops.aten.native_layer_norm_backward(
                        y, x, (width,), mean, deviation, weight, bias, [True, True, True]
                    ),
                    6 * elements,
                )
            case "activation":
                return lambda: F.gelu(x, approximate="tanh"), 4 * elements
            case "add":
                return lambda: x + y, 6 * elements
            case "lookup":
                places = torch.randint(table.shape[0], (rows,), device=_DEVICE)
                return lambda: F.embedding(places, table), 4 * elements
            case "loss":
                logits = bench.operand(0, max(1, elements // vocabulary), vocabulary)
                targets = torch.randint(vocabulary, (logits.shape[0],), device=_DEVICE)
                return lambda: F.cross_entropy(logits.float(), targets), 8 * logits.numel()
            case "accumulate":
                total = torch.zeros(rows, width, device=_DEVICE)
                return lambda: total.add_(x), 10 * elements
            case "update":
                state = [torch.zeros(elements, device=_DEVICE) for _ in range(3)]
                gradient = torch.randn(elements, device=_DEVICE)
                step = torch.ones((), device=_DEVICE)

                def update() -> object:
                    return torch._fused_adamw_(
                        [state[0]],
                        [gradient],
                        [state[1]],
                        [state[2]],
                        [],
                        [step],
                        lr=1e-4,
                        beta1=0.9,
                        beta2=0.95,
                        weight_decay=0.1,
                        eps=1e-8,
                        amsgrad=False,
                        maximize=False,
                    )

                return update, 28 * elements
            case _:
                raise AssertionError(kind)

    tables = []
    for kind, per_element in (
        ("norm", 4),
        ("norm_backward", 6),
        ("activation", 4),
        ("add", 6),
        ("lookup", 4),
        ("loss", 8),
        ("accumulate", 10),
        ("update", 28),
    ):
        values = []
        for num_bytes in _MEMORY_BYTES:
            elements = max(width, num_bytes // per_element // width * width)
            repeats = max(1, bench.num_repeats(0.0, num_bytes) // 2)
            calls = [kernel(kind, elements) for _ in range(repeats)]
            values.append(bench.efficiency(0.0, calls[0][1], bench.seconds([call for call, _ in calls])))
        tables.append(MemoryTable(kind=kind, num_bytes=_MEMORY_BYTES, efficiency=tuple(values)))
        torch.cuda.empty_cache()
    return tuple(tables)


def measure_kernels(kind: DeviceKind, limit_s: float) -> Efficiencies:
    """The table of this GPU, whose peaks are those of `kind`. Past the limit, attention has one backend only."""
    began = time.monotonic()
    bench = _Bench(kind=kind)

    def said(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    said(f"one launch takes {bench.launch_s * 1e6:.2f} us")
    columns = tuple(
        _column(bench, outputs, inputs, tokens) for (outputs, inputs), tokens in sorted(recipe_shapes().items())
    )
    said(f"{len(columns)} shapes of the recipes")
    grid = tuple(_column(bench, outputs, inputs, _GRID_TOKENS) for outputs in _GRID for inputs in _GRID)
    said(f"{len(grid)} shapes of a grid")
    memory = _memory_tables(bench)
    said("memory-bound kernels")
    attention = tuple(
        _attention_table(bench, head_width, causal, planes, lengths, began + limit_s)
        for head_width, causal, planes, lengths in _ATTENTION
    )
    said("attention")
    return Efficiencies(
        launch_s=round(bench.launch_s, 8),
        gemm=columns,
        gemm_grid=grid,
        attention=attention,
        memory=memory,
        measured_on=f"one {torch.cuda.get_device_name()} with torch {torch.__version__}, bf16, "
        f"{datetime.date.today():%B %Y}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What kernels reach of this GPU's peaks, as a table.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--kind", default="h200", choices=sorted(PRESETS), help="the peaks of this GPU")
    parser.add_argument("--limit-s", type=float, default=90.0, help="after so long, leave out what can be left out")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("spindle.measure.kernels: needs a GPU, torch sees none; run it where there is one")
    write_artifact(given.output, KIND, measure_kernels(PRESETS[given.kind].kind, given.limit_s))


if __name__ == "__main__":
    main()
