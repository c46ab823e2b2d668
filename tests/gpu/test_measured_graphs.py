"""CUDA graphs of layers that are timed. Skipped where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from spindle.measure.timing import Graphed, Work, warm_up

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS, CLASSES = 64, 512


def test_a_backward_pass_can_be_replayed_without_its_forward_pass():
    """Contention is measured so; a second replay must find the targets and indices that the forward pass saved."""
    device = torch.device("cuda")
    table, head = nn.Embedding(CLASSES, 256, device=device), nn.Linear(256, CLASSES, device=device)
    words = torch.arange(ROWS, device=device) * 7 % CLASSES

    def run() -> torch.Tensor:
        targets = torch.arange(ROWS, device=device)  # made anew, so in the memory of the graph
        return nn.functional.cross_entropy(head(table(words + 0)), targets)

    parameters = (*table.parameters(), *head.parameters())
    work = Work(run=run, leaves=(), parameters=parameters, device=device, is_graphed=True)
    passes = warm_up(work)
    assert isinstance(passes, Graphed)
    passes.forward()
    gradients = []
    for _ in range(3):
        passes.backward()
        torch.cuda.synchronize()
        gradients.append([buffer.clone() for buffer in passes.buffers])
    for again in gradients[1:]:
        assert all(map(torch.equal, gradients[0], again))


COPIES = """
import torch
from torch import nn
from spindle.measure.contention import measure_contention
from spindle.measure.timing import Work

device = torch.device("cuda")
works = []
for _ in range(4):
    layers = nn.Sequential(*(
        nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
    )).to(device, torch.bfloat16)
    x = torch.randn(64, 257, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    run = lambda layers=layers, x=x: layers(x)
    works.append(Work(run=run, leaves=(x,), parameters=tuple(layers.parameters()), device=device, is_graphed=True))
contention, _ = measure_contention(works)
print(contention)
"""


def test_large_layers_that_are_replayed_at_the_same_time_do_not_wait_for_each_other():
    """In a process of its own, because kernels that wait forever cannot be ended otherwise."""
    answer = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, timeout=90, check=True)
    assert "Contention" in answer.stdout
