"""The second interpreter of a Program: runs one rank's instructions on `torch.distributed`.

Transfers are posted as soon as their data is there and waited for when it is needed; synchronisation runs behind the
backward that is still going on. The order of each lane is the program's, so what `verify` proved holds here.

Rows of a link are rows of the batch, because both ends of a task's flow have the same one. Left out
so far: lanes with quotas.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from spindle.errors import ProgramError, TrainingError
from spindle.graph import MetaGraph
from spindle.models import styles_on, with_styles
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.run.code import LayerCode, LayersCode, LossCode, OpCode
from spindle.run.gradients import Gradients
from spindle.run.graphs import Chunk, Graphs, Made
from spindle.run.losses import loss_part
from spindle.run.members import TENSOR, RankMembers
from spindle.run.parts import start_reduce_scatter
from spindle.run.rows import Axes, LeafForm, as_leaves, copied, cut, cut_leaf, joined, takes_gradient
from spindle.run.shards import Shards
from spindle.run.side import LinkEnd, SlotSide, held_parameters, side_of, tensor_groups
from spindle.run.step import Losses, Pace, Piece, Step, Turn, Watch
from spindle.run.transfers import Transfers
from spindle.run.world import World, compute_stream, peers, wait

_STEPS_BEFORE_CAPTURE = 2  # in which libraries choose their kernels
_MOST_GRAPHS = 4  # sets of them, each with memory of its own: one for each choice of tasks


class Updates(Protocol):
    """What changes parameters by their gradients: an optimizer, or what does more around one."""

    def step(self) -> Any: ...


class Executor:
    """Runs steps of one program on one rank.

    `parameters` are in the graph's order, this process's own tensors; `reached` has by task the positions of those that
    any gradient reaches at all. `batch_axes` has the row axes of each task's batch. Layers and losses run under an
    `autocast` to that type. The program of a plan that shards the optimizer needs `shards`, which took parameters in.

    A step may leave tasks out. All ranks then pass over whatever their programs have of these, which leaves the order
    of everything else as `verify` saw it.
    """

    def __init__(
        self,
        program: Program,
        graph: MetaGraph,
        code: Sequence[OpCode],
        parameters: Sequence[nn.Parameter],
        batch_axes: Mapping[str, Axes],
        world: World,
        *,
        reached: Mapping[str, frozenset[int]] | None = None,
        seed: int = 0,
        cuda_graphs: bool = True,
        autocast: torch.dtype | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.program, self.graph, self.world, self.batch_axes, self.seed = program, graph, world, batch_axes, seed
        self._side = side_of(program, graph, code, world.rank)
        self._transfers = Transfers(program, self._side, world)
        self.reads, self.uses = self._side.reads, self._side.uses
        self.held = held_parameters(program, graph, world.rank)
        trainable = {number for number in self.held if graph.parameters[number].trainable}
        self._trained = [parameters[number] for number in sorted(trainable)]
        mine = set(self._side.compute)
        self._chunks_of: dict[str, set[int]] = {}  # backward instructions by task
        for position in mine:
            instruction = program.instructions[position]
            if isinstance(instruction, Backward):
                self._chunks_of.setdefault(self._side.slots[instruction.slot].task, set()).add(position)
        self._after = [frozenset(bucket.after) & mine for bucket in program.buckets]
        self._users = [frozenset(map(self._task_of, bucket.after)) for bucket in program.buckets]
        self._shards = shards
        # What is summed at once: a bucket, or all of one type in a bucket that is sharded.
        summed: list[list[nn.Parameter]] = []
        self._sums_of: list[list[int]] = []  # by bucket
        for number, bucket in enumerate(program.buckets):
            # Other shards than this rank's are other ranks' matter.
            sums = [[parameters[one] for one in bucket.parameters] if world.rank in bucket.ranks else []]
            if shards is not None:
                sums = [list(flat.parameters) for flat in shards.flats[number]]
            self._sums_of.append(list(range(len(summed), len(summed) + len(sums))))
            summed += sums
        flats = dict(enumerate(shards)) if shards is not None else {}
        self._gradients = Gradients(summed, flats)
        # By slot and the first layer of a chunk: positions of the gathers that it waits for.
        self._needed_by: dict[tuple[int, int], list[int]] = {}
        self._gathers: list[tuple[int, int]] = []  # in the order of the lane, with the bucket
        for position in self._side.sync:
            instruction = program.instructions[position]
            if isinstance(instruction, GatherParameters):
                self._gathers.append((position, instruction.bucket))
                for one in program.buckets[instruction.bucket].after:
                    chunk = self._backward_at(one)
                    self._needed_by.setdefault((chunk.slot, chunk.first), []).append(position)
        if self._gathers and shards is None:
            raise ProgramError("this plan shards the optimizer, but no shards were made")

        @cache
        def unreached(tasks: frozenset[str]) -> list[nn.Parameter]:
            """What no gradient of these tasks reaches."""
            if reached is None:
                return []
            found = frozenset[int]().union(*(reached[task] for task in tasks))
            return [parameters[number] for number in sorted(trainable - found)]

        self._unreached, self._autocast = unreached, autocast
        self._stream = compute_stream() if world.device.type == "cuda" else None
        self._captures = cuda_graphs and self._stream is not None
        self._graphs: dict[frozenset[tuple[str, int]], Graphs] = {}  # by the shapes they are for
        self._steps_on: Counter[frozenset[tuple[str, int]]] = Counter()
        self._refused: dict[str, str] = {}
        self._places: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # of parameters and buffers, by slot
        if world.size > 1:
            for bucket in program.buckets:
                world.group("sync", tuple(bucket.ranks.tolist()))
            for shape in program.slots:
                if isinstance(code[shape.op], LossCode) and len(shape.ranks) > 1:
                    world.group("loss", tuple(shape.ranks.tolist()))
                for group in tensor_groups(shape) if shape.tensor_degree > 1 else ():
                    world.group(TENSOR, group)

    def step(
        self,
        number: int,
        batches: Mapping[str, Any],
        signatures: Mapping[str, int],
        optimizer: Updates | None = None,
        *,
        turn: Turn | None = None,
        held: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
        check_losses: bool = False,
        timed: bool = True,
    ) -> tuple[Losses, Watch]:
        """Runs a step on its batches (whole ones; each slot takes its rows) and the signatures of all tasks' batches.

        Of a batch that is not all here, `held` has the rows of each leaf. A task without a signature is left out. Of
        several turns, the last one synchronises gradients and updates.
        Returns this rank's parts of the tasks' losses, which add up over ranks, and, of a timed step, when everything
        ran.
        """
        step = Step(
            number=number,
            batches=batches,
            signatures=signatures,
            check_losses=check_losses,
            held=held or {},
            new=self._transfers.new(signatures),
            turn=turn or Turn(tasks=frozenset(signatures)),
        )
        for task, chunks in self._chunks_of.items():
            if task not in signatures:
                step.done_chunks |= chunks
        with _on(self._stream):
            watch = Watch(self.world.device, timed)
            self._use_graphs(step)
            self._run(step, optimizer, watch)
            self._transfers.remember(signatures)
            if step.graphs is not None and not step.graphs.is_complete:
                step.graphs.finish()
                if step.graphs.is_spoiled:
                    self._drop_graphs()
            return self._losses(step), watch

    def _run(self, step: Step, optimizer: Updates | None, watch: Watch) -> None:
        """This rank's instructions, in order."""
        if self._shards is not None and step.turn.is_first:
            self._shards.drop_gradients()
            for position, bucket in self._gathers:
                if self._shards.is_gathering(bucket):
                    watch.posted[position] = watch.now()  # they go on since the last update
        for parameter in self._trained:
            if step.turn.is_first:
                parameter.grad = None
            elif step.graphs is not None and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # graphs write over the place where it may be, and then add it
        self._advance(step, watch)
        pace = Pace(self.world.device)
        for position in self._side.compute:
            instruction = self.program.instructions[position]
            if not self._is_on(step, instruction):
                continue
            pace.keep()
            watch.posted[position] = watch.now()
            try:
                match instruction:
                    case Forward(slot=slot):
                        self._forward(step, self._side.slots[slot], watch, position)
                        step.forwarded.add(slot)
                    case Backward(slot=slot, first=first, last=last):
                        self._backward(step, self._side.slots[slot], first, last, watch, position)
                        step.done_chunks.add(position)
                        if first == self.program.plan.slots[slot].first:
                            step.returned.add(slot)
                    case OptimizerStep():
                        self._finish_syncs(step, watch)
                        watch.start[position] = watch.now()
                        if optimizer is not None:
                            self._update(step, optimizer)
                    case Exchange() | SyncGradients() | GatherParameters():
                        raise AssertionError("these stand on other lanes")
            except Exception as error:
                error.add_note(f"in step {step.number} on rank {self.world.rank}, {self._describe(instruction)}")
                raise
            watch.end[position] = watch.now()
            self._advance(step, watch)
        self._finish_syncs(step, watch)
        for request, _ in step.sending:
            wait(request)

    def _is_on(self, step: Step, instruction: Instruction) -> bool:
        """Whether an instruction belongs to this step."""
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                return self._side.slots[slot].task in step.signatures
            case Exchange(link=link):
                return self._side.links[link].task in step.signatures
            case SyncGradients(bucket=bucket):
                return not self._users[bucket].isdisjoint(step.turn.tasks)
            case GatherParameters():
                return step.turn.is_first
            case OptimizerStep():
                return step.turn.is_last

    def _backward_at(self, position: int) -> Backward:
        instruction = self.program.instructions[position]
        assert isinstance(instruction, Backward)
        return instruction

    def _task_of(self, position: int) -> str:
        """The task of a backward instruction, whichever ranks run it."""
        return self.graph.metaops[self.program.slots[self._backward_at(position).slot].op].task

    def _use_graphs(self, step: Step) -> None:
        """After a few steps on batches of the same shapes, the next is captured and later ones replay it."""
        if not self._captures or step.check_losses:
            return
        tasks = {slot.task for slot in self._side.slots.values() if slot.task in step.signatures}
        shapes = frozenset((task, step.signatures[task]) for task in tasks)
        self._watch_places()
        self._steps_on[shapes] += 1
        is_known = any({task for task, _ in one} == tasks for one in self._graphs)
        if self._steps_on[shapes] > _STEPS_BEFORE_CAPTURE and not is_known and len(self._graphs) < _MOST_GRAPHS:
            self._graphs[shapes] = Graphs(self._gradients, step.batches, self._refused)
        step.graphs = self._graphs.get(shapes)
        if step.graphs is not None:
            step.batches = step.graphs.batches(step.batches)

    def _watch_places(self) -> None:
        """Graphs know where parameters and buffers were. Moved ones need new graphs; a slot whose buffers are others
        after every step can have none."""
        for slot in self._side.slots.values():
            if not isinstance(slot.code, LayersCode):
                continue
            layers = slot.code.layers[slot.chunks[0][0] : slot.chunks[-1][1]]
            weights = tuple(one.data_ptr() for layer in layers for one in layer.parameters)
            buffers = tuple(one.data_ptr() for layer in layers for one in layer.buffers())
            before = self._places.get(slot.number)
            self._places[slot.number] = (weights, buffers)
            if before is None or before == (weights, buffers) or slot.name in self._refused:
                continue
            if before[0] == weights:
                self._refused[slot.name] = "it replaces its buffers"
            self._drop_graphs()

    def _replays_all_layers(self, step: Step) -> bool:
        layers = (
            slot
            for slot in self._side.slots.values()
            if isinstance(slot.code, LayersCode) and slot.task in step.signatures
        )
        return (
            step.graphs is not None and step.graphs.is_complete and all(one.name not in self._refused for one in layers)
        )

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._steps_on.clear()

    @property
    def gradient_memory(self) -> list[torch.Tensor]:
        """Where gradients stand from step to step."""
        return self._gradients.memory

    @property
    def num_captured(self) -> int:
        """How many slots run as CUDA graphs."""
        return max((one.num_slots for one in self._graphs.values()), default=0)

    @property
    def without_graph(self) -> dict[str, str]:
        """Why slots run without a CUDA graph, by name."""
        return self._refused

    def _describe(self, instruction: Instruction) -> str:
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                what = "forward" if isinstance(instruction, Forward) else "backward"
                return f"{what} of {self._side.slots[slot].name}"
            case _:
                return type(instruction).__name__

    # Transfers and synchronisation, posted in the order of their lanes.

    def _advance(self, step: Step, watch: Watch) -> None:
        transfers = self._side.transfer
        while step.next_transfer < len(transfers):
            position = transfers[step.next_transfer]
            instruction = self.program.instructions[position]
            assert isinstance(instruction, Exchange)
            if not self._is_on(step, instruction):
                step.next_transfer += 1
                continue
            if not self._transfers.post(step, self._side.links[instruction.link], instruction.backward):
                break
            watch.posted[position] = watch.now()
            step.next_transfer += 1
        syncs = self._side.sync
        while step.turn.is_last and step.next_sync < len(syncs):
            position = syncs[step.next_sync]
            instruction = self.program.instructions[position]
            if not isinstance(instruction, SyncGradients) or not self._is_on(step, instruction):
                step.next_sync += 1
                continue
            if not self._after[instruction.bucket] <= step.done_chunks:
                break
            watch.posted[position] = watch.now()
            self._post_sync(step, instruction.bucket, position)
            step.next_sync += 1

    def _post_sync(self, step: Step, bucket: int, position: int) -> None:
        ranks = tuple(self.program.buckets[bucket].ranks.tolist())
        unreached = {id(parameter) for parameter in self._unreached(step.turn.tasks)}
        for one in self._sums_of[bucket]:
            flat = self._gradients.gathered(one, unreached)
            request: Any
            if self._shards is not None:
                request = start_reduce_scatter(flat, ranks, self.world)
            else:
                with peers("synchronising gradients"):
                    request = dist.all_reduce(flat, group=self.world.group("sync", ranks), async_op=True)
            step.syncs.append((position, one, request))

    def _finish_syncs(self, step: Step, watch: Watch) -> None:
        for position, one, request in step.syncs:
            wait(request)
            watch.end[position] = watch.now()
            # Reading the flags waits for the GPU. Where all is replayed, what this rank has it always has.
            is_certain = self._replays_all_layers(step) and self._gradients.has_all(one)
            self._gradients.spread(one, self._gradients.holders(one) if not is_certain else None)
        step.syncs.clear()
        for parameter in self._unreached(step.turn.tasks) if step.turn.is_last else ():
            # Zeros from another rank are no gradient: one process would have none.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def _update(self, step: Step, optimizer: Updates) -> None:
        """The optimizer's step. What it changes of sharded parameters goes to other ranks at once, rather than when the
        next step begins: nothing that stands between waits for it."""
        if self._shards is not None:
            self._shards.settle()  # what no forward of this step has waited for
        optimizer.step()
        for _, bucket in self._gathers:
            if self._shards is not None and self._is_on(step, SyncGradients(bucket=bucket)):
                self._shards.start_gather(bucket)

    def _wait_for_parameters(self, slot: int, first: int, watch: Watch) -> None:
        """Chunk by chunk, where the program waits for those of a whole slot: the last ones come while the first run."""
        for position in self._needed_by.get((slot, first), ()):
            instruction = self.program.instructions[position]
            assert isinstance(instruction, GatherParameters)
            if self._shards is not None and self._shards.is_gathering(instruction.bucket):
                self._shards.wait(instruction.bucket)
                watch.end[position] = watch.now()

    # Compute.

    def _forward(self, step: Step, slot: SlotSide, watch: Watch, position: int) -> None:
        nests = {link.source: self._input(step, link, watch) for link in slot.inputs} if slot.rows else {}
        watch.start[position] = watch.now()
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            return
        if step.graphs is not None and step.graphs.has(slot):
            for first, _ in slot.chunks:
                self._wait_for_parameters(slot.number, first, watch)
            nests, made = step.graphs.forward(slot, nests, lambda inputs: self._compute(step, slot, inputs, watch))
        else:
            made = self._compute(step, slot, nests, watch)
        for link in slot.inputs if slot.rows else ():
            leaves = tree_leaves(nests[link.source])
            step.inputs[link.number] = [leaf if takes_gradient(leaf) else None for leaf in leaves]
        step.pieces[slot.number] = made.pieces
        if isinstance(slot.code, LossCode):
            step.losses[slot.number] = made.outputs
        else:
            step.outputs[slot.number] = made.outputs

    def _compute(self, step: Step, slot: SlotSide, nests: dict[str, Any], watch: Watch) -> Made:
        """A slot's forward pass on its inputs."""
        with self._casting():
            return self._compute_as_is(step, slot, nests, watch)

    def _casting(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        # A graph must not count on weights that were cast before it was captured.
        return torch.autocast(self.world.device.type, dtype=self._autocast, cache_enabled=not self._captures)

    def _compute_as_is(self, step: Step, slot: SlotSide, nests: dict[str, Any], watch: Watch) -> Made:
        if isinstance(slot.code, LayersCode):
            return self._run_layers(step, slot, slot.code, nests, watch)
        if slot.code.is_random:
            self._seed(step, slot, slot.first_layer)
        batch = self._batch(step, slot) if slot.rows else None
        whole = step.batches[slot.task] if step.check_losses and slot.task not in step.held else None
        loss = loss_part(slot.code, slot, batch, nests, self.world, check_with=whole)
        return Made([Piece(inputs=(), outputs=loss)], loss)

    def _run_layers(self, step: Step, slot: SlotSide, code: LayersCode, nests: dict[str, Any], watch: Watch) -> Made:
        pieces = []
        values: Any = None
        members = RankMembers(self.world, slot.group) if len(slot.group) > 1 else None
        for first, last in slot.chunks:
            self._wait_for_parameters(slot.number, first, watch)
            layers = code.layers[first:last]
            inputs: Any = ()
            if values is not None:
                inputs = values = as_leaves(values)
            elif not (slot.begins_call and code.arguments is not None):
                (values,) = nests.values()
            for number, layer in enumerate(layers, start=first):
                if layer.is_random:
                    self._seed(step, slot, slot.first_layer + number)
                run, args = layer.run, values
                if members is not None and layer.styled:
                    run = with_styles(run, layer.styled, members)
                if values is None:
                    # The glue that feeds a call is part of its first layer.
                    run = _behind(code.arguments, run)
                    args = (self._batch(step, slot), *(nests[source][0] for source in code.sources))
                if layer.writes_input and (number == first or slot.recompute):
                    run = _on_copies(run)
                values = _recomputed(layer, run, args) if slot.recompute else run(*args)
            pieces.append(Piece(inputs=inputs, outputs=values))
        return Made(pieces, values)

    def _seed(self, step: Step, slot: SlotSide, layer: int) -> None:
        """Random layers draw the same numbers whenever the same rows of the same step pass through them."""
        when = step.number if step.turn.is_first else (step.number, step.turn.number)
        torch.manual_seed(seed_of(self.seed, when, slot.task, slot.call, layer, slot.begin, slot.end))

    def _batch(self, step: Step, slot: SlotSide) -> Any:
        nest, axes = step.batches[slot.task], self.batch_axes[slot.task]
        if slot.task not in step.held:
            return cut(nest, axes, slot.num_rows, slot.begin, slot.end)
        leaves, spec = tree_flatten(nest)
        # What this slot does not look at may be here for another one, with other rows.
        parts = [
            cut_leaf(leaf, axis, last - first, slot.begin - first, slot.end - first)
            if first <= slot.begin and slot.end <= last
            else None
            for leaf, axis, (first, last) in zip(leaves, axes, step.held[slot.task], strict=True)
        ]
        return tree_unflatten(parts, spec)

    def _input(self, step: Step, link: LinkEnd, watch: Watch) -> Any:
        """A slot's input over one link: rows that are here and rows that came, joined, as leaves of a new graph."""
        if link.is_whole:
            return as_leaves(step.outputs[link.producer])
        slot = self._side.slots[link.consumer]
        arrivals = self._transfers.arrived(step, link, False, watch)
        if link.local is None:
            form = self._transfers.form_of(step, link)
            here: list[Any] = [None] * len(form.leaves)
            kept: list[Any] = list(form.leaves)
            spec, maker_rows = form.spec, form.num_rows
        else:
            producer = self._side.slots[link.producer]
            here, spec = tree_flatten(step.outputs[link.producer])
            kept, maker_rows = here, producer.rows
            first, last = link.local[0] - producer.begin, link.local[1] - producer.begin
        leaves: list[Any] = []
        for number, (leaf, axis) in enumerate(zip(kept, link.axes, strict=True)):
            if not isinstance(leaf, torch.Tensor | LeafForm):
                leaves.append(cut_leaf(leaf, axis, maker_rows, 0, slot.rows))
                continue
            parts: list[tuple[int, torch.Tensor]] = []
            if link.local is not None:
                parts.append((link.local[0], cut_leaf(here[number].detach(), axis, producer.rows, first, last)))
            for arrival in arrivals:
                assert arrival.tensors is not None
                part = arrival.tensors[number]
                assert part is not None
                parts.append((arrival.flow.first, part))
            if axis is None:
                whole = min(parts, key=lambda entry: entry[0])[1]
            else:
                try:
                    whole = joined(parts, axis)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    raise TrainingError(
                        f"{slot.name} gets rows of shapes {', '.join(str(tuple(one.shape)) for _, one in parts)} from "
                        "different ranks; a module's shapes must follow from the batch's, not from its rows"
                    ) from error
            leaves.append(whole.detach().requires_grad_(leaf.requires_grad))
        return tree_unflatten(leaves, spec)

    def _backward(self, step: Step, slot: SlotSide, first: int, last: int, watch: Watch, position: int) -> None:
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            watch.start[position] = watch.now()
            return
        number = slot.chunks.index((first, last))
        is_last = number == len(slot.chunks) - 1
        pieces = step.pieces[slot.number]
        gradients: list[torch.Tensor | None]
        if isinstance(slot.code, LossCode):
            # The weight comes in here, and not into the loss, because a captured loss would keep it for good.
            weight = slot.code.weight(step.number) if callable(slot.code.weight) else slot.code.weight
            gradients = [torch.full_like(step.losses[slot.number], weight / step.turn.count)]
        elif is_last:
            gradients = self._output_gradients(step, slot, tree_leaves(step.outputs[slot.number]), watch)
        else:
            below = tree_leaves(pieces[number + 1].inputs) if pieces else []
            gradients = [leaf.grad if takes_gradient(leaf) else None for leaf in below]
        watch.start[position] = watch.now()
        if step.graphs is None or not step.graphs.backward(
            slot, first, gradients, lambda: self._chunk(step, slot, number), is_last=is_last
        ):
            with self._styles(slot, first, last):
                _run_backward(tree_leaves(pieces[number].outputs), gradients)
        if step.graphs is None:
            self._gradients.keep(_parameters_of(slot, number))
        # Activations go as soon as they are used; the inputs of a chunk stay for the chunk before it.
        if pieces:
            pieces[number].outputs = None
            del pieces[number + 1 :]
        if number == 0 and slot.number in step.outputs:
            step.outputs.pop(slot.number)
            for link in slot.outputs:
                if not link.sends[True]:
                    step.inputs.pop(link.number, None)

    def _styles(self, slot: SlotSide, first: int, last: int) -> Any:
        """Inside, layers of a slot run as a member of its tensor group runs them."""
        if len(slot.group) == 1 or not isinstance(slot.code, LayersCode):
            return nullcontext()
        styled = {id(one.module): one for layer in slot.code.layers[first:last] for one in layer.styled}
        return styles_on(styled.values(), RankMembers(self.world, slot.group))

    def _chunk(self, step: Step, slot: SlotSide, number: int) -> Chunk:
        """A chunk of a slot with all that its gradients are for."""
        pieces = step.pieces[slot.number]
        inputs: list[Any] = [leaf for link in slot.inputs for leaf in step.inputs[link.number]]
        if number > 0:
            inputs = tree_leaves(pieces[number].inputs)
        return Chunk(
            outputs=tree_leaves(pieces[number].outputs),
            inputs=[leaf for leaf in inputs if takes_gradient(leaf)],
            parameters=_parameters_of(slot, number),
        )

    def _output_gradients(
        self, step: Step, slot: SlotSide, outputs: list[Any], watch: Watch
    ) -> list[torch.Tensor | None]:
        """The gradient of a slot's output: what its consumers, here and elsewhere, say of its rows."""
        if len(slot.outputs) == 1 and slot.outputs[0].is_whole:
            inputs = step.inputs[slot.outputs[0].number]
            return [None if leaf is None else leaf.grad for leaf in inputs]
        sums: list[torch.Tensor | None] = [None] * len(outputs)
        ours: set[int] = set()
        for link in slot.outputs:
            parts: list[tuple[int, int, bool, list[torch.Tensor | None]]] = [
                (arrival.flow.first, arrival.flow.last, arrival.flow.with_rowless, arrival.tensors or [])
                for arrival in self._transfers.arrived(step, link, True, watch)
            ]
            if link.local is not None:
                consumer = self._side.slots[link.consumer]
                first, last = link.local
                gradients = [
                    None
                    if leaf is None or leaf.grad is None
                    else cut_leaf(leaf.grad, axis, consumer.rows, first - consumer.begin, last - consumer.begin)
                    for leaf, axis in zip(step.inputs[link.number], link.axes, strict=True)
                ]
                parts.append((first, last, first == consumer.begin, gradients))
            for first, last, with_rowless, gradients in parts:
                for number, (leaf, axis, gradient) in enumerate(zip(outputs, link.axes, gradients, strict=True)):
                    if gradient is None or (axis is None and not with_rowless):
                        continue
                    total = sums[number]
                    if total is None and gradient.shape == leaf.shape:
                        sums[number] = gradient  # not ours to write to: it may be on its way to another rank
                        continue
                    if number not in ours:
                        total = torch.zeros_like(leaf) if total is None else total.clone()
                        ours.add(number)
                    assert total is not None
                    sums[number] = total
                    place = cut_leaf(total, axis, slot.rows, first - slot.begin, last - slot.begin)
                    place += gradient
        return sums

    def _losses(self, step: Step) -> Losses:
        """This rank's part of each task's loss."""
        tasks = list(self.graph.tasks)
        values = torch.zeros(len(tasks), dtype=torch.float64, device=self.world.device)
        for slot, loss in step.losses.items():
            values[tasks.index(self._side.slots[slot].task)] += loss.detach()
        return Losses(values)


def seed_of(*parts: object) -> int:
    """A seed from anything with a text."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On a stream of its own, between what comes before and after."""
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)


def _parameters_of(slot: SlotSide, number: int) -> list[nn.Parameter]:
    """What a chunk of a slot trains."""
    if not isinstance(slot.code, LayersCode):
        return []
    first, last = slot.chunks[number]
    used = (one for layer in slot.code.layers[first:last] for one in layer.parameters)
    return list({id(one): one for one in used if one.requires_grad}.values())


def _run_backward(outputs: list[Any], gradients: list[torch.Tensor | None]) -> None:
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


Run = Callable[..., Any]


def _behind(arguments: Run | None, run: Run) -> Run:
    """A call's first layer over what its arguments are made of."""

    def glued(batch: Any, *outputs: Any) -> Any:
        assert arguments is not None
        args, kwargs = arguments(batch, *outputs)
        return run(*args, **kwargs)

    return glued


def _on_copies(run: Run) -> Run:
    return lambda *args: run(*copied(args))


def _recomputed(layer: LayerCode, run: Run, args: Any) -> Any:
    """Runs a layer now, and again in backward instead of keeping what it needs there."""
    before = [buffer.clone() for buffer in layer.buffers()]
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=layer.is_random,
        context_fn=lambda: (nullcontext(), _again(layer, before)),
    )


@contextmanager
def _again(layer: LayerCode, before: list[torch.Tensor]) -> Iterator[None]:
    """Inside, a layer's buffers are as they were when it first ran; what it does to them counts once."""
    after = [buffer.clone() for buffer in layer.buffers()]
    _fill(layer.buffers(), before)
    try:
        yield
    finally:
        _fill(layer.buffers(), after)


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # unseen by autograd, which keeps running statistics for backward
