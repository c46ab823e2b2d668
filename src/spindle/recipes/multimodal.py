"""The models of the DIP paper (§5) as values, and the profile of a batch of such a model.

A microbatch is a task of the step's graph: its calls are the encoder's sub-microbatches (`vision.0`, `vision.1`, ...)
and the module they feed. All tasks share the modules' weights, one parameter for each layer. A microbatch without input
for a module does not call it.

Vision-language models: images go through a ViT and an adapter into a language model. Text to video: the hidden states
of a language model go through an adapter into a diffusion transformer, whose layers attend to them by cross attention;
each clip sees its share of the text. `docs/recipes.md` lists what is from the paper and what is ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, assert_never

import numpy as np

from spindle.artifact import artifact_from_json
from spindle.cluster import Cluster, cluster_named
from spindle.errors import InputError, PlanError, WorkloadError
from spindle.graph import MetaGraph, MetaOp
from spindle.profile import EFFICIENCIES_KIND, Curve, Efficiencies, Profile, Semu
from spindle.recipes.layers import Adapter, Block, Embedding, Final, Head, Lengths, Patches, Shape, lengths_of
from spindle.recipes.transformer import Tower
from spindle.workload import (
    LANGUAGE,
    VIDEO,
    VISION,
    Layer,
    LayerCost,
    Microbatch,
    Module,
    Parameter,
    even_parts,
    items_in_parts,
    split_evenly,
)

Before = Literal["embedding", "patches"]
After = Literal["head", "adapter", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A tower, and the layers before and after its blocks."""

    tower: Tower
    before: Before
    after: After
    causal: bool = False
    patch_elements: int = 0  # numbers in a patch of pixels or latents
    merge: int = 1  # tokens that the adapter merges into one
    output_width: int = 0  # the adapter's output width
    tested_sizes: tuple[int, ...] = (1,)  # candidate sizes of sub-microbatches, in instances

    @property
    def name(self) -> str:
        return self.tower.name

    def shapes(self, lengths: Lengths, context: Lengths = ()) -> tuple[tuple[Shape, int], ...]:
        """Its layers over instances of these lengths, in order: shapes, each with its number of equal layers."""
        tower = self.tower
        first: Shape
        match self.before:
            case "embedding":
                first = Embedding(tower=tower, lengths=lengths)
            case "patches":
                first = Patches(tower=tower, lengths=lengths, patch_elements=self.patch_elements)
            case _:
                assert_never(self.before)
        last: Shape
        match self.after:
            case "head":
                last = Head(tower=tower, lengths=lengths)
            case "adapter":
                last = Adapter(tower=tower, lengths=lengths, output_width=self.output_width, merge=self.merge)
            case "final":
                last = Final(tower=tower, lengths=lengths, patch_elements=self.patch_elements)
            case _:
                assert_never(self.after)
        block = Block(tower=tower, lengths=lengths, causal=self.causal, context=context)
        return (first, 1), (block, tower.num_layers), (last, 1)

    @property
    def module(self) -> Module:
        kinds = [self.before, *["block"] * self.tower.num_layers, self.after]
        return Module(
            name=self.name,
            layers=tuple(Layer(kind=kind, parameters=(f"{self.name}.{number}",)) for number, kind in enumerate(kinds)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """One parameter for each layer."""
        tower, out = self.tower, self.output_width
        sizes = {
            "embedding": tower.vocabulary * tower.width,
            "patches": (self.patch_elements + 1) * tower.width,
            "block": tower.layer_elements,
            "head": (tower.vocabulary + 1) * tower.width,
            "adapter": (self.merge * tower.width + out + 2) * out + 2 * tower.width,
            "final": (tower.width + 1) * self.patch_elements + 2 * tower.width,
        }
        return tuple(
            Parameter(name=layer.parameters[0], num_elements=sizes[layer.kind], is_split=layer.kind not in _WHOLE)
            for layer in self.module.layers
        )


_WHOLE = ("patches", "final")  # small layers that tensor groups do not split
_MOST_INSTANCES = {VISION: 48, VIDEO: 8}  # limits for a microbatch


Parts = Mapping[str, Sequence[Sequence[tuple[int, ...]]]]  # by module and microbatch: the items of each part


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalModel:
    """One of the papers' setups: chains, of which all feed the last, and its devices, tensor groups and stages."""

    name: str
    description: str
    chains: tuple[Chain, ...]
    tensor_degree: int
    num_stages: int
    cluster_name: str

    @property
    def item_modules(self) -> tuple[str, ...]:
        """Modules that feed the last chain and whose instances are independent: encoders of images or sound."""
        return tuple(chain.name for chain in self.chains[:-1] if chain.before == "patches")

    @property
    def cluster(self) -> Cluster:
        """The cluster of the paper's experiment."""
        return cluster_named(self.cluster_name)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for chain in self.chains for parameter in chain.parameters)

    def refuse_cluster(self, cluster: Cluster) -> None:
        """Raise an error if stages and tensor groups do not divide the cluster; a tensor group lies inside an
        island."""
        degree, num_devices = self.tensor_degree, self.tensor_degree * self.num_stages
        if cluster.num_devices % num_devices:
            raise PlanError(
                f"{self.name} has {self.num_stages} stages of {degree} devices, so it needs a multiple of "
                f"{num_devices} devices; {cluster.name} has {cluster.num_devices}"
            )
        if degree * cluster.num_tensor_groups(degree) < cluster.num_devices:
            size = next(island.num_devices for island in cluster.islands if island.num_devices % degree)
            raise InputError(
                f"{self.name} has tensor groups of {degree} devices, which lie inside islands: {cluster.name} has an "
                f"island of {size}; give a cluster whose islands have a multiple of {degree} devices"
            )

    def chain(self, module: str) -> Chain:
        for chain in self.chains:
            if chain.name == module:
                return chain
        raise WorkloadError(
            f"model {self.name!r} has no module {module!r}; it has {', '.join(chain.name for chain in self.chains)}"
        )


AUDIO = "audio"


def vit_chain(
    num_layers: int,
    width: int,
    hidden: int,
    heads: int,
    output_width: int,
    tested_sizes: tuple[int, ...] = tuple(range(4, 33, 4)),  # the paper's range
) -> Chain:
    tower = Tower(
        name=VISION, num_layers=num_layers, width=width, num_heads=heads, mlp_width=hidden, max_tensor_degree=8
    )
    return Chain(
        tower=tower,
        before="patches",
        after="adapter",
        patch_elements=3 * 14 * 14,
        merge=16,
        output_width=output_width,
        tested_sizes=tested_sizes,
    )


def language_chain(
    num_layers: int, width: int, hidden: int, heads: int, vocabulary: int, output_width: int = 0
) -> Chain:
    tower = Tower(
        name=LANGUAGE,
        num_layers=num_layers,
        width=width,
        num_heads=heads,
        num_key_heads=8,
        mlp_width=hidden,
        gated=True,
        vocabulary=vocabulary,
        max_tensor_degree=8,
    )
    after: After = "adapter" if output_width else "head"
    return Chain(tower=tower, before="embedding", after=after, causal=True, output_width=output_width)


def _dit(num_layers: int, width: int, hidden: int, heads: int, max_tensor_degree: int) -> Chain:
    tower = Tower(
        name=VIDEO,
        num_layers=num_layers,
        width=width,
        num_heads=heads,
        mlp_width=hidden,
        cross_attention=True,
        max_tensor_degree=max_tensor_degree,
    )
    return Chain(
        tower=tower, before="patches", after="final", patch_elements=16 * 2 * 2, tested_sizes=tuple(range(1, 9))
    )


_LLAMA, _QWEN = 128_256, 152_064  # vocabularies


def _vlm_s(name: str, cluster_name: str) -> MultimodalModel:
    return MultimodalModel(
        name=name,
        description="ViT 5B and Llama3 8B",
        chains=(vit_chain(63, 1792, 15360, 16, 4096), language_chain(32, 4096, 14336, 32, _LLAMA)),
        tensor_degree=4,
        num_stages=4,
        cluster_name=cluster_name,
    )


MODELS: dict[str, MultimodalModel] = {
    model.name: model
    for model in (
        _vlm_s("vlm-s", "h800x16"),
        _vlm_s("vlm-s-h20", "h20x16"),
        MultimodalModel(
            name="vlm-m",
            description="ViT 5B and Qwen2 32B",
            chains=(vit_chain(63, 1792, 15360, 16, 5120), language_chain(64, 5120, 27648, 40, _QWEN)),
            tensor_degree=8,
            num_stages=4,
            cluster_name="h800x32",
        ),
        MultimodalModel(
            name="vlm-l",
            description="ViT 22B and Qwen2 72B",
            chains=(vit_chain(48, 6144, 24576, 48, 8192), language_chain(80, 8192, 29568, 64, _QWEN)),
            tensor_degree=8,
            num_stages=8,
            cluster_name="h800x64",
        ),
        MultimodalModel(
            name="t2v-s",
            description="Llama3 8B and DiT 5B",
            chains=(language_chain(32, 4096, 14336, 32, _LLAMA, 3584), _dit(28, 3584, 10240, 28, 4)),
            tensor_degree=4,
            num_stages=4,
            cluster_name="h800x16",
        ),
        MultimodalModel(
            name="t2v-l",
            description="Qwen2 32B and DiT 30B",
            chains=(language_chain(64, 5120, 27648, 40, _QWEN, 6144), _dit(48, 6144, 24576, 48, 8)),
            tensor_degree=8,
            num_stages=8,
            cluster_name="h800x64",
        ),
    )
}


@functools.cache
def measured_efficiencies() -> Efficiencies:
    """Kernel efficiencies measured on an H200 (`benchmarks/kernels.py`)."""
    file = resources.files("spindle.recipes") / "h200_kernels.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    return artifact_from_json(data, "h200_kernels.json", EFFICIENCIES_KIND, Efficiencies)


def emulator(cluster: Cluster) -> Semu:
    """SEMU on a cluster, with the efficiencies that were measured on an H200."""
    return Semu.of(cluster, measured_efficiencies())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of equal layers of one call."""

    first: int
    num_layers: int
    shape: Shape
    cost: LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One call of a task: a module over one sub-microbatch."""

    name: str
    module: str
    pieces: tuple[_Piece, ...]
    items: tuple[int, ...] = ()


def batch_profile(
    model: MultimodalModel,
    microbatches: Sequence[Microbatch],
    splits: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
    semu: Semu | None = None,
    parts: Parts | None = None,
    tensor_degrees: Mapping[str, Sequence[int]] | None = None,
) -> Profile:
    """The profile of one batch at the model's tensor degree, on the model's own cluster unless another is given.

    `splits` are sizes of sub-microbatches by module. `parts`, if a planner chose them, are the items of the parts of
    each microbatch, by module; a part of one item has times on sequence groups, too. `tensor_degrees` are those that
    modules may have, if not the model's. A `semu` that is kept from batch to batch remembers the shapes it has seen.
    """
    cluster = cluster or model.cluster
    semu = semu or emulator(cluster)
    graph, shapes = _graph_and_shapes(model, microbatches, splits or {}, parts or {})
    curves: list[tuple[Curve, ...]] = []
    for op, shape in zip(graph.metaops, shapes, strict=True):
        module = op.module or ""
        of_op = []
        for degree in (tensor_degrees or {}).get(module, (model.tensor_degree,)):
            shared = sequence_degrees(model, module, cluster, degree) if len(op.items) == 1 else (1,)
            of_op.append(semu.curve(shape, degree, shared))
        curves.append(tuple(of_op))
    return Profile(graph=graph, cluster=cluster, curves=tuple(curves), leaves_out=semu.leaves_out)


PART_TOKENS = (2048, 8192)  # sizes of parts: smaller ones leave more freedom, larger ones run faster


def parts_profile(
    model: MultimodalModel,
    microbatches: Sequence[Microbatch],
    part_tokens: int | None,
    cluster: Cluster | None = None,
    semu: Semu | None = None,
) -> Profile:
    """The profile of a batch with item calls in parts of about `part_tokens` (None: whole), at every tensor degree that
    encoders may have."""
    parts = {
        module: [
            items_in_parts(microbatch.tokens_of(module), part_tokens)
            if part_tokens
            else split_evenly(tuple(range(len(microbatch.tokens_of(module)))), None)
            for microbatch in microbatches
        ]
        for module in model.item_modules
    }
    degrees = [1 << power for power in range(model.tensor_degree.bit_length())]
    of_module = {
        module: tuple(degree for degree in degrees if degree <= model.chain(module).tower.max_tensor_degree)
        for module in model.item_modules
    }
    return batch_profile(model, microbatches, None, cluster, semu, parts, of_module)


def sequence_degrees(model: MultimodalModel, module: str, cluster: Cluster, tensor_degree: int) -> tuple[int, ...]:
    """The numbers of tensor groups over which an item may be split: they divide its heads, inside one island."""
    heads = model.chain(module).tower.num_heads // tensor_degree
    most = max(island.num_devices for island in cluster.islands) // tensor_degree
    return tuple(degree for degree in (1, 2, 4, 8) if degree <= most and heads % degree == 0)


def model_flops(model: MultimodalModel, microbatches: Sequence[Microbatch]) -> float:
    """FLOPs of forward and backward of a batch without recomputation, as for MFU."""
    return sum(
        piece.num_layers * (piece.cost.forward_flops + piece.cost.backward_flops)
        for _, parts in _parts(model, microbatches, {}, {})
        for part in parts
        for piece in part.pieces
    )


def sub_microbatch_sizes(
    model: MultimodalModel, microbatches: Sequence[Microbatch], semu: Semu
) -> tuple[dict[str, int], ...]:
    """Sizes of sub-microbatches, in instances, that a planner may choose among, by module that has several. The first
    choice leaves microbatches whole; the others are the sizes that DIP tested, and the one that it would take
    (§4.1)."""
    choices: list[dict[str, int]] = [{}]
    for chain in model.chains:
        lengths = [count for microbatch in microbatches for count in microbatch.tokens_of(chain.name)]
        if chain.name in _MOST_INSTANCES and lengths:
            most = max(len(microbatch.tokens_of(chain.name)) for microbatch in microbatches)
            tested = range(1, 1 + _MOST_INSTANCES[chain.name])
            rule = sub_microbatch_size(model, chain.name, int(np.mean(lengths)), semu, tested)
            sizes = [size for size in sorted({rule, *chain.tested_sizes}) if size < most]
            choices += [{**choice, chain.name: size} for choice in choices for size in sizes]
    return tuple(choices)


def sub_microbatch_size(
    model: MultimodalModel,
    module: str,
    instance_tokens: int,
    semu: Semu,
    sizes: Iterable[int] = (),
    share: float = 0.95,
) -> int:
    """The smallest size (in instances) whose efficiency is at least `share` of the best over all tested sizes (DIP
    §4.1): `sizes`, or the module's own.

    Efficiency is model FLOPs per second over forward and backward of the whole module.
    """
    tested = tuple(sizes) or model.chain(module).tested_sizes
    reached = {size: _flops_per_s(model, module, instance_tokens, size, semu) for size in tested}
    best = max(reached.values())
    return min(size for size, rate in reached.items() if rate >= share * best)


def _flops_per_s(model: MultimodalModel, module: str, instance_tokens: int, size: int, semu: Semu) -> float:
    chain = model.chain(module)
    lengths = ((instance_tokens, size),)
    context = lengths_of(even_parts(8192, size)) if chain.tower.cross_attention else ()
    flops = time_s = 0.0
    for shape, count in chain.shapes(lengths, context):
        time = semu.layer(shape, model.tensor_degree)
        flops += 3 * count * shape.cost.forward_flops
        time_s += count * (time.forward_s + time.backward_s)
    return flops / time_s


def _parts(
    model: MultimodalModel, microbatches: Sequence[Microbatch], splits: Mapping[str, int], given: Parts
) -> list[tuple[str, list[_Part]]]:
    """The calls of every task, those of the first module first; `given` are the items of parts, if they are chosen."""
    for module in splits:
        model.chain(module)
    digits = max(2, len(str(len(microbatches) - 1)))
    known: dict[tuple[str, Lengths, Lengths], tuple[_Piece, ...]] = {}

    def pieces(chain: Chain, lengths: Lengths, context: Lengths) -> tuple[_Piece, ...]:
        key = (chain.name, lengths, context)
        if key not in known:
            rows, first = [], 0
            for shape, count in chain.shapes(lengths, context):
                rows.append(_Piece(first=first, num_layers=count, shape=shape, cost=shape.cost))
                first += count
            known[key] = tuple(rows)
        return known[key]

    result = []
    for number, microbatch in enumerate(microbatches):
        for module, _ in microbatch.instances:
            model.chain(module)
        parts: list[_Part] = []
        for chain in model.chains:
            instances = microbatch.tokens_of(chain.name)
            if chain.name in given:
                parts += [
                    _Part(
                        name=f"{chain.name}.{position}",
                        module=chain.name,
                        pieces=pieces(chain, lengths_of(instances[item] for item in items), ()),
                        items=items,
                    )
                    for position, items in enumerate(given[chain.name][number])
                ]
                continue
            most = splits.get(chain.name)
            cut = split_evenly(instances, most)
            if not cut:
                continue
            # Each instance attends to its share of the previous module's output.
            text = sum(microbatch.tokens_of(model.chains[0].name)) if chain.tower.cross_attention else 0
            seen = even_parts(text, len(instances)) if text else []
            start = 0
            for position, instance_tokens in enumerate(cut):
                context = lengths_of(seen[start : start + len(instance_tokens)])
                start += len(instance_tokens)
                is_whole = most is None and chain.before == "embedding"  # one packed sequence
                name = chain.name if is_whole else f"{chain.name}.{position}"
                parts.append(
                    _Part(name=name, module=chain.name, pieces=pieces(chain, lengths_of(instance_tokens), context))
                )
        result.append((f"m{number:0{digits}d}", parts))
    return result


def _flows(model: MultimodalModel, parts: list[_Part]) -> tuple[tuple[str, str], ...]:
    """Every part of another module feeds every part of the last."""
    consumers = [part.name for part in parts if part.module == model.chains[-1].name]
    producers = [part.name for part in parts if part.module != model.chains[-1].name]
    return tuple((producer, consumer) for producer in producers for consumer in consumers)


@functools.cache
def _parameters(model: MultimodalModel) -> tuple[Parameter, ...]:
    return tuple(parameter for chain in model.chains for parameter in chain.parameters)


def _graph_and_shapes(
    model: MultimodalModel, microbatches: Sequence[Microbatch], splits: Mapping[str, int], given: Parts
) -> tuple[MetaGraph, tuple[Shape, ...]]:
    first_parameter, offset = {}, 0
    for chain in model.chains:
        first_parameter[chain.name] = offset
        offset += chain.tower.num_layers + 2
    metaops: list[MetaOp] = []
    shapes: list[Shape] = []
    edges: list[tuple[int, int]] = []
    weights: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {}
    for microbatch, (task, parts) in enumerate(_parts(model, microbatches, splits, given)):
        ends: dict[str, tuple[int, int]] = {}
        for part in parts:
            begin = len(metaops)
            for piece in part.pieces:
                key = (part.module, piece.first)
                if key not in weights:
                    at = first_parameter[part.module] + piece.first
                    weights[key] = tuple((at + number,) for number in range(piece.num_layers))
                if len(metaops) > begin:
                    edges.append((len(metaops) - 1, len(metaops)))
                metaops.append(
                    MetaOp(
                        name=f"{task}/{part.name}[{piece.first}:{piece.first + piece.num_layers}]",
                        num_layers=piece.num_layers,
                        task=task,
                        microbatch=microbatch,
                        batch_size=1,
                        module=part.module,
                        call=part.name,
                        first_layer=piece.first,
                        cost=piece.cost,
                        parameters=weights[key],
                        items=part.items,
                    )
                )
                shapes.append(piece.shape)
            ends[part.name] = (begin, len(metaops) - 1)
        edges += [(ends[producer][1], ends[consumer][0]) for producer, consumer in _flows(model, parts)]
    graph = MetaGraph(name=model.name, metaops=tuple(metaops), edges=tuple(edges), parameters=_parameters(model))
    return graph, tuple(shapes)
