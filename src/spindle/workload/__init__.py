"""What are we training? Tasks, modules (chains of layers), flows and batch sizes, as values. Knows no machine."""

from spindle.workload.workload import Call, Layer, LayerCost, Module, Numerics, Parameter, Task, Workload

__all__ = ["Call", "Layer", "LayerCost", "Module", "Numerics", "Parameter", "Task", "Workload"]
