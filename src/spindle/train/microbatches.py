"""Steps whose batches are microbatches of one pipeline. Each step has a graph, a plan and a program of its own.

The micro-steps of gradient accumulation become the microbatches of a pipeline: they run interleaved in one program
instead of one after another. The placement of layers is chosen once; the order of a step's passes depends on its
batches, and is searched while the previous step runs. Results are those of gradient accumulation.

Layers were measured on the first batch of each variant. For batches of other shapes their times scale with the number
of output elements, and no pass gets shorter than its launch; that attention grows faster is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from spindle.graph import MetaGraph, MetaOp, microbatch_name
from spindle.planners import Job, Layout, PlanOptions
from spindle.profile import Curve, Profile
from spindle.program import Program
from spindle.run import (
    Cuts,
    Lengths,
    LossCode,
    OpCode,
    PytreeMeta,
    ShapeInference,
    TensorMeta,
    meta_of_items,
    signature_of,
)
from spindle.train.background_planner import BackgroundPlanner
from spindle.train.item_parts import (
    BatchItems,
    PartSettings,
    groups_of_ops,
    item_code,
    item_lengths,
    modules_in_parts,
    part_curve,
    part_op,
    parts_of_group,
    scaled_cost,
    shared_curve,
    times_of,
)
from spindle.workload import LayerCost

EVALUATIONS = 2000
_MOST_GRAPHS = 8  # the number of steps whose graphs are kept
_ENOUGH_ALIKE = 4  # batches with different items that must agree before shapes after the items are taken as known
_MOST_PROGRAMS = 32  # the number of programs that are kept, in case a step with such batches comes again

Part = tuple[str, int, int]  # one microbatch of a step: a variant, its rows, and the signature of its batch
Key = tuple[tuple[Part, ...], ...]  # microbatches by micro-step


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of one step with its times and code, and the task variant of each microbatch."""

    profile: Profile
    code: list[OpCode]
    variants: dict[str, str]
    reached: dict[str, frozenset[int]] | None


def step_graph(
    key: Key,
    profile: Profile,
    code: Sequence[OpCode],
    scales: Mapping[tuple[str, int], Mapping[int, float]],
    reached: Mapping[str, frozenset[int]] | None,
    counts: Mapping[str, int],
    batches: Mapping[tuple[str, int], BatchItems] | None = None,
    parts: PartSettings | None = None,
) -> StepGraph:
    """Make the graph of a step: the ops of each variant, once for each micro-step that takes it.

    `counts` has the micro-steps over which a variant's losses are averaged. `scales` says, by variant and signature,
    how much longer ops take than measured. With `parts`, item calls are split into parts, by the items of `batches`.
    """
    metaops: list[MetaOp] = []
    curves: list[tuple[Curve, ...]] = []
    codes: list[OpCode] = []
    edges: list[tuple[int, int]] = []
    by_variant: dict[str, list[int]] = {}
    for position, op in enumerate(profile.graph.metaops):
        by_variant.setdefault(op.task, []).append(position)
    variants: dict[str, str] = {}
    scaled: dict[tuple[int, float, int], tuple[LayerCost, Curve]] = {}  # by op, scale and rows: most are alike
    for micro_step, batches_taken in enumerate(key):
        for variant, rows, signature in batches_taken:
            task = microbatch_name(variant, micro_step)
            variants[task] = variant
            part_of: dict[int, list[list[int]]] = {}  # by op: the items of each of its parts
            batch = None if batches is None else batches[variant, signature]
            if parts is not None and parts.part_tokens is not None and batch is not None:
                for group in groups_of_ops(profile.graph, code, by_variant[variant]):
                    of_group = parts_of_group(group, code, batch, parts.part_tokens)
                    part_of.update(dict.fromkeys(group, of_group) if of_group else {})
            places: dict[int, list[int]] = {}  # by op: its position in the step's graph, or the positions of its parts
            for position in by_variant[variant]:
                op, curve = profile.graph.metaops[position], profile.curves[position][0]
                layers = f"[{op.first_layer}:{op.first_layer + op.num_layers}]"
                known, times = item_code(code[position]), times_of(profile, op)
                lengths: tuple[int, ...] = ()
                whole = 0
                if known is not None and parts is not None and batch is not None:
                    lengths = item_lengths(known, batch)
                    whole = sum(item_lengths(known, parts.measured[variant]))
                if position in part_of:
                    places[position] = list(range(len(metaops), len(metaops) + len(part_of[position])))
                    for number, items in enumerate(part_of[position]):
                        name = f"{task}/{op.call}.{number}{layers}"
                        metaops.append(part_op(op, number, items, name, task, micro_step, lengths, whole))
                        part = part_curve(curve, times, [lengths[item] for item in items], whole)
                        sequence = known.sequence if known is not None and len(items) == 1 else None
                        if sequence is not None and parts is not None:
                            most = parts.sequence_degrees.get(op.module or "")
                            length = lengths[items[0]]
                            part = shared_curve(part, times, length, sequence, op.first_layer, profile, most)
                        curves.append((part,))
                        codes.append(code[position])
                    continue
                scale = scales[variant, signature].get(position, 1.0)
                if lengths and whole:
                    scale = sum(lengths) / whole
                places[position] = [len(metaops)]
                assert op.cost is not None
                if (position, scale, rows) not in scaled:
                    # A cost is per row: `scale` is by the elements of the whole batch, which may have other rows.
                    cost = scaled_cost(op.cost, scale * (op.batch_size or 1) / rows)
                    scaled[position, scale, rows] = cost, curve.scaled(scale)
                cost, scaled_curve = scaled[position, scale, rows]
                name = f"{task}/{op.call}{layers}"
                metaops.append(replace(op, name=name, task=task, microbatch=micro_step, batch_size=rows, cost=cost))
                is_measured = bool(lengths) and times is not None
                curves.append((part_curve(curve, times, lengths, whole) if is_measured else scaled_curve,))
                codes.append(_with_averaged_loss(code[position], counts[variant]))
            for producer, consumer in profile.graph.edges:
                if producer not in places:
                    continue
                if producer in part_of and consumer in part_of:
                    edges += zip(places[producer], places[consumer], strict=True)
                else:
                    edges += [(place, places[consumer][0]) for place in places[producer]]
    graph = MetaGraph(
        name=profile.graph.name,
        metaops=tuple(metaops),
        edges=tuple(edges),
        parameters=profile.graph.parameters,
        numerics=profile.graph.numerics,
        remarks=profile.graph.remarks,
    )
    whole_profile = replace(profile, graph=graph, curves=tuple(curves), item_times=())
    reached_by = None if reached is None else {task: reached[variant] for task, variant in variants.items()}
    return StepGraph(whole_profile, codes, variants, reached_by)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Consecutive batches whose items differ in their rows, but that had the same shapes after the items: how many
    there were, and the rows of the last one."""

    count: int
    cuts: Cuts
    rows: tuple[int, Mapping[tuple[str, str], PytreeMeta]]


def _ends_call(graph: MetaGraph, position: int) -> bool:
    """Whether an op contains the last layer of its call."""
    op = graph.metaops[position]
    return all(
        (graph.metaops[after].task, graph.metaops[after].call) != (op.task, op.call)
        for after in graph.successors[position]
    )


def _with_averaged_loss(code: OpCode, count: int) -> OpCode:
    if not isinstance(code, LossCode):
        return code
    weight = code.weight
    if callable(weight):
        return replace(code, weight=lambda step: weight(step) / count)
    return replace(code, weight=weight / count)


class Microbatches:
    """The microbatches of one rank. All ranks request the same steps in the same order, and rank 0 has them planned."""

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        code: Sequence[OpCode],
        examples: Mapping[str, Any],
        forms: ShapeInference,
        *,
        is_first: bool,
        seed: int,
        planner: str = "pipeline",
        parts: PartSettings | None = None,
    ) -> None:
        self.profile, self.layout, self._code = profile, layout, code
        self.forms, self._seed, self._is_first = forms, seed, is_first
        self._step_planner, self._parts = planner, parts
        self._has_parts = parts is not None and parts.has_parts
        self._modules_in_parts = modules_in_parts(profile.graph, code) if self._has_parts else set()
        self._example_cuts = {
            variant: forms.of(profile.graph, code, {variant: without_values(example)})
            for variant, example in examples.items()
        }
        self._measured = {variant: self._output_elements(variant, cuts) for variant, cuts in self._example_cuts.items()}
        self._batches: dict[tuple[str, int], BatchItems] = {}  # by variant and signature
        self._cuts: dict[tuple[str, int], Cuts] = {}
        # by variant, and the signature of the entries without items
        self._alike: dict[tuple[str, int], _Alike] = {}
        self._scales: dict[tuple[str, int], dict[int, float]] = {}
        self.owning_ranks: dict[int, tuple[int, ...]] = {}
        self._planner: BackgroundPlanner | None = None
        self._numbers: dict[Key, int] = {}  # job numbers of the steps that are being planned
        self._graphs: dict[Key, StepGraph] = {}  # graphs of the last steps
        self._programs: dict[Key, tuple[Program, bool]] = {}  # with whether their search is over
        self._count = 0

    def infer_cuts(self, variant: str, signature: int, batch: BatchItems) -> Cuts | None:
        """The shapes that cross cuts between layers for a batch without values; None if they are known already.

        If item calls run in parts, the other calls mostly have the same shapes whatever the lengths of items. After a
        few batches that differ only in the lengths of items and agree in these shapes, shapes are not inferred again. A
        batch with other shapes would be refused when it is sent.
        """
        if (variant, signature) in self._scales:
            return None
        self._batches[variant, signature] = batch
        rows_key = (variant, self._rows_signature(variant, batch))
        known = self._item_outputs(variant, variant, batch)
        # Different lengths of items with the same total number of rows prove nothing: shapes may follow from that
        # number.
        rows = signature_of(batch.nest), known
        alike = self._alike.get(rows_key)
        is_inferred = alike is None or (alike.count < _ENOUGH_ALIKE and alike.rows != rows)
        if alike is not None and not is_inferred:
            cuts = alike.cuts
        else:
            cuts = self.forms.of(self.profile.graph, self._code, {variant: batch.nest}, known)
            if self._has_parts:
                count = alike.count if alike is not None and alike.cuts == cuts else 0
                self._alike[rows_key] = _Alike(count + 1, cuts, rows)
        self._scales[variant, signature] = self._scales_of(variant, cuts)
        self._cuts[variant, signature] = cuts
        return cuts if is_inferred else None

    def _scales_of(self, variant: str, cuts: Cuts) -> dict[int, float]:
        """How much longer ops take than measured, estimated by the number of elements that cross cuts."""
        measured, sizes = self._measured[variant], self._output_elements(variant, cuts)
        return {op: size / measured[op] for op, size in sizes.items() if measured.get(op) and size}

    def _rows_signature(self, variant: str, batch: BatchItems) -> int:
        """A signature of the entries of a batch that have no rows of items."""
        entries = {
            name
            for position, op in enumerate(self.profile.graph.metaops)
            if op.task == variant and (known := item_code(self._code[position])) is not None
            for name, _ in known.entries
        }
        nest = batch.nest
        return signature_of(
            {name: value for name, value in nest.items() if name not in entries} if isinstance(nest, dict) else nest
        )

    def _item_outputs(self, variant: str, task: str, batch: BatchItems) -> dict[tuple[str, str], PytreeMeta]:
        """The shapes of the outputs of item calls that run in parts. They follow from the lengths of items and the
        first batch."""
        outputs = {}
        for position, op in enumerate(self.profile.graph.metaops) if self._has_parts else ():
            known = item_code(self._code[position])
            if op.task != variant or known is None or not known.can_split or op.module not in self._modules_in_parts:
                continue
            example = self._output_of_example(variant, position)
            if example is not None and _ends_call(self.profile.graph, position):
                num_items = known.num_items(batch.nest, batch.lengths)
                outputs[task, op.call or ""] = meta_of_items(example, known, batch.lengths, range(num_items))
        return outputs

    def _output_of_example(self, variant: str, position: int) -> PytreeMeta | None:
        return self._example_cuts[variant].get((position, self.profile.graph.metaops[position].num_layers))

    def cuts(self, step: StepGraph, key: Key) -> Cuts:
        """The shapes that cross cuts between layers in a step."""
        cuts: Cuts = {}
        taken = {
            microbatch_name(variant, micro_step): (variant, rows, signature)
            for micro_step, parts in enumerate(key)
            for variant, rows, signature in parts
        }
        graph = step.profile.graph
        positions = {(op.task, op.call, op.first_layer): place for place, op in enumerate(self.profile.graph.metaops)}
        for place, op in enumerate(graph.metaops):
            variant, rows, signature = taken[op.task]
            position = positions[variant, op.whole_call, op.first_layer]
            if not op.items:
                inferred = self._cuts[variant, signature]
                for layers in range(1, op.num_layers + 1):
                    if (position, layers) in inferred:
                        cuts[place, layers] = replace(inferred[position, layers], num_rows=rows)
                continue
            example, known = self._output_of_example(variant, position), item_code(step.code[place])
            if example is not None and known is not None and known.can_split and _ends_call(graph, place):
                lengths = self._batches[variant, signature].lengths
                cuts[place, op.num_layers] = meta_of_items(example, known, lengths, op.items)
        return cuts

    def lengths(self, key: Key) -> dict[str, Lengths]:
        """The number of rows of each item, by microbatch."""
        return {
            microbatch_name(variant, micro_step): self._batches[variant, signature].lengths
            for micro_step, taken in enumerate(key)
            for variant, _, signature in taken
        }

    def forget(self) -> None:
        """Forget the shapes of all batches."""
        self._scales.clear()
        self._batches.clear()
        self._cuts.clear()

    def _output_elements(self, variant: str, cuts: Cuts) -> dict[int, int]:
        """Op of a variant → the number of elements that its first layer returns. A loss counts as the size of its
        inputs."""
        graph = self.profile.graph
        sizes = {
            op: sum(math.prod(leaf.shape) for leaf in form.leaves if isinstance(leaf, TensorMeta))
            for (op, layers), form in cuts.items()
            if layers == 1
        }
        for op in graph.order:
            if isinstance(self._code[op], LossCode) and graph.metaops[op].task == variant:
                sizes[op] = sum(sizes.get(source, 0) for source in graph.predecessors[op])
        return sizes

    def graph(self, key: Key, reached: Mapping[str, frozenset[int]] | None, counts: Mapping[str, int]) -> StepGraph:
        """The graph of a step. Rank 0 requests it twice: to have the step planned, and to run it."""
        if key not in self._graphs:
            while len(self._graphs) > _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = step_graph(
                key, self.profile, self._code, self._scales, reached, counts, self._batches, self._parts
            )
        return self._graphs[key]

    def request_plan(self, key: Key, profile: Profile, time_limit_s: float | None = None) -> None:
        """On rank 0: have a step with these batches planned. It will run in about `time_limit_s`."""
        known = self._programs.get(key)
        if not self._is_first or key in self._numbers or (known is not None and known[1]):
            return
        if self._planner is None:
            self._planner = BackgroundPlanner()
        options = PlanOptions(
            seed=self._seed, evaluations=EVALUATIONS, time_limit_s=time_limit_s, layouts=(self.layout,)
        )
        self._planner.request_plan(
            Job(
                number=self._count,
                profile=profile,
                owning_ranks=self.owning_ranks,
                options=options,
                planner=self._step_planner,
            )
        )
        self._numbers[key] = self._count
        self._count += 1

    def request_plan_early(
        self,
        key: Key,
        batches: Mapping[tuple[str, int], BatchItems],
        reached: Mapping[str, frozenset[int]] | None,
        counts: Mapping[str, int],
        time_limit_s: float | None = None,
    ) -> None:
        """On rank 0: have a step planned whose headers were not exchanged yet.

        Shapes of its batches are not inferred, because all ranks would have to do that in the same order. So it is
        planned only if the last batches with other items had the same shapes, whose times then stand for those of this
        step.
        """
        scales = {}
        for (variant, signature), batch in batches.items():
            known = self._scales.get((variant, signature))
            alike = self._alike.get((variant, self._rows_signature(variant, batch)))
            if known is None and alike is None:
                return
            scales[variant, signature] = (
                self._scales_of(variant, alike.cuts) if known is None and alike else known or {}
            )
        step = step_graph(key, self.profile, self._code, scales, reached, counts, batches, self._parts)
        self.request_plan(key, step.profile, time_limit_s)

    def ready(self, key: Key) -> Program | None:
        """On rank 0: the program of a step, if its search is done."""
        number = self._numbers.get(key)
        if number is not None and self._planner is not None and self._planner.is_final(number):
            self._programs[key] = self._planner.best(number)
            del self._numbers[key]
            self._forget_old()
        known = self._programs.get(key)
        return known[0] if known is not None and known[1] else None

    def program(self, key: Key, profile: Profile) -> Program:
        """On rank 0: the best program for a step so far. A search that is still running may be done when such batches
        come again."""
        self.request_plan(key, profile)
        number = self._numbers.get(key)
        if number is not None:
            assert self._planner is not None
            self._programs[key] = self._planner.best(number)
            if self._programs[key][1]:
                del self._numbers[key]
        self._forget_old()
        return self._programs[key][0]

    def _forget_old(self) -> None:
        """Drop all but the last programs, and the answers of the planning process that are no longer needed."""
        while len(self._programs) > _MOST_PROGRAMS:
            oldest = next(iter(self._programs))
            del self._programs[oldest]
            self._numbers.pop(oldest, None)
        if self._planner is not None:
            self._planner.keep(self._numbers.values())

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None
            self._numbers.clear()


def without_values(nest: Any) -> Any:
    """A nest of tensors without values."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, nest)
