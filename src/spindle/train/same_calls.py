"""Which calls of a sweep's trials are the same call: of a frozen module, on the same input, without random numbers.

Trials read the same batches. So a call of the same frozen module, with the same code before it on the batch or on
outputs that are the same themselves, gives the same output in each of them, and is computed once. What is not known to
be the same runs in each trial. What would let one trial change another is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten

from spindle.display import listed
from spindle.errors import WorkloadError
from spindle.train.probe import KEEPS, Facts
from spindle.train.record import RecordedCall
from spindle.train.trace import TracedTask

Key = tuple[str, str]  # (task, call)


def same_calls(tasks: Sequence[TracedTask], facts: Facts) -> dict[Key, Key]:
    """For each call that is the same as a call of an earlier task: that call. All tasks read the same batches."""
    computed: list[tuple[TracedTask, RecordedCall, tuple[Key, ...]]] = []
    same: dict[Key, Key] = {}
    for task in tasks:
        fixed: dict[str, Key] = {}  # calls whose output no trial can change, with the call that computes it
        for call in task.recorded.calls:
            if not fixed.keys() >= set(call.sources) or why_not_fixed(task.name, call, facts):
                continue
            sources = tuple(fixed[source] for source in call.sources)
            key = (task.name, call.name)
            for other, before, its_sources in computed:
                if its_sources == sources and _is_same((other, before), (task, call), facts):
                    same[key] = (other.name, before.name)
                    break
            else:
                computed.append((task, call, sources))
            fixed[call.name] = same.get(key, key)
    return same


def why_not_fixed(task: str, call: RecordedCall, facts: Facts) -> str:
    """Why a call may return something else for the same arguments later, or in another trial; empty if it cannot."""
    modules = list(call.handle.module.modules())
    if any(parameter.requires_grad for parameter in call.handle.module.parameters()):
        return "it is trained"
    if _changes_buffers(task, call, facts):
        return KEEPS
    is_random = any((task, call.name) == layer[:2] for layer in facts.random_layers)
    # For a plan without weights nothing was run, so dropout is recognised by its class.
    if is_random or any(isinstance(module, _DropoutNd) and module.training and module.p for module in modules):
        return "it draws random numbers; .eval() on it stops dropout"
    return "its batch has items" if (task, call.name) in facts.items else ""


def _changes_buffers(task: str, call: RecordedCall, facts: Facts) -> bool:
    """Whether a call changes buffers of its module."""
    return (task, call.name) in facts.keeping or any(
        isinstance(module, _BatchNorm) and module.training and module.track_running_stats
        for module in call.handle.module.modules()
    )


def _is_same(first: tuple[TracedTask, RecordedCall], second: tuple[TracedTask, RecordedCall], facts: Facts) -> bool:
    (task, call), (other, again) = first, second
    if call.handle.module is not again.handle.module or call.handle.name != again.handle.name:
        return False
    # how a call may be split also depends on the whole task
    axes, its_axes = ([layer.axes for layer in each.layers[name.name]] for each, name in (first, second))
    is_coupled, is_coupled_again = ((each.name, name.name) in facts.coupled for each, name in (first, second))
    is_cut_alike = (task.batch_axes, axes, is_coupled) == (other.batch_axes, its_axes, is_coupled_again)
    return is_cut_alike and _is_same_code(call.arguments, again.arguments)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node among the arguments of another node, by its number."""

    number: int


def _is_same_code(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    """Whether two pieces of recorded code compute the same from the same values.

    Functions must be the same objects, because otherwise only their text could be compared. So must constants, because
    the script may change one of two equal tensors later.
    """
    runners = [code.__self__ for code in (first, second)]  # type: ignore[attr-defined]
    graphs = [list(runner.graph.nodes) for runner in runners]
    if len(graphs[0]) != len(graphs[1]):
        return False
    places = [{node: _Place(number) for number, node in enumerate(graph)} for graph in graphs]
    for nodes in zip(*graphs, strict=True):
        if nodes[0].op != nodes[1].op:
            return False
        if nodes[0].op == "get_attr":  # a constant of the script
            constants = [
                operator.attrgetter(str(node.target))(runner) for node, runner in zip(nodes, runners, strict=True)
            ]
            if constants[0] is not constants[1]:
                return False
        elif nodes[0].op != "placeholder" and nodes[0].target != nodes[1].target:
            return False
        arguments = [
            fx.node.map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[arg-type]
            for node, known in zip(nodes, places, strict=True)
        ]
        if nodes[0].op != "placeholder" and not _is_same_argument(*arguments):
            return False
    return True


def _is_same_argument(first: Any, second: Any) -> bool:
    """Whether two values are equal and of the same type: 1, 1.0 and True are equal, but compute different things."""
    leaves, spec = tree_flatten(first)
    other_leaves, other_spec = tree_flatten(second)
    return spec == other_spec and all(
        type(leaf) is type(other_leaf) and leaf == other_leaf
        for leaf, other_leaf in zip(leaves, other_leaves, strict=True)
    )


def check_trials(tasks: Sequence[TracedTask], facts: Facts) -> None:
    """Refuse trials if one would change what another computes."""
    trained_by: dict[int, tuple[str, str]] = {}  # by parameter: the trial that trains it, and its name there
    called_by: dict[int, str] = {}  # by module: the first trial that calls it
    for task in tasks:
        for call in task.recorded.calls:
            handle = call.handle
            for path, parameter in handle.module.named_parameters():
                trial, name = trained_by.setdefault(id(parameter), (task.name, f"{handle.name}.{path}"))
                if parameter.requires_grad and trial != task.name:
                    tied = "" if name == f"{handle.name}.{path}" else f", which is tied to {name!r}"
                    raise WorkloadError(
                        f"trials {trial!r} and {task.name!r} would both train {handle.name + '.' + path!r}{tied}: "
                        "freeze it (module.requires_grad_(False)), or give each trial a module of its own"
                    )
            trial = called_by.setdefault(id(handle.module), task.name)
            if trial != task.name and _changes_buffers(task.name, call, facts):
                raise WorkloadError(
                    f"trials {trial!r} and {task.name!r} both call module {handle.name!r}, which keeps something of "
                    "the samples it sees (running statistics?): switch it to evaluation mode (module.eval()), or give "
                    "each trial a module of its own"
                )


def repeated_modules(tasks: Sequence[TracedTask], facts: Facts, same: Mapping[Key, Key]) -> dict[str, str]:
    """Frozen modules that several trials call but that run in each of them, although no trial changes their inputs or
    for a reason of their own; with the reason."""
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for task in tasks:
        for call in task.recorded.calls:
            name = call.handle.name
            if first.setdefault(name, task.name) == task.name or (task.name, call.name) in same:
                continue
            if _has_frozen_weights(call.handle.module):
                reasons[name] = why_not_fixed(task.name, call, facts) or "its calls are not known to be the same"
    return reasons


def _has_frozen_weights(module: nn.Module) -> bool:
    weights = list(module.parameters())
    return bool(weights) and not any(parameter.requires_grad for parameter in weights)


def describe_same(same: Mapping[Key, Key], tasks: Sequence[TracedTask]) -> list[str]:
    """For each call that is computed once for several trials, a sentence that says so."""
    sentences = []
    for first in dict.fromkeys(same.values()):
        trials = [first[0], *(key[0] for key, known in same.items() if known == first)]
        handle = next(
            call.handle
            for task in tasks
            if task.name == first[0]
            for call in task.recorded.calls
            if call.name == first[1]
        )
        sentences.append(f"module {handle.name!r} runs once for trials {listed(list(dict.fromkeys(trials)))}")
    return sentences
