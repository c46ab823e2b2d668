"""SEMU compared with measured layers: one member's part of a layer, forward and backward, on one GPU.

    python benchmarks/semu_layers.py -o benchmarks/results/semu_layers.json [--measured EARLIER.json]

Layers are ordinary torch, eager, bf16, without the collectives of their tensor group, gradients of weights added to
32-bit sums. What SEMU says of the kernels that ran stands beside it: `as_run` adds to a block's operators what eager
torch does besides (copies in place of collectives, sums of whole tensors, activations in several kernels). With times
measured earlier no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spindle.artifact import read_json_file, write_atomically
from spindle.cluster import PRESETS
from spindle.profile import Attention, Gemm, LayerOperators, MemoryBound, Semu
from spindle.recipes.layers import Block, num_tokens
from spindle.recipes.multimodal import MODELS, measured_efficiencies

_WARM_UPS, _REPEATS = 5, 20

# Model, module, lengths of instances, context.
CASES = (
    *(("vlm-s", "vision", ((2704, count),), ()) for count in (1, 2, 4, 8, 12, 24)),
    ("vlm-s", "language", ((8192, 1),), ()),
    *(("vlm-m", "vision", ((2704, count),), ()) for count in (2, 12)),
    ("vlm-m", "language", ((8192, 1),), ()),
    *(("vlm-l", "vision", ((2704, count),), ()) for count in (2, 12)),
    ("vlm-l", "language", ((8192, 1),), ()),
    *(("t2v-s", "video", ((length, 1),), ((1024, 1),)) for length in (2048, 8192, 16384)),
    ("t2v-l", "video", ((8192, 1),), ((1024, 1),)),
)


class Part(torch.nn.Module):
    """One member's part of a block, without collectives."""

    def __init__(self, block: Block, degree: int) -> None:
        super().__init__()
        tower = block.tower
        self.heads, self.head_width = tower.num_heads // degree, tower.width // tower.num_heads
        self.key_heads = max(1, (tower.num_key_heads or tower.num_heads) // degree)
        self.block, self.degree = block, degree
        width, hidden, own = tower.width, tower.hidden // degree, self.heads * self.head_width

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False)

        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3 if block.context else 2))
        self.qkv = linear(width, own + 2 * self.key_heads * self.head_width)
        self.out = linear(own, width)
        if block.context:
            self.query, self.key_value, self.cross = linear(width, own), linear(width, 2 * own), linear(own, width)
        self.up = linear(width, hidden * (2 if tower.gated else 1))
        self.down = linear(hidden, width)

    def normed(self, number: int, x_TD: torch.Tensor) -> torch.Tensor:
        """A member norms its part of the tokens; the all-gather that would follow is left out."""
        share = -(-x_TD.shape[0] // self.degree)
        normed = self.norms[number](x_TD[:share])
        return torch.cat([normed, x_TD[share:]])

    def forward(self, x_TD: torch.Tensor, context_TD: torch.Tensor | None = None) -> torch.Tensor:
        block, (length, count) = self.block, self.block.lengths[0]
        query, key, value = self.qkv(self.normed(0, x_TD)).split(
            [self.heads * self.head_width, *[self.key_heads * self.head_width] * 2], dim=-1
        )
        x_TD = x_TD + self.out(self.attend(query, key, value, count, length, length, block.causal))
        if context_TD is not None:
            key, value = self.key_value(context_TD).chunk(2, dim=-1)
            seen = context_TD.shape[0] // count
            x_TD = x_TD + self.cross(
                self.attend(self.query(self.normed(2, x_TD)), key, value, count, length, seen, False)
            )
        hidden = self.up(self.normed(1, x_TD))
        if block.tower.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return x_TD + self.down(hidden)

    def attend(self, query, key, value, count, length, seen, causal):
        query, key, value = (
            tensor.view(count, tokens, -1, self.head_width).transpose(1, 2)
            for tensor, tokens in ((query, length), (key, seen), (value, seen))
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=key.shape[1] != query.shape[1]
        )
        return mixed.transpose(1, 2).reshape(count * length, -1)


class AsRun:
    """A block's kernels as eager torch runs them in `Part`."""

    def __init__(self, block: Block, degree: int) -> None:
        self.block, self.degree = block, degree

    def operators(self, tensor_degree: int) -> LayerOperators:
        block, tower = self.block, self.block.tower
        known = block.operators(tensor_degree)
        tokens, num_norms = num_tokens(block.lengths), 3 if block.context else 2
        row = 2 * tokens * tower.width  # bytes of a tensor of the layer's width
        hidden = 2 * tokens * tower.hidden // tensor_degree
        heads = 2 * tokens * sum(gemm.outputs for gemm in known.forward[:3] if isinstance(gemm, Gemm))

        def memory(kind: str, num_bytes: float) -> MemoryBound:
            return MemoryBound(kind=kind, num_bytes=num_bytes)

        def kernels(operators: tuple) -> list:
            return [operator for operator in operators if isinstance(operator, Gemm | Attention)]

        forward = [memory("norm", 2 * row / tensor_degree), memory("add", 2 * row), memory("add", 3 * row)] * num_norms
        # Gradients of the two slices of a normed tensor: zeros and a copy each, then two sums with the residual's.
        back = [memory("norm_backward", 3 * row / tensor_degree), *[memory("add", 2 * row)] * 2] * num_norms
        back += [memory("add", 3 * row)] * 2 * num_norms
        back.append(memory("add", 2 * heads))  # gradients of queries, keys and values side by side
        if tower.gated:
            forward += [memory("activation", 2 * hidden), memory("add", 3 * hidden)]
            back += [memory("add", 3 * hidden)] * 2 + [memory("activation", 3 * hidden), memory("add", 4 * hidden)]
        else:
            forward.append(memory("activation", 2 * hidden))
            back.append(memory("activation", 3 * hidden))
        sums = [memory("accumulate", 10 * gemm.outputs * gemm.inputs) for gemm in kernels(known.weight)]
        return LayerOperators(
            forward=(*kernels(known.forward), *forward),
            input=(*kernels(known.input), *back),
            weight=(*kernels(known.weight), *sums),
        )


def measured(block: Block, degree: int) -> tuple[float, float]:
    """Forward and backward seconds of one member's part, the better of torch's attention kernels."""
    part = Part(block, degree).to("cuda", torch.bfloat16)
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in part.parameters()]
    x_TD = torch.randn(num_tokens(block.lengths), block.tower.width, device="cuda", dtype=torch.bfloat16)
    x_TD.requires_grad_()
    context_TD = None
    if block.context:
        context_TD = torch.randn(num_tokens(block.context), block.tower.width, device="cuda", dtype=torch.bfloat16)
        context_TD.requires_grad_()
    gradient = torch.randn_like(x_TD)
    filler = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    best = None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        marks = []
        try:
            with sdpa_kernel(backend):
                for _ in range(_WARM_UPS + _REPEATS):
                    torch.mm(filler, filler)  # launches go ahead of the GPU
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                    events[0].record()
                    output = part(x_TD, context_TD)
                    events[1].record()
                    inputs = [x_TD, *([] if context_TD is None else [context_TD]), *part.parameters()]
                    gradients = torch.autograd.grad(output, inputs, gradient)
                    for total, weight_gradient in zip(sums, gradients[-len(sums) :], strict=True):
                        total.add_(weight_gradient)
                    events[2].record()
                    marks.append(events)
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(backend.name, str(error)[:100])
            continue
        times = [
            statistics.median(events[at].elapsed_time(events[at + 1]) for events in marks[_WARM_UPS:]) / 1e3
            for at in (0, 1)
        ]
        if best is None or sum(times) < sum(best):
            best = times
    assert best is not None
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--measured", type=Path)
    arguments = parser.parse_args()
    island = PRESETS["h200"]
    semu = Semu(island.kind, island.link, measured_efficiencies())
    earlier = read_json_file(arguments.measured) if arguments.measured else None
    rows = []
    for number, (name, module, lengths, context) in enumerate(CASES):
        model = MODELS[name]
        chain = model.chain(module)
        block = Block(tower=chain.tower, lengths=lengths, causal=chain.causal, context=context)
        predicted = semu.layer(AsRun(block, model.tensor_degree), model.tensor_degree)
        if earlier is None:
            forward_s, backward_s = measured(block, model.tensor_degree)
        else:
            row = earlier["rows"][number]
            assert (row["model"], row["module"], row["lengths"]) == (name, module, [list(length) for length in lengths])
            forward_s, backward_s = row["forward_ms"] / 1e3, row["backward_ms"] / 1e3
        error = (predicted.forward_s + predicted.backward_s) / (forward_s + backward_s) - 1
        rows.append(
            {
                "model": name,
                "module": module,
                "tensor_degree": model.tensor_degree,
                "lengths": lengths,
                "forward_ms": round(forward_s * 1e3, 3),
                "backward_ms": round(backward_s * 1e3, 3),
                "semu_forward_ms": round(predicted.forward_s * 1e3, 3),
                "semu_backward_ms": round(predicted.backward_s * 1e3, 3),
                "error_percent": round(error * 100, 1),
            }
        )
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    mean = statistics.mean(abs(row["error_percent"]) for row in rows)
    print(f"mean error {mean:.1f} % over {len(rows)} layers")
    on = earlier["measured_on"] if earlier else f"one {torch.cuda.get_device_name()} with torch {torch.__version__}"
    write_atomically(
        arguments.output,
        json.dumps({"measured_on": on, "mean_error_percent": round(mean, 1), "rows": rows}, indent=1) + "\n",
    )


if __name__ == "__main__":
    main()
