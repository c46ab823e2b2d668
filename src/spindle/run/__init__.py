"""Do it: the executor of a Program on `torch.distributed`."""

from spindle.run.executor import Executor

__all__ = ["Executor"]
