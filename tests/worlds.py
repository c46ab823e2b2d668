"""Small torch workloads for tests, and one process's part of running them. Imported by every process of the pool."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.plan import parse_plan
from spindle.planners import Effort, make_plan
from spindle.profile import roofline_profile
from spindle.program import lower, verify
from spindle.run import Executor, World
from spindle.run.rows import signature_of
from spindle.train import bind, code_of, mean, module, probe, task, trace_all


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    """Something before a list of equal blocks, something after it."""

    def __init__(self, width_in: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width_in, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def everything():
    """Shared, frozen, tied and twice-called modules; branching flows; whole-batch, token-mean, per-sample losses."""
    torch.manual_seed(0)
    vision, text = module("vision", Tower(4, 8, 3).double()), module("text", Tower(3, 8, 2).double())
    language = module("lm", Tower(8, 8, 3).double())
    head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    head[0].weight = language.module.blocks[0].linear.weight  # tied
    head = module("head", head)
    frozen = module("frozen", Tower(8, 8, 2).double())
    for parameter in frozen.module.parameters():
        parameter.requires_grad_(False)

    @task(batch_size=7)
    def contrast(batch):
        a = F.normalize(vision(batch["x"]), dim=-1)
        b = F.normalize(text(batch["y"]), dim=-1)
        return F.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0]))

    @task(batch_size=5, weight=0.5)
    def question(batch):
        seen = vision(batch["x"])
        answer = head(language(seen + text(batch["y"]))) + frozen(seen)
        loss = ((answer - batch["z"]) ** 2).mean(-1)
        return mean((loss * batch["m"]).sum(), batch["m"].sum())

    @task(batch_size=4, per_sample_mean=True)
    def plain(batch):
        return (language(language(batch["z"])) ** 2).mean()

    return [contrast, question, plain]


def batches(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kept = (torch.rand(5, generator=generator) > 0.4).double()
    kept[0] = 1.0
    return {
        "contrast": {"x": normal(7, 4), "y": normal(7, 3)},
        "question": {"x": normal(5, 4), "y": normal(5, 3), "z": normal(5, 8), "m": kept},
        "plain": {"z": normal(4, 8)},
    }


def reference(tasks, step_batches) -> dict[str, float]:
    """Plain PyTorch in one process: the losses, with gradients left in the parameters."""
    total, losses = 0.0, {}
    for one in tasks:
        result = one(step_batches[one.name])
        loss = result.total / result.count if isinstance(result, tuple) else result
        losses[one.name] = loss.item()
        total = total + one.weight * loss
    total.backward()
    return losses


def error_of(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    return float((ours - theirs).norm() / max(float(theirs.norm()), floor))


def compare_step(rank: int, num_ranks: int, planner: str, seed: int) -> tuple[float, float, int]:
    """Runs a plan for two steps on this rank; the largest error of losses and of gradients, and how many were held."""
    tasks = everything()
    examples = batches(seed)
    traced = trace_all(tasks, examples)
    bound = bind("everything", traced, probe(traced, examples))
    graph = metagraph_of(bound.workload)
    profile = roofline_profile(graph, cluster_named(f"cpux{num_ranks}"))
    if planner.startswith("random"):
        plan = parse_plan(random_plan_text(profile, int(planner.removeprefix("random"))), profile)
    else:
        plan = make_plan(profile, planner, Effort(evaluations=2_000))
    program = lower(plan, profile)
    verify(program, profile)
    parameters = [bound.parameters[one.name] for one in graph.parameters]
    world = World(rank, num_ranks, torch.device("cpu"))
    code = [code_of(bound, op) for op in graph.metaops]
    executor = Executor(program, graph, code, parameters, bound.batch_axes, world)
    for number in range(2):
        step_batches = batches(seed + number)
        signatures = {name: signature_of(batch) for name, batch in step_batches.items()}
        parts, _ = executor.step(number, step_batches, signatures, check_losses=number == 0)
    if num_ranks > 1:
        dist.all_reduce(parts)
    losses = dict(zip(graph.tasks, parts.tolist(), strict=True))
    ours = {name: tensor.grad for name, tensor in bound.parameters.items()}
    for tensor in bound.parameters.values():
        tensor.grad = None
    expected = reference(tasks, batches(seed + 1))
    trainable = [tensor for tensor in bound.parameters.values() if tensor.grad is not None]
    whole = torch.stack([tensor.grad.norm() for tensor in trainable]).norm()
    floor = 1e-3 * float(whole) / len(trainable) ** 0.5
    held = [name for name, tensor in bound.parameters.items() if ours[name] is not None and tensor.grad is not None]
    gradient_error = max((error_of(ours[name], bound.parameters[name].grad, floor) for name in held), default=0.0)
    loss_error = max(abs(losses[name] - value) / abs(value) for name, value in expected.items())
    dist.barrier()
    return loss_error, gradient_error, len(held)


def random_plan_text(profile, seed: int) -> str:
    """Some legal plan: ops in flow order, cut anywhere, on any devices in any order."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    lines = []
    for position in profile.graph.order:
        op, curve = profile.graph.metaops[position], profile.curves[position][0]
        left = op.num_layers
        while left:
            layers = 1 + below(left)
            count = curve.num_devices[below(len(curve.num_devices))]
            devices = torch.randperm(profile.cluster.num_devices, generator=generator)[:count].tolist()
            lines.append(f"{op.name}*{layers}@{','.join(map(str, devices))}")
            left -= layers
    return "\n".join(lines)
