"""Shape inference: what will cross cuts between layers, for batches of given shapes.

Every rank infers it by itself, on fake tensors, so that no shapes are sent; the training loop compares digests of what
ranks have inferred. Results are cached by layer and input shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from spindle.graph import MetaGraph
from spindle.models import FakeWeights, ModuleSnapshot, as_when_compiling, fake_mode
from spindle.run.op_code import LayerCode, LayersCode, OpCode
from spindle.run.pytrees import PytreeMeta, TensorMeta, copied, pytree_meta

_MOST_KNOWN = 10_000  # cached outputs: batches may have new shapes in every step

Cuts = dict[tuple[int, int], PytreeMeta]  # by op, and the number of its layers that come before the cut


class ShapeInference:
    """Infers shapes for all programs of a training run. Must be created while modules have all their weights, whose
    shapes it remembers."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, autocast: torch.dtype | None = None) -> None:
        self._modules, self._device, self._autocast = modules, device, autocast
        self._mode = fake_mode()
        self._swapped = [FakeWeights(module, self._mode, device) for module in modules]
        self._entered: ExitStack | None = None
        # The values also keep the functions whose ids are in the key, so that no other object gets these ids.
        self._known: dict[Any, tuple[Any, PytreeMeta | None]] = {}

    def of(
        self,
        graph: MetaGraph,
        code: Sequence[OpCode],
        batches: Mapping[str, Any],
        known: Mapping[tuple[str, str], PytreeMeta] | None = None,
    ) -> Cuts:
        """The metadata of all layers' outputs, for batches of which only the shapes are used.

        Outputs whose shapes depend on values are left out, the same on all ranks. So are calls whose outputs are
        `known`, by task and call.
        """
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        cuts: Cuts = {}
        known = known or {}
        given_by: dict[tuple[str, str | None], PytreeMeta | None] = {}  # by task and call
        given_by.update((call, meta) for call, meta in known.items())
        batch_metas = {task: pytree_meta(batch, 0) for task, batch in batches.items()}
        with ExitStack() as without_values:
            for number in graph.order:
                op, layers = graph.metaops[number], code[number]
                if not isinstance(layers, LayersCode) or op.task not in batch_metas or op.items:
                    continue
                if (op.task, op.call or "") in known:
                    continue
                glue, given = None, [given_by.get((op.task, op.call))]
                if op.first_layer == 0 and layers.arguments is not None:
                    glue = layers.arguments
                    given = [batch_metas[op.task], *(given_by.get((op.task, source)) for source in layers.sources)]
                for position, layer in enumerate(layers.layers):
                    meta = self._output_meta(layer, glue, given, op.batch_size or 1, without_values)
                    glue, given = None, [meta]
                    if meta is not None:
                        cuts[number, position + 1] = meta
                given_by[op.task, op.call] = given[0]
        return cuts

    def _output_meta(
        self,
        layer: LayerCode,
        glue: Callable[..., Any] | None,
        given: Sequence[PytreeMeta | None],
        num_rows: int,
        without_values: ExitStack,
    ) -> PytreeMeta | None:
        """The metadata of a layer's output. None if it cannot be inferred."""
        known = [meta for meta in given if meta is not None]
        if len(known) < len(given):
            return None
        likeness = layer.likeness if layer.likeness is not None and glue is None else id(layer.run)
        key = (likeness, id(glue), tuple((str(meta.spec), meta.leaves, meta.num_rows) for meta in known), num_rows)
        if key not in self._known:
            if self._entered is not without_values:
                self._enter(without_values)
            self._known[key] = ((layer.run, glue), self._infer(layer, glue, known, num_rows))
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

    def _infer(
        self, layer: LayerCode, glue: Callable[..., Any] | None, given: Sequence[PytreeMeta], num_rows: int
    ) -> PytreeMeta | None:
        first, *outputs = [self._fake_tree(meta) for meta in given]
        try:
            args, kwargs = (first, {}) if glue is None else glue(first, *(output[0] for output in outputs))
            return pytree_meta(layer.run(*(copied(args) if layer.writes_input else args), **kwargs), num_rows)
        except Exception:  # the user's code reads values
            return None

    def _fake_tree(self, meta: PytreeMeta) -> Any:
        """A pytree of fake tensors with this metadata."""
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, TensorMeta)
            else leaf
            for leaf in meta.leaves
        ]
        return tree_unflatten(leaves, meta.spec)
