"""Measure the efficiency of GEMM, attention and memory-bound kernels on a GPU, each at many sizes, as a table.

    python benchmarks/kernels.py -o src/spindle/recipes/h200_kernels.json

Times are those of a busy GPU: a large GEMM runs before each group of repeats, so that launches are ahead of the GPU and
its clock is that of sustained work. Operands are random numbers from different places of a large pool, so that none is
in a cache. Times are medians of several groups. The shapes are those of the recipes' models at their tensor degrees,
and a grid around them.

Not covered: concurrent kernels, links, and kernels other than torch's own (cuBLAS, the faster of flash and cuDNN
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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spindle.artifact import write_artifact
from spindle.cluster import PRESETS, DeviceKind
from spindle.errors import ProfileError
from spindle.profile import (
    EFFICIENCIES_KIND,
    Attention,
    AttentionTable,
    Efficiencies,
    Gemm,
    GemmColumn,
    MemoryTable,
    Operator,
    Pass,
)
from spindle.recipes import Chain, Lengths
from spindle.recipes.multimodal import MODELS

_DEVICE = torch.device("cuda")
_GROUPS = 3
_GROUP_S, _MAX_REPEATS = 1e-3, 48
_FILLER = 8192  # size of a GEMM that takes about a millisecond
_POOL = 1 << 31  # elements of a pool of random numbers for operands
_LAUNCH_S = 1.5e-6  # a guess, to choose the number of repeats; the real value is measured

_GRID = tuple(1 << power for power in range(7, 15))  # of outputs and inputs
_GRID_TOKENS = tuple(1 << power for power in range(7, 17))
_PASSES: tuple[Pass, ...] = ("forward", "input", "weight")
_IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
_CLIPS = tuple(1 << power for power in range(10, 18))
_CLIP_TEXT = (128, 512, 1024, 2048, 4096, 8192)

# Head width, causal, planes, lengths. A ViT of width 1792 has heads of width 112; an image has 2704 patches.
_ATTENTION = (
    (112, False, (2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 2704, 8192)),
    (128, False, (2, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 2704, 4096, 8192, 16384)),
    (128, True, (2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192, 16384)),
)
_MAX_ATTENTION_FLOPS = 1.2e13
_MEMORY_BYTES = tuple(1 << power for power in range(20, 32))


@dataclass(slots=True)
class _Bench:
    """One GPU with a filler GEMM, pools of random numbers, and the present position in them."""

    kind: DeviceKind
    pools: list[torch.Tensor] = field(default_factory=list)
    filler: list[torch.Tensor] = field(default_factory=list)
    position: int = 0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for _ in range(3):
            pool = torch.empty(_POOL, device=_DEVICE, dtype=torch.bfloat16)
            for start in range(0, _POOL, _POOL // 8):
                pool[start : start + _POOL // 8].normal_()
            self.pools.append(pool)
        self.filler = [torch.randn(_FILLER, _FILLER // 2, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        scalar = torch.zeros(1, device=_DEVICE)
        self.launch_s = self.seconds([lambda: scalar.add_(1.0)] * _MAX_REPEATS)

    def operand(self, pool: int, *shape: int) -> torch.Tensor:
        """Random numbers that no kernel has used for a long time, so that they are in no cache."""
        size = math.prod(shape)
        if self.position + size > _POOL:
            self.position = 0
        return self.pools[pool][self.position : self.position + size].view(*shape)

    def step(self, elements: int) -> None:
        self.position = (self.position + -(-elements // 512) * 512) % _POOL

    def num_repeats(self, flops: float, num_bytes: float) -> int:
        roofline_s = max(flops / self.kind.peak_flops, num_bytes / self.kind.memory_bytes_per_s)
        return max(1, min(_MAX_REPEATS, round(_GROUP_S / (1.6 * roofline_s + _LAUNCH_S))))

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        """Seconds per call, with the calls back to back."""
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
    """The weight shapes (outputs, inputs) of the recipes' models at their tensor degrees, with numbers of tokens."""
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
        for shape, _ in chain.shapes(own, context):
            yield from shape.operators(degree).forward


def _attention_table(
    bench: _Bench, head_width: int, causal: bool, planes: tuple[int, ...], lengths: tuple[int, ...], deadline: float
) -> AttentionTable:
    """One row per number of planes; points with too much work take the efficiency of the row above."""
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
            if attention.flops > _MAX_ATTENTION_FLOPS and forward:
                efficiencies = forward[-1][position], backward[-1][position]
            else:
                efficiencies = _attention(bench, attention, deadline)
            for row, value in zip(rows, efficiencies, strict=True):
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
    """Forward and backward efficiency of the backend with the smaller total time."""
    shape = (1, attention.heads, attention.queries, attention.head_width)
    backward = replace(attention, backward=True)
    best: tuple[float, float, float] | None = None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if best is not None and time.monotonic() > deadline:
            break
        try:
            with sdpa_kernel(backend):
                times_s = _attention_s(bench, attention, shape)
        except RuntimeError as error:
            print(f"{backend.name}: no attention of {shape}: {str(error)[:80]}", file=sys.stderr)
            continue
        if best is None or sum(times_s) < best[0]:
            best = (sum(times_s), *times_s)
    if best is None:
        raise ProfileError(f"no attention kernel of torch runs {shape}")
    return (
        bench.efficiency(attention.flops, attention.memory_bytes, best[1]),
        bench.efficiency(backward.flops, backward.memory_bytes, best[2]),
    )


def _attention_s(bench: _Bench, attention: Attention, shape: tuple[int, ...]) -> tuple[float, float]:
    repeats = max(1, min(12, bench.num_repeats(2 * attention.flops, attention.memory_bytes)))

    def inputs() -> list[torch.Tensor]:
        bench.step(math.prod(shape))
        return [bench.operand(number, *shape).detach().requires_grad_() for number in range(3)]

    sets = [inputs() for _ in range(repeats)]

    def run_forward(qkv: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=attention.causal)

    with torch.no_grad():
        forward_s = bench.seconds([partial(run_forward, qkv) for qkv in sets])
    outputs = [run_forward(qkv) for qkv in sets]
    gradient = torch.randn_like(outputs[0])

    def run_backward(qkv: list[torch.Tensor], output: torch.Tensor) -> object:
        return torch.autograd.grad(output, qkv, gradient, retain_graph=True)

    backward_s = bench.seconds([partial(run_backward, qkv, output) for qkv, output in zip(sets, outputs, strict=True)])
    return forward_s, backward_s


def _memory_tables(bench: _Bench) -> tuple[MemoryTable, ...]:
    width, vocabulary = 4096, 32_768
    weight, bias = (torch.randn(width, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2))
    table = bench.pools[2][: 131_072 * width].view(-1, width)

    def kernel(kind: str, elements: int) -> tuple[Callable[[], object], float]:
        """A call over this many elements, and its bytes as `profile.operators` counts them."""
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
                ids = torch.randint(table.shape[0], (rows,), device=_DEVICE)
                return lambda: F.embedding(ids, table), 4 * elements
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
    """The tables of this GPU, whose peaks are those of `kind`. Past the limit, only one backend of attention is
    tried."""
    start = time.monotonic()
    bench = _Bench(kind=kind)

    def report(what: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {what}", file=sys.stderr, flush=True)

    report(f"one launch takes {bench.launch_s * 1e6:.2f} us")
    columns = tuple(
        _column(bench, outputs, inputs, tokens) for (outputs, inputs), tokens in sorted(recipe_shapes().items())
    )
    report(f"{len(columns)} shapes of the recipes")
    grid = tuple(_column(bench, outputs, inputs, _GRID_TOKENS) for outputs in _GRID for inputs in _GRID)
    report(f"{len(grid)} shapes of a grid")
    memory = _memory_tables(bench)
    report("memory-bound kernels")
    attention = tuple(
        _attention_table(bench, head_width, causal, planes, lengths, start + limit_s)
        for head_width, causal, planes, lengths in _ATTENTION
    )
    report("attention")
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
    parser = argparse.ArgumentParser(description="Measure the efficiency of kernels on this GPU, as a table.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--kind", default="h200", choices=sorted(PRESETS), help="the peaks of this GPU")
    parser.add_argument("--limit-s", type=float, default=90.0, help="after so many seconds, skip what can be skipped")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels.py: needs a GPU, torch sees none; run it where there is one")
    write_artifact(
        arguments.output, EFFICIENCIES_KIND, measure_kernels(PRESETS[arguments.kind].kind, arguments.limit_s)
    )


if __name__ == "__main__":
    main()
