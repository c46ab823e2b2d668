"""Tasks over shared modules.

A module is a named chain of layers; a task calls modules on a batch, and flows say which call feeds which. The cost of
a layer depends on the call (the same text tower may read 77 tokens in one task and 512 in another), so costs are part
of the call, by kind of layer. Parameters have names of their own, so that a tied weight is one parameter that two
layers use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from spindle.errors import WorkloadError

# What a script may plan with instead of a planner with a name: `Workload.planner`.
OWN_FUNCTION, GIVEN_PLAN = "a function", "a given plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One weight tensor. If not `trainable`, it has no gradient and no optimizer state; if not `is_split`, every member
    of a tensor group holds all of it."""

    name: str
    num_elements: int
    trainable: bool = True
    is_split: bool = True

    def __post_init__(self) -> None:
        if self.num_elements < 0:
            raise WorkloadError(f"parameter {self.name!r}: num_elements must not be negative, got {self.num_elements}")

    def elements_at(self, tensor_degree: int) -> int:
        """Elements on each member of a tensor group."""
        return -(-self.num_elements // tensor_degree) if self.is_split else self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a module. Layers of the same kind in one call differ in their weights only."""

    kind: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise WorkloadError(f"module {self.name!r} has no layers; it needs at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRemark:
    """Why a module cannot be divided further, as text for reports; no plan depends on it."""

    module: str
    one_layer: str = ""  # why it is a single layer
    one_device: str = ""  # why one device must see its whole batch
    closed: str = ""  # why its towers are not modules of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer per sample of the batch; parameters are counted separately."""

    forward_flops: float
    backward_flops: float
    traffic_bytes: float  # activations read and written by the forward pass
    saved_bytes: float  # activations saved for the backward pass
    output_bytes: float  # crosses a cut after this layer
    tensor_bytes: float = 0.0  # all-reduced by the forward pass of a tensor-parallel layer
    tensor_share: float = 1.0  # share of its activations that a tensor group splits; 0: every member does all the work
    max_tensor_degree: int = 1
    whole_batch: bool = False  # samples depend on each other, so one device must see them all
    gang: bool = False  # its devices synchronize in the forward pass (a reduced loss), so they run at the same time
    recompute: bool = False  # the user asked for activation checkpointing
    input_bytes: float | None = None  # saved with recomputation; None: as much as `output_bytes`
    sequence_parallel: bool = False  # members of a tensor group each have a shard of what crosses cuts
    state: str = ""  # what each call changes (running statistics): calls with the same state run in order on one device

    def __post_init__(self) -> None:
        for name in ("forward_flops", "backward_flops", "traffic_bytes", "saved_bytes", "output_bytes", "tensor_bytes"):
            value = getattr(self, name)
            if not value >= 0:
                raise WorkloadError(f"{name} must be a number of at least 0, got {value}")
            # Not the int that was given: a fingerprint must be that of the workload read back from a file.
            object.__setattr__(self, name, float(value))
        if not 0 <= self.tensor_share <= 1:
            raise WorkloadError(f"tensor_share must lie in [0, 1], got {self.tensor_share}")
        if self.max_tensor_degree < 1:
            raise WorkloadError(f"max_tensor_degree must be at least 1, got {self.max_tensor_degree}")

    def work_divisor(self, tensor_degree: int) -> int:
        """The factor by which a tensor group reduces the work of each member."""
        return tensor_degree if self.tensor_share else 1

    def cut_bytes_at(self, tensor_degree: int) -> float:
        """Bytes on each member of what crosses a cut after this layer."""
        return self.output_bytes / (tensor_degree if self.sequence_parallel else 1)

    def recompute_bytes_at(self, tensor_degree: int) -> float:
        """Bytes that each member saves for a layer that is recomputed."""
        whole = self.output_bytes if self.input_bytes is None else self.input_bytes
        return whole / (tensor_degree if self.sequence_parallel else 1)

    def saved_bytes_at(self, tensor_degree: int) -> float:
        """Bytes that each member saves for the backward pass."""
        return self.saved_bytes * (1 - self.tensor_share + self.tensor_share / tensor_degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module by a task; `costs` has one entry for each kind of layer of the module.

    `same_as` names an equal call of an earlier task (`task/call`): this one takes its output instead of computing it.
    """

    name: str
    module: str
    costs: tuple[tuple[str, LayerCost], ...]
    same_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Calls connected by flows `(producer, consumer)`, over a batch of its own size."""

    name: str
    batch_size: int
    calls: tuple[Call, ...]
    flows: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WorkloadError(f"task {self.name!r}: batch_size must be at least 1, got {self.batch_size}")
        names = _unique(f"task {self.name!r}: call", [call.name for call in self.calls])
        for producer, consumer in self.flows:
            for end in (producer, consumer):
                if end not in names:
                    raise WorkloadError(
                        f"task {self.name!r}: the flow {producer!r} -> {consumer!r} names {end!r}, "
                        f"which is not one of its calls: {', '.join(sorted(names))}"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Bytes per parameter element. The default is mixed precision Adam: 16-bit weights and gradients, 32-bit master
    weights and two moments. `update_bytes` is what one optimizer step reads and writes."""

    parameter_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12
    update_bytes: int = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    tasks: tuple[Task, ...]
    numerics: Numerics = Numerics()
    tensor_degrees: tuple[tuple[str, int], ...] = ()  # by module, as the user gave them; planners choose the others
    remarks: tuple[ModuleRemark, ...] = field(default=(), compare=False)
    num_steps: int | None = field(default=None, compare=False)  # steps of a script's first `fit`
    planner: str = field(default="", compare=False)  # of a script; empty: the default one
    pipeline_parallel_degree: int | None = field(default=None, compare=False)  # as a script gave it
    gradient_accumulation_steps: int = field(default=1, compare=False)  # of a script: batches of each task in a step

    def __post_init__(self) -> None:
        if not self.tasks:
            raise WorkloadError(f"workload {self.name!r} has no tasks; it needs at least one")
        if self.num_steps is not None and self.num_steps < 1:
            raise WorkloadError(f"workload {self.name!r}: num_steps must be at least 1, got {self.num_steps}")
        if self.pipeline_parallel_degree is not None and self.pipeline_parallel_degree < 1:
            raise WorkloadError(
                f"workload {self.name!r}: pipeline_parallel_degree must be at least 1, got "
                f"{self.pipeline_parallel_degree}"
            )
        if self.gradient_accumulation_steps < 1:
            raise WorkloadError(
                f"workload {self.name!r}: gradient_accumulation_steps must be at least 1, got "
                f"{self.gradient_accumulation_steps}"
            )
        modules = {module.name: module for module in self.modules}
        _unique("module", [module.name for module in self.modules])
        _unique("task", [task.name for task in self.tasks])
        parameters = _unique("parameter", [parameter.name for parameter in self.parameters])
        for module in self.modules:
            for position, layer in enumerate(module.layers):
                for name in layer.parameters:
                    if name not in parameters:
                        raise WorkloadError(
                            f"module {module.name!r}, layer {position}: parameter {name!r} is not in the workload"
                        )
        for task in self.tasks:
            for call in task.calls:
                if call.module not in modules:
                    raise WorkloadError(
                        f"task {task.name!r}, call {call.name!r}: unknown module {call.module!r}; "
                        f"modules: {', '.join(sorted(modules))}"
                    )
                where = f"task {task.name!r}, call {call.name!r}"
                missing = {layer.kind for layer in modules[call.module].layers} - {kind for kind, _ in call.costs}
                if missing:
                    raise WorkloadError(f"{where}: no cost for layers of kind {', '.join(sorted(missing))}")
        self._check_same_as()

    def _check_same_as(self) -> None:
        """Refuse a `same_as` that is not a computed call of an earlier task, of the same module and batch size."""
        computed: dict[str, tuple[str, int]] = {}  # module and batch size of earlier tasks' computed calls
        for task in self.tasks:
            for call in task.calls:
                if call.same_as and computed.get(call.same_as) != (call.module, task.batch_size):
                    raise WorkloadError(
                        f"task {task.name!r}, call {call.name!r}: same_as={call.same_as!r} is not a call of module "
                        f"{call.module!r} over {task.batch_size} samples by an earlier task"
                    )
            computed |= {
                f"{task.name}/{call.name}": (call.module, task.batch_size) for call in task.calls if not call.same_as
            }

    @property
    def tasks_digest(self) -> str:
        """Identifies the tasks and their batch sizes, which change when a task joins or leaves a running job."""
        names = sorted(f"{task.name}\n{task.batch_size}" for task in self.tasks)
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)


def _unique(what: str, names: list[str]) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise WorkloadError(f"{what} {name!r} appears twice; names must differ")
        seen.add(name)
    return seen
