"""`spindle_ipc`: a `torch.distributed` backend for ranks of one host that share a GPU, or have none."""

from spindle.run.ipc.process_group import BACKEND, register

__all__ = ["BACKEND", "register"]
