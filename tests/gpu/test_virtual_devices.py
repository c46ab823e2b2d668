"""Virtual devices on a real GPU: `virtual_devices`, part by part. Skipped where there is none."""

from __future__ import annotations

import shutil

import pytest
import torch

from gpu import virtual_devices

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or shutil.which("nvidia-cuda-mps-control") is None, reason="needs a GPU and MPS"
)


@pytest.mark.parametrize("part", ["checks", "towers"])
def test_the_backend_and_the_runtime_on_eight_ranks(part):
    virtual_devices.run_part(part, 8)


@pytest.mark.parametrize("how", ["kill_waiting", "kill_on_stream"])
def test_a_killed_rank_ends_the_job_within_seconds(how):
    virtual_devices.kill_a_rank(3, how)


def test_nothing_of_mps_stays_after_a_launcher_that_is_killed():
    virtual_devices.kill_the_launcher(2)
