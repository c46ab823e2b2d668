"""Slots as CUDA graphs: a slot's forward pass, and the backward pass of each of its chunks, launched as one.

A step is captured as it runs: each piece of compute is recorded instead of launched, then replayed at once, so
transfers between pieces go on as ever. All graphs of a rank take their memory from one pool, in the order of the rank's
program, and later steps replay them in that order: what one piece leaves free the next ones use, as in the step that
was captured. What lives longer (inputs, outputs, gradients) keeps its place for good.

Captures and all other steps run on one stream, not the default one, because autograd puts a parameter's gradient on the
stream of its first use.

Layers that draw random numbers each have a generator that their graph knows. It is seeded before each replay, as
torch's own generator is before the layer in a step that is not captured: the same numbers.

A piece that cannot be captured (it waits for the GPU, draws random numbers on the host, synchronizes with other ranks)
runs as it did before.
"""

from __future__ import annotations

import gc
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import TrainingError
from spindle.run.gradients import Gradients
from spindle.run.nests import takes_gradient
from spindle.run.op_code import LossCode
from spindle.run.rank_program import RankSlot
from spindle.run.step import Piece

Nests = dict[str, Any]
RANDOM_LAYERS = True  # are captured
_ROUNDING = 0.05  # of a tensor's norm, at most, in bfloat16


@dataclass(slots=True)
class Made:
    """What a slot's forward pass made: its chunks, and what it hands on (a loss, or a nest of tensors)."""

    pieces: list[Piece]
    outputs: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers whose backward runs as one: their outputs, and the leaves that gradients are for."""

    outputs: list[Any]
    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]


@dataclass(slots=True)
class _Slot:
    """A captured slot. The backward passes are by their first layer."""

    forward: torch.cuda.CUDAGraph
    compute: Callable[[Nests], Made] | None  # until then, too
    nests: Nests
    made: Made  # with its autograd graph until its backward passes are captured
    generators: dict[int, torch.Generator]  # by layer that draws random numbers
    backward: dict[int, _Backward] = field(default_factory=dict)


@dataclass(slots=True)
class _Backward:
    graph: torch.cuda.CUDAGraph | None  # None where there is nothing to do
    gradients: list[torch.Tensor | None]  # of the outputs, where they come from elsewhere
    written: list[tuple[nn.Parameter, bool]]  # with whether this pass is the first to write to the parameter's place


class GraphMemory:
    """The memory pool of all graphs of a rank. A step replays one set of them, from its first forward to its last
    backward, so what one set leaves free another may use; what a set keeps is its own."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._reserve: torch.cuda.CUDAGraph | None = None  # which holds nothing but memory

    @property
    def handle(self) -> Any:
        """The pool; it begins as one piece of memory, as large as what steps took so far beside what stays. Pieces as
        they are asked for do not fit together: what one round leaves free is too small for a tensor of the next."""
        if self._handle is None:
            self._handle, self._reserve = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            num_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            if num_bytes > 0:
                try:
                    with capturing(self._reserve, self._handle):
                        torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
                except RuntimeError:  # not in one piece
                    self.renew()
        return self._handle

    def renew(self) -> None:
        """A capture that failed does not give its pool back."""
        torch.cuda.synchronize()
        self._handle, self._reserve = torch.cuda.graph_pool_handle(), None

    def release(self) -> None:
        """When no graph is left."""
        self._handle = self._reserve = None


class Graphs:
    """The captured slots of one rank, for batches of one set of shapes."""

    def __init__(
        self,
        gradients: Gradients,
        batches: Mapping[str, Any],
        refused: dict[str, str],
        memory: GraphMemory,
        evict: Callable[[], None],
    ) -> None:
        """`evict()` gives up all other sets, when memory runs out."""
        self.gradients = gradients
        self.refused = refused  # why slots run without a graph, by name
        self.is_spoiled = False  # must not be replayed
        self.num_steps = 0  # that replayed them
        self.ran_out_of_memory = False
        self._memory, self._evict = memory, evict
        self._generators: dict[int, torch.Generator] | None = None  # of the slot that is being captured
        self._batches = {task: tree_map(_copied, nest) for task, nest in batches.items()}
        self._slots: dict[int, _Slot] = {}
        self._written: set[int] = set()
        self.is_complete = False  # the step that captures is over
        gc.collect()  # what earlier steps hold is for the pool
        torch.cuda.empty_cache()

    def batches(self, batches: Mapping[str, Any]) -> Mapping[str, Any]:
        """These batches, at the place from which the graphs read."""
        return {task: _put(self._batches[task], nest) for task, nest in batches.items()}

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def has(self, slot: RankSlot) -> bool:
        """Whether a slot runs as a graph, or is to be captured now."""
        return slot.number in self._slots or (not self.is_complete and self._can_try(slot))

    def _can_try(self, slot: RankSlot) -> bool:
        reason = None
        match slot.code:
            case LossCode() as code:
                if slot.rows == 0:
                    return False
                if code.is_mean and len(slot.ranks) > 1:
                    reason = "its ranks add up their counts"
                elif code.is_random and not RANDOM_LAYERS:
                    reason = "its loss draws random numbers"
            case code:
                if len(slot.group) > 1:
                    reason = "its tensor group meets inside it"
                elif any(layer.is_random for layer in code.layers) and not RANDOM_LAYERS:
                    reason = "it draws random numbers"
                elif any(_is_hooked(parameter) for layer in code.layers for parameter in layer.parameters):
                    reason = "a parameter has a hook"
        if reason is not None:
            self.refused[slot.name] = reason
        return slot.name not in self.refused

    def draw_from(self, layer: int) -> bool:
        """Lets a random layer draw from its own generator, if its slot is being captured."""
        if self._generators is None:
            return False
        _generator().graphsafe_set_state(self._generators[layer])
        return True

    def forward(
        self,
        slot: RankSlot,
        nests: Nests,
        compute: Callable[[Nests], Made],
        seeds: Mapping[int, int],
    ) -> tuple[Nests, Made]:
        """Runs a slot's forward pass. Gives the inputs that gradients will be for, and what was made. `seeds` are those
        of its random layers in this step."""
        captured = self._slots.get(slot.number)
        if captured is not None:
            for source, nest in nests.items():
                _put(captured.nests[source], nest)
            for layer, seed in seeds.items():
                captured.generators[layer].manual_seed(seed)
            captured.forward.replay()
            return captured.nests, captured.made
        nests = {source: tree_map(_writable, nest) for source, nest in nests.items()}
        graph = torch.cuda.CUDAGraph()
        generators: dict[int, torch.Generator] = {}
        on_host = _host_generators()
        failed = False
        try:
            for layer in seeds:
                generators[layer] = torch.Generator(device="cuda")
                graph.register_generator_state(generators[layer])
            self._generators = generators
            with capturing(graph, self._memory.handle):
                made = compute(nests)
                if _host_generators() != on_host:
                    raise TrainingError("it draws random numbers on the host")
            self._generators = None
            for layer, seed in seeds.items():
                generators[layer].manual_seed(seed)
            graph.replay()
            if seeds and not _draws_alike(slot, made, lambda: compute(nests)):
                raise TrainingError("it draws other random numbers in a graph")
        except Exception as error:
            self._refuse(slot, error)
            failed = True
        finally:
            self._generators = None
        if failed:
            gc.collect()  # torch 2.11's checkpoint leaves its hooks on until its frames go, which the error held
            return nests, compute(nests)
        self._slots[slot.number] = _Slot(graph, compute, nests, made, generators)
        return nests, Made(made.pieces, tree_map(_cut_off, made.outputs))

    def backward(
        self,
        slot: RankSlot,
        first: int,
        gradients: list[torch.Tensor | None],
        chunk: Callable[[], Chunk],
        *,
        is_last: bool,
    ) -> bool:
        """Runs the backward pass of a chunk of a slot, or says that it cannot.

        `gradients` are those of its outputs; only the last chunk's come from elsewhere, the others are where the chunk
        behind them left them. Gradients of its inputs and parameters are at their `grad` afterwards.
        """
        captured = self._slots.get(slot.number)
        if captured is None:
            return False
        known = captured.backward.get(first)
        if known is None:
            if is_last:  # else they are what the chunk behind this one writes when it is replayed
                gradients = [_writable(gradient) for gradient in gradients]
            known = self._capture_backward(slot, gradients, chunk())
            if known is None:
                # Trying has used up what backward needs. What others captured may count on what this would have left.
                self.is_spoiled = True
                assert captured.compute is not None
                with _buffers_kept(slot):
                    captured.made.pieces[:] = captured.compute(captured.nests).pieces
                del self._slots[slot.number]
                return False
            if is_last:
                known.gradients = gradients
            captured.backward[first] = known
        elif is_last:
            for place, gradient in zip(known.gradients, gradients, strict=True):
                if (place is None) != (gradient is None):
                    raise TrainingError(
                        f"{slot.name} got gradients for other outputs than when it was captured in a CUDA graph; "
                        "train with spindle.Trainer(cuda_graphs=False)"
                    )
                _put(place, gradient)
        if known.graph is not None:
            known.graph.replay()
        for parameter, is_first in known.written:
            place = self.gradients.place(parameter)
            if is_first and parameter.grad is not None and parameter.grad.data_ptr() != place.data_ptr():
                place += parameter.grad  # from a slot that ran without a graph
            parameter.grad = place
        return True

    def _capture_backward(
        self,
        slot: RankSlot,
        gradients: list[torch.Tensor | None],
        chunk: Chunk,
    ) -> _Backward | None:
        graph = torch.cuda.CUDAGraph()
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(chunk.outputs, gradients, strict=True)
            if gradient is not None and takes_gradient(leaf)
        ]
        inputs, parameters = chunk.inputs, chunk.parameters
        wanted = [*inputs, *parameters]
        if not (pairs and wanted):
            return _Backward(None, [], [])
        written = []
        places: dict[int, Any] = {}  # None where the gradient may stay where it is
        try:
            for parameter in parameters:
                can_stay = self.gradients.is_free(parameter) and id(parameter) not in self._written
                places[id(parameter)] = None if can_stay else self.gradients.place(parameter)
            with capturing(graph, self._memory.handle):
                gradients_made: Sequence[torch.Tensor | None] = torch.autograd.grad(
                    [leaf for leaf, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
                )
                storages = Counter(
                    _storage(tensor) for tensor in [*gradients_made, *(gradient for _, gradient in pairs)]
                )
                for parameter, gradient in zip(parameters, gradients_made[len(inputs) :], strict=True):
                    if gradient is None:
                        continue
                    is_first, place = id(parameter) not in self._written, places[id(parameter)]
                    if place is None and storages[_storage(gradient)] == 1 and _is_shaped_like(gradient, parameter):
                        places[id(parameter)] = gradient
                    elif place is None:
                        places[id(parameter)] = torch.empty_like(parameter).copy_(gradient)
                    else:
                        place.copy_(gradient) if is_first else place.add_(gradient)
                    written.append((parameter, is_first))
        except Exception as error:
            self._refuse(slot, error)
            failed = True
        else:
            failed = False
        if failed:
            gc.collect()  # as above
            return None
        for parameter, _ in written:
            self.gradients.take(parameter, places[id(parameter)])
        self._written.update(id(parameter) for parameter, _ in written)
        for leaf, gradient in zip(inputs, gradients_made, strict=False):
            leaf.grad = gradient
        return _Backward(graph, [], written)

    def finish(self) -> None:
        """The step that captured is over: what remains of it goes."""
        for slot in self._slots.values():
            slot.made, slot.compute = Made([], tree_map(_cut_off, slot.made.outputs)), None
        self.is_complete = True

    def _refuse(self, slot: RankSlot, error: Exception) -> None:
        # What was captured before is in another pool than what comes. Where there is no room for two, a later step with
        # these shapes starts anew, and leaves this slot out.
        self.is_spoiled |= _has_no_room_for_two()
        self._memory.renew()
        cause = error.__context__ or error  # the end of a capture that has failed fails, too
        if isinstance(error, torch.OutOfMemoryError) or isinstance(cause, torch.OutOfMemoryError):
            self.ran_out_of_memory = self.is_spoiled = True
            self._evict()
            return
        self.refused[slot.name] = f"capturing it failed: {(str(cause).splitlines() or [type(cause).__name__])[0]}"


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, draws_from: torch.Generator | None = None) -> Iterator[None]:
    """Inside, what is put on the current stream, not the default one, becomes a graph with memory from this pool.

    A capture that fails leaves the generators that it knows in a state in which nothing can be drawn from them, so
    torch's own one has no part in it: random numbers are drawn from another that the graph knows, or drawing ends the
    capture.
    """
    collects = gc.isenabled()
    gc.disable()  # freeing what another graph holds would end the capture
    generator, unknown = _generator(), torch.Generator(device="cuda")
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(draws_from or torch.Generator(device="cuda"))  # which the graph takes note of
    try:
        # Other threads (transfers) use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        if draws_from is None:
            generator.graphsafe_set_state(unknown)
        try:
            yield
        finally:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a layer may do nothing but views
                    graph.capture_end()
            except Exception:
                # torch goes on as if it captured, and frees nothing that another stream has used.
                device = torch.cuda.current_device()
                for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with suppress(Exception):
                        getattr(torch._C, end)(device, pool)
                raise
    finally:
        generator.graphsafe_set_state(state)
        if collects:
            gc.enable()


def _draws_alike(slot: RankSlot, made: Made, compute: Callable[[], Made]) -> bool:
    """Whether a slot gives without a graph what its graph gave. Random numbers that differ change it far more than
    rounding does. What it keeps (running statistics) is as the graph left it afterwards."""
    with torch.no_grad(), _buffers_kept(slot):
        again = compute().outputs
        return all(
            float((one - other).norm()) <= _ROUNDING * max(float(other.norm()), 1e-6)
            for one, other in zip(tree_leaves(made.outputs), tree_leaves(again), strict=True)
            if isinstance(one, torch.Tensor) and one.is_floating_point()
        )


def _has_no_room_for_two() -> bool:
    """Whether this process has taken more than half of the memory that it may take."""
    if not torch.cuda.is_available():
        return False
    device = torch.cuda.current_device()
    limit = torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.memory_reserved(device) > 0.5 * limit


@contextmanager
def _buffers_kept(slot: RankSlot) -> Iterator[None]:
    """What a slot writes to its buffers inside does not count: it has run before."""
    code = slot.code
    buffers = [] if isinstance(code, LossCode) else [buffer for layer in code.layers for buffer in layer.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # unseen by autograd


def _put(place: Any, value: Any) -> Any:
    """Values into the tensors of a nest, unless they are there already."""
    with torch.no_grad():
        for old, new in zip(tree_leaves(place), tree_leaves(value), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.detach().copy_(new, non_blocking=True)
    return place


def _writable(leaf: Any) -> Any:
    """A leaf, or a copy of one whose elements share memory, which cannot be written to."""
    if not isinstance(leaf, torch.Tensor) or 0 not in leaf.stride():
        return leaf
    return leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)


def _storage(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage().data_ptr()


def _is_shaped_like(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient may be a parameter's `grad` as it is: all of its memory, in the parameter's order."""
    num_bytes = gradient.numel() * gradient.element_size()
    return gradient.stride() == parameter.stride() and gradient.untyped_storage().nbytes() == num_bytes


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _cut_off(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _generator() -> torch.Generator:
    """Torch's own on this device."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _host_generators() -> tuple[Any, ...]:
    """The states of generators whose numbers no graph draws again."""
    return bytes(torch.get_rng_state().numpy()), random.getstate(), pickle.dumps(numpy.random.get_state())


def _is_hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
