"""The compute lane of one rank: slots forward and backward, in the order of its program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spindle.errors import TrainingError
from spindle.models import apply_styles, with_styles
from spindle.program import Backward
from spindle.run.backward_split import WeightPart, capture_input_part, run_input_part
from spindle.run.captured_slot import Chunk, SlotOutput
from spindle.run.graph_cache import GraphCache
from spindle.run.item_share import ItemShare
from spindle.run.items import cut_items, join_items
from spindle.run.lanes import on_slot_lane
from spindle.run.losses import loss_part
from spindle.run.op_code import LayerCode, LayersCode, LossCode
from spindle.run.pytrees import Axes, TensorMeta, as_leaves, copied, cut, cut_leaf, joined, leaves_of, takes_gradient
from spindle.run.rank_program import LinkEnd, RankProgram, RankSlot
from spindle.run.recompute_offload import HostOffload, Run, checkpointed, copy_buffers, with_buffers
from spindle.run.sequence_parallel import SequenceParallelGroup
from spindle.run.step import Piece, Step, StepTimer
from spindle.run.syncs import Syncs
from spindle.run.tensor_parallel import TensorParallelGroup
from spindle.run.transfers import Transfers, cut_consumed
from spindle.run.world import World


class Compute:
    """Runs slots. Their inputs come from `transfers`, and the gradients of their weights go to `syncs`."""

    def __init__(
        self,
        rank_program: RankProgram,
        transfers: Transfers,
        syncs: Syncs,
        graph_cache: GraphCache,
        world: World,
        batch_axes: Mapping[str, Axes],
        seed: int,
        autocast: torch.dtype | None,
        offload: HostOffload,
    ) -> None:
        self._rank_program, self._transfers, self._syncs, self._world = rank_program, transfers, syncs, world
        self._batch_axes, self._base_seed, self._autocast = batch_axes, seed, autocast
        self._graph_cache, self.offload = graph_cache, offload

    def forward(self, step: Step, slot: RankSlot, timer: StepTimer, position: int) -> None:
        link_inputs = {link.number: self._input(step, link, timer) for link in slot.inputs} if slot.rows else {}
        inputs_by_call = _inputs_by_call(step, slot, link_inputs)
        timer.start[position] = timer.now()
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            return
        if step.graphs is not None and step.graphs.has(slot):
            for first, _ in slot.chunks:
                self._syncs.wait_for_parameters(slot.number, first, timer)
            inputs_by_call, output = step.graphs.forward(
                slot, inputs_by_call, lambda inputs: self._compute(step, slot, inputs, timer), self._seeds(step, slot)
            )
        else:
            output = self._compute(step, slot, inputs_by_call, timer)
        for link in slot.inputs if slot.rows else ():
            leaves = leaves_of(link_inputs[link.number] if link.items else inputs_by_call[link.source])
            step.inputs[link.number] = [leaf if takes_gradient(leaf) else None for leaf in leaves]
        step.pieces[slot.number] = output.pieces
        if isinstance(slot.code, LossCode):
            step.losses[slot.number], step.metrics[slot.number] = output.outputs
        else:
            step.outputs[slot.number] = output.outputs

    def _compute(self, step: Step, slot: RankSlot, inputs_by_call: dict[str, Any], timer: StepTimer) -> SlotOutput:
        """Run a slot's forward pass on its inputs."""
        with self._autocast_context():
            return self._compute_eagerly(step, slot, inputs_by_call, timer)

    def _autocast_context(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        # a graph must not use weights that were cast before it was captured
        return torch.autocast(
            self._world.device.type, dtype=self._autocast, cache_enabled=not self._graph_cache.is_enabled
        )

    def _compute_eagerly(
        self, step: Step, slot: RankSlot, inputs_by_call: dict[str, Any], timer: StepTimer
    ) -> SlotOutput:
        if isinstance(slot.code, LayersCode):
            return self._run_layers(step, slot, slot.code, inputs_by_call, timer)
        if slot.code.is_random:
            self._seed(step, slot, slot.first_layer)
        batch = _batch(step, slot, self._batch_axes[slot.task]) if slot.rows else None
        whole = step.batches[slot.task] if step.check_losses and slot.task not in step.held else None
        num_tokens = step.micro_step.token_counts.get(slot.task)
        loss, metrics = loss_part(
            slot.code, slot, batch, inputs_by_call, self._world, check_with=whole, num_tokens=num_tokens
        )
        return SlotOutput([Piece(inputs=(), outputs=loss)], (loss, metrics))

    def _run_layers(
        self, step: Step, slot: RankSlot, code: LayersCode, inputs_by_call: dict[str, Any], timer: StepTimer
    ) -> SlotOutput:
        # Each chunk of layers, which has a backward instruction of its own, is detached from the autograd graph before
        # it: its inputs are new leaves. The backward of a chunk ends at these leaves. Their `grad` is where the
        # backward of the previous chunk starts, so the gradients of this chunk can be reduced while that one runs.
        pieces = []
        values: Any = None
        tensor_group = TensorParallelGroup(self._world, slot.group) if len(slot.group) > 1 else None
        share = self._item_share(step, slot)
        for chunk, (first, last) in enumerate(slot.chunks):
            self._syncs.wait_for_parameters(slot.number, first, timer)
            inputs: Any = ()
            if values is not None:
                inputs = values = as_leaves(values)
            elif not (slot.begins_call and code.arguments is not None):
                (values,) = inputs_by_call.values()
            is_open = False  # whether layers have run since the last piece
            for number, layer in enumerate(code.layers[first:last], start=first):
                if layer.is_random:
                    self._seed(step, slot, slot.first_layer + number)
                run, args = layer.run, values
                if tensor_group is not None and layer.styled:
                    run = with_styles(run, layer.styled, tensor_group)
                elif share is not None:
                    run = share.of_layer(run, slot.first_layer + number)
                elif layer.compiled is not None and not slot.is_split:
                    # A compiled backward is one node of the autograd graph, so each part of a split backward would run
                    # all of it.
                    run = layer.compiled
                if values is None:
                    # the glue code that computes a call's arguments belongs to its first layer
                    run = _with_glue_code(code.arguments, run, share)
                    batch = _batch(step, slot, self._batch_axes[slot.task])
                    args = (batch, *(inputs_by_call[source][0] for source in code.sources))
                is_recomputed = number - slot.first < slot.recomputed
                # An in-place layer must not change values that are needed later: the inputs of a recomputation, or
                # leaves of the autograd graph, where autograd forbids it.
                if layer.writes_input and (is_recomputed or not is_open):
                    run = _with_copied_inputs(run)
                if is_recomputed and slot.is_split:
                    # a piece of its own, so that one recomputation serves both parts of a split backward
                    piece = Piece(inputs, None, self._rerun(step, slot, number, layer, run, args), chunk)
                    pieces.append(piece)
                    inputs = values = as_leaves(run(*args))
                    continue
                if is_recomputed:
                    values = checkpointed(layer, run, args)
                elif number - slot.first < slot.recomputed + slot.offloaded and slot.number in self.offload:
                    with self.offload.saved_tensors(slot.number, layer):
                        values = run(*args)
                else:
                    values = run(*args)
                is_open = True
            if is_open:
                pieces.append(Piece(inputs, values, chunk=chunk))
        return SlotOutput(pieces, values)

    def _rerun(
        self, step: Step, slot: RankSlot, number: int, layer: LayerCode, run: Run, args: Any
    ) -> Callable[[], Any]:
        before = copy_buffers(layer)

        def rerun() -> Any:
            if layer.is_random:
                self._seed(step, slot, slot.first_layer + number)
            with self._autocast_context(), with_buffers(layer, before):
                return run(*args)

        return rerun

    def _seed(self, step: Step, slot: RankSlot, layer: int) -> None:
        """Seed a random layer, so that it draws the same numbers whenever the same rows of the same step pass through
        it."""
        if step.graphs is None or not step.graphs.use_generator_of(layer):
            torch.manual_seed(self._seed_at(step, slot, layer))

    def _seed_at(self, step: Step, slot: RankSlot, layer: int) -> int:
        at_step = step.number if step.micro_step.is_first else (step.number, step.micro_step.number)
        return seed_of(self._base_seed, at_step, slot.task, slot.call, layer, slot.begin, slot.end)

    def _seeds(self, step: Step, slot: RankSlot) -> dict[int, int]:
        """The seeds of a slot's random layers, by layer."""
        match slot.code:
            case LossCode(is_random=is_random):
                layers = [slot.first_layer] if is_random else []
            case LayersCode(layers=all_layers):
                span = range(slot.first, slot.chunks[-1][1])
                layers = [slot.first_layer + number for number in span if all_layers[number].is_random]
        return {layer: self._seed_at(step, slot, layer) for layer in layers}

    def _input(self, step: Step, link: LinkEnd, timer: StepTimer) -> Any:
        """A slot's input over one link: local and received rows, concatenated, as leaves of a new autograd graph."""
        # Detached, as everywhere between slots: every slot has its own autograd graph, because the backward of its
        # consumers may run on other ranks.
        if link.is_whole:
            return as_leaves(step.outputs[link.producer])
        slot = self._rank_program.slots[link.consumer]
        arrivals = self._transfers.arrived(step, link, False, timer)
        if link.local is None:
            meta = self._transfers.meta_of(step, link)
            local: list[Any] = [None] * len(meta.leaves)
            leaves_to_join: list[Any] = list(meta.leaves)
            spec, producer_rows = meta.spec, meta.num_rows
        else:
            producer = self._rank_program.slots[link.producer]
            local, spec = tree_flatten(step.outputs[link.producer])
            leaves_to_join, producer_rows = local, producer.rows
            first, last = link.local[0] - producer.begin, link.local[1] - producer.begin
        leaves: list[Any] = []
        for number, (leaf, axis) in enumerate(zip(leaves_to_join, link.axes, strict=True)):
            if not isinstance(leaf, torch.Tensor | TensorMeta):
                leaves.append(cut_leaf(leaf, axis, producer_rows, 0, slot.rows))
                continue
            parts: list[tuple[int, torch.Tensor]] = []
            if link.local is not None:
                parts.append((link.local[0], cut_leaf(local[number].detach(), axis, producer.rows, first, last)))
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
                    shapes = ", ".join(str(tuple(part.shape)) for _, part in parts)
                    raise TrainingError(
                        f"{slot.name} gets rows of shapes {shapes} from different ranks; a module's "
                        "shapes must follow from the batch's, not from its rows"
                    ) from error
            leaves.append(whole.detach().requires_grad_(leaf.requires_grad))
        return tree_unflatten(leaves, spec)

    def backward(self, step: Step, slot: RankSlot, instruction: Backward, timer: StepTimer, position: int) -> None:
        """Run a chunk of a slot's backward: all of it, or only input or weight gradients."""
        first, last = instruction.first, instruction.last
        number = slot.chunks.index((first, last))
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            timer.start[position] = timer.now()
            return
        if not instruction.makes_inputs:
            timer.start[position] = timer.now()
            self._run_weight_parts(step, slot, number)
            return
        # Backward starts from the gradient of the loss, of the slot's outputs, or of the inputs of the chunk after it.
        is_last = number == len(slot.chunks) - 1
        pieces = step.pieces[slot.number]
        gradients: list[torch.Tensor | None]
        if isinstance(slot.code, LossCode):
            gradients = [self._loss_gradient(step, slot)]
        elif is_last:
            outputs = leaves_of(step.outputs[slot.number])
            gradients = self._output_gradients(step, slot, outputs, timer)
            if slot.sequence_group and any(not link.is_whole for link in slot.outputs):
                # All members of a group run backward, or none: a member sees whether its consumer has no gradient.
                gradients = [
                    torch.zeros_like(leaf) if gradient is None and takes_gradient(leaf) else gradient
                    for leaf, gradient in zip(outputs, gradients, strict=True)
                ]
        else:
            gradients = _gradients_of(leaves_of(pieces[_first_piece_of(pieces, number + 1)].inputs) if pieces else [])
        timer.start[position] = timer.now()
        if not instruction.makes_weights:
            if step.graphs is None or not step.graphs.backward_inputs(
                slot,
                first,
                gradients,
                lambda gradients: self._input_parts(step, slot, number, gradients, capture_input_part),
                is_last=is_last,
            ):
                with self._as_member(step, slot, first, last):
                    step.deferred[slot.number, number] = self._input_parts(
                        step, slot, number, gradients, run_input_part
                    )
        elif step.graphs is None or not step.graphs.backward(
            slot, first, gradients, lambda: self._chunk(step, slot, number), is_last=is_last
        ):
            with self._as_member(step, slot, first, last):
                _run_backward(leaves_of(pieces[number].outputs), gradients)
        if step.graphs is None and instruction.makes_weights:
            self._syncs.gradients.move_to_buckets(_used_by(slot, number))
        # free activations as soon as they are used; the chunk before this one needs only the gradients of its inputs
        if pieces:
            first_piece = _first_piece_of(pieces, number)
            pieces[first_piece].outputs = None
            del pieces[first_piece + 1 :]
        if number == 0:
            if slot.number in step.losses and step.graphs is None:
                step.losses[slot.number] = step.losses[slot.number].detach()
            step.outputs.pop(slot.number, None)
            for link in slot.outputs:
                if not link.sends[True]:
                    step.inputs.pop(link.number, None)

    def loss_factors(self, step: Step) -> dict[int, float]:
        """By slot: the factor by which the gradient of its loss is scaled, apart from the loss scale."""
        return {
            slot.number: _loss_factor(step, slot.code, slot.task)
            for slot in self._rank_program.slots.values()
            if isinstance(slot.code, LossCode) and slot.task in step.signatures
        }

    def _loss_gradient(self, step: Step, slot: RankSlot) -> torch.Tensor:
        loss = step.losses[slot.number]
        if step.graphs is not None and step.graphs.step_graph is not None:
            return step.graphs.step_graph.loss_gradient(slot.number, loss)
        assert isinstance(slot.code, LossCode)
        gradient = torch.full_like(loss, _loss_factor(step, slot.code, slot.task))
        if step.loss_scale is not None:
            gradient = (gradient * step.loss_scale).to(gradient.dtype)
        return gradient

    def _run_weight_parts(self, step: Step, slot: RankSlot, chunk: int) -> None:
        """Compute the gradients of a chunk's weights."""
        first = slot.chunks[chunk][0]
        deferred: list[WeightPart] | None
        if step.graphs is not None and step.graphs.has_weight_gradients(slot, first):
            deferred = step.graphs.backward_weights(slot, first, _parameters_of(slot, chunk))
        else:
            deferred = step.deferred.pop((slot.number, chunk))
        if deferred is None:
            return
        with on_slot_lane(slot, self._world.device):
            while deferred:
                deferred.pop().run()
            self._syncs.gradients.move_to_buckets(_used_by(slot, chunk))

    def _input_parts(
        self,
        step: Step,
        slot: RankSlot,
        chunk: int,
        gradients: list[torch.Tensor | None],
        run: Callable[..., WeightPart],
    ) -> list[WeightPart]:
        """Compute the gradients of a chunk's inputs, last piece first. Returns the parts that compute the gradients of
        its weights, for the weight instruction of this backward."""
        deferred = []
        pieces = step.pieces[slot.number]
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            if piece.chunk != chunk:
                continue
            outputs = leaves_of(piece.recompute() if piece.recompute is not None else piece.outputs)
            inputs: list[Any] = leaves_of(piece.inputs)
            if number == 0:
                inputs = [leaf for link in slot.inputs for leaf in step.inputs[link.number]]
            deferred.append(run(outputs, gradients, filter(takes_gradient, inputs)))
            if number:
                gradients = _gradients_of(inputs)
            piece.outputs = piece.recompute = None
        return deferred

    def _item_share(self, step: Step, slot: RankSlot) -> ItemShare | None:
        """This rank's share of an item, if a sequence group runs the slot."""
        if not slot.sequence_group:
            return None
        assert isinstance(slot.code, LayersCode)
        assert slot.code.items is not None
        group, (item,) = SequenceParallelGroup(self._world, slot.sequence_group), slot.items
        return ItemShare(slot.code.items, step.lengths[slot.task], item, group)

    def _as_member(self, step: Step, slot: RankSlot, first: int, last: int) -> Any:
        """A context in which the layers of a slot run as a member of its tensor-parallel or sequence group."""
        share = self._item_share(step, slot)
        if share is not None:
            return share.attention()
        if len(slot.group) == 1 or not isinstance(slot.code, LayersCode):
            return nullcontext()
        styled = {id(part.module): part for layer in slot.code.layers[first:last] for part in layer.styled}
        return apply_styles(styled.values(), TensorParallelGroup(self._world, slot.group))

    def _chunk(self, step: Step, slot: RankSlot, number: int) -> Chunk:
        """A chunk of a slot, with the inputs and parameters for which its backward computes gradients."""
        pieces = step.pieces[slot.number]
        inputs: list[Any] = [leaf for link in slot.inputs for leaf in step.inputs[link.number]]
        if number > 0:
            inputs = leaves_of(pieces[number].inputs)
        return Chunk(
            outputs=leaves_of(pieces[number].outputs),
            inputs=[leaf for leaf in inputs if takes_gradient(leaf)],
            parameters=_parameters_of(slot, number),
        )

    def _output_gradients(
        self, step: Step, slot: RankSlot, outputs: list[Any], timer: StepTimer
    ) -> list[torch.Tensor | None]:
        """The gradient of a slot's output: the sum over its consumers on this and other ranks."""
        # Most slots feed a single slot on the same ranks with the same rows. The gradient of that slot's input then is
        # the output gradient, without a copy.
        if len(slot.outputs) == 1 and slot.outputs[0].is_whole:
            inputs = step.inputs[slot.outputs[0].number]
            return [None if leaf is None else leaf.grad for leaf in inputs]
        sums: list[torch.Tensor | None] = [None] * len(outputs)
        owned: set[int] = set()  # sums that have memory of their own
        for link in slot.outputs:
            parts: list[tuple[int, int, bool, list[torch.Tensor | None]]] = [
                (arrival.flow.first, arrival.flow.last, arrival.flow.with_rowless, arrival.tensors or [])
                for arrival in self._transfers.arrived(step, link, True, timer)
            ]
            if link.local is not None:
                consumer = self._rank_program.slots[link.consumer]
                first, last = link.local
                gradients = [
                    None
                    if leaf is None or leaf.grad is None
                    else cut_consumed(step, link, consumer, number, leaf.grad, first, last)
                    for number, leaf in enumerate(step.inputs[link.number])
                ]
                parts.append((first, last, first == consumer.begin, gradients))
            for first, last, with_rowless, gradients in parts:
                for number, (leaf, axis, gradient) in enumerate(zip(outputs, link.axes, gradients, strict=True)):
                    if gradient is None or (axis is None and not with_rowless):
                        continue
                    total = sums[number]
                    if total is None and gradient.shape == leaf.shape:
                        sums[number] = gradient  # must not be written to: it may be being sent to another rank
                        continue
                    if number not in owned:
                        total = torch.zeros_like(leaf) if total is None else total.clone()
                        owned.add(number)
                    assert total is not None
                    sums[number] = total
                    view = cut_leaf(total, axis, slot.rows, first - slot.begin, last - slot.begin)
                    view += gradient
        return sums


def _inputs_by_call(step: Step, slot: RankSlot, link_inputs: Mapping[int, Any]) -> dict[str, Any]:
    """A slot's inputs by the calls that produce them. Outputs of parts are joined, unless the slot itself is a part."""
    inputs_by_call: dict[str, Any] = {}
    parts: dict[str, list[LinkEnd]] = {}
    for link in slot.inputs if link_inputs else ():
        if link.items and not slot.items:
            parts.setdefault(link.source, []).append(link)
        else:
            inputs_by_call[link.source] = link_inputs[link.number]
    for source, links in parts.items():
        code = links[0].item_code
        assert code is not None
        outputs = [(link.items, link_inputs[link.number]) for link in links]
        inputs_by_call[source] = join_items(outputs, code, step.lengths[slot.task], f"{slot.task}/{source}")
    return inputs_by_call


def _batch(step: Step, slot: RankSlot, axes: Axes) -> Any:
    """A slot's rows of its task's batch, or a part's items."""
    tree = step.batches[slot.task]
    if slot.items and isinstance(slot.code, LayersCode) and slot.code.items is not None:
        held = step.held_items.get(slot.task)
        return cut_items(tree, slot.code.items, step.lengths[slot.task], slot.items, held)
    if slot.task not in step.held:
        return cut(tree, axes, slot.num_rows, slot.begin, slot.end)
    leaves, spec = tree_flatten(tree)
    # leaves that this slot does not read may be present for another slot, with other rows
    parts = [
        cut_leaf(leaf, axis, last - first, slot.begin - first, slot.end - first)
        if first <= slot.begin and slot.end <= last
        else None
        for leaf, axis, (first, last) in zip(leaves, axes, step.held[slot.task], strict=True)
    ]
    return tree_unflatten(parts, spec)


def _loss_factor(step: Step, code: LossCode, task: str) -> float:
    """The factor by which the gradient of a loss is scaled. The loss itself is not, because a CUDA graph computes it as
    it was captured."""
    weight = code.weight(step.number) if callable(code.weight) else code.weight
    return weight * step.micro_step.weights.get(task, 1.0) / step.micro_step.count


def seed_of(*parts: object) -> int:
    """A seed derived from the `repr` of its parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _parameters_of(slot: RankSlot, number: int) -> list[nn.Parameter]:
    """The trainable parameters of a chunk, each once."""
    return list({id(parameter): parameter for parameter in _used_by(slot, number) if parameter.requires_grad}.values())


def _used_by(slot: RankSlot, number: int) -> Iterator[nn.Parameter]:
    first, last = slot.chunks[number]
    for layer in slot.code.layers[first:last] if isinstance(slot.code, LayersCode) else ():
        yield from layer.parameters


def _gradients_of(leaves: list[Any]) -> list[torch.Tensor | None]:
    return [leaf.grad if takes_gradient(leaf) else None for leaf in leaves]


def _first_piece_of(pieces: list[Piece], chunk: int) -> int:
    """The position of the first piece of a chunk."""
    return next(number for number, piece in enumerate(pieces) if piece.chunk == chunk)


def _run_backward(outputs: list[Any], gradients: list[torch.Tensor | None]) -> None:
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


def _with_glue_code(arguments: Run | None, run: Run, share: ItemShare | None) -> Run:
    """A call's first layer as a function of the inputs of its glue code: the batch, and the outputs of other calls."""

    def glued(batch: Any, *outputs: Any) -> Any:
        assert arguments is not None
        given = arguments(batch, *outputs)
        args, kwargs = given if share is None else share.of_arguments(given)
        return run(*args, **kwargs)

    return glued


def _with_copied_inputs(run: Run) -> Run:
    return lambda *args: run(*copied(args))
