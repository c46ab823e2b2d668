"""Lanes with quotas: on which streams their instructions are launched, and what is refused before there are any."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import small  # noqa: E402
from random_plans import contended  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.program import OptimizerStep, lower, needed_pairs  # noqa: E402
from spindle.run import World, green_contexts, lanes  # noqa: E402


class Stream:
    """Stands for a CUDA stream: notes what it launches and waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.log = name, []

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait", other, len(other.log)))

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.log.append(("wait", *event))

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.log)


def done_before(stream: Stream, length: int) -> set[int]:
    """Instructions that are done when a stream has run this much of its log."""
    done = set()
    for entry in stream.log[:length]:
        done |= {entry[1]} if entry[0] == "run" else done_before(*entry[1:])
    return done


@pytest.mark.parametrize("quotas", [(), (64, 56)])
def test_every_instruction_waits_for_what_it_needs_and_updates_have_all_sms(monkeypatch, quotas):
    tasks = {"first": ["vision", "head"], "second": ["text", "head"]}
    profile = contended(small.workload_profile(tasks, num_devices=1))
    lane_of = {"vision": 0, "head": 0, "text": 1}
    ops = {op.name: op.module for op in profile.graph.metaops}
    order = sorted(ops, key=lambda name: ops[name] == "head")
    plan = small.plan("\n".join(f"{name}*4@0|{lane_of[ops[name]]}" for name in order), profile)
    object.__setattr__(plan, "quotas", quotas)
    program = lower(plan, profile)
    compute = program.compute_of_rank(0)
    home, streams = Stream("all SMs"), [Stream("lane 0"), Stream("lane 1")]
    current = [home]

    @contextmanager
    def stream_of(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(lanes, "compute_stream", lambda: home)
    monkeypatch.setattr(lanes, "_stream_of_lane", lambda lane: streams[1] if lane == 1 else Stream("of regions"))
    monkeypatch.setattr(lanes, "partitions", lambda given: [SimpleNamespace(stream=stream) for stream in streams])
    monkeypatch.setattr(torch.cuda, "stream", stream_of)
    rank_program = SimpleNamespace(compute=compute, transfer=(), sync=())
    launched = lanes.Lanes(program, rank_program, World(0, 1, torch.device("cuda")))
    launched.begin()
    stream_at = {}
    for position in compute:
        with launched.on_stream_of(position):
            stream_at[position] = current[-1], len(current[-1].log)
            current[-1].log.append(("run", position))
    launched.join()
    for before, after in needed_pairs(program).tolist():
        if before in stream_at and after in stream_at:
            assert before in done_before(*stream_at[after])
    assert done_before(home, len(home.log)) == set(compute)  # what follows the step
    for position in compute:
        instruction = program.instructions[position]
        if isinstance(instruction, OptimizerStep):
            assert stream_at[position][0] is home
        else:
            lane = plan.slots[instruction.slot].lane
            assert stream_at[position][0] is (streams[lane] if quotas or lane else home)


def test_a_driver_without_green_contexts_refuses_quotas(monkeypatch):
    monkeypatch.setattr(green_contexts, "Driver", lambda: SimpleNamespace(has_green_contexts=False))
    with pytest.raises(TrainingError, match="quotas of 64, 56 SMs, for which this driver has no green contexts"):
        green_contexts._partitions((64, 56), 0)
    assert green_contexts.sm_groups(0) is None


def test_quotas_of_another_gpu_are_refused(monkeypatch):
    groups = [green_contexts.SmResource(num_sms=8)] * 5
    driver = SimpleNamespace(
        has_green_contexts=True, split_sms=lambda device: (groups, green_contexts.SmResource(num_sms=2))
    )
    monkeypatch.setattr(green_contexts, "Driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert green_contexts.sm_groups(0).num_sms == 42
    with pytest.raises(TrainingError, match=r"cannot give its lanes quotas of 64, 56 SMs: .* there are: 5 groups of 8"):
        green_contexts._partitions((64, 56), 0)
    with pytest.raises(TrainingError, match="a quota of 12 SMs is not granted"):
        green_contexts._partitions((12, 16), 0)

    def fail(device):
        raise RuntimeError("cuDeviceGetDevResource failed: operation not supported")

    driver.split_sms = fail
    with pytest.raises(
        TrainingError, match=r"quotas of 8, 8 SMs: cuDeviceGetDevResource failed.*; plan on this machine"
    ):
        green_contexts._partitions((8, 8), 0)
    assert green_contexts.sm_groups(0) is None
