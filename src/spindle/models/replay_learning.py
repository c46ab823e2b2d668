"""Learn from a first batch what a replay needs: a forward whose code reads values, as statements.

The module's forward runs once on real arguments, while its parts return zeros of the right shapes and are not computed.
Operations are followed through the dispatcher, so that for each part it is known which inputs, outputs of earlier parts
and loose parameters its arguments depend on, and which values had been read by then (everything after them may depend
on these). Outputs that a piece of code does not depend on need not be sent to the rank that runs it: it gets zeros of
the same shape.

The result is a list of statements like a recording's, in which pieces of code are calls of a `Replay`
(`replay_writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.errors import GuardError
from spindle.models.cross_entropy import CrossEntropies
from spindle.models.effects import Effects, recording_effects, written_tensors
from spindle.models.fake import as_when_compiling, device_of, without_caches
from spindle.models.intercept import intercepted_calls
from spindle.models.recording import argument_normalizer
from spindle.models.replay import PassedOn, Replay, ReplayedCall, SameShape, version_of
from spindle.models.replay_writing import LearntCall, ReplayWriter, Source, has_parameters
from spindle.models.state import ModuleStates
from spindle.models.statements import (
    INNER_TENSOR,
    Attribute,
    Recording,
    UnsupportedForwardError,
    current_context,
)
from spindle.models.zeros import zero_output, zero_weights


def replay_forward(
    module: nn.Module, args: Any, kwargs: Any, blocks: Iterable[nn.Module], *, runs_ahead: bool
) -> Recording:
    """Learn the forward of a module on real arguments, as statements that replay its code around calls of its parts.

    With `runs_ahead`, arguments of blocks that depend on no block are computed before the first block.

    A replay runs the code several times per step and on several ranks, so the code must leave no state on modules that
    a later call reads. State that only the first call sets up is fine, and so are tensors that it leaves for others
    (`rope_deltas`).
    """
    learner = _Learner(module, list(blocks), args, kwargs, runs_ahead)
    recording = learner.recording()
    if learner.has_changed_modules or learner.has_left_tensors:
        # Again: only the second call can read what the first one has left behind.
        learner = _Learner(module, list(blocks), args, kwargs, runs_ahead)
        recording = learner.recording()
    if learner.has_changed_modules:
        raise UnsupportedForwardError("its forward changes attributes or buffers of the module itself")
    if learner.read_and_replaced:
        owner, name = learner.read_and_replaced[0]
        raise UnsupportedForwardError(f"its forward reads {type(owner).__name__}.{name}, a tensor of the call before")
    return recording


class _Dependencies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks which sources each storage depends on. Everything computed after Python code has read a value depends on
    the sources of that value, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: dict[int, set[Source]] = {}
        self.read: set[Source] = set()
        self.used: set[int] = set()  # storages of attributes that an operation has read
        self.attributes: frozenset[int] = frozenset()
        self.is_random = False
        self.is_paused = False
        self._alive: list[Any] = []

    def add(self, value: Any, source: Source) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                self.of.setdefault(leaf.untyped_storage()._cdata, set()).add(source)

    def sources(self, value: Any) -> set[Source]:
        sources: set[Source] = set()
        for leaf in tree_leaves(value):
            if isinstance(leaf, FakeTensor):  # parts run on fake tensors, and return zeros
                raise UnsupportedForwardError(INNER_TENSOR)
            if isinstance(leaf, torch.Tensor):
                key = leaf.untyped_storage()._cdata
                sources |= self.of.get(key, set())
                if key in self.attributes:
                    self.used.add(key)
        return sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        sources = self.sources((args, kwargs or {}))
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self.read |= sources
        tags = getattr(func, "tags", ())
        self.is_random |= torch.Tag.nondeterministic_seeded in tags
        if func is torch.ops.aten.index.Tensor:  # indexing by a mask: the number of rows follows from values
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            self.read |= self.sources(masks)
        elif func is torch.ops.aten.masked_select.default:
            self.read |= self.sources(args[1])
        elif func is torch.ops.aten._ctc_loss.Tensor:  # sizes follow from the lengths, not from the probabilities
            self.read |= self.sources(args[1:4])
        elif torch.Tag.dynamic_output_shape in tags:
            self.read |= sources
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                self.of.setdefault(leaf.untyped_storage()._cdata, set()).update(sources)
        for tensor in written_tensors(func, args, kwargs or {}):
            self.of.setdefault(tensor.untyped_storage()._cdata, set()).update(sources)
        return result


@dataclass(slots=True)
class _Learner:
    """Runs a module's forward once on a first batch, and notes what each call of a part depends on."""

    module: nn.Module
    blocks: list[nn.Module]
    args: Any
    kwargs: Any
    runs_ahead: bool
    calls: list[LearntCall] = field(default_factory=list)
    losses: dict[int, int | set[int]] = field(default_factory=dict)  # by leaf of the output; see `_losses`
    has_changed_modules: bool = False  # whether the code around its parts has changed modules
    has_left_tensors: bool = False  # whether it has assigned other tensors to attributes
    read_and_replaced: list[Attribute] = field(default_factory=list)  # tensor attributes, by that code
    # By id: modules that draw random numbers or keep state, and are not parts yet.
    effectful_modules: dict[int, nn.Module] = field(default_factory=dict)

    def recording(self) -> Recording:
        outer_context = current_context()
        leaves, spec = tree_flatten(argument_normalizer(self.module)(self.args, self.kwargs))
        is_input = [isinstance(leaf, torch.Tensor) or type(leaf) is int for leaf in leaves]
        block_ids = {id(block) for block in self.blocks}
        inlined_modules = [
            submodule
            for submodule in self.module.modules()
            if id(submodule) not in block_ids and any(id(inner) in block_ids for inner in submodule.modules())
        ]
        inlined_ids = {id(submodule) for submodule in inlined_modules}
        paths = {id(submodule): path for path, submodule in self.module.named_modules()}
        targets = [
            submodule
            for submodule in self.module.modules()
            if id(submodule) not in inlined_ids and has_parameters(submodule)
        ]
        loose = [
            (submodule, name)
            for submodule in self.module.modules()
            if id(submodule) in inlined_ids
            for name, parameter in submodule._parameters.items()
            if parameter is not None
        ]
        device = device_of(leaves)
        given = leaves
        while True:
            dependencies = _Dependencies()
            leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
            for number, leaf in enumerate(leaves):
                dependencies.add(leaf, ("input", number))
            result, result_sources, result_read = self._learn(
                leaves, spec, targets, loose, dependencies, device, inlined_modules
            )
            if not self.effectful_modules:
                break
            # these are parts, too, so that each runs once in a step
            targets += self.effectful_modules.values()
            self.effectful_modules, self.calls = {}, []
        self._check_blocks(block_ids)
        # Calls inside a part are the part's own. From here on, only parts that this code calls, or might call, are
        # intercepted.
        outermost = {
            id(child) for part in self.module.modules() if id(part) in inlined_ids for child in part.children()
        }
        outermost |= {id(call.module) for call in self.calls}
        targets = [target for target in targets if id(target) in outermost]
        first_block = next(number for number, call in enumerate(self.calls) if id(call.module) in block_ids)
        if dependencies.is_random:
            raise UnsupportedForwardError("random numbers are drawn between its parts")
        # The parts return zeros here; with real outputs, the code may branch differently.
        if any(kind != "input" for kind, _ in result_read):
            raise UnsupportedForwardError("the code between its parts branches on values that its parts compute")
        passed = _PassedThrough(leaves, is_input, self.calls)
        replay = Replay(
            module=self.module,
            spec=spec,
            constants=tuple(None if named else leaf for leaf, named in zip(leaves, is_input, strict=True)),
            is_input=tuple(is_input),
            targets=tuple(paths[id(target)] for target in targets),
            calls=tuple(
                ReplayedCall(
                    path=paths[id(call.module)],
                    spec=call.output_spec,
                    shapes=tuple(_shape_rule(leaf, call.leaves) for leaf in call.output),
                    passed=tuple(map(passed.rule, call.leaves, call.versions, [call.read] * len(call.leaves))),
                    writes=any(version_of(leaf) for leaf in call.output),
                )
                for call in self.calls
            ),
            loose=tuple(
                (paths[id(owner)], name, tuple(owner._parameters[name].shape), owner._parameters[name].dtype)  # type: ignore[union-attr]
                for owner, name in loose
            ),
            first_block=first_block,
            returned=tuple(passed.rule(leaf, version_of(leaf), result_read) for leaf in tree_leaves(result)),
            written=tuple(number for number, leaf in enumerate(leaves) if version_of(leaf)),
        )
        self._try(replay, leaves, len(loose), device)
        writer = ReplayWriter(replay, self.calls, leaves, loose, self.runs_ahead, block_ids)
        return writer.recording(result, result_sources, result_read, outer_context, self.losses)

    def _try(self, replay: Replay, leaves: list[Any], num_loose: int, device: Any) -> None:
        """Replay the code once to its end. It may behave differently if parts are not computed, because they have
        hooks."""
        inputs = [leaf for leaf, named in zip(leaves, replay.is_input, strict=True) if named]
        outputs = [tree_unflatten(call.output, call.output_spec) for call in self.calls]
        try:
            with torch.no_grad(), zero_weights(self.module, device):
                replay.segment(len(self.calls), range(len(self.calls)), inputs, outputs, [None] * num_loose)
        except GuardError as error:
            raise UnsupportedForwardError(f"its code cannot be run around its parts: {error}") from error

    def _learn(
        self,
        leaves: list[Any],
        spec: Any,
        targets: list[nn.Module],
        loose: list[Attribute],
        dependencies: _Dependencies,
        device: Any,
        inlined_modules: list[nn.Module],
    ) -> tuple[Any, list[set[Source]], set[Source]]:
        known = {id(each) for each in (*targets, *inlined_modules)}
        others = [each for each in self.module.modules() if id(each) not in known and not has_parameters(each)]
        other_ids = {id(each) for each in others}

        def intercept(module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
            if id(module) in other_ids:
                effects = Effects()
                output = recording_effects(module, run, effects)(args, kwargs)
                if effects.draws_random_numbers or effects.changes_module:
                    self.effectful_modules[id(module)] = module
                return output
            context = current_context()
            argument_leaves, argument_spec = tree_flatten((tuple(args), dict(kwargs)))
            sources = [dependencies.sources(leaf) for leaf in argument_leaves]
            dependencies.is_paused = losses.is_paused = True
            try:
                output = _without_aliases(zero_output(module, args, kwargs))
            finally:
                dependencies.is_paused = losses.is_paused = False
            if any(isinstance(leaf, int | float) for leaf in tree_leaves(output)):
                name = type(module).__name__
                raise UnsupportedForwardError(f"its {name} returns a number, which may follow from values of tensors")
            dependencies.add(output, ("call", len(self.calls)))
            versions = list(map(version_of, argument_leaves))
            # as leaves, because the code may modify the object that it gets
            returned = tree_flatten(output)
            self.calls.append(
                LearntCall(
                    module,
                    argument_leaves,
                    argument_spec,
                    sources,
                    set(dependencies.read),
                    versions,
                    context,
                    *returned,
                )
            )
            return output

        losses = CrossEntropies()
        args, kwargs = tree_unflatten(leaves, spec)
        # with gradients enabled, as outside, to see where the code disables them; zeros need none
        with as_when_compiling(), without_caches(self.module), zero_weights(self.module, device) as zeros:
            for number, (owner, name) in enumerate(loose):
                dependencies.add(zeros[id(owner), name], ("loose", number))
            before, tensors = ModuleStates(inlined_modules), _tensor_attributes(inlined_modules)
            dependencies.attributes = frozenset(tensor.untyped_storage()._cdata for tensor, _ in tensors.values())
            with (
                intercepted_calls([*targets, *others], intercept),
                dependencies,
                _recording_reads(dependencies),
                losses,
            ):
                result = self.module(*args, **kwargs)
            self.has_changed_modules = bool(before.changed_modules(ignore_tensors=True))
            self._compare_tensors(inlined_modules, tensors, dependencies)
        result_leaves = tree_leaves(result)
        self.losses = _losses(result_leaves, losses, dependencies, leaves)
        return result, [dependencies.sources(leaf) for leaf in result_leaves], set(dependencies.read)

    def _compare_tensors(
        self,
        inlined_modules: list[nn.Module],
        before: dict[Attribute, tuple[torch.Tensor, int]],
        dependencies: _Dependencies,
    ) -> None:
        """Note tensors that were assigned to attributes, and which of them had earlier values that were read."""
        now = _tensor_attributes(inlined_modules)
        changed = [
            key
            for key, (value, version) in before.items()
            if key not in now or now[key][0] is not value or now[key][1] != version
        ]
        self.has_left_tensors = bool(changed) or now.keys() != before.keys()
        self.read_and_replaced = [
            key for key in changed if before[key][0].untyped_storage()._cdata in dependencies.used
        ]

    def _check_blocks(self, block_ids: set[int]) -> None:
        num_blocks = sum(id(call.module) in block_ids for call in self.calls)
        if num_blocks < (2 if self.runs_ahead else 1):
            raise UnsupportedForwardError("its forward calls fewer than two of its blocks one by one")


def _losses(
    result: list[Any], losses: CrossEntropies, dependencies: _Dependencies, leaves: list[Any]
) -> dict[int, int | set[int]]:
    """The leaves of the output that are losses over tokens: either the number of the cross entropy whose mean it is, or
    the inputs that a sum is divided by (`num_items_in_batch`). Where a plain number comes from is unknown."""
    losses_by_leaf: dict[int, int | set[int]] = {}
    for position, leaf in enumerate(result):
        for number, (value, reduction) in enumerate(losses.results):
            if value is leaf and reduction == "mean":
                losses_by_leaf[position] = number
        for quotient, divisor in losses.quotients:
            sources = dependencies.sources(divisor)
            if (
                quotient is leaf
                and sources
                and all(
                    kind == "input" and not (isinstance(leaves[number], torch.Tensor) and leaves[number].dim())
                    for kind, number in sources
                )
            ):
                losses_by_leaf[position] = {number for _, number in sources}
    return losses_by_leaf


def _shape_rule(leaf: Any, arguments: list[Any]) -> Any:
    """How a replay knows the shape of a leaf of an output: see `ReplayedCall`."""
    if not isinstance(leaf, torch.Tensor):
        return (leaf,)
    for number, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and argument.shape == leaf.shape and argument.dtype == leaf.dtype:
            return SameShape(number)
    return None


class _PassedThrough:
    """Which tensors the code passes on unchanged."""

    def __init__(self, leaves: list[Any], is_input: list[bool], calls: list[LearntCall]) -> None:
        self._places: dict[int, PassedOn] = {}
        for number, leaf in enumerate(leaves):
            if is_input[number] and isinstance(leaf, torch.Tensor):
                self._places[id(leaf)] = PassedOn(None, number)
        for number, call in enumerate(calls):
            for position, leaf in enumerate(call.output):
                if isinstance(leaf, torch.Tensor):
                    self._places.setdefault(id(leaf), PassedOn(number, position))

    def rule(self, value: Any, version: int, read: set[Source]) -> PassedOn | None:
        """What a value must be in every batch; None for a value that is computed from each batch. Inputs are passed on
        without a replay only if no value was read before."""
        place = self._places.get(id(value)) if isinstance(value, torch.Tensor) and version == 0 else None
        return None if place is None or (place.call is None and read) else place


def _without_aliases(nest: Any) -> Any:
    """The same nest with no tensor in it twice, because on other ranks such leaves are different tensors."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        is_known = isinstance(leaf, torch.Tensor) and id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if is_known else leaf

    return tree_map(own, nest)


def _tensor_attributes(modules: Iterable[nn.Module]) -> dict[Attribute, tuple[torch.Tensor, int]]:
    """Plain attributes that are tensors, with how often they were changed in place."""
    return {
        (module, name): (value, version_of(value))
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def _recording_reads(dependencies: _Dependencies) -> Iterator[None]:
    """A context that also notes reads of whole tensors, which the dispatcher does not see."""
    names = ("tolist", "numpy", "__array__")
    before = {name: getattr(torch.Tensor, name) for name in names}

    def recording(name: str) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not dependencies.is_paused:
                dependencies.read |= dependencies.sources(tensor)
            return before[name](tensor, *args, **kwargs)

        return read

    own = {name for name in names if name in vars(torch.Tensor)}  # other methods are inherited
    for name in names:
        setattr(torch.Tensor, name, recording(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method) if name in own else delattr(torch.Tensor, name)
