"""How do several devices share one layer? Tensor parallel styles, in Hugging Face's words, over local tensors.

A plan names parts of a module and their styles: a `colwise` linear has some of its outputs on each member of a tensor
group, a `rowwise` one takes them and the members' results are added up. A member has its own shard of the parameters
that are split, as ordinary tensors, and whole copies of the others.

A `sequence_parallel` part (a block, or the norms of one) runs on a member's slice of the tokens: what it is given first
is cut, and what it gives is joined. Inside it, a part with colwise ones takes its slices joined, what rowwise ones give
is added up into slices, and so are gradients of other weights, which saw these tokens alone.

These are the meanings of `torch.distributed.tensor.parallel`, without its DTensors: parameters stay the user's own,
which optimizers, gradient buckets and checkpoints then see as ordinary tensors of the same number of dimensions; the
group is another for each slot of a plan, and a DTensor knows one; and the same code runs without any process group,
member after member, to be tried out (`rehearse`). Who the members are is told by `Members`.

A forward runs with styles by way of `module.forward` of the parts, put there while a layer runs: it works inside
recorded code, and again when a layer or a block is recomputed, and leaves nothing behind.
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
from spindle.models.crossings import SEQUENCE, Entered, Members, cut, enter, enter_all, join, leave, leave_cut, shard_of

MOST_MEMBERS = 8  # of a tensor group: it stays where links are fast

# By style: what it is for, and on which dimension parameters are split.
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
# What takes and gives whole tensors may as well not be split.
_FREE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise")
_TAKING = ("colwise", "colwise_gather_output")  # these need every token
_GIVING = ("rowwise", "rowwise_split_input", "all_reduce")


@dataclass(frozen=True, slots=True)
class Styled:
    """A part of a module with its style. Where sequences are cut, `sequence` says what it is given: the whole to be
    cut, slices, or slices to be joined."""

    path: str
    module: nn.Module
    style: str
    sequence: Literal["", "cut", "slices", "joined"] = ""

    @property
    def split(self) -> list[tuple[str, nn.Parameter, int]]:
        """Its parameters that are split, with the dimension."""
        found = [(name, self.module._parameters.get(name), dim) for name, dim in _STYLES[self.style][1].items()]
        return [(name, parameter, dim) for name, parameter, dim in found if parameter is not None]

    @property
    def slice_weights(self) -> list[str]:
        """Its own parameters that see slices: their gradients are parts of a sum."""
        if self.style == "sequence_parallel" and self.sequence != "joined":
            return list(self.module._parameters)
        return ["bias"] if self.style in _GIVING and self.sequence and "bias" in self.module._parameters else []


# From a plan to styles.


def plan_inside(module: nn.Module) -> dict[str, str]:
    """The tensor parallel plans that Hugging Face models bring along."""
    own = getattr(module, "_tp_plan", None)
    if isinstance(own, dict) and own:
        return dict(own)
    return {
        f"{name}.{path}".rstrip("."): style
        for name, child in module.named_children()
        for path, style in plan_inside(child).items()
    }


def styles_of(module: nn.Module, plan: Mapping[str, str], where: str = "", strict: bool = False) -> list[Styled]:
    """The parts that a plan names; `*` stands for a number. Of a model's own plan, not `strict`, rules that are not
    known here (of experts, which stay whole) are left out: whether the rest is right is tried out later."""
    parts = dict(module.named_modules())
    found: dict[int, Styled] = {}
    for pattern, given in plan.items():
        style = _OLD_NAMES.get(given, given)
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        named = [(path, part) for path, part in parts.items() if matches.fullmatch(path)]
        if strict and style not in _STYLES:
            raise WorkloadError(f"{where}: {given!r} is no style that is known; known: {', '.join(sorted(_STYLES))}")
        if strict and not named:
            raise WorkloadError(f"{where}: {pattern!r} names no part of the {type(module).__name__}")
        for path, part in named if style in _STYLES else ():
            kind, name = _STYLES[style][0]
            if isinstance(part, kind):
                found[id(part)] = Styled(path, part, style)
            elif strict:
                raise WorkloadError(f"{where}: {style!r} is for an {name}, but {path!r} is a {type(part).__name__}")
    return _along_sequences(parts, found)


def _along_sequences(parts: Mapping[str, nn.Module], found: dict[int, Styled]) -> list[Styled]:
    """What sequence parallel parts mean for those inside them.

    Where a plan names norms alone, as torch's do, they stand for the block that holds them; but a model's last norm,
    beside its blocks, for itself.
    """
    split = {key for key, one in found.items() if one.style != "sequence_parallel"}
    named = {one.path: one.module for one in found.values() if one.style == "sequence_parallel"}
    parents = {path.rpartition(".")[0] for path, part in named.items() if path and not _holds(part, split)}
    blocks = {path: parts[path] for path in (*named, *parents) if _holds(parts[path], split)}
    inner = {id(part) for part in blocks.values()}
    named |= {path: part for path, part in blocks.items() if path in named or not _holds(part, inner)}
    ids = {id(part) for part in named.values()}

    def mark(path: str, part: nn.Module, style: str, sequence: Literal["cut", "slices", "joined"]) -> None:
        found[id(part)] = Styled(path, part, style, sequence)

    def descend(path: str, part: nn.Module) -> None:
        """A part that runs on slices."""
        for name, child in part.named_children():
            below, own = f"{path}.{name}".lstrip("."), found.get(id(child))
            if own is not None and id(child) in split:
                mark(below, child, own.style, "slices")
            elif id(child) not in ids and not _holds(child, ids) and _holds(child, takers):
                mark(below, child, "sequence_parallel", "joined")
                for each in child.modules():
                    one = found.get(id(each))
                    if one is not None and one.style in _GIVING:
                        found[id(each)] = replace(one, sequence="slices")
            else:
                mark(below, child, "sequence_parallel", "slices")
                descend(below, child)

    takers = {key for key, one in found.items() if one.style in _TAKING}
    for path, part in named.items():
        if not any(_holds(other, {id(part)}) for other in named.values()):
            mark(path, part, "sequence_parallel", "cut")
            descend(path, part)
    return list(found.values())


def _holds(part: nn.Module, wanted: set[int]) -> bool:
    """Whether some of these are inside a part."""
    return any(id(each) in wanted for each in part.modules() if each is not part)


def without_tied(styled: Sequence[Styled], modules: Iterable[nn.Module]) -> list[Styled]:
    """Styles of parts that may as well be whole are left out where a tied weight is used otherwise, too, or does not
    divide."""
    dims: dict[int, set[int | None]] = {}
    split = {(id(one.module), name): dim for one in styled for name, _, dim in one.split}
    for module in {id(part): part for root in modules for part in root.modules()}.values():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dims.setdefault(id(parameter), set()).add(split.get((id(module), name)))
    return [
        one
        for one in styled
        if one.style not in _FREE
        or all(dims[id(each)] == {dim} and each.shape[dim] % MOST_MEMBERS == 0 for _, each, dim in one.split)
    ]


def split_dims(styled: Iterable[Styled]) -> dict[int, int]:
    """The dimension that each split parameter is split on, by its id."""
    return {id(parameter): dim for one in styled for _, parameter, dim in one.split}


# A forward with styles.


def with_styles(run: Callable[..., Any], styled: Sequence[Styled], members: Members) -> Callable[..., Any]:
    """A layer's function as a member of a tensor group runs it."""

    def split_run(*args: Any, **kwargs: Any) -> Any:
        with styles_on(styled, members):
            return run(*args, **kwargs)

    return split_run


@contextmanager
def styles_on(styled: Iterable[Styled], members: Members) -> Iterator[None]:
    """Inside, parts run as a member runs them. A backward pass needs it, too: a block may recompute itself there."""
    styled = list(styled)
    before = [vars(one.module).get("forward") for one in styled]
    entered = Entered(members)
    # Those that are no leaves have entered already, around this.
    owners = [(one.module._parameters, name) for one in styled for name in one.slice_weights]
    weights = [(owner, name, each) for owner, name in owners if (each := owner[name]) is not None and _is_trained(each)]
    for one, own in zip(styled, before, strict=True):
        is_on = isinstance(own, partial) and own.func is _forward
        forward = own.args[-1] if isinstance(own, partial) and is_on else one.module.forward
        one.module.forward = partial(_forward, one, members, entered, forward)
    try:
        inside: list[Any] = enter_all([each for *_, each in weights], members)
        for (owner, name, _), each in zip(weights, inside, strict=True):
            owner[name] = each
        yield
    finally:
        for owner, name, own_weight in weights:
            owner[name] = own_weight
        for one, own in zip(styled, before, strict=True):
            del one.module.forward
            if own is not None:
                one.module.forward = own


def _is_trained(parameter: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and parameter.requires_grad and parameter.is_leaf


def _forward(
    one: Styled, members: Members, entered: Entered, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    module = one.module
    if one.style == "replicated_with_grad_allreduce":
        # It sees this member's part of something, and so does its gradient.
        own = [(part, dict(part._parameters)) for part in module.modules()]
        for part, parameters in own:
            for name, each in parameters.items():
                entered_part: Any = None if each is None else enter(each, members)
                part._parameters[name] = entered_part
        try:
            return forward(*args, **kwargs)
        finally:
            for part, parameters in own:
                part._parameters.update(parameters)
    if one.style == "all_reduce":
        return _left(one, forward(*args, **kwargs), members)
    if one.style == "sequence_parallel":
        return _along_sequence(one, members, entered, forward, args, kwargs)
    given, *_ = (*args, *kwargs.values())
    if one.style in _TAKING and one.sequence:
        given = entered.whole(given)
    match one.style:
        case "colwise":
            return _columns(one, entered, forward, given)
        case "colwise_gather_output":
            return _columns_joined(_columns(one, entered, forward, given), members)
        case "rowwise" | "rowwise_split_input":
            if one.style == "rowwise_split_input":
                given = cut(given, members, given.dim() - 1)
            bias = module._parameters["bias"]
            module._parameters["bias"] = None  # to be added once
            try:
                total = _left(one, forward(given), members)
            finally:
                module._parameters["bias"] = bias
            return total if bias is None else total + bias.to(total.dtype)
        case "embedding_rowwise":
            return leave(_looked_up(module, forward, given, members), members)
        case "embedding_colwise":
            return _columns_joined(forward(given), members)
    raise AssertionError(one.style)


def _left(one: Styled, part: torch.Tensor, members: Members) -> torch.Tensor:
    return leave_cut(part, members) if one.sequence else leave(part, members)


def _columns(one: Styled, entered: Entered, forward: Callable[..., Any], given: torch.Tensor) -> torch.Tensor:
    """This member's columns."""
    if isinstance(one.module, nn.Linear) and getattr(forward, "__func__", None) is nn.Linear.forward:
        found = entered.linear(given, one.module)
        if found is not None:
            return found
    made: torch.Tensor = forward(entered(given))
    return made


def _columns_joined(part: torch.Tensor, members: Members) -> torch.Tensor:
    return join(part, members, part.dim() - 1, part.shape[-1] * members.size)


def _along_sequence(
    one: Styled,
    members: Members,
    entered: Entered,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if one.sequence == "slices":
        return forward(*args, **kwargs)
    change = entered.whole if one.sequence == "joined" else partial(cut, members=members, dim=SEQUENCE)
    given, *_ = (*args, *kwargs.values())
    if args:
        args = (change(given), *args[1:])
    else:
        kwargs = {**kwargs, next(iter(kwargs)): change(given)}
    if one.sequence == "joined":
        return forward(*args, **kwargs)
    entered.length = given.shape[SEQUENCE]
    try:
        with _own_random_numbers(given.device, members.place) if one.module.training else nullcontext():
            made = forward(*args, **kwargs)
        whole = partial(join, members=members, dim=SEQUENCE, length=entered.length)
        return (whole(made[0]), *made[1:]) if isinstance(made, tuple) else whole(made)
    finally:
        entered.length = None


@contextmanager
def _own_random_numbers(device: torch.device, place: int) -> Iterator[None]:
    """Inside, a member draws other numbers than the rest, who have other tokens; outside all draw alike."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(1 << 62, ())) + place)
        yield


def _looked_up(module: Any, forward: Callable[..., Any], ids: torch.Tensor, members: Members) -> torch.Tensor:
    """The rows of a table that this member has, and zeros for the others."""
    rows = module.weight.shape[0]
    first = members.place * rows
    outside = (ids < first) | (ids >= first + rows)
    padding = module.padding_idx
    module.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None
    try:
        found: torch.Tensor = forward((ids - first).masked_fill(outside, 0))
    finally:
        module.padding_idx = padding
    return found.masked_fill(outside.unsqueeze(-1), 0)


# All members in one process, without a process group.


class _Paused(Exception):
    """A member has said something that others must answer."""


class Rehearsal:
    """A tensor group whose members run one after another: what each says is noted, and all run again from the start
    once everyone has said it. `sent_bytes` is what a member gives to be added up until `is_back` is set."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0
        self.is_back, self.sent_bytes = False, 0.0
        self._answers: list[torch.Tensor] = []
        self._said: list[torch.Tensor] = []
        self._next = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meet(tensor, lambda parts: torch.stack(parts).sum(0), 1.0)

    def add_up_shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        # A ring sums into parts with half the messages that it adds up with, and gathers with the other half.
        return shard_of(self._meet(tensor, lambda parts: torch.stack(parts).sum(0), 1 / 2), dim, self.size, self.place)

    def join(self, tensor: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
        return self._meet(tensor, lambda parts: torch.cat(parts, dim=dim), self.size / 2)

    def _meet(
        self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor], weight: float
    ) -> torch.Tensor:
        if self._next < len(self._answers):
            self._next += 1
            return self._answers[self._next - 1].clone()
        self._said.append(tensor.detach().clone())
        if len(self._said) == self.size:
            self._answers.append(combine(self._said))
            if not self.is_back:
                self.sent_bytes += tensor.numel() * tensor.element_size() * weight
        raise _Paused

    def run(self, member: Callable[[int], Any]) -> list[Any]:
        """What `member(place)` gives for each of them."""
        while True:
            self._said.clear()
            results = []
            for place in range(self.size):
                self.place, self._next, self.is_back = place, 0, False
                with suppress(_Paused):
                    results.append(member(place))
            if not self._said:
                return results
            if len(self._said) < self.size:
                raise ValueError("its members do not all tell each other the same")
