"""`spindle_ipc`: a backend of `torch.distributed` for ranks of one host that share a GPU, or none.

NCCL refuses two ranks on one GPU, and gloo cannot send its tensors. Here they pass through memory that all ranks of a
group map, of the GPU by CUDA IPC, of the host by shared memory (`medium`). Whoever waits carries them, or else a thread
(`transport`). Point to point, all-reduce, all-gather, reduce-scatter, broadcast and barrier, on both kinds of tensors
in one group; DDP runs on it unchanged. Times say nothing about links between GPUs.

As with NCCL, waiting for an operation on CUDA tensors lets the current stream wait. It keeps the host only until the
operation is on a stream, which all ranks that take part in it must have called it for.

Left out: `reduce`, `gather`, `scatter`, all-to-all, and what reaches a backend from C++ other than DDP (functional
collectives, DTensor): torch does not let a backend in Python serve those.
"""

# mypy: disable-error-code="override, assignment"
# Torch's stubs know overloads that no backend is called by.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from spindle.run.ipc.collectives import Combine
from spindle.run.ipc.job import Job
from spindle.run.ipc.shm_control import Board
from spindle.run.ipc.transport import Transport

BACKEND = "spindle_ipc"

_SUM = Combine(lambda rows: rows.sum(0, dtype=rows.dtype), lambda total, part: total.add_(part), is_sum=True)
_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _SUM,
    dist.ReduceOp.PRODUCT: Combine(lambda rows: rows.prod(0, dtype=rows.dtype), lambda total, part: total.mul_(part)),
    dist.ReduceOp.MAX: Combine(lambda rows: rows.amax(0), lambda total, part: torch.maximum(total, part, out=total)),
    dist.ReduceOp.MIN: Combine(lambda rows: rows.amin(0), lambda total, part: torch.minimum(total, part, out=total)),
}


def register() -> None:
    """Makes the backend known to torch. Calling it again is fine."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(options: Any, _: Any) -> IpcGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return IpcGroup(options, ranks)


class IpcWork(dist.Work):
    """An operation under way, as torch knows it."""

    def __init__(self, transport: Transport, job: Job, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._transport, self._job, self._outputs = transport, job, outputs
        self._device = outputs[0].device if outputs else torch.device("cpu")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Lets the current stream wait, or the host where there is no stream."""
        if not self._transport.finish(self._job, timeout.total_seconds() or None):
            raise RuntimeError(f"{self._job.name} is not over after {timeout}")
        if self._job.error is not None:
            raise RuntimeError(str(self._job.error))
        if self._job.done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._job.done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._job.is_over() and (self._job.done is None or self._job.done.query())

    def is_success(self) -> bool:
        return self._job.is_over() and self._job.error is None

    def exception(self) -> Any:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        """What DDP waits for. To C++ an error that Python sets on a future is a result; one raised in `then` is not."""
        on_gpu = self._device.type == "cuda"
        over: Future[Any] = Future(devices=[self._device] if on_gpu else None)

        def tell() -> None:
            # What is on the current stream then is what those who wait for the future wait for.
            entered = self._job.medium.enter()
            over.set_result(None)
            self._job.medium.leave(entered)

        def outputs(_: Any) -> list[torch.Tensor]:
            if self._job.error is not None:
                raise RuntimeError(str(self._job.error))
            return self._outputs

        self._job.when_over(tell)
        return over.then(outputs)


class IpcGroup(dist.ProcessGroup):
    """A group of processes of one host. Names of methods and shapes of arguments are torch's."""

    def __init__(self, options: Any, ranks: Sequence[int]) -> None:
        # The other way to make one, with a store, is closed to subclasses.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._size, self._name = options.group_size, options.group_id
        timeout_s = options.timeout.total_seconds()
        board = Board(options.store, options.group_rank, options.group_size, timeout_s)
        self._transport = Transport(board, [f"rank {rank}" for rank in ranks], timeout_s)

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
        combine, is_mean, name = _reduction("all_reduce", opts)
        tensors = _checked(tensors)
        steps = self._transport.collectives.all_reduce
        job = self._transport.start(name, tensors, lambda job: steps(job, tensors, combine, is_mean))
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

    # What torch 2.11 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> IpcWork:
        for outputs, given in pairs:
            if len(outputs) != self._size or any(output.numel() != given.numel() for output in outputs):
                raise ValueError(f"all_gather: expected {self._size} outputs with {given.numel()} elements each")
        outputs = [output for one, _ in pairs for output in one]
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
        combine, is_mean, name = _reduction("reduce_scatter", opts)
        for output, inputs in pairs:
            if len(inputs) != self._size or any(given.numel() != output.numel() for given in inputs):
                raise ValueError(f"reduce_scatter: expected {self._size} inputs with {output.numel()} elements each")
        outputs = [output for output, _ in pairs]
        tensors = outputs + [given for _, inputs in pairs for given in inputs]
        steps = self._transport.collectives.reduce_scatter
        job = self._transport.start(name, tensors, lambda job: steps(job, pairs, combine, is_mean))
        return self._work(job, outputs)

    def barrier(self, opts: Any = None) -> IpcWork:
        """When it is over, all that any rank had started before, on the host or its current stream, is done."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        return self._work(self._transport.start("barrier", [], self._transport.collectives.barrier), [])

    def _work(self, job: Job, outputs: list[torch.Tensor]) -> IpcWork:
        return IpcWork(self._transport, job, outputs)

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor in one piece for each rank."""
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


def _reduction(name: str, opts: Any) -> tuple[Combine, bool, str]:
    """How two parts become one, whether the sum becomes a mean, and what to call the operation."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, combine in _COMBINE.items():
        if op == known:
            return combine, known == dist.ReduceOp.AVG, f"{name} ({known.name.lower()})"
    raise ValueError(f"{BACKEND} reduces by sum, average, product, maximum or minimum, not by {op}")
