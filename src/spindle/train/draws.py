"""Random numbers that a task draws itself: noise, masks, time steps of a diffusion.

A task's function runs once, to be recorded. A draw that has no tensor of the batch among its arguments is recorded all
the same, instead of drawing one number for the whole training; numbers of Python, numpy or a generator of the user's
are refused.

Code between calls runs wherever its result is needed, which may be in several places: noise is added to what a module
gets, and compared with what it returns. Such a draw becomes a call of its own, of a module without parameters that runs
on the whole batch, so that all of them see the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import WorkloadError
from spindle.models import EffectsMode, fake_like, fake_mode, fake_output, host_random_state, zero_output
from spindle.train.composites import replace_in_losses
from spindle.train.task import ModuleHandle, called_module, called_part

_CALLS = (called_module, called_part)
_INSTEAD = "draw them with torch (torch.rand(x.shape[0], device=x.device)), or in the dataset"


@contextmanager
def draws_recorded(tracer: fx.Tracer) -> Iterator[None]:
    """A context for recording a task: what it draws is recorded, or refused."""
    host, generators = host_random_state(), generator_states()
    with _EagerDraws(tracer):
        yield
    if host_random_state() != host:
        raise WorkloadError(
            "it draws random numbers with Python or numpy. A task is recorded once, and every step would have the same "
            f"numbers; {_INSTEAD}"
        )
    if has_drawn_since(generators):
        _restore(generators)
        raise WorkloadError("it seeds torch's random numbers; those of a task follow Trainer(seed=...) and the step")


def generator_states() -> list[torch.Tensor]:
    """The states of torch's generators."""
    with _disable_current_modes():  # read without recording: these states are not tensors of the recorded code
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def has_drawn_since(states: list[torch.Tensor]) -> bool:
    """Whether random numbers were drawn since the generators had these states."""
    with _disable_current_modes():
        return any(not torch.equal(before, now) for before, now in zip(states, generator_states(), strict=True))


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


class _EagerDraws(TorchFunctionMode):
    """Records functions of torch that draw random numbers but have no recorded argument."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = generator_states()
        result = func(*args, **kwargs)
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise WorkloadError(
                "it draws random numbers from a torch.Generator, which is not recorded; leave it out: the numbers that "
                "a task draws follow Trainer(seed=...) and the step"
            )
        if not has_drawn_since(before):
            return result
        _restore(before)
        return self._tracer.create_proxy("call_function", func, args, kwargs)


class Draw(nn.Module):
    """A function that draws random numbers, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


# By function, so that all tasks and all recordings of a task call the same module.
_handles: dict[Any, ModuleHandle] = {}


def _handle_of(node: fx.Node) -> ModuleHandle:
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    if function not in _handles:
        name = f"draw_{function.__name__}"  # not "dropout": a user may have a module of that name
        _handles[function] = ModuleHandle(name, Draw(function), whole_batch=True, split=False)
    return _handles[function]


def draw_once(graph: fx.Graph, constants: nn.Module, example: Any) -> bool:
    """Make a call of its own of each draw that several calls, or a call and the loss, depend on. Returns whether there
    are any."""
    has_changed = False
    if not (shared := _shared_nodes(graph)):
        return False
    values = _Values(constants, example)
    # In order: a node that draws is such a draw itself if nothing before it is.
    while shared:
        node = shared.pop(0)
        if not values.draws(node):
            continue
        with graph.inserting_before(node):
            arguments: Any = (_handle_of(node), (node.args, node.kwargs))
            call = graph.call_function(called_part, arguments)
        call.meta.update(node.meta)
        replace_in_losses(graph, node, call)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        has_changed = True
    return has_changed


_SELECTING = (getattr, operator.getitem)


def _shared_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes computed between calls that several calls, or a call and the loss, depend on, in order."""
    users: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(graph.nodes):
        is_end = node.op == "output" or node.target in _CALLS
        ends = {node} if is_end else users.get(node, set())
        for source in node.all_input_nodes:
            users.setdefault(source, set()).update(ends)
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method")
        and node.target not in (*_CALLS, *_SELECTING)
        and len(users.get(node, ())) > 1
    ]


class _Values:
    """The values of nodes for a first batch: fake tensors; for code that reads values, real tensors, with modules that
    return zeros."""

    def __init__(self, constants: nn.Module, example: Any) -> None:
        self._constants, self._example, self._mode = constants, example, fake_mode()
        self._fakes: dict[fx.Node, Any] = {}
        self._reals: dict[fx.Node, Any] = {}

    def draws(self, node: fx.Node) -> bool:
        """Whether computing a node draws random numbers."""
        watch = EffectsMode()
        try:
            self._fake(node, watch)
            return watch.has_drawn
        except Exception:  # the code reads values
            pass
        with torch.random.fork_rng(), torch.no_grad():
            sources: Any = fx.node.map_arg((node.args, node.kwargs), self._real)
            before = generator_states()
            with suppress(Exception):  # the user's code fails on this batch; the step will show the error
                self._run(node, *sources)
            return has_drawn_since(before)

    def _fake(self, node: fx.Node, watch: EffectsMode | None = None) -> Any:
        if node not in self._fakes:
            sources: Any = fx.node.map_arg((node.args, node.kwargs), self._fake)
            args, kwargs = sources
            if node.op == "placeholder":
                value = self._example
            elif node.target in _CALLS:
                value = fake_output(args[0].module, *_arguments_of(node, args, kwargs))
            else:
                with self._mode, watch or nullcontext():
                    value = self._run(node, args, kwargs)
            self._fakes[node] = tree_map(lambda leaf: fake_like(self._mode, leaf), value)
        return self._fakes[node]

    def _real(self, node: fx.Node) -> Any:
        if node not in self._reals:
            sources: Any = fx.node.map_arg((node.args, node.kwargs), self._real)
            args, kwargs = sources
            if node.op == "placeholder":
                value = self._example
            elif node.target in _CALLS:
                value = zero_output(args[0].module, *_arguments_of(node, args, kwargs))
            else:
                value = self._run(node, args, kwargs)
            self._reals[node] = value
        return self._reals[node]

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        match node.op:
            case "get_attr":
                return getattr(self._constants, str(node.target))
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case _:
                assert callable(node.target)
                return node.target(*args, **kwargs)


def _arguments_of(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The arguments of the module that a node calls."""
    return args[1] if node.target is called_part else (args[1:], kwargs)
