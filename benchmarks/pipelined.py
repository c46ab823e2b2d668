"""A pipeline run by Spindle and by torch.distributed.pipelining: python benchmarks/pipelined.py

The same chain of blocks, the same microbatches and the same order of passes (that of torch's Schedule1F1B, or
ScheduleInterleaved1F1B), on two processes. A few steps of one after a few steps of the other, in one run; the ratio of
the medians of each pair, the median of all pairs, and their spread.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from common import markdown, publish
from encoder import Block
from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.plan import BACKWARD, FORWARD, Piece, assemble_passes, check, slot_links
from spindle.plan.times import Key, pass_needs
from spindle.profile import roofline_profile
from spindle.program import lower, verify
from spindle.run import Executor, LayerCode, LayersCode, LossCode, World, join_world
from spindle.run.pytrees import signature_of
from spindle.workload import Call, Layer, LayerCost, Module, Parameter, Task, Workload

PAIRS, STEPS_OF_A_PAIR, WARM_UP = 30, 5, 3
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A chain on some ranks, each of which has as many stages of it."""

    width: int
    num_blocks: int
    length: int
    rows: int  # of a microbatch
    num_microbatches: int = 8
    num_ranks: int = 2
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def blocks_per_stage(self) -> int:
        return self.num_blocks // self.num_stages

    def blocks(self, dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block(self.width).to(device, dtype) for _ in range(self.num_blocks)]

    def data(
        self, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.rows * self.num_microbatches, self.length, self.width)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(shape, generator=generator, dtype=dtype).to(device) for _ in range(2))
        return x, y


SETUPS = {
    "1F1B, little compute": Setup(width=64, num_blocks=4, length=8, rows=2),
    "1F1B, more compute": Setup(width=256, num_blocks=4, length=64, rows=2),
    "interleaved 1F1B, 2 stages a rank": Setup(width=256, num_blocks=4, length=64, rows=2, stages_per_rank=2),
}

_KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD}  # torch's words
Run = Callable[[], list[float]]  # one step: the losses of microbatches, on the last rank


def _device_of(blocks: list[nn.Module]) -> torch.device:
    return next(blocks[0].parameters()).device


def torch_schedule(setup: Setup, blocks: list[nn.Module], rank: int) -> Any:
    stages = [
        PipelineStage(
            nn.Sequential(*blocks[number * setup.blocks_per_stage : (number + 1) * setup.blocks_per_stage]),
            number,
            setup.num_stages,
            _device_of(blocks),
        )
        for number in range(rank, setup.num_stages, setup.num_ranks)
    ]
    if setup.stages_per_rank == 1:
        return Schedule1F1B(stages[0], setup.num_microbatches, nn.functional.mse_loss)
    return ScheduleInterleaved1F1B(stages, setup.num_microbatches, nn.functional.mse_loss)


def by_torch(setup: Setup, blocks: list[nn.Module], rank: int, dtype: torch.dtype = torch.float32) -> Run:
    schedule, (x, y) = torch_schedule(setup, blocks, rank), setup.data(dtype, _device_of(blocks))
    parameters = [parameter for block in blocks for parameter in block.parameters()]

    def run() -> list[float]:
        for parameter in parameters:
            parameter.grad = None
        losses: list[torch.Tensor] = []
        is_first, is_last = rank == 0, rank == setup.num_ranks - 1
        targets = {"target": y, "losses": losses} if is_last else {}
        schedule.step(*([x] if is_first else []), return_outputs=False, **targets)
        return [loss.item() for loss in losses]

    return run


def by_spindle(
    setup: Setup,
    blocks: list[nn.Module],
    world: World,
    order: list[list[tuple[int, int, str]]],
    dtype: torch.dtype = torch.float32,
) -> Run:
    """Every microbatch is a task. `order` has what each rank does."""
    names = {
        id(parameter): f"{number}.{name}"
        for number, block in enumerate(blocks)
        for name, parameter in block.named_parameters()
    }
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    flops = 2.0 * setup.rows * setup.length * sum(parameter.numel() for parameter in blocks[0].parameters())
    cost = LayerCost(forward_flops=flops, backward_flops=2 * flops, traffic_bytes=1, saved_bytes=1, output_bytes=1)
    tasks = [f"m{number}" for number in range(setup.num_microbatches)]
    calls = (
        Call(name="chain", module="chain", costs=(("block", cost),)),
        Call(name="loss", module="loss", costs=(("loss", cost),)),
    )
    layers = [
        Layer(kind="block", parameters=tuple(names[id(parameter)] for parameter in block.parameters()))
        for block in blocks
    ]
    graph = metagraph_of(
        Workload(
            name="chain",
            modules=(Module(name="chain", layers=tuple(layers)), Module(name="loss", layers=(Layer(kind="loss"),))),
            parameters=tuple(
                Parameter(name=names[id(parameter)], num_elements=parameter.numel()) for parameter in parameters
            ),
            tasks=tuple(Task(name=task, batch_size=1, calls=calls, flows=(("chain", "loss"),)) for task in tasks),
        )
    )
    chain = LayersCode(
        layers=tuple(
            LayerCode(run=lambda x, block=block: (block(x),), axes=(None,), parameters=tuple(block.parameters()))
            for block in blocks
        ),
        arguments=lambda batch: ((batch["x"],), {}),
    )
    loss = LossCode(
        loss=lambda batch, output: nn.functional.mse_loss(output, batch["y"]),
        sources=("chain",),
        weight=1 / setup.num_microbatches,
        is_mean=False,
        per_sample_mean=False,
    )
    code = [chain if op.call == "chain" else loss for op in graph.metaops]
    profile = roofline_profile(graph, cluster_named(f"cpux{setup.num_ranks}"))

    pieces, slots = [], {}
    for number, op in enumerate(graph.metaops):
        for stage in range(setup.num_stages if op.call == "chain" else 1):
            slots[op.task, op.call, stage] = len(pieces)
            layers_here, device = setup.blocks_per_stage, stage % setup.num_ranks
            if op.call == "loss":
                layers_here, device = 1, setup.num_ranks - 1
            pieces.append(Piece(op=number, num_layers=layers_here, devices=(device,)))
    lists: list[list[Key]] = []
    for rank in range(setup.num_ranks):
        passes: list[Key] = []
        for stage, microbatch, kind in order[rank]:
            task = f"m{microbatch}"
            passes.append((slots[task, "chain", stage], kind))
            if stage == setup.num_stages - 1:
                passes.insert(len(passes) - (kind == BACKWARD), (slots[task, "loss", 0], kind))
        lists.append(passes)
    listed = [one for passes in lists for one in passes]
    columns = pass_needs(listed, slot_links([one.op for one in pieces], graph))
    needs = {key: [listed[need] for need in columns.of(number)] for number, key in enumerate(listed)}
    plan = assemble_passes(profile, profile.default_setting, "1f1b", pieces, _merged(lists, needs))
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    executor = Executor(program, graph, code, parameters, dict.fromkeys(tasks, (None, None)), world)
    x, y = setup.data(dtype, _device_of(blocks))
    batches = {
        task: {"x": part, "y": target}
        for task, part, target in zip(tasks, x.split(setup.rows), y.split(setup.rows), strict=True)
    }
    signatures = {task: signature_of(batch) for task, batch in batches.items()}
    number = 0

    def run() -> list[float]:
        nonlocal number
        losses, _ = executor.step(number, batches, signatures)
        number += 1
        return losses.tolist()

    return run


def _merged(lists: list[list[Key]], needs: dict[Key, list[Key]]) -> list[Key]:
    """One order of all ranks' passes that respects the flows."""
    done: dict[Key, None] = {}
    while any(lists):
        for passes in lists:
            while passes and all(need in done for need in needs[passes[0]]):
                done[passes.pop(0)] = None
    return list(done)


def order_of(setup: Setup, schedule: Any) -> list[list[tuple[int, int, str]]]:
    """What each rank does under one of torch's schedules: stage, microbatch and kind of pass."""
    if setup.stages_per_rank > 1:
        return [
            [
                (action.stage_index, action.microbatch_index, _KINDS[action.computation_type.name])
                for action in schedule.pipeline_order[rank]
                if action is not None and action.computation_type.name in _KINDS
            ]
            for rank in range(setup.num_ranks)
        ]
    lists = []
    for rank in range(setup.num_ranks):
        ahead = min(setup.num_ranks - rank, setup.num_microbatches)
        order = [(rank, number, FORWARD) for number in range(ahead)]
        for number in range(setup.num_microbatches):
            order.append((rank, number, BACKWARD))
            if ahead + number < setup.num_microbatches:
                order.append((rank, ahead + number, FORWARD))
        lists.append(order)
    return lists


def measure(name: str, report: Path) -> None:
    """Pairs of a few steps of either kind, turn and turn about."""
    torch.set_num_threads(1)
    world, setup = join_world(), SETUPS[name]
    blocks = setup.blocks()
    both = {
        "torch": by_torch(setup, blocks, world.rank),
        "spindle": by_spindle(setup, blocks, world, order_of(setup, torch_schedule(setup, blocks, world.rank))),
    }
    pairs = []
    for number in range(PAIRS + WARM_UP):
        seconds: dict[str, float] = {}
        for kind in sorted(both, reverse=bool(number % 2)):
            world.barrier()
            steps, begin_cpu = [], time.process_time()
            for _ in range(STEPS_OF_A_PAIR):
                begin = time.perf_counter()
                both[kind]()
                world.barrier()
                steps.append(time.perf_counter() - begin)
            seconds[kind], seconds[f"{kind}_cpu"] = statistics.median(steps), time.process_time() - begin_cpu
        if number >= WARM_UP:
            pairs.append(seconds)
    if world.rank == 0:
        report.write_text(json.dumps(pairs))
    dist.barrier()


def main() -> None:
    rows, data = [], {}
    for name in SETUPS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "pairs.json"
            launch = [sys.executable, "-m", "spindle.cli", "launch", "-n", "2"]
            subprocess.run([*launch, __file__, "--report", name, str(report)], check=True)
            pairs = json.loads(report.read_text())
        data[name] = pairs
        ratios = sorted(pair["spindle"] / pair["torch"] for pair in pairs)
        rows.append(
            [
                name,
                f"{statistics.median(pair['torch'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(pair['spindle'] for pair in pairs) * 1e3:.1f} ms",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                f"{statistics.median(pair['spindle_cpu'] / pair['torch_cpu'] for pair in pairs):.3f}",
            ]
        )
    header = ["order", "torch", "Spindle", f"ratio, median of {PAIRS} pairs", "middle half", "all", "ratio of CPU time"]
    publish("pipelined", {"pairs": data, "steps_of_a_pair": STEPS_OF_A_PAIR}, markdown(header, rows))


if __name__ == "__main__":
    if "--report" in sys.argv:
        place = sys.argv.index("--report")
        measure(sys.argv[place + 1], Path(sys.argv[place + 2]))
    else:
        main()
