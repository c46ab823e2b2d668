"""Send a recorded chain to another process, as bytes in which everything that belongs to the module is a path, so that
the receiver finds it in its own module.

Modules, and tensors that are attributes of modules, travel as paths; torch operators as their qualified names; a GPU as
"the receiver's GPU"; small constant tensors by value; classes and functions by their import name, as pickle does it.
`NotSerializableError` refuses what has no import name (a local class, a lambda) and what processes cannot share (a
generator, a module from elsewhere). Then every process has to record the module itself.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from spindle.models.chain import Chain, ChainSource, ChildModules, WholeModule
from spindle.models.layer_source import LayerSource, RecordedForward

_LARGEST_CONSTANT_BYTES = 1 << 20
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class NotSerializableError(Exception):
    """A recorded chain that cannot be sent to another process; the message says why."""


def dump_chain(chain: Chain) -> bytes:
    """Serialize the source of a chain, and check that it can be loaded again."""
    source = chain.source
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, chain.module).dump(_fields(source))
        data = buffer.getvalue()
        loaded = _load_source(chain.module, data, None)  # fails here, not on another rank
    except NotSerializableError:
        raise
    except Exception as error:  # pickling runs arbitrary code of the objects in a recording
        raise NotSerializableError(str(error) or type(error).__name__) from error
    if isinstance(source, RecordedForward):
        assert isinstance(loaded, RecordedForward)
        for constant, copy in zip(source.constants, loaded.constants, strict=True):
            if copy is not constant and copy != constant:
                raise NotSerializableError(f"its argument {constant!r} does not equal its copy")
    return data


def load_source(module: nn.Module, data: bytes, device: torch.device) -> ChainSource:
    """Load the source of a chain for a module equal to the recorded one, whose tensors are on this device."""
    return _load_source(module, data, device)


def _load_source(module: nn.Module, data: bytes, device: torch.device | None) -> ChainSource:
    kind, *fields = _Unpickler(io.BytesIO(data), module, device).load()
    if kind == "whole":
        return WholeModule(reason=fields[0], kind=fields[1])
    if kind == "children":
        return ChildModules(kinds=fields[0])
    layers, namespace, spec, inputs, constants = fields
    return RecordedForward(
        layers=tuple(
            LayerSource(text=text, kind=name, settings=settings, modules=modules, attributes=attributes)
            for text, name, settings, modules, attributes in layers
        ),
        namespace=namespace,
        spec=spec,
        inputs=inputs,
        constants=constants,
    )


def _fields(source: ChainSource) -> tuple[Any, ...]:
    match source:
        case WholeModule(reason=reason, kind=kind):
            return "whole", reason, kind
        case ChildModules(kinds=child_kinds):
            return "children", child_kinds
        case RecordedForward():
            kinds: dict[str, str] = {}  # interned: pickle writes an object once, however often it appears
            layers = tuple(
                (layer.text, kinds.setdefault(layer.kind, layer.kind), layer.settings, layer.modules, layer.attributes)
                for layer in source.layers
            )
            return "recorded", layers, dict(source.namespace), source.spec, source.inputs, source.constants


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._paths = {id(submodule): path for path, submodule in module.named_modules()}
        self._tensors = {id(tensor): (path, name) for path, name, tensor in _tensors_of(module)}

    def persistent_id(self, value: Any) -> Any:
        match value:
            case nn.Module():
                if id(value) not in self._paths:
                    raise NotSerializableError(f"it uses a {type(value).__name__} that does not belong to it")
                return "module", self._paths[id(value)]
            case torch.Tensor():
                return self._tensor(value)
            case TreeSpec():  # as a nest: the fields of a spec differ between versions of torch
                nest = tree_unflatten(list(range(value.num_leaves)), value)
                if tree_structure(nest) != value:
                    raise NotSerializableError(f"the structure {value} does not equal its copy")
                return "structure", nest
            case torch._ops.OpOverload():
                return "operator", value.namespace, value._opname, value._overloadname
            case torch.device() if value.type != "cpu":
                return "device", value.type, value.index is not None
            case torch.Generator():
                raise NotSerializableError("it uses a torch.Generator")
        return None

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._tensors:
            return "attribute", *self._tensors[id(tensor)]
        if type(tensor) is not torch.Tensor or tensor.requires_grad:
            raise NotSerializableError(f"it uses a {type(tensor).__name__} that does not belong to it")
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > _LARGEST_CONSTANT_BYTES:
            raise NotSerializableError(f"it uses a tensor of {num_bytes} bytes that does not belong to it")
        buffer = io.BytesIO()
        torch.save(tensor.cpu(), buffer)
        return "tensor", buffer.getvalue(), tensor.device.type


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, module: nn.Module, device: torch.device | None) -> None:
        super().__init__(file)
        self._module, self._device = module, device

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case "module", str(path):
                return self._module.get_submodule(path)
            case "attribute", str(path), str(name):
                return getattr(self._module.get_submodule(path), name)
            case "structure", nest:
                return tree_structure(nest)
            case "operator", str(namespace), str(name), str(overload):
                return getattr(getattr(getattr(torch.ops, namespace), name), overload)
            case "device", str(kind), bool(has_index):
                return self._local(kind) if has_index else torch.device(kind)
            case "tensor", bytes(data), str(kind):
                tensor = torch.load(io.BytesIO(data), weights_only=True)
                return tensor if kind == "cpu" else tensor.to(self._local(kind))
        raise pickle.UnpicklingError(f"unknown reference {pid!r}")

    def _local(self, kind: str) -> torch.device:
        if self._device is None or self._device.type != kind:
            return torch.device(kind)
        return self._device


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors of a module and its submodules: path, attribute name, tensor."""
    for path, submodule in module.named_modules():
        for attributes in (vars(submodule), submodule._buffers, submodule._parameters):
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor):
                    yield path, name, value


def source_text(chain: Chain) -> str:
    """Describe a chain as text that is equal in all processes where the chain does the same, for their digests."""
    source = chain.source
    match source:
        case WholeModule(reason=reason):
            return f"one layer: {reason}"
        case ChildModules():
            return f"its {len(chain.layers)} children"
    name_of = _namer(chain.module)
    lines = []
    for number, layer in enumerate(source.layers):
        lines += [f"layer {number}: {_ADDRESS.sub('', layer.kind)}", _ADDRESS.sub("", layer.text)]
        lines += [f"reads {name_of(owner)} {name}" for owner, name in layer.attributes]
    lines += [f"{name} = {name_of(value)}" for name, value in source.namespace.items()]
    constants = [name_of(value) for value in source.constants]
    return "\n".join([*lines, f"arguments {source.inputs} {constants} {_ADDRESS.sub('', str(source.spec))}"])


def namespace_text(module: nn.Module, namespace: Mapping[str, Any]) -> str:
    """A description of the objects that names in generated code refer to, equal in all processes if they are the
    same."""
    name_of = _namer(module)
    return "\n".join(f"{name} = {name_of(value)}" for name, value in namespace.items())


def _namer(module: nn.Module) -> Callable[[Any], str]:
    """A function that describes a value of a recording, equal in all processes."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    tensors = {id(tensor): f"{path}.{name}" for path, name, tensor in _tensors_of(module)}

    def name_of(value: Any) -> str:
        if id(value) in paths:
            return f"module {paths[id(value)]!r}"
        if id(value) in tensors:
            return f"tensor {tensors[id(value)]!r}"
        if isinstance(value, torch.Tensor):
            return f"tensor {value.dtype} {tuple(value.shape)} {value.tolist() if value.numel() <= 64 else ''}"
        if isinstance(value, torch.device):  # each process has a GPU of its own
            return f"device {value.type}"
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, set | frozenset):  # iteration order differs between processes
            return f"{{{', '.join(sorted(map(name_of, value)))}}}"
        if type(value) in (tuple, list):
            return f"({', '.join(map(name_of, value))})"
        if type(value) is dict:
            return f"{{{', '.join(f'{name_of(key)}: {name_of(item)}' for key, item in value.items())}}}"
        return _ADDRESS.sub("", repr(value))

    return name_of
