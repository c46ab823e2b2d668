"""Code that runs on a GPU alone, on one that is emulated: fits, lanes as streams and their graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import spindle  # noqa: E402
from backends import BACKEND_VARIABLE  # noqa: E402
from emulated_gpu import Stream, emulated_gpu, is_on_gpu  # noqa: E402
from gpu import lanes  # noqa: E402
from spindle.run.graph_memory import capturing  # noqa: E402
from training_cases import train_named  # noqa: E402
from trainings import assert_trained  # noqa: E402


def test_a_tensor_of_the_cpu_meets_none_of_the_gpu():
    with emulated_gpu():
        on_cpu, on_gpu = torch.ones(3), torch.ones(3, device="cuda")
        assert [tensor.device.type for tensor in (on_cpu, on_gpu, on_gpu * 2, on_cpu.to("cuda"))] == ["cpu"] + 3 * [
            "cuda"
        ]
        assert (on_gpu * torch.tensor(2.0)).is_cuda
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            on_cpu + on_gpu
        with pytest.raises(TypeError, match="to numpy"):
            on_gpu.numpy()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.sum().item(), "not permitted when stream is capturing"),
        (lambda x: torch.cuda.synchronize(), "not permitted when stream is capturing"),
        (lambda x: x.cpu(), "not permitted when stream is capturing"),
        (lambda x: torch.tensor([1.0], device="cuda"), "not permitted when stream is capturing"),
        (lambda x: x + torch.ones(3), "expected all tensors on one device"),
    ],
)
def test_what_no_capture_may_do_ends_it(call, message):
    with emulated_gpu(), torch.cuda.stream(Stream()):
        x = torch.ones(3, device="cuda")
        with (
            pytest.raises(RuntimeError, match=message),
            capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()),
        ):
            call(x)
        assert x.sum().item() == 3  # the capture has ended


def test_the_default_stream_is_not_captured():
    with emulated_gpu():
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with pytest.raises(RuntimeError, match="non-default stream"), capturing(graph, pool):
            pass


def test_a_fit_on_a_gpu_gives_the_numbers_of_plain_pytorch(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "nccl")  # whose tests train on a GPU
    with emulated_gpu():
        trained = train_named(0, 1, "accumulated, captured", "plan 3")
    assert_trained([trained])
    assert trained.captured > 0


@pytest.mark.parametrize(
    ("seed", "kind", "how"), [(1, "weight", "whole steps"), (9, "slots", "slots"), (2, "plain", "whole steps")]
)
def test_lanes_are_streams_of_a_gpu(seed, kind, how):
    with emulated_gpu():
        run = lanes.run_on_rank(0, 1, seed, kind, True, "")
    assert run.error < 1
    assert run.how == how
    assert not run.refused


def test_layers_and_their_contention_are_measured_before_a_fit_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    with emulated_gpu():
        towers = {name: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for name in ("vision", "text")}
        handles = {name: spindle.module(name, tower) for name, tower in towers.items()}

        @spindle.task(batch_size=4)
        def pair(batch):
            return F.mse_loss(handles["vision"](batch["x"]), handles["text"](batch["y"]))

        trainer = spindle.Trainer(
            [pair], optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
        )
        batches = [{"x": torch.randn(4, 8), "y": torch.randn(4, 8)} for _ in range(6)]
        result = trainer.fit({"pair": batches}, steps=6, progress=False)
        assert all(is_on_gpu(parameter) for tower in towers.values() for parameter in tower.parameters())
    profile = result.profile
    assert all(contention.forward for curves in profile.curves for curve in curves for contention in curve.contention)
    assert any(curve.contention for curves in profile.curves for curve in curves)
    assert profile.gradient_sum_bytes_per_s is not None
    assert result.losses[-1]["pair"] < result.losses[0]["pair"]
    assert result.num_captured_slots > 0
