"""Small pipelines for tests: microbatches of different make-up through shared modules, under random legal schedules.

Encoders see images and sounds, each in some sub-microbatches or in none; a language model reads tokens behind them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from backends import rank_device, to_device
from comparison import Comparison
from spindle.cluster import Cluster, cluster_named
from spindle.graph import MetaGraph, metagraph_of
from spindle.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Piece,
    Plan,
    assemble_passes,
    check,
    slot_links,
)
from spindle.plan.times import pass_needs
from spindle.profile import Profile, roofline_profile
from spindle.program import lower, verify
from spindle.run import Executor, LayerCode, LayersCode, LossCode, OpCode, ShapeInference, World
from spindle.run.pytrees import signature_of
from spindle.run.shards import Shards
from spindle.workload import Call, Layer, LayerCost, Module, Parameter, Task, Workload

WIDTH, NUM_TOKENS = 6, 11
SOURCES = {"vision": ("images", 4), "hearing": ("sounds", 3)}  # with the size of one entry
LEARNING_RATE, MOMENTUM = 0.1, 0.9


class Enter(nn.Module):
    """The first layer of an encoder."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, WIDTH)

    def forward(self, x):
        return (self.linear(x),)


class Mix(nn.Module):
    """Two products, a norm, and a scale that both ways take as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, *rest):
        y = self.down(torch.tanh(self.up(self.norm(x) * self.scale)))
        return (x + y * self.scale, *rest)


class Shift(nn.Module):
    """Moves what it gets by places, without weights, over its input."""

    def forward(self, x, *rest):
        x += torch.cos(rest[0].to(x.dtype)).unsqueeze(-1) if rest else 0.5
        return (x * 1.5, *rest)


class Read(nn.Module):
    """Tokens behind what encoders have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)

    def forward(self, tokens, seen):
        x = self.embedding(tokens)
        x = x if seen is None else torch.cat([seen, x])
        return x, torch.arange(len(x), device=x.device), {"behind": len(x) - len(tokens)}


class Say(nn.Module):
    """The last layer of the language model, tied to its first."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x, positions, counts):
        return (x[counts["behind"] :] @ self.embedding.weight.T,)


def model(seed: int) -> nn.ModuleDict:
    """Modules as chains of layers."""
    torch.manual_seed(seed)
    read = Read()
    modules = nn.ModuleDict(
        {
            "vision": nn.ModuleList([Enter(4), Mix(), Mix(), Mix()]),
            "hearing": nn.ModuleList([Enter(3), Shift(), Mix()]),
            "language": nn.ModuleList([read, Mix(), Mix(), Shift(), Mix(), Mix(), Say(read.embedding)]),
        }
    ).double()
    for parameter in modules["hearing"][0].parameters():
        parameter.requires_grad_(False)  # so that the next layer's input takes no gradient
    return modules


def microbatches(seed: int, count: int) -> dict[str, dict[str, Any]]:
    """So many, by task. Of each kind of entries there are some sub-microbatches, each with some entries."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batches = {}
    for number in range(count):
        batch: dict[str, Any] = {"tokens": torch.randint(NUM_TOKENS, (choose.randint(2, 7),), generator=generator)}
        for key, size in SOURCES.values():
            parts = choose.choice((0, 0, 1, 2, 3))
            batch[key] = [
                torch.randn(choose.randint(1, 5), size, dtype=torch.float64, generator=generator) for _ in range(parts)
            ]
        batches[f"m{number:02}"] = batch
    return batches


def loss_of(batch: Any, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, batch["tokens"])


def plain_loss(modules: nn.ModuleDict, batch: Any) -> torch.Tensor:
    """One microbatch in one process."""
    seen = []
    for name, (key, _) in SOURCES.items():
        for entries in batch[key]:
            values: Any = (entries.clone(),)
            for layer in modules[name]:
                values = layer(*values)
            seen.append(values[0])
    values = (batch["tokens"], torch.cat(seen) if seen else None)
    for layer in modules["language"]:
        values = layer(*values)
    return loss_of(batch, values[0])


# As a workload with code.


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    graph: MetaGraph
    code: list[OpCode]
    parameters: list[nn.Parameter]
    names: list[str]


def pipeline(modules: nn.ModuleDict, batches: dict[str, Any]) -> Pipeline:
    names: dict[int, str] = {}
    for name, parameter in modules.named_parameters():
        names.setdefault(id(parameter), name)
    parameters = {names[id(weight)]: weight for weight in modules.parameters()}
    chains = [
        Module(
            name=name,
            layers=tuple(
                Layer(kind=type(layer).__name__, parameters=tuple(names[id(weight)] for weight in layer.parameters()))
                for layer in modules[name]
            ),
        )
        for name in modules
    ]
    tasks = []
    for task, batch in batches.items():
        calls = [f"{name}.{part}" for name, (key, _) in SOURCES.items() for part in range(len(batch[key]))]
        flows = [(call, "language") for call in calls] + [("language", "loss")]
        tasks.append(
            Task(
                name=task,
                batch_size=1,
                calls=tuple(_call(modules, call, batch) for call in [*calls, "language", "loss"]),
                flows=tuple(flows),
            )
        )
    workload = Workload(
        name="pipeline",
        modules=(*chains, Module(name="loss", layers=(Layer(kind="loss"),))),
        parameters=tuple(
            Parameter(name=name, num_elements=weight.numel(), trainable=weight.requires_grad)
            for name, weight in parameters.items()
        ),
        tasks=tuple(tasks),
    )
    graph = metagraph_of(workload)
    code = [_code(modules, op, batches[op.task], len(batches)) for op in graph.metaops]
    return Pipeline(graph=graph, code=code, parameters=list(parameters.values()), names=list(parameters))


def _call(modules: nn.ModuleDict, name: str, batch: Any) -> Call:
    module, _, part = name.partition(".")
    size = float(len(batch[SOURCES[module][0]][int(part)]) if part else len(batch["tokens"]))
    cost = LayerCost(
        forward_flops=1e6 * size, backward_flops=2e6 * size, traffic_bytes=1e3, saved_bytes=1e3, output_bytes=1e2
    )
    kinds = {type(layer).__name__ for layer in modules[module]} if module != "loss" else {"loss"}
    return Call(name=name, module=module, costs=tuple((kind, cost) for kind in sorted(kinds)))


def _code(modules: nn.ModuleDict, op: Any, batch: Any, count: int) -> OpCode:
    if op.call == "loss":
        return LossCode(loss=loss_of, sources=("language",), weight=1 / count, is_mean=False, per_sample_mean=False)
    chain = modules[op.module]
    layers = tuple(
        LayerCode(
            run=layer,
            axes=(None,) * (3 if op.module == "language" and not isinstance(layer, Say) else 1),
            parameters=tuple(layer.parameters()),
            writes_input=isinstance(layer, Shift),
            likeness="mix" if isinstance(layer, Mix) else None,
        )
        for layer in chain[op.first_layer : op.first_layer + op.num_layers]
    )
    if op.first_layer:
        return LayersCode(layers=layers)
    if op.module == "language":
        sources = tuple(f"{name}.{part}" for name, (key, _) in SOURCES.items() for part in range(len(batch[key])))
        return LayersCode(layers=layers, arguments=_behind_encoders, sources=sources)
    key, part = SOURCES[op.module][0], int(op.call.partition(".")[2])
    return LayersCode(layers=layers, arguments=lambda whole: ((whole[key][part],), {}))


def _behind_encoders(batch: Any, *outputs: torch.Tensor) -> Any:
    return (batch["tokens"], torch.cat(outputs) if outputs else None), {}


# Plans.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline by its seed: how many ranks, replicas, chunks of layers for each rank of one; which share of slots has
    its backward in two parts, and of layers is recomputed or waits on the host."""

    seed: int
    num_ranks: int
    num_replicas: int = 1
    num_microbatches: int = 4
    num_chunks: int = 2
    split: float = 0.5
    lean: float = 0.4
    forms: bool = True  # shapes are inferred; else they are sent
    shares_order: bool = False  # all steps have the first one's program
    shards: bool = False  # the optimizer
    steps: int = 2


def profile_of(graph: MetaGraph, num_ranks: int) -> Profile:
    """Half of every backward is for weights; there is a host."""
    cluster = cluster_named(f"cpux{num_ranks}")
    islands = tuple(
        replace(island, kind=replace(island.kind, host_bytes_per_s=1e9, host_memory_bytes=1 << 30))
        for island in cluster.islands
    )
    profile = roofline_profile(graph, Cluster(name=cluster.name, islands=islands))
    curves = tuple(
        tuple(replace(curve, weight_s=tuple(0.5 * part for part in curve.backward_s)) for curve in by_degree)
        for by_degree in profile.curves
    )
    return replace(profile, curves=curves)


def places_of(modules: nn.ModuleDict, case: Case) -> dict[str, list[int]]:
    """The rank of each layer in its replica: chunks from rank to rank, and again."""
    choose = random.Random(case.seed)
    per_replica = case.num_ranks // case.num_replicas
    places = {}
    for name, layers in modules.items():
        ends = sorted(choose.randint(0, len(layers)) for _ in range(per_replica * case.num_chunks - 1))
        places[name] = [sum(number >= end for end in ends) % per_replica for number in range(len(layers))]
    return places


def owning_ranks_of(
    modules: nn.ModuleDict, made: Pipeline, places: dict[str, list[int]], case: Case
) -> dict[int, tuple[int, ...]]:
    """The ranks that have each parameter, in every replica, whatever a step's microbatches need."""
    per_replica = case.num_ranks // case.num_replicas
    number_of = {id(weight): number for number, weight in enumerate(made.parameters)}
    holders: dict[int, set[int]] = {}
    for name, layers in modules.items():
        for layer, place in zip(layers, places[name], strict=True):
            for parameter in layer.parameters():
                holders.setdefault(number_of[id(parameter)], set()).update(range(place, case.num_ranks, per_replica))
    return {number: tuple(sorted(ranks)) for number, ranks in holders.items()}


def random_plan(profile: Profile, places: dict[str, list[int]], case: Case, step: int) -> Plan:
    """Any order of passes that the flows allow."""
    graph, choose = profile.graph, random.Random(f"{case.seed} {step}")
    per_replica = case.num_ranks // case.num_replicas
    replica_of = {task: number % case.num_replicas for number, task in enumerate(graph.tasks)}
    pieces: list[Piece] = []
    for number, op in enumerate(graph.metaops):
        base = replica_of[op.task] * per_replica
        if op.module == "loss":
            ranks = [places["language"][-1]]
        else:
            ranks = places[op.module][op.first_layer : op.first_layer + op.num_layers]
        first = 0
        for layer in range(1, len(ranks) + 1):
            if layer == len(ranks) or ranks[layer] != ranks[first] or choose.random() < 0.2:
                leaner = [choose.random() < case.lean for _ in range(layer - first)] if op.parameters[0] else []
                recomputed = choose.randint(0, sum(leaner))
                pieces.append(
                    Piece(
                        op=number,
                        num_layers=layer - first,
                        devices=(base + ranks[first],),
                        recomputed=recomputed,
                        offloaded=sum(leaner) - recomputed,
                    )
                )
                first = layer
    order = random_order(graph, pieces, case.split, choose)
    return assemble_passes(profile, profile.default_setting, "random", pieces, order)


def random_order(graph: MetaGraph, pieces: list[Piece], split: float, choose: random.Random) -> list[tuple[int, str]]:
    """Any order of passes that the flows allow; of so many pieces, backward comes in two parts."""
    kinds = [(FORWARD, INPUT, WEIGHT) if choose.random() < split else (FORWARD, BACKWARD) for _ in pieces]
    waiting = [(slot, kind) for slot, all_kinds in enumerate(kinds) for kind in all_kinds]
    columns = pass_needs(waiting, slot_links([piece.op for piece in pieces], graph))
    needs = {entry: [waiting[need] for need in columns.of(number)] for number, entry in enumerate(waiting)}
    haste = choose.choice((0.5, 1.0, 3.0))  # of backward passes
    order: list[tuple[int, str]] = []
    done: set[tuple[int, str]] = set()
    while waiting:
        ready = [entry for entry in waiting if done.issuperset(needs[entry])]
        entry = choose.choices(ready, [1.0 if kind == FORWARD else haste for _, kind in ready])[0]
        waiting.remove(entry)
        order.append(entry)
        done.add(entry)
    return order


# Running them.


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """What one rank reports."""

    comparison: Comparison
    offloaded_bytes: int
    num_split: int  # backward passes in two parts
    num_recomputed: int


class Tidy(Executor):
    """Sees to it that nothing is left of a step's activations."""

    def _losses(self, step: Any) -> Any:
        assert not any((step.inputs, step.outputs, step.arrivals, step.sending, step.deferred, self.offload))
        assert not any(
            piece.outputs or piece.inputs or piece.recompute for pieces in step.pieces.values() for piece in pieces
        )
        return super()._losses(step)


def run_pipeline(rank: int, num_ranks: int, case: Case) -> PipelineRun:
    """Some steps, each with other microbatches and a program of its own. Parameters that this rank does not hold are
    NaN."""
    ours, reference = model(case.seed).to(rank_device()), model(case.seed)
    forms = ShapeInference([ours], rank_device())
    places = places_of(ours, case)
    world = World(rank, num_ranks, rank_device())
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    optimizer: torch.optim.Optimizer | None = None
    shards: Shards | None = None
    executor: Executor | None = None
    comparison, history, expected_history = Comparison(), [], []
    offloaded_bytes = num_split = num_recomputed = 0
    for step in range(case.steps):
        batches = microbatches(1000 * case.seed + (0 if case.shares_order else step), case.num_microbatches)
        if executor is None or not case.shares_order:
            made = pipeline(ours, batches)
            profile = profile_of(made.graph, num_ranks)
            plan = replace(random_plan(profile, places, case, step), shard_optimizer=case.shards)
            check(plan, profile)
            program = lower(plan, profile, owning_ranks=owning_ranks_of(ours, made, places, case))
            verify(program, profile)
            axes = dict.fromkeys(batches, (None,) * 99)
            if case.shards and shards is None:
                shards = Shards(program, made.parameters, world)
                shards.attach()
            buffers = None if executor is None else executor.release_gradient_buffers()
            executor = Tidy(
                program, made.graph, made.code, made.parameters, axes, world, gradient_buffers=buffers, shards=shards
            )
            num_split += sum(plan_pass.kind == WEIGHT for plan_pass in plan.passes)
            num_recomputed += sum(slot.recomputed for slot in plan.slots)
        if optimizer is None:
            held = {made.names[number]: made.parameters[number] for number in executor.held}
            for name, parameter in zip(made.names, made.parameters, strict=True):
                if name not in held:
                    parameter.data.fill_(torch.nan)
            optimizer = make_optimizer(made, executor, shards)
            gradients = GradientsAtUpdate(made, held, shards, optimizer)
        given = to_device(batches)
        cuts = forms.of(made.graph, made.code, given) if case.forms else None
        own_batches = {task: batch for task, batch in given.items() if task in executor.reads}
        signatures = {task: signature_of(batch) for task, batch in given.items()}
        losses, _ = executor.step(step, own_batches, signatures, optimizer if case.shards else None, cuts=cuts)
        offloaded_bytes += executor.offload.num_bytes
        if shards is None:
            optimizer.step()
        else:
            shards.wait_all()
        summed = torch.tensor(losses.tolist(), dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(summed)
        history.append(dict(zip(made.graph.tasks, summed.tolist(), strict=True)))
        reference_optimizer.zero_grad()
        expected = {task: plain_loss(reference, batch) for task, batch in batches.items()}
        (sum(expected.values()) / len(batches)).backward()
        expected_history.append({task: loss.item() for task, loss in expected.items()})
        named = dict(reference.named_parameters())
        expected_gradients = {name: parameter.grad for name, parameter in named.items()}
        comparison.add_tensors("gradient", gradients.whole(num_ranks), expected_gradients, f" in step {step}")
        reference_optimizer.step()
        comparison.add_tensors("parameter", held, named, f" after step {step}")
    comparison.add_losses(history, expected_history)
    return PipelineRun(
        comparison=comparison,
        offloaded_bytes=offloaded_bytes,
        num_split=num_split,
        num_recomputed=num_recomputed,
    )


def make_optimizer(made: Pipeline, executor: Executor, shards: Shards | None) -> torch.optim.Optimizer:
    """Over what this rank holds; of sharded parameters, over its parts."""
    parts = {} if shards is None else shards.owned
    trained = [made.parameters[number] for number in executor.held if number not in parts]
    trained += [part for part in parts.values() if part is not None]
    return torch.optim.SGD([{"params": trained}], lr=LEARNING_RATE, momentum=MOMENTUM)


class GradientsAtUpdate:
    """The gradients that an optimizer updates with; those in parts are put together from all ranks' parts."""

    def __init__(
        self,
        made: Pipeline,
        held: dict[str, nn.Parameter],
        shards: Shards | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._made, self._held, self._shards = made, held, shards
        self._seen: dict[int, torch.Tensor] = {}  # by the id of a parameter or of a part
        optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._seen = {id(each): each.grad.cpu().clone() for each in parameters if each.grad is not None}

    def whole(self, num_ranks: int) -> dict[str, torch.Tensor | None]:
        """By name, of the parameters that this rank holds. All ranks call it."""
        gradients = {name: self._seen.get(id(parameter)) for name, parameter in self._held.items()}
        if self._shards is None:
            return gradients
        owned = self._shards.owned
        for number, (name, parameter) in enumerate(zip(self._made.names, self._made.parameters, strict=True)):
            summed = torch.zeros(2, parameter.numel(), dtype=torch.float64)  # gradients, and how many ranks have them
            part = owned.get(number)
            if part is not None and id(part) in self._seen:
                first = part.storage_offset() - parameter.storage_offset()  # both are views of the flat bucket
                summed[0, first : first + part.numel()] = self._seen[id(part)].flatten()
                summed[1, first : first + part.numel()] = 1
            if num_ranks > 1:
                dist.all_reduce(summed)
            if number in owned:
                assert summed[1].eq(summed[1, 0]).all(), f"{name}: some of its elements have no gradient"
                gradients[name] = summed[0].view(parameter.shape) if summed[1, 0] else None
                assert summed[1, 0] <= 1, f"{name}: several ranks update the same elements"
        return gradients
