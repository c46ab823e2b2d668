"""A composite (CLIP, LLaVA) as calls of its parts, with the code between them as glue.

    composite, arguments ── record_forward ─▶ Recording ── slice ─▶ calls of parts, each with its glue

The parts are its towers, which are split into layers later, and other submodules: those with parameters (projectors,
embeddings, heads), those that keep state from call to call, and those that draw random numbers which several pieces of
code need. The forward of the composite is recorded around them. The statements that compute the arguments of a call
become a function of the composite's own arguments and of the outputs of earlier calls. So do the statements that
compute what the composite returns. A statement that two functions need is run by both.

Parameters that this code reads itself (a temperature) are the output of a part, too: `LooseParameters`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.models.blocks import towers_of
from spindle.models.chain import has_hooks, record_pure
from spindle.models.cross_entropy import MEAN, SUM, cross_entropy_parts
from spindle.models.fake import clone_leaf
from spindle.models.layer_source import function_text
from spindle.models.recording import argument_normalizer
from spindle.models.replay import after, has_replay, shape_of
from spindle.models.replay_learning import replay_forward
from spindle.models.serialize import namespace_text
from spindle.models.state import ModuleSnapshot
from spindle.models.statements import (
    Attribute,
    Recording,
    References,
    Statement,
    UnsupportedForwardError,
    failure_reason,
    guard_error,
    needs_values,
)


class LooseParameters(nn.Module):
    """Parameters that belong to a module but are read outside its forward, as a module that returns them by name."""

    def __init__(self, owner: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, getattr(owner, name))

    def extend(self, module: LooseParameters) -> None:
        """Return the parameters of another module, too."""
        self._parameters.update(module._parameters)

    def forward(self) -> dict[str, torch.Tensor]:
        parameters = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        return {name: parameter.view_as(parameter) for name, parameter in parameters.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """A function of variables: arguments of the composite, outputs of parts, and loose parameters."""

    run: Callable[..., Any]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCall:
    """A call of a part, whose output is the variable `name`. Its glue returns its args and kwargs. `is_detached` where
    it was made under `torch.no_grad()`: then its output gets no gradient.

    A call of `LooseParameters` assigns several variables: those in `entries`, from what it returns by name.
    """

    name: str
    path: str
    module: nn.Module
    glue: Glue
    entries: Mapping[str, str] | None = None
    is_detached: bool = False
    returns_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedComposite:
    """A composite's forward as calls of parts. `inputs` and `constants` are those of `Recording`; `index` is its output
    with the position of each leaf instead of the leaf."""

    module: nn.Module
    spec: Any
    inputs: tuple[str | None, ...]
    constants: tuple[Any, ...]
    calls: tuple[PartCall, ...]
    index: Any
    result: Any  # the output, as fake tensors
    output: Callable[[Any], Glue]  # what computes part of `index`
    loss_parts: Callable[[int], tuple[str, Glue, frozenset[str]] | None]
    reads_values: bool  # whether its code runs itself, around calls of its parts


def open_composite(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    values: Callable[[], tuple[Any, Any]] | None = None,
    *,
    records: bool = True,
) -> OpenedComposite | str:
    """A composite's forward on arguments like these as calls of its parts, or why it cannot be opened.

    `values` returns the arguments as real tensors, on which code between its towers is replayed if it reads values.
    With `records=False`, it is always replayed.
    """
    towers = towers_of(module)
    if not towers:
        return "it has no towers"
    if has_hooks(module):
        return "it has hooks, which run around all of it"
    opened = _opened(module, args, kwargs, values, towers, records)
    while not isinstance(opened, str):
        # A tower that returns a loss (a language model with its head) is opened, too, so that this loss can be divided.
        inside = {id(call.module): towers_of(call.module) for call in opened.calls if call.returns_number}
        if not any(inside.values()):
            break
        towers = [deeper for tower in towers for deeper in inside.get(id(tower)) or [tower]]
        further = _opened(module, args, kwargs, values, towers, records)
        if isinstance(further, str):
            break
        opened = further
    return opened


def _opened(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    values: Callable[[], tuple[Any, Any]] | None,
    towers: list[nn.Module],
    records: bool,
) -> OpenedComposite | str:
    """A composite's forward as calls of these towers and its other parts, or why it is not."""
    reason = "what its code does between its parts depends on how many samples there are"
    try:
        if records:
            return _Opening(module, record_pure(module, args, kwargs, [towers]), args, kwargs).opened()
    except Exception as error:  # recording runs the user's code, which may raise anything
        reason = failure_reason(error)
        if values is None or not needs_values(error):
            return reason
    assert values is not None
    before = ModuleSnapshot([module])
    try:
        return _Opening(module, replay_forward(module, *values(), towers, runs_ahead=False), args, kwargs).opened()
    except Exception as error:
        return f"{reason}; and on real tensors, {failure_reason(error)}"
    finally:
        before.restore()


class _Opening:
    def __init__(self, module: nn.Module, recording: Recording, args: Any, kwargs: Any) -> None:
        self._module, self._recording = module, recording
        leaves = tree_leaves(argument_normalizer(module)(args, kwargs))
        self._with_rows = {
            name
            for name, leaf in zip(recording.inputs, leaves, strict=True)
            if name is not None and isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        self._paths = {id(submodule): path for path, submodule in module.named_modules()}
        self._names = {id(value): name for name, value in recording.namespace.items() if isinstance(value, nn.Module)}
        self._parts: dict[str, Statement] = {}
        self._choose_parts(lambda statement: statement.changes_module or _has_parameters(statement))
        random_in_several = self._random_in_several()
        if any(statement.module is None for statement in random_in_several):
            # Each function that needs them would draw other numbers.
            raise UnsupportedForwardError("several of its parts need random numbers that are drawn between them")
        if random_in_several:
            chosen = {*self._parts, *(statement.name for statement in random_in_several)}
            self._choose_parts(lambda statement: statement.name in chosen)
        self._loose: dict[str, Attribute] = {}  # by variable

    def _choose_parts(self, is_part: Callable[[Statement], bool]) -> None:
        calls = [statement for statement in self._recording.statements if statement.module is not None]
        self._parts = {statement.name: statement for statement in calls if is_part(statement)}

    def _random_in_several(self) -> list[Statement]:
        """The statements that draw random numbers which several functions need: operations, and calls of modules."""
        drawn = [
            statement
            for statement in self._recording.statements
            if statement.draws_random_numbers or _is_random(statement)
        ]
        if not drawn:
            return []
        slices = [self._slice(References(uses=set(part.uses)), part)[0] for part in self._parts.values()]
        slices += [self._slice(references, None)[0] for _, references in self._recording.leaves]
        names = [{statement.name for statement in statements} for statements in slices]
        return [statement for statement in drawn if sum(statement.name in needed for needed in names) > 1]

    def opened(self) -> OpenedComposite:
        recording = self._recording
        if sum(statement.is_block for statement in self._parts.values()) < 1:
            raise UnsupportedForwardError("its forward calls none of its towers")
        calls = []
        for statement in self._parts.values():
            assert statement.module is not None
            has_gradient, *casts = statement.context
            if casts != list(recording.outer_context[1:]):
                raise UnsupportedForwardError(f"it switches autocast around its {type(statement.module).__name__}")
            arguments = statement.text.partition("(")[2]
            references = References(uses=set(statement.uses), attributes=list(statement.attributes))
            calls.append(
                PartCall(
                    name=statement.name,
                    path=self._paths[id(statement.module)],
                    module=statement.module,
                    glue=self._glue(f"_arguments({arguments}", references, before=statement),
                    is_detached=recording.outer_context[0] and not has_gradient,
                    returns_number=statement.returns_number,
                )
            )
        num_leaves = len(recording.leaves)
        spec = tree_flatten(recording.result)[1]
        # Last, because the glue of all calls and outputs says which parameters are loose.
        for position in range(num_leaves):
            self._output(position)
        return OpenedComposite(
            module=self._module,
            spec=recording.spec,
            inputs=recording.inputs,
            constants=recording.constants,
            calls=(*self._loose_calls(), *calls),
            index=tree_unflatten(list(range(num_leaves)), spec),
            result=recording.result,
            output=self._output,
            loss_parts=self._loss_parts,
            reads_values=has_replay(recording.namespace),
        )

    def _loose_calls(self) -> list[PartCall]:
        by_owner: dict[int, dict[str, str]] = {}  # variable by name
        owners = {id(owner): owner for owner, _ in self._loose.values()}
        for variable, (owner, name) in self._loose.items():
            by_owner.setdefault(id(owner), {})[name] = variable
        calls: list[PartCall] = []
        for owner_id, variables in by_owner.items():
            owner = owners[owner_id]
            if any(statement.module is owner for statement in self._parts.values()):
                raise UnsupportedForwardError(
                    f"its forward reads parameters of its {type(owner).__name__} as well as calling it"
                )
            calls.append(
                PartCall(
                    name=f"loose{len(calls)}",
                    path=self._paths[owner_id],
                    module=LooseParameters(owner, variables),
                    glue=Glue(run=_no_arguments, inputs=()),
                    entries={variable: name for name, variable in variables.items()},
                )
            )
        return calls

    def _output(self, index: Any) -> Glue:
        positions, spec = tree_flatten(index)
        references = References()
        texts = []
        for position in positions:
            text, uses = self._recording.leaves[position]
            references.uses |= uses.uses
            references.attributes += uses.attributes
            texts.append(text)
        if positions == [index]:
            return self._glue(texts[0], references)
        return self._glue(f"_unflatten([{', '.join(texts)}], _spec)", references, extra={"_spec": spec})

    def _loss_parts(self, position: int) -> tuple[str, Glue, frozenset[str]] | None:
        """A leaf of the output as the mean of a cross entropy over tokens, or as its sum over a given number: ("mean",
        the glue of its total and count, nothing), or ("sum", its glue, the inputs that this number follows from); None
        for any other."""
        if position in self._recording.losses:
            kind, parts, references = self._recording.losses[position]
            if kind == "sum":
                return kind, self._output(position), frozenset(references.uses)
            return kind, self._glue(parts, references), frozenset()
        text, _ = self._recording.leaves[position]
        by_name = {statement.name: statement for statement in self._recording.statements if statement.name}
        statement = by_name.get(text)
        if statement is None:
            return None
        loss = _cross_entropy(statement, self._recording.namespace)
        if loss is not None and loss.reduction == MEAN:
            total = re.sub(r"^\w+", "_cross_entropy_parts", statement.text)
            references = References(uses=set(statement.uses), attributes=list(statement.attributes))
            return "mean", self._glue(total, references), frozenset()
        if statement.kind.startswith("aten.div.") and len(statement.uses) >= 1:
            dividend = statement.text.partition("(")[2].partition(",")[0]
            summed = by_name.get(dividend)
            loss = _cross_entropy(summed, self._recording.namespace) if summed is not None else None
            divisors = [name for name in statement.uses if name != dividend]
            if (
                loss is not None
                and loss.reduction == SUM
                and not any(self._depends_on_rows(divisor) for divisor in divisors)
            ):
                _, needed = self._slice(References(uses=set(divisors)), None)
                return "sum", self._output(position), frozenset(needed) & {*self._recording.inputs} - {None}
        return None

    def _depends_on_rows(self, name: str) -> bool:
        """Whether a variable depends on the rows of the batch: it is computed from an input with rows, or from a part's
        output."""
        _, needed = self._slice(References(uses={name}), None)
        return not needed.isdisjoint(self._with_rows) or not needed.isdisjoint(self._parts)

    def _slice(self, references: References, before: Statement | None) -> tuple[list[Statement], set[str]]:
        """The statements that compute these references, in order and without calls of parts, and all variables that
        they need."""
        statements = list(self._recording.statements)
        if before is not None:
            statements = statements[: statements.index(before)]
        storages = self._recording.storages
        needed = set(references.uses)
        taken = []
        for statement in reversed(statements):
            if statement.name in self._parts:
                continue
            written = {storages.get(name) for name in statement.writes} - {None}
            is_written = any(storages.get(name) in written for name in needed) if written else False
            if statement.kind == "check":
                taken.append(statement)
            elif statement.name in needed or is_written:
                needed |= statement.uses
                taken.append(statement)
        # A size check that nothing here depends on is left to other glue.
        return [each for each in taken[::-1] if each.kind != "check" or each.uses <= needed], needed

    def _glue(
        self,
        result: str,
        references: References,
        before: Statement | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Glue:
        recording = self._recording
        statements, needed = self._slice(references, before)
        attributes = [*references.attributes, *(each for statement in statements for each in statement.attributes)]
        loose = {
            self._variable_of(owner, name): f"{self._names[id(owner)]}.{name}"
            for owner, name in attributes
            if isinstance(getattr(owner, name), nn.Parameter)
        }
        assigned = {statement.name for statement in statements}
        inputs = [name for name in recording.inputs if name in needed]
        inputs += [name for name in self._parts if name in needed]
        assert needed <= {*inputs, *assigned}, needed - {*inputs, *assigned}
        inputs += list(loose)
        # Statements that modify a tensor in place work on copies of the function's arguments.
        storages = recording.storages
        given = {storages.get(name) for name in inputs}
        given |= {storages.get(statement.name) for statement in statements if statement.kind == "pick"}
        written = {storages.get(name) for statement in statements for name in statement.writes} - {None}
        text = function_text(recording, statements, inputs, result)
        for variable, attribute in loose.items():
            text = re.sub(rf"\b{re.escape(attribute)}\b", variable, text)
        words = frozenset(re.findall(r"\w+", text))
        namespace = {name: value for name, value in recording.namespace.items() if name in words}
        return Glue(
            run=_compiled(self._module, text, namespace, extra or {}, copies=bool(given & written)),
            inputs=tuple(inputs),
        )

    def _variable_of(self, owner: nn.Module, name: str) -> str:
        for variable, (known_owner, known_name) in self._loose.items():
            if known_owner is owner and known_name == name:
                return variable
        variable = f"p{len(self._loose)}"
        self._loose[variable] = (owner, name)
        return variable


def _has_parameters(statement: Statement) -> bool:
    return statement.module is not None and any(True for _ in statement.module.parameters())


def _is_random(statement: Statement) -> bool:
    """Whether a statement is an operation that draws random numbers."""
    namespace, _, rest = statement.kind.partition(".")
    name, _, overload = rest.partition(".")
    operation = getattr(getattr(torch.ops.aten, name, None), overload, None) if namespace == "aten" else None
    return operation is not None and torch.Tag.nondeterministic_seeded in operation.tags


def _compiled(
    module: nn.Module, text: str, namespace: Mapping[str, Any], extra: Mapping[str, Any], copies: bool
) -> Callable[..., Any]:
    """The function of a text. Its `__qualname__` is a digest of what it does, equal in all processes."""
    names = {**_NAMESPACE, **namespace, **extra, "_module": module}
    exec(compile(text, f"<glue of {type(module).__name__}>", "exec"), names)
    run = names["run"]
    description = "\n".join([text, namespace_text(module, {**namespace, **extra})])
    digest = hashlib.blake2b(description.encode(errors="replace"), digest_size=8).hexdigest()

    def glue(*values: Any) -> Any:
        return run(*(tree_map(clone_leaf, value) for value in values)) if copies else run(*values)

    glue.reads_values = has_replay(namespace)  # type: ignore[attr-defined]
    glue.__qualname__ = f"glue of {type(module).__qualname__} {digest}"
    return glue


def _no_arguments() -> tuple[tuple[()], dict[str, Any]]:
    return (), {}


@dataclass(frozen=True, slots=True)
class _CrossEntropy:
    reduction: int


def _cross_entropy(statement: Statement | None, namespace: Mapping[str, Any]) -> _CrossEntropy | None:
    """The reduction of a statement that is a cross entropy."""
    if statement is None or statement.kind != "aten.cross_entropy_loss.default":
        return None
    values = statement.text.partition("(")[2].rstrip(")").split(", ")
    return _CrossEntropy(int(values[3]) if len(values) > 3 else MEAN)


def matched_leaves(opened: OpenedComposite, args: Any, kwargs: Any) -> list[Any] | None:
    """The leaves of arguments in the order of `inputs`; None if their structure differs."""
    leaves, spec = tree_flatten(argument_normalizer(opened.module)(args, kwargs))
    return leaves if spec == opened.spec else None


_NAMESPACE: Mapping[str, Any] = {
    "math": math,
    "torch": torch,
    "_leaves": tree_leaves,
    "_unflatten": tree_unflatten,
    "_guard_error": guard_error,
    "_arguments": lambda *args, **kwargs: (args, kwargs),
    "_cross_entropy_parts": cross_entropy_parts,
    "_shape_of": shape_of,
    "_after": after,
}
