"""`spindle_ipc`: a `torch.distributed` backend for ranks of one host that share one GPU, or have none.

NCCL refuses two ranks on one GPU, and gloo cannot send CUDA tensors. Here tensors pass through memory that all ranks of
a group map: GPU memory by CUDA IPC, host memory by shared memory (`memory_backend`). The thread that waits for an
operation executes it, or else a background thread does (`transport`). Send and receive, all-reduce, all-gather,
reduce-scatter, all-to-all of equal parts, broadcast and barrier work on CPU and CUDA tensors in one group; DDP runs on
it unchanged. Measured times say nothing about links between GPUs.

As with NCCL, waiting for an operation on CUDA tensors makes the current stream wait. The host waits only until the
operation is enqueued, for which all ranks that take part must have called it.

Left out: `reduce`, `gather`, `scatter`, all-to-all of unequal parts, and code other than DDP that calls a backend from
C++ (functional collectives, DTensor), for which torch does not support backends written in Python.
"""

# mypy: disable-error-code="override, assignment"
# Torch's stubs declare overloads that are never called on a backend.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from spindle.run.ipc.collectives import Reduction
from spindle.run.ipc.job import Job
from spindle.run.ipc.shm_control import ShmControl
from spindle.run.ipc.transport import Transport

BACKEND = "spindle_ipc"

_SUM = Reduction(lambda rows: rows.sum(0, dtype=rows.dtype), lambda total, part: total.add_(part), is_sum=True)
_REDUCTIONS: dict[Any, Reduction] = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _SUM,
    dist.ReduceOp.PRODUCT: Reduction(lambda rows: rows.prod(0, dtype=rows.dtype), lambda total, part: total.mul_(part)),
    dist.ReduceOp.MAX: Reduction(lambda rows: rows.amax(0), lambda total, part: torch.maximum(total, part, out=total)),
    dist.ReduceOp.MIN: Reduction(lambda rows: rows.amin(0), lambda total, part: torch.minimum(total, part, out=total)),
}


def register() -> None:
    """Register the backend with torch. Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(options: Any, _: Any) -> IpcGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return IpcGroup(options, ranks)


class IpcWork(dist.Work):
    """An operation in flight, as a `torch.distributed.Work`."""

    def __init__(self, transport: Transport, job: Job, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._transport, self._job, self._outputs = transport, job, outputs
        self._device = outputs[0].device if outputs else torch.device("cpu")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait, or the host if the tensors are on the CPU."""
        if not self._transport.finish(self._job, timeout.total_seconds() or None):
            raise RuntimeError(f"{self._job.name} has not finished after {timeout}")
        if self._job.error is not None:
            raise RuntimeError(str(self._job.error))
        if self._job.done_event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._job.done_event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._job.is_done() and (self._job.done_event is None or self._job.done_event.query())

    def is_success(self) -> bool:
        return self._job.is_done() and self._job.error is None

    def exception(self) -> Any:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        """The future that DDP waits for. Errors are raised in `then`, because C++ takes an error that Python sets on a
        future for a result."""
        on_gpu = self._device.type == "cuda"
        future: Future[Any] = Future(devices=[self._device] if on_gpu else None)

        def complete() -> None:
            # The future records the current stream; whoever waits for the future waits for that stream.
            entered = self._job.backend.enter()
            future.set_result(None)
            self._job.backend.leave(entered)

        def outputs(_: Any) -> list[torch.Tensor]:
            if self._job.error is not None:
                raise RuntimeError(str(self._job.error))
            return self._outputs

        self._job.add_done_callback(complete)
        return future.then(outputs)


class IpcGroup(dist.ProcessGroup):
    """A process group of one host. Method names and argument layouts are torch's."""

    def __init__(self, options: Any, ranks: Sequence[int]) -> None:
        # The constructor that takes a store cannot be called by subclasses.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._size, self._name = options.group_size, options.group_id
        timeout_s = options.timeout.total_seconds()
        control = ShmControl(options.store, options.group_rank, options.group_size, timeout_s)
        self._transport = Transport(control, [f"rank {rank}" for rank in ranks], timeout_s)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        return self._name

    def shutdown(self) -> None:
        self._transport.leave()

    def abort(self) -> None:
        self._transport.leave()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> IpcWork:
        (tensor,) = _checked(tensors)
        return self._work(self._transport.start_message(False, tensor, dst, tag), [tensor])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> IpcWork:
        (tensor,) = _checked(tensors)
        return self._work(self._transport.start_message(True, tensor, src, tag), [tensor])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> IpcWork:
        reduction, is_mean, name = _reduction("all_reduce", opts)
        tensors = _checked(tensors)
        steps = self._transport.collectives.all_reduce
        job = self._transport.start(name, tensors, lambda job: steps(job, tensors, reduction, is_mean))
        return self._work(job, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> IpcWork:
        root = 0 if opts is None else opts.rootRank
        tensors = _checked(tensors)
        steps = self._transport.collectives.broadcast
        job = self._transport.start(f"broadcast from {root}", tensors, lambda job: steps(job, tensors, root))
        return self._work(job, tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> IpcWork:
        return self._all_gather(list(zip(map(_checked, outputs), _checked(inputs), strict=True)))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> IpcWork:
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> IpcWork:
        pairs = zip(_checked(outputs), _checked(inputs), strict=True)
        return self._all_gather([(self._parts(output), given) for output, given in pairs])

    # The names that torch 2.11 calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> IpcWork:
        for outputs, given in pairs:
            if len(outputs) != self._size or any(output.numel() != given.numel() for output in outputs):
                raise ValueError(f"all_gather: expected {self._size} outputs with {given.numel()} elements each")
        outputs = [output for gathered, _ in pairs for output in gathered]
        tensors = outputs + [given for _, given in pairs]
        steps = self._transport.collectives.all_gather
        job = self._transport.start("all_gather", tensors, lambda job: steps(job, pairs))
        return self._work(job, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> IpcWork:
        return self._reduce_scatter(list(zip(_checked(outputs), map(_checked, inputs), strict=True)), opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> IpcWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> IpcWork:
        pairs = zip(_checked(outputs), _checked(inputs), strict=True)
        return self._reduce_scatter([(output, self._parts(given)) for output, given in pairs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: list[tuple[torch.Tensor, list[torch.Tensor]]], opts: Any) -> IpcWork:
        reduction, is_mean, name = _reduction("reduce_scatter", opts)
        for output, inputs in pairs:
            if len(inputs) != self._size or any(given.numel() != output.numel() for given in inputs):
                raise ValueError(f"reduce_scatter: expected {self._size} inputs with {output.numel()} elements each")
        outputs = [output for output, _ in pairs]
        tensors = outputs + [given for _, inputs in pairs for given in inputs]
        steps = self._transport.collectives.reduce_scatter
        job = self._transport.start(name, tensors, lambda job: steps(job, pairs, reduction, is_mean))
        return self._work(job, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> IpcWork:
        if len({*output_sizes}) > 1 or len({*input_sizes}) > 1:
            raise ValueError(
                f"{BACKEND} exchanges parts of one size in an all-to-all, got {list(input_sizes)} and "
                f"{list(output_sizes)}; pad them"
            )
        if output.numel() != given.numel():
            raise ValueError(f"all_to_all: {given.numel()} elements do not become {output.numel()}")
        tensors = _checked([output, given])
        outputs, inputs = self._parts(output), self._parts(given)
        steps = self._transport.collectives.all_to_all
        job = self._transport.start("all_to_all", tensors, lambda job: steps(job, outputs, inputs))
        return self._work(job, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> IpcWork:
        """Wait for all work that any rank has started before the barrier, on the host or on its current stream."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        return self._work(self._transport.start("barrier", [], self._transport.collectives.barrier), [])

    def _work(self, job: Job, outputs: list[torch.Tensor]) -> IpcWork:
        return IpcWork(self._transport, job, outputs)

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split a tensor into one part per rank."""
        if tensor.numel() % self._size:
            raise ValueError(f"{tensor.numel()} elements cannot be split over {self._size} ranks")
        return list(tensor.view(self._size, -1).unbind())


def _checked(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda") or tensor.is_sparse:
            raise ValueError(f"{BACKEND} takes dense tensors of a CPU or a GPU, got one of {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{BACKEND} takes contiguous tensors, got one of shape {tuple(tensor.shape)} that is not")
    return tensors


def _reduction(name: str, opts: Any) -> tuple[Reduction, bool, str]:
    """How parts are reduced, whether the sum becomes a mean, and the name of the operation."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, reduction in _REDUCTIONS.items():
        if op == known:
            return reduction, known == dist.ReduceOp.AVG, f"{name} ({known.name.lower()})"
    raise ValueError(f"{BACKEND} reduces by sum, average, product, maximum or minimum, not by {op}")
