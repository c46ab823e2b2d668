"""What must hold of the backend `spindle_ipc`, on whatever device: each check runs on all ranks of a world.

`test_ipc` runs them on the CPU, `test_virtual_devices` on a GPU that the ranks share.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spindle.models import sequence_attention
from spindle.program import slice_bounds
from spindle.run.flat_collectives import start_all_gather, start_reduce_scatter
from spindle.run.sequence_parallel import SequenceParallelGroup
from spindle.run.world import World

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64, torch.uint8)
# Fewer bytes than a round takes in one go, as many, more; nothing at all, one element, none that divides evenly.
SIZES = (0, 1, 7, 4_099, 70_001, 700_003)


def sizes_on(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Memory of a GPU takes more in one go."""
    return (*SIZES, 20_000_003) if device.type == "cuda" and dtype == torch.float32 else SIZES


def values(rank: int, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """What a rank has: whole numbers, so that sums are exact in every type and order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 5, (size,), generator=generator).to(device=device, dtype=dtype)


def everybody(num_ranks: int, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.stack([values(rank, size, dtype, device, seed) for rank in range(num_ranks)])


def same(ours: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert ours.dtype == expected.dtype, what
    assert torch.equal(ours, expected), f"{what}: {(ours != expected).sum()} of {ours.numel()} elements differ"


def check_all_reduce(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in ALL:
        for size in sizes_on(device, dtype):
            ours = values(rank, size, dtype, device)
            dist.all_reduce(ours)
            same(ours, everybody(num_ranks, size, dtype, device).sum(0).to(dtype), (dtype, size))


def check_all_reduce_of_the_same_memory(device: torch.device) -> None:
    """What is summed again and again is read where it is, by all ranks or beside one that does otherwise."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    size = 2_000_003 if device.type == "cuda" else 700_003
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        memory = torch.zeros(size + 64, dtype=dtype, device=device)
        if device.type == "cpu":
            memory.share_memory_()
        ours = memory[64:]
        for step in range(6):
            other = values(rank, size, dtype, device, seed=step)
            is_elsewhere = step > 2 and rank == step % num_ranks
            given = other if is_elsewhere else ours.copy_(other)
            dist.all_reduce(given)
            same(given, everybody(num_ranks, size, dtype, device, seed=step).sum(0).to(dtype), (dtype, step))
            given.zero_()  # nobody may still be reading it
        for op, expected in ((dist.ReduceOp.MAX, num_ranks), (dist.ReduceOp.AVG, (num_ranks + 1) / 2)):
            if dtype.is_floating_point:
                ours.fill_(rank + 1)
                dist.all_reduce(ours, op)
                same(ours, torch.full_like(ours, expected), (dtype, op))


def check_reductions(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for size in (5, 70_001):
        given = everybody(num_ranks, size, torch.float32, device) + 1
        for op, expected in (
            (dist.ReduceOp.MAX, given.amax(0)),
            (dist.ReduceOp.MIN, given.amin(0)),
            (dist.ReduceOp.PRODUCT, given.prod(0)),
            (dist.ReduceOp.AVG, given.mean(0)),
        ):
            ours = given[rank].clone()
            dist.all_reduce(ours, op)
            torch.testing.assert_close(ours, expected)


def check_half_precision_adds_up_in_float32(device: torch.device) -> None:
    """256 + 1 is 256 in bfloat16, so ones that were added one by one would be lost."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for size in (3, 70_001):
        ours = torch.full((size,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, device=device)
        dist.all_reduce(ours)
        same(ours, torch.full_like(ours, 256.0 + num_ranks - 1), size)


def check_gathering(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for dtype in ALL:
        for size in sizes_on(device, dtype):
            given = values(rank, size, dtype, device)
            expected = everybody(num_ranks, size, dtype, device)
            parts = [torch.empty_like(given) for _ in range(num_ranks)]
            dist.all_gather(parts, given)
            whole = torch.empty_like(expected)
            into(whole, given)
            for peer in range(num_ranks):
                same(parts[peer], expected[peer], (dtype, size))
            same(whole, expected, (dtype, size))


def check_scattering(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for dtype in FLOATS:
        for size in SIZES:
            # What rank r has for rank s.
            table = [[values(r, size, dtype, device, seed=s) for s in range(num_ranks)] for r in range(num_ranks)]
            expected = torch.stack([row[rank] for row in table]).sum(0).to(dtype)
            ours, again = torch.empty_like(expected), torch.empty_like(expected)
            dist.reduce_scatter(ours, table[rank])
            into(again, torch.stack(table[rank]).view(-1))
            same(ours, expected, (dtype, size))
            same(again, expected, (dtype, size))


def check_all_to_all(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in ALL:
        for size in sizes_on(device, dtype):
            # What rank r has for rank s; of a large one, chunk by chunk.
            given = torch.stack([values(rank, size, dtype, device, seed=peer) for peer in range(num_ranks)])
            received = torch.full_like(given, 1)
            dist.all_to_all_single(received, given)
            expected = torch.stack([values(peer, size, dtype, device, seed=rank) for peer in range(num_ranks)])
            same(received, expected, (dtype, size))
    sizes = [2, *[1] * (num_ranks - 1)]
    buffers = [torch.zeros(sum(sizes), device=device) for _ in range(2)]
    with pytest.raises(ValueError, match="parts of one size"):
        dist.all_to_all_single(*buffers, sizes, sizes)


def check_attention_of_a_sequence_group(device: torch.device) -> None:
    """Slices of different lengths, on ranks in another order than that of a process group: outputs and gradients are
    those of the whole sequence."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ranks = (*range(1, num_ranks), 0)
    group = SequenceParallelGroup(World(rank, num_ranks, device), ranks)
    bounds = slice_bounds(4 * num_ranks + 3, num_ranks)
    generator = torch.Generator().manual_seed(3)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    heads, own = 2 * num_ranks, slice(bounds[group.group_rank], bounds[group.group_rank + 1])
    whole = [made(2, heads, bounds[-1], 4).requires_grad_() for _ in range(3)]
    seed, mask = made(2, heads, bounds[-1], 4), made(heads, bounds[-1], bounds[-1])
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask[0] > 0}):
        expected = F.scaled_dot_product_attention(*whole, **options)
        gradients = torch.autograd.grad(expected, whole, seed)
        slices = [tensor.detach()[:, :, own].requires_grad_() for tensor in whole]
        with sequence_attention(group, bounds):
            ours = F.scaled_dot_product_attention(*slices, **options)
        torch.testing.assert_close(ours, expected[:, :, own], rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(torch.autograd.grad(ours, slices, seed[:, :, own]), gradients, strict=True):
            torch.testing.assert_close(mine, theirs[:, :, own], rtol=1e-12, atol=1e-12)


def check_parts_of_a_flat_tensor(device: torch.device) -> None:
    """Sums into the parts of ranks, then all parts everywhere: both in place."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    world, ranks = World(rank, num_ranks, device), tuple(range(num_ranks))
    for dtype in FLOATS:
        for size in (1, 7, 70_001):
            flat = values(rank, size * num_ranks, dtype, device)
            start_reduce_scatter(flat, ranks, world).wait()
            total = everybody(num_ranks, size * num_ranks, dtype, device).sum(0).to(dtype)
            mine = slice(rank * size, (rank + 1) * size)
            same(flat[mine], total[mine], (dtype, size))
            start_all_gather(flat, ranks, world).wait()
            same(flat, total, (dtype, size))


def check_parts_that_are_read_in_place(device: torch.device) -> None:
    """A large flat tensor that takes part again and again; in some steps, one rank has another."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    world, ranks = World(rank, num_ranks, device), tuple(range(num_ranks))
    for dtype, size in ((torch.float32, 900_003), (torch.bfloat16, 1_700_000)):
        memory = torch.zeros(size * num_ranks + 64, dtype=dtype, device=device)
        if device.type == "cpu":
            memory.share_memory_()
        ours, mine = memory[64:], slice(rank * size, (rank + 1) * size)
        for step in range(6):
            given = values(rank, size * num_ranks, dtype, device, seed=step)
            is_elsewhere = step > 2 and rank == step % num_ranks
            flat = given if is_elsewhere else ours.copy_(given)
            start_reduce_scatter(flat, ranks, world).wait()
            total = everybody(num_ranks, size * num_ranks, dtype, device, seed=step).sum(0).to(dtype)
            same(flat[mine], total[mine], (dtype, step))
            start_all_gather(flat, ranks, world).wait()
            same(flat, total, (dtype, step))
            flat.zero_()  # nobody may still be reading it


def check_broadcast(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in ALL:
        for root, size in enumerate(sizes_on(device, dtype)):
            source = root % num_ranks
            ours = values(rank, size, dtype, device)
            dist.broadcast(ours, source)
            same(ours, values(source, size, dtype, device), (dtype, size))


def check_several_at_once(device: torch.device) -> None:
    """A list of tensors in one call, as torch's coalescing hands them over."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ours = [values(rank, size, torch.float32, device, seed=size) for size in (3, 0, 70_001)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        for tensor in ours:
            dist.all_reduce(tensor)
    coalesced.wait()
    for tensor in ours:
        size = tensor.numel()
        same(tensor, everybody(num_ranks, size, torch.float32, device, seed=size).sum(0), size)


def check_objects(device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": peer} for peer in range(num_ranks)]
    box = ["from 1"] if rank == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    assert box == ["from 1"]


def check_async_order(device: torch.device) -> None:
    """Many collectives under way, waited for backwards; each sees what its tensor was when it was called."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ours = [values(rank, 1 + 997 * number, torch.float32, device, seed=number) for number in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in ours]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(ours):
        expected = everybody(num_ranks, tensor.numel(), torch.float32, device, seed=number).sum(0)
        same(tensor, expected, number)
        assert works[number].is_success()


def check_messages(device: torch.device) -> None:
    """Everybody writes to everybody: many messages under way both ways, tags posted in different orders."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = (1, 0, 33, 5_000, 300_001) if device.type == "cpu" else (1, 0, 33, 5_000, 300_001, 9_000_001)

    def message(source: int, target: int, tag: int, number: int) -> torch.Tensor:
        size = sizes[(tag + number) % len(sizes)]
        return values(source, size, torch.float32, device, seed=100 * target + 10 * tag + number)

    works, arrivals = [], []
    posts = [(peer, tag) for peer in range(num_ranks) if peer != rank for tag in range(6)]
    random.Random(rank).shuffle(posts)
    for peer, tag in posts:
        for number in range(3):  # in order, for each rank and tag
            expected = message(peer, rank, tag, number)
            buffer = torch.full_like(expected, -1)
            works.append(dist.irecv(buffer, peer, tag=tag))
            arrivals.append((buffer, expected, (peer, tag, number)))
    random.Random(rank + 100).shuffle(posts)
    for peer, tag in posts:
        for number in range(3):
            works.append(dist.isend(message(rank, peer, tag, number), peer, tag=tag))
    random.Random(rank + 200).shuffle(works)
    for work in works:
        work.wait()
    for buffer, expected, what in arrivals:
        same(buffer, expected, what)


def check_many_messages_of_one_tag(device: torch.device) -> None:
    """More than fit the rings, in order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    buffers = [torch.zeros(3, device=device) for _ in range(200)]
    works = [dist.irecv(buffer, source) for buffer in buffers]
    works += [dist.isend(torch.full((3,), float(number), device=device), to) for number in range(200)]
    for work in works:
        work.wait()
    assert [int(buffer[1]) for buffer in buffers] == list(range(200))


def check_blocking_messages(device: torch.device) -> None:
    rank = dist.get_rank()
    buffer = torch.arange(70_001.0, device=device)
    if rank == 0:
        dist.send(buffer * 2, 1)
        dist.recv(buffer, 1)
        same(buffer, torch.arange(70_001.0, device=device) * 3, "back")
    elif rank == 1:
        dist.recv(buffer, 0)
        same(buffer, torch.arange(70_001.0, device=device) * 2, "there")
        dist.send(torch.arange(70_001.0, device=device) * 3, 0)


def check_tensors_of_the_host_beside_them(device: torch.device) -> None:
    """One group carries both kinds; their order among each other does not matter."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    here, there = torch.ones(1000, device=device), torch.ones(1000)
    works = [dist.all_reduce(here, async_op=True), dist.all_reduce(there, async_op=True)]
    for work in works:
        work.wait()
    same(here.cpu(), torch.full((1000,), float(num_ranks)), rank)
    same(there, torch.full((1000,), float(num_ranks)), rank)


def check_groups(device: torch.device) -> None:
    """Overlapping groups, started in another order on every rank, with messages in between."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pairs = [tuple(sorted((first, (first + 1) % num_ranks))) for first in range(num_ranks)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(pairs)}
    mine = [ranks for ranks in groups if rank in ranks]
    if rank % 2:
        mine.reverse()
    tensors, works = {}, []
    for ranks in mine * 5:
        tensors[ranks] = values(rank, 30_001, torch.float32, device)
        works.append(dist.all_reduce(tensors[ranks], group=groups[ranks], async_op=True))
    for work in reversed(works):
        work.wait()
    for ranks, tensor in tensors.items():
        expected = sum(values(peer, 30_001, torch.float32, device) for peer in ranks)
        same(tensor, expected, ranks)
    check_async_order(device)  # the first group works as before
    for ranks in mine:
        first, second = ranks
        box = torch.tensor([float(rank)], device=device)
        if rank == first:
            dist.send(box, group=groups[ranks], group_dst=1)
        else:
            dist.recv(box, group=groups[ranks], group_src=0)
            assert int(box) == first
        assert dist.get_process_group_ranks(groups[ranks]) == [first, second]
    for group in groups.values():
        dist.destroy_process_group(group)


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 300), nn.Linear(300, 5))
    return model.to(device=device, dtype=torch.float64)


def gradients(model: nn.Module, device: torch.device, num_steps: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        model.zero_grad()
        batch = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(device)
        model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check_ddp(device: torch.device) -> None:
    """Gradients of torch's own DDP over this backend are those of DDP over gloo, buckets and buffers included."""
    gloo = dist.new_group(backend="gloo")
    host = torch.device("cpu")
    options = {"bucket_cap_mb": 0.1}
    ours = gradients(DistributedDataParallel(small_model(device), **options), device, 3)
    theirs = gradients(DistributedDataParallel(small_model(host), process_group=gloo, **options), host, 3)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-9, atol=1e-12)
    view = DistributedDataParallel(small_model(device), gradient_as_bucket_view=True, **options)
    for actual, expected in zip(gradients(view, device, 3), ours, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def check_barrier(device: torch.device) -> None:
    """Nobody passes before the last has come."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank == num_ranks - 1:
        time.sleep(0.3)
    come_ns = time.monotonic_ns()  # one clock for all processes of a host
    dist.barrier()
    passed_ns = time.monotonic_ns()
    times: list[Any] = [None] * num_ranks
    dist.all_gather_object(times, (come_ns, passed_ns))
    assert min(passed for _, passed in times) > max(come for come, _ in times)


def expect_error(words: str, call: Callable[[torch.Tensor], Any], size: int, device: torch.device) -> None:
    said = ""
    try:
        call(torch.ones(size, device=device))
    except RuntimeError as error:
        said = str(error)
    assert words in said, f"expected an error with {words!r}, got {said!r}"


def check_mistakes(device: torch.device) -> None:
    """What ranks do not agree on is an error on all of them, and time runs out."""
    rank = dist.get_rank()
    group = dist.new_group()
    if rank == 0:
        expect_error("rank 1 does not run the all_reduce", lambda x: dist.all_reduce(x, group=group), 3, device)
    else:
        expect_error("rank 0", lambda x: dist.broadcast(x, 0, group=group), 3, device)
    expect_error("rank", lambda x: dist.all_reduce(x, group=group), 3, device)  # the group is of no use any more
    pair = dist.new_group()
    if rank == 0:
        expect_error("12 bytes here has 16 bytes", lambda x: dist.send(x, 1, group=pair), 3, device)
    elif rank == 1:
        expect_error("16 bytes here has 12 bytes", lambda x: dist.recv(x, 0, group=pair), 4, device)
    short = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        words = "recv timed out after 0.5 s, waiting for rank 1"
        expect_error(words, lambda x: dist.recv(x, 1, group=short), 3, device)
    dist.barrier()


CHECKS = [function for name, function in list(globals().items()) if name.startswith("check_")]
