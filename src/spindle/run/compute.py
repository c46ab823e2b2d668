"""The compute lane of one rank: slots forward and backward, in whatever order its program has them."""

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
from spindle.run.backward_split import run_input_part
from spindle.run.graphs import Chunk, Made
from spindle.run.losses import loss_part
from spindle.run.nests import Axes, LeafForm, as_leaves, copied, cut, cut_leaf, joined, leaves_of, takes_gradient
from spindle.run.op_code import LayerCode, LayersCode, LossCode
from spindle.run.rank_program import LinkEnd, RankProgram, RankSlot
from spindle.run.recompute_offload import Host, Run, again, buffers_of, recomputed
from spindle.run.step import Piece, Step, Watch
from spindle.run.syncs import Syncs
from spindle.run.tensor_parallel import TensorParallelGroup
from spindle.run.transfers import Transfers
from spindle.run.world import World


class Compute:
    """Runs slots. Inputs come from `transfers`, the gradients of weights go to `syncs`."""

    def __init__(
        self,
        rank_program: RankProgram,
        transfers: Transfers,
        syncs: Syncs,
        world: World,
        batch_axes: Mapping[str, Axes],
        seed: int,
        autocast: torch.dtype | None,
    ) -> None:
        self._rank_program, self._transfers, self._syncs, self._world = rank_program, transfers, syncs, world
        self._batch_axes, self._seed_of_all, self._autocast = batch_axes, seed, autocast
        self.captures = False  # slots are, or will be, CUDA graphs
        self.host = Host()

    def forward(self, step: Step, slot: RankSlot, watch: Watch, position: int) -> None:
        nests = {link.source: self._input(step, link, watch) for link in slot.inputs} if slot.rows else {}
        watch.start[position] = watch.now()
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            return
        if step.graphs is not None and step.graphs.has(slot):
            for first, _ in slot.chunks:
                self._syncs.wait_for_parameters(slot.number, first, watch)
            nests, made = step.graphs.forward(
                slot, nests, lambda inputs: self._compute(step, slot, inputs, watch), self._seeds(step, slot)
            )
        else:
            made = self._compute(step, slot, nests, watch)
        for link in slot.inputs if slot.rows else ():
            leaves = leaves_of(nests[link.source])
            step.inputs[link.number] = [leaf if takes_gradient(leaf) else None for leaf in leaves]
        step.pieces[slot.number] = made.pieces
        if isinstance(slot.code, LossCode):
            step.losses[slot.number] = made.outputs
        else:
            step.outputs[slot.number] = made.outputs

    def _compute(self, step: Step, slot: RankSlot, nests: dict[str, Any], watch: Watch) -> Made:
        """A slot's forward pass on its inputs."""
        with self._casting():
            return self._compute_as_is(step, slot, nests, watch)

    def _casting(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        # A graph must not count on weights that were cast before it was captured.
        return torch.autocast(self._world.device.type, dtype=self._autocast, cache_enabled=not self.captures)

    def _compute_as_is(self, step: Step, slot: RankSlot, nests: dict[str, Any], watch: Watch) -> Made:
        if isinstance(slot.code, LayersCode):
            return self._run_layers(step, slot, slot.code, nests, watch)
        if slot.code.is_random:
            self._seed(step, slot, slot.first_layer)
        batch = self._batch(step, slot) if slot.rows else None
        whole = step.batches[slot.task] if step.check_losses and slot.task not in step.held else None
        loss = loss_part(slot.code, slot, batch, nests, self._world, check_with=whole)
        return Made([Piece(inputs=(), outputs=loss)], loss)

    def _run_layers(self, step: Step, slot: RankSlot, code: LayersCode, nests: dict[str, Any], watch: Watch) -> Made:
        pieces = []
        values: Any = None
        members = TensorParallelGroup(self._world, slot.group) if len(slot.group) > 1 else None
        for first, last in slot.chunks:
            self._syncs.wait_for_parameters(slot.number, first, watch)
            inputs: Any = ()
            if values is not None:
                inputs = values = as_leaves(values)
            elif not (slot.begins_call and code.arguments is not None):
                (values,) = nests.values()
            is_open = False  # layers have run since the last piece
            for number, layer in enumerate(code.layers[first:last], start=first):
                if layer.is_random:
                    self._seed(step, slot, slot.first_layer + number)
                run, args = layer.run, values
                if members is not None and layer.styled:
                    run = with_styles(run, layer.styled, members)
                if values is None:
                    # The glue that feeds a call is part of its first layer.
                    run = _behind(code.arguments, run)
                    args = (self._batch(step, slot), *(nests[source][0] for source in code.sources))
                runs_again = number - slot.first < slot.recomputed
                if layer.writes_input and (runs_again or not is_open):
                    run = _on_copies(run)
                if runs_again and slot.is_split:
                    # A piece by itself: what runs again is for both parts of backward.
                    piece = Piece(inputs, None, self._rerun(step, slot, number, layer, run, args))
                    pieces.append(piece)
                    inputs = values = as_leaves(run(*args))
                    continue
                if runs_again:
                    values = recomputed(layer, run, args)
                elif number - slot.first < slot.recomputed + slot.offloaded:
                    with self.host.keeping(layer):
                        values = run(*args)
                else:
                    values = run(*args)
                is_open = True
            if is_open:
                pieces.append(Piece(inputs, values))
        return Made(pieces, values)

    def _rerun(
        self, step: Step, slot: RankSlot, number: int, layer: LayerCode, run: Run, args: Any
    ) -> Callable[[], Any]:
        before = buffers_of(layer)

        def rerun() -> Any:
            if layer.is_random:
                self._seed(step, slot, slot.first_layer + number)
            with self._casting(), again(layer, before):
                return run(*args)

        return rerun

    def _seed(self, step: Step, slot: RankSlot, layer: int) -> None:
        """Random layers draw the same numbers whenever the same rows of the same step pass through them."""
        if step.graphs is None or not step.graphs.draw_from(layer):
            torch.manual_seed(self._seed_at(step, slot, layer))

    def _seed_at(self, step: Step, slot: RankSlot, layer: int) -> int:
        when = step.number if step.micro_step.is_first else (step.number, step.micro_step.number)
        return seed_of(self._seed_of_all, when, slot.task, slot.call, layer, slot.begin, slot.end)

    def _seeds(self, step: Step, slot: RankSlot) -> dict[int, int]:
        """The seeds of a slot's random layers, by layer."""
        match slot.code:
            case LossCode(is_random=is_random):
                layers = [slot.first_layer] if is_random else []
            case LayersCode(layers=all_layers):
                span = range(slot.first, slot.chunks[-1][1])
                layers = [slot.first_layer + number for number in span if all_layers[number].is_random]
        return {layer: self._seed_at(step, slot, layer) for layer in layers}

    def _batch(self, step: Step, slot: RankSlot) -> Any:
        nest, axes = step.batches[slot.task], self._batch_axes[slot.task]
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
        slot = self._rank_program.slots[link.consumer]
        arrivals = self._transfers.arrived(step, link, False, watch)
        if link.local is None:
            form = self._transfers.form_of(step, link)
            here: list[Any] = [None] * len(form.leaves)
            kept: list[Any] = list(form.leaves)
            spec, maker_rows = form.spec, form.num_rows
        else:
            producer = self._rank_program.slots[link.producer]
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

    def backward(self, step: Step, slot: RankSlot, instruction: Backward, watch: Watch, position: int) -> None:
        first, last = instruction.first, instruction.last
        number = slot.chunks.index((first, last))
        if slot.rows == 0 and not isinstance(slot.code, LossCode):
            watch.start[position] = watch.now()
            return
        if not instruction.makes_inputs:
            watch.start[position] = watch.now()
            later = step.later.pop(slot.number)
            while later:
                later.pop().run()
            self._syncs.gradients.keep(_used_by(slot, number))
            return
        is_last = number == len(slot.chunks) - 1
        pieces = step.pieces[slot.number]
        gradients: list[torch.Tensor | None]
        if isinstance(slot.code, LossCode):
            # The weight comes in here, and not into the loss, because a captured loss would keep it for good.
            weight = slot.code.weight(step.number) if callable(slot.code.weight) else slot.code.weight
            gradients = [torch.full_like(step.losses[slot.number], weight / step.micro_step.count)]
        elif is_last:
            gradients = self._output_gradients(step, slot, leaves_of(step.outputs[slot.number]), watch)
        else:
            gradients = _gradients_of(leaves_of(pieces[number + 1].inputs) if pieces else [])
        watch.start[position] = watch.now()
        if not instruction.makes_weights:
            with self._styles(slot, first, last):
                self._run_input_parts(step, slot, gradients)
        elif step.graphs is None or not step.graphs.backward(
            slot, first, gradients, lambda: self._chunk(step, slot, number), is_last=is_last
        ):
            with self._styles(slot, first, last):
                _run_backward(leaves_of(pieces[number].outputs), gradients)
        if step.graphs is None and instruction.makes_weights:
            self._syncs.gradients.keep(_used_by(slot, number))
        # Activations go as soon as they are used; the inputs of a chunk stay for the chunk before it.
        if pieces:
            pieces[number].outputs = None
            del pieces[number + 1 :]
        if number == 0:
            if slot.number in step.losses and step.graphs is None:
                step.losses[slot.number] = step.losses[slot.number].detach()
            step.outputs.pop(slot.number, None)
            for link in slot.outputs:
                if not link.sends[True]:
                    step.inputs.pop(link.number, None)

    def _run_input_parts(self, step: Step, slot: RankSlot, gradients: list[torch.Tensor | None]) -> None:
        """The gradients of a slot's inputs, piece by piece; those of its weights are left for later."""
        later = step.later[slot.number] = []
        pieces = step.pieces[slot.number]
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            outputs = leaves_of(piece.again() if piece.again is not None else piece.outputs)
            inputs: list[Any] = leaves_of(piece.inputs)
            if number == 0:
                inputs = [leaf for link in slot.inputs for leaf in step.inputs[link.number]]
            later.append(run_input_part(outputs, gradients, filter(takes_gradient, inputs)))
            if number:
                gradients = _gradients_of(inputs)
            piece.outputs = piece.again = None

    def _styles(self, slot: RankSlot, first: int, last: int) -> Any:
        """Inside, layers of a slot run as a member of its tensor group runs them."""
        if len(slot.group) == 1 or not isinstance(slot.code, LayersCode):
            return nullcontext()
        styled = {id(one.module): one for layer in slot.code.layers[first:last] for one in layer.styled}
        return apply_styles(styled.values(), TensorParallelGroup(self._world, slot.group))

    def _chunk(self, step: Step, slot: RankSlot, number: int) -> Chunk:
        """A chunk of a slot with all that its gradients are for."""
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
        self, step: Step, slot: RankSlot, outputs: list[Any], watch: Watch
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
                consumer = self._rank_program.slots[link.consumer]
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


def seed_of(*parts: object) -> int:
    """A seed from anything with a text."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _parameters_of(slot: RankSlot, number: int) -> list[nn.Parameter]:
    """What a chunk of a slot trains."""
    return list({id(one): one for one in _used_by(slot, number) if one.requires_grad}.values())


def _used_by(slot: RankSlot, number: int) -> Iterator[nn.Parameter]:
    first, last = slot.chunks[number]
    for layer in slot.code.layers[first:last] if isinstance(slot.code, LayersCode) else ():
        yield from layer.parameters


def _gradients_of(leaves: list[Any]) -> list[torch.Tensor | None]:
    return [leaf.grad if takes_gradient(leaf) else None for leaf in leaves]


def _run_backward(outputs: list[Any], gradients: list[torch.Tensor | None]) -> None:
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


def _behind(arguments: Run | None, run: Run) -> Run:
    """A call's first layer over what its arguments are made of."""

    def glued(batch: Any, *outputs: Any) -> Any:
        assert arguments is not None
        args, kwargs = arguments(batch, *outputs)
        return run(*args, **kwargs)

    return glued


def _on_copies(run: Run) -> Run:
    return lambda *args: run(*copied(args))
