"""What will cross cuts between layers, for batches of given shapes? Every rank infers it by itself, on tensors without
values, so no shapes are sent; the loop compares digests of what ranks inferred. Layers that were seen with such an
input are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_unflatten

from spindle.graph import MetaGraph
from spindle.models import FakeWeights, ModuleSnapshot, as_when_compiling
from spindle.run.nests import Form, LeafForm, copied, form_of
from spindle.run.op_code import LayerCode, LayersCode, OpCode

Cuts = dict[tuple[int, int], Form]  # by op and how many of its layers come before


class ShapeInference:
    """Forms from program to program. To be made while modules have all their weights, of which it keeps the shapes."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, autocast: torch.dtype | None = None) -> None:
        self._modules, self._device, self._autocast = modules, device, autocast
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._swapped = [FakeWeights(module, self._mode, device) for module in modules]
        self._entered: ExitStack | None = None
        # With what the key was made of, so that nothing else gets its address.
        self._known: dict[Any, tuple[Any, Form | None]] = {}

    def of(self, graph: MetaGraph, code: Sequence[OpCode], batches: Mapping[str, Any]) -> Cuts:
        """What all layers of a graph give, on batches of which only the shapes matter. What depends on values is left
        out, on all ranks alike."""
        cuts: Cuts = {}
        given_by: dict[tuple[str, str | None], Form | None] = {}  # by calls, so far
        forms = {task: form_of(batch, 0) for task, batch in batches.items()}
        with ExitStack() as without_values:
            for number in graph.order:
                op, layers = graph.metaops[number], code[number]
                if not isinstance(layers, LayersCode) or op.task not in forms:
                    continue
                glue, given = None, [given_by.get((op.task, op.call))]
                if op.first_layer == 0 and layers.arguments is not None:
                    glue = layers.arguments
                    given = [forms[op.task], *(given_by.get((op.task, source)) for source in layers.sources)]
                for position, layer in enumerate(layers.layers):
                    form = self._behind(layer, glue, given, op.batch_size or 1, without_values)
                    glue, given = None, [form]
                    if form is not None:
                        cuts[number, position + 1] = form
                given_by[op.task, op.call] = given[0]
        return cuts

    def _behind(
        self,
        layer: LayerCode,
        glue: Callable[..., Any] | None,
        given: Sequence[Form | None],
        num_rows: int,
        without_values: ExitStack,
    ) -> Form | None:
        """The form of what a layer gives; None where it cannot be told."""
        known = [one for one in given if one is not None]
        if len(known) < len(given):
            return None
        likeness = layer.likeness if layer.likeness is not None and glue is None else id(layer.run)
        key = (likeness, id(glue), tuple((str(one.spec), one.leaves, one.num_rows) for one in known), num_rows)
        if key not in self._known:
            if self._entered is not without_values:
                self._enter(without_values)
            self._known[key] = ((layer.run, glue), self._found(layer, glue, known, num_rows))
        return self._known[key][1]

    def _enter(self, without_values: ExitStack) -> None:
        self._entered = without_values
        without_values.callback(ModuleSnapshot(self._modules).restore)
        for swapped in self._swapped:
            without_values.enter_context(swapped)
        without_values.enter_context(self._mode)
        without_values.enter_context(as_when_compiling())
        without_values.enter_context(torch.enable_grad())
        if self._autocast is not None:
            without_values.enter_context(torch.autocast(self._device.type, dtype=self._autocast))

    def _found(
        self, layer: LayerCode, glue: Callable[..., Any] | None, given: Sequence[Form], num_rows: int
    ) -> Form | None:
        first, *others = [self._nest(form) for form in given]
        try:
            args, kwargs = (first, {}) if glue is None else glue(first, *(one[0] for one in others))
            return form_of(layer.run(*(copied(args) if layer.writes_input else args), **kwargs), num_rows)
        except Exception:  # the user's code, which may look at values
            return None

    def _nest(self, form: Form) -> Any:
        """A nest of this form, without values."""
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, LeafForm)
            else leaf
            for leaf in form.leaves
        ]
        return tree_unflatten(leaves, form.spec)
