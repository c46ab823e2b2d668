"""Tensor-parallel styles: how the members of a tensor group share one layer.

A tensor-parallel plan names submodules and their styles, in Hugging Face's words: a `colwise` linear has some of its
outputs on each member of the group; a `rowwise` linear takes them, and the results of the members are summed. A member
holds its own shard of each split parameter, as an ordinary tensor, and whole copies of the others.

A `sequence_parallel` module (a block, or the norms of one) runs on a member's shard of the tokens: its first argument
is scattered and its output gathered. Inside it, a child that contains colwise linears takes the sequence gathered, what
rowwise linears return is reduce-scattered, and gradients of the other weights, which saw these tokens only, are summed.

The styles mean what they mean in `torch.distributed.tensor.parallel`, but without DTensors. Parameters stay the
user's own, so optimizers, gradient buckets and checkpoints see ordinary tensors of the same number of dimensions. Each
slot of a plan has a group of its own, where a DTensor has one mesh. And the same code runs without a process group, one
member after another, to be tried out (`EmulatedTensorGroup`).

Styles are applied by replacing `module.forward` of the styled modules while a layer runs. This works inside recorded
code and when a layer or a block is recomputed, and leaves nothing behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from spindle.errors import WorkloadError
from spindle.models.mappings import (
    SEQUENCE,
    GroupInputs,
    TensorGroup,
    copy_all_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
    shard_of,
)

MAX_TENSOR_DEGREE = 8  # a tensor group stays where links are fast

# By style: the modules that it is for, and the dimension on which each parameter is split.
_LINEAR, _EMBEDDING = (nn.Linear, "nn.Linear"), (nn.Embedding, "nn.Embedding")
_ANY = (nn.Module, "nn.Module")
_STYLES: dict[str, tuple[tuple[type[nn.Module], str], dict[str, int]]] = {
    "colwise": (_LINEAR, {"weight": 0, "bias": 0}),
    "colwise_gather_output": (_LINEAR, {"weight": 0, "bias": 0}),
    "rowwise": (_LINEAR, {"weight": 1}),
    "rowwise_split_input": (_LINEAR, {"weight": 1}),
    "embedding_rowwise": (_EMBEDDING, {"weight": 0}),
    "embedding_colwise": (_EMBEDDING, {"weight": 1}),
    "replicated_with_grad_allreduce": (_ANY, {}),
    "all_reduce": (_ANY, {}),
    "sequence_parallel": (_ANY, {}),
}
_OLD_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
# Styles that take and return whole tensors: leaving such a module unsplit changes nothing around it.
_OPTIONAL = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise")
_COLWISE = ("colwise", "colwise_gather_output")  # need every token
_REDUCING = ("rowwise", "rowwise_split_input", "all_reduce")  # return partial sums


@dataclass(frozen=True, slots=True)
class StyledModule:
    """A submodule with its style. Inside a sequence-parallel module, `sequence` says how its input arrives: "scatter"
    (whole, and is scattered here), "sharded", or "gather" (sharded, and is gathered here)."""

    path: str
    module: nn.Module
    style: str
    sequence: Literal["", "scatter", "sharded", "gather"] = ""

    @property
    def split(self) -> list[tuple[str, nn.Parameter, int]]:
        """Its split parameters: name, parameter, dimension."""
        named = [(name, self.module._parameters.get(name), dim) for name, dim in _STYLES[self.style][1].items()]
        return [(name, parameter, dim) for name, parameter, dim in named if parameter is not None]

    @property
    def partial_gradients(self) -> list[str]:
        """Its own parameters that see one shard of the tokens, so that their gradients must be summed."""
        if self.style == "sequence_parallel" and self.sequence != "gather":
            return list(self.module._parameters)
        return ["bias"] if self.style in _REDUCING and self.sequence and "bias" in self.module._parameters else []


# From a tensor-parallel plan to styled modules.


def builtin_tp_plan(module: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that a Hugging Face model, or one inside this module, comes with."""
    own = getattr(module, "_tp_plan", None)
    if isinstance(own, dict) and own:
        return dict(own)
    return {
        f"{name}.{path}".rstrip("."): style
        for name, child in module.named_children()
        for path, style in builtin_tp_plan(child).items()
    }


def resolve_styles(
    module: nn.Module, plan: Mapping[str, str], where: str = "", strict: bool = False
) -> list[StyledModule]:
    """Find the submodules that a plan names; `*` in a path stands for a number.

    Not `strict`, for a model's own plan: unknown styles (of experts, which stay whole) are skipped. Whether the rest is
    correct is tried out later.
    """
    submodules = dict(module.named_modules())
    styled: dict[int, StyledModule] = {}
    # Later patterns win: a plan may name a group of modules, and then exceptions.
    for pattern, given_style in plan.items():
        style = _OLD_NAMES.get(given_style, given_style)
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = [(path, submodule) for path, submodule in submodules.items() if regex.fullmatch(path)]
        if strict and style not in _STYLES:
            raise WorkloadError(f"{where}: unknown style {given_style!r}; known styles: {', '.join(sorted(_STYLES))}")
        if strict and not matches:
            raise WorkloadError(f"{where}: {pattern!r} matches no submodule of the {type(module).__name__}")
        for path, submodule in matches if style in _STYLES else ():
            kind, name = _STYLES[style][0]
            if isinstance(submodule, kind):
                styled[id(submodule)] = StyledModule(path, submodule, style)
            elif strict:
                raise WorkloadError(
                    f"{where}: style {style!r} needs an {name}, but {path!r} is a {type(submodule).__name__}"
                )
    return _with_sequence_parallel(submodules, styled)


def _with_sequence_parallel(submodules: Mapping[str, nn.Module], styled: dict[int, StyledModule]) -> list[StyledModule]:
    """Derive from `sequence_parallel` modules how sequences reach every module inside them.

    Where a plan names norms only, as torch's plans do, they stand for the block that contains them; but a model's last
    norm, next to its blocks, stands for itself.
    """
    split = {key for key, entry in styled.items() if entry.style != "sequence_parallel"}
    colwise = {key for key, entry in styled.items() if entry.style in _COLWISE}

    # The roots: the modules whose input is scattered and whose output is gathered.
    roots = {entry.path: entry.module for entry in styled.values() if entry.style == "sequence_parallel"}
    parents_of_norms = {
        path.rpartition(".")[0] for path, module in roots.items() if path and not _contains(module, split)
    }
    blocks = {path: submodules[path] for path in (*roots, *parents_of_norms) if _contains(submodules[path], split)}
    block_ids = {id(block) for block in blocks.values()}
    roots |= {path: block for path, block in blocks.items() if path in roots or not _contains(block, block_ids)}
    root_ids = {id(module) for module in roots.values()}

    def mark(path: str, module: nn.Module, style: str, sequence: Literal["scatter", "sharded", "gather"]) -> None:
        styled[id(module)] = StyledModule(path, module, style, sequence)

    def mark_children(path: str, module: nn.Module) -> None:
        """Mark what is inside a module that runs on a shard of the sequence."""
        for name, child in module.named_children():
            child_path, entry = f"{path}.{name}".lstrip("."), styled.get(id(child))
            if entry is not None and id(child) in split:
                mark(child_path, child, entry.style, "sharded")
            elif id(child) not in root_ids and not _contains(child, root_ids) and _contains(child, colwise):
                # Attention or an MLP: gather once at its entrance, reduce-scatter at its rowwise linears.
                mark(child_path, child, "sequence_parallel", "gather")
                for descendant in child.modules():
                    inner = styled.get(id(descendant))
                    if inner is not None and inner.style in _REDUCING:
                        styled[id(descendant)] = replace(inner, sequence="sharded")
            else:
                mark(child_path, child, "sequence_parallel", "sharded")
                mark_children(child_path, child)

    # Roots inside other roots are marked by them.
    for path, module in roots.items():
        if not any(_contains(root, {id(module)}) for root in roots.values()):
            mark(path, module, "sequence_parallel", "scatter")
            mark_children(path, module)
    return list(styled.values())


def _contains(module: nn.Module, ids: set[int]) -> bool:
    """Whether any of these modules is inside `module`."""
    return any(id(descendant) in ids for descendant in module.modules() if descendant is not module)


def drop_tied_conflicts(styled: Sequence[StyledModule], modules: Iterable[nn.Module]) -> list[StyledModule]:
    """Drop optional styles whose weight is tied to one that is split differently, or does not divide evenly."""
    split = {(id(entry.module), name): dim for entry in styled for name, _, dim in entry.split}
    dims: dict[int, set[int | None]] = {}  # by parameter: the dimension it is split on, in each module that uses it
    for module in {id(submodule): submodule for root in modules for submodule in root.modules()}.values():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dims.setdefault(id(parameter), set()).add(split.get((id(module), name)))
    return [
        entry
        for entry in styled
        if entry.style not in _OPTIONAL
        or all(
            dims[id(parameter)] == {dim} and parameter.shape[dim] % MAX_TENSOR_DEGREE == 0
            for _, parameter, dim in entry.split
        )
    ]


def split_dims(styled: Iterable[StyledModule]) -> dict[int, int]:
    """The dimension that each split parameter is split on, by its id."""
    return {id(parameter): dim for entry in styled for _, parameter, dim in entry.split}


# A forward with styles.


def with_styles(run: Callable[..., Any], styled: Sequence[StyledModule], group: TensorGroup) -> Callable[..., Any]:
    """A layer's function as a member of a tensor group runs it."""

    def run_with_styles(*args: Any, **kwargs: Any) -> Any:
        with apply_styles(styled, group):
            return run(*args, **kwargs)

    return run_with_styles


@contextmanager
def apply_styles(styled: Iterable[StyledModule], group: TensorGroup) -> Iterator[None]:
    """A context in which styled modules run as this member of the group. The backward pass needs it, too: a block may
    recompute its forward there."""
    styled = list(styled)
    own_forwards = [vars(entry.module).get("forward") for entry in styled]
    inputs = GroupInputs(group)
    owners = [(entry.module._parameters, name) for entry in styled for name in entry.partial_gradients]
    # Weights that are not leaves have been copied to the group by an enclosing context.
    weights = [
        (owner, name, weight)
        for owner, name in owners
        if (weight := owner[name]) is not None and _is_trained_leaf(weight)
    ]
    for entry, own_forward in zip(styled, own_forwards, strict=True):
        # Where an enclosing context has replaced the forward already, wrap what it wrapped.
        is_nested = isinstance(own_forward, partial) and own_forward.func is _styled_forward
        forward = own_forward.args[-1] if isinstance(own_forward, partial) and is_nested else entry.module.forward
        entry.module.forward = partial(_styled_forward, entry, group, inputs, forward)
    try:
        copied: list[Any] = copy_all_to_group([weight for *_, weight in weights], group)
        for (owner, name, _), copied_weight in zip(weights, copied, strict=True):
            owner[name] = copied_weight
        yield
    finally:
        for owner, name, own_weight in weights:
            owner[name] = own_weight
        for entry, own_forward in zip(styled, own_forwards, strict=True):
            del entry.module.forward
            if own_forward is not None:
                entry.module.forward = own_forward


def _is_trained_leaf(parameter: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and parameter.requires_grad and parameter.is_leaf


def _styled_forward(
    entry: StyledModule,
    group: TensorGroup,
    inputs: GroupInputs,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward of a styled module; `forward` is its own."""
    if entry.style == "replicated_with_grad_allreduce":
        with _copied_parameters(entry.module, group):
            return forward(*args, **kwargs)
    if entry.style == "all_reduce":
        return _reduced(entry, forward(*args, **kwargs), group)
    if entry.style == "sequence_parallel":
        return _sequence_parallel_forward(entry, group, inputs, forward, args, kwargs)
    tensor, *_ = (*args, *kwargs.values())  # linears and embeddings have one input
    if entry.style in _COLWISE and entry.sequence:
        tensor = inputs.gathered(tensor)
    match entry.style:
        case "colwise":
            return _colwise_forward(entry, inputs, forward, tensor)
        case "colwise_gather_output":
            return _gather_columns(_colwise_forward(entry, inputs, forward, tensor), group)
        case "rowwise":
            return _rowwise_forward(entry, group, forward, tensor)
        case "rowwise_split_input":
            return _rowwise_forward(entry, group, forward, scatter_to_group(tensor, group, tensor.dim() - 1))
        case "embedding_rowwise":
            return reduce_from_group(_local_embedding(entry.module, forward, tensor, group), group)
        case "embedding_colwise":
            return _gather_columns(forward(tensor), group)
    raise AssertionError(entry.style)


@contextmanager
def _copied_parameters(module: nn.Module, group: TensorGroup) -> Iterator[None]:
    """A context in which gradients of a module's parameters are all-reduced: the module sees this member's part of
    something, so its gradients are partial."""
    own = [(submodule, dict(submodule._parameters)) for submodule in module.modules()]
    for submodule, parameters in own:
        for name, parameter in parameters.items():
            copied: Any = None if parameter is None else copy_to_group(parameter, group)
            submodule._parameters[name] = copied
    try:
        yield
    finally:
        for submodule, parameters in own:
            submodule._parameters.update(parameters)


def _reduced(entry: StyledModule, partial_sum: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    return reduce_scatter_sequence(partial_sum, group) if entry.sequence else reduce_from_group(partial_sum, group)


def _colwise_forward(
    entry: StyledModule, inputs: GroupInputs, forward: Callable[..., Any], tensor: torch.Tensor
) -> torch.Tensor:
    """This member's columns of a linear's output."""
    if isinstance(entry.module, nn.Linear) and getattr(forward, "__func__", None) is nn.Linear.forward:
        columns = inputs.linear(tensor, entry.module)
        if columns is not None:
            return columns
    output: torch.Tensor = forward(inputs.copied(tensor))
    return output


def _rowwise_forward(
    entry: StyledModule, group: TensorGroup, forward: Callable[..., Any], tensor: torch.Tensor
) -> torch.Tensor:
    parameters = entry.module._parameters
    bias = parameters["bias"]
    parameters["bias"] = None  # added once, after the sum
    try:
        total = _reduced(entry, forward(tensor), group)
    finally:
        parameters["bias"] = bias
    return total if bias is None else total + bias.to(total.dtype)


def _gather_columns(columns: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    return gather_from_group(columns, group, columns.dim() - 1, columns.shape[-1] * group.size)


def _sequence_parallel_forward(
    entry: StyledModule,
    group: TensorGroup,
    inputs: GroupInputs,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if entry.sequence == "sharded":
        return forward(*args, **kwargs)
    map_input = inputs.gathered if entry.sequence == "gather" else partial(scatter_to_group, group=group, dim=SEQUENCE)
    tensor, *_ = (*args, *kwargs.values())  # the hidden states; masks and positions stay whole
    if args:
        args = (map_input(tensor), *args[1:])
    else:
        kwargs = {**kwargs, next(iter(kwargs)): map_input(tensor)}
    if entry.sequence == "gather":
        return forward(*args, **kwargs)
    inputs.sequence_length = tensor.shape[SEQUENCE]
    try:
        with _own_random_numbers(tensor.device, group.group_rank) if entry.module.training else nullcontext():
            output = forward(*args, **kwargs)
        gather = partial(gather_from_group, group=group, dim=SEQUENCE, length=inputs.sequence_length)
        return (gather(output[0]), *output[1:]) if isinstance(output, tuple) else gather(output)
    finally:
        inputs.sequence_length = None


@contextmanager
def _own_random_numbers(device: torch.device, group_rank: int) -> Iterator[None]:
    """A context in which members draw different random numbers (their tokens differ). Outside, all draw the same."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(1 << 62, ())) + group_rank)
        yield


def _local_embedding(module: Any, forward: Callable[..., Any], ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Look up ids in this member's rows of an embedding table; ids in rows of other members give zeros."""
    num_rows = module.weight.shape[0]
    first = group.group_rank * num_rows
    is_elsewhere = (ids < first) | (ids >= first + num_rows)
    # The padding index is a row of the whole table, which may be on another member.
    padding = module.padding_idx
    module.padding_idx = padding - first if padding is not None and first <= padding < first + num_rows else None
    try:
        vectors: torch.Tensor = forward((ids - first).masked_fill(is_elsewhere, 0))
    finally:
        module.padding_idx = padding
    return vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0)


# All members of a group in one process.


class _Paused(Exception):
    """A member has reached a collective whose result is not known yet."""


class EmulatedTensorGroup:
    """A tensor group whose members run one after another in this process, without a process group.

    A member runs until the first collective whose result is not known, and is paused there. Once all members have
    contributed to it, its result is known, and all of them run again from the start. So with n collectives every member
    runs n + 1 times.

    `sent_bytes` counts what a member contributes to all-reduces until it sets `is_backward`. A reduce-scatter, an
    all-gather or an all-to-all counts as half of the all-reduce of the whole tensor, as in a ring.
    """

    def __init__(self, size: int) -> None:
        self.size, self.group_rank = size, 0
        self.is_backward, self.sent_bytes = False, 0.0
        self._results: list[torch.Tensor] = []  # of collectives, in order
        self._contributions: list[torch.Tensor] = []  # to the next collective, by member
        self._num_done = 0  # collectives that the running member has passed

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._collective(tensor, lambda tensors: torch.stack(tensors).sum(0), 1.0)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        total = self._collective(tensor, lambda tensors: torch.stack(tensors).sum(0), 1 / 2)
        return shard_of(total, dim, self.size, self.group_rank)

    def all_gather(self, tensor: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
        return self._collective(tensor, lambda tensors: torch.cat(tensors, dim=dim), self.size / 2)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """As in a sequence group (`sequence_attention`). A member sends all but its own row, once."""
        return self._collective(tensor, torch.stack, 1 / 2)[:, self.group_rank].clone()

    def _collective(
        self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor], weight: float
    ) -> torch.Tensor:
        if self._num_done < len(self._results):  # known from an earlier round
            self._num_done += 1
            return self._results[self._num_done - 1].clone()
        self._contributions.append(tensor.detach().clone())
        if len(self._contributions) == self.size:
            self._results.append(combine(self._contributions))
            if not self.is_backward:
                self.sent_bytes += tensor.numel() * tensor.element_size() * weight
        raise _Paused

    def run(self, member: Callable[[int], Any]) -> list[Any]:
        """The results of `member(group_rank)` for all members."""
        while True:
            self._contributions.clear()
            results = []
            for group_rank in range(self.size):
                self.group_rank, self._num_done, self.is_backward = group_rank, 0, False
                with suppress(_Paused):
                    results.append(member(group_rank))
            if not self._contributions:  # no member was paused: this was the last round
                return results
            if len(self._contributions) < self.size:
                raise ValueError("members of a tensor group do not all take part in the same collectives")
