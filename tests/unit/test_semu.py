"""SEMU: times and bytes of layers from their operators, worked out once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spindle.cluster import PRESETS, cluster_named
from spindle.errors import ClusterError, ProfileError
from spindle.profile import (
    Attention,
    AttentionTable,
    Collective,
    Curve,
    Efficiencies,
    Gemm,
    GemmColumn,
    LayerOperators,
    MemoryBound,
    MemoryTable,
    Semu,
)
from spindle.recipes.data import vlm_batch
from spindle.recipes.layers import Block
from spindle.recipes.multimodal import (
    MODELS,
    batch_profile,
    emulator,
    measured_efficiencies,
    sub_microbatch_size,
)
from spindle.workload import LANGUAGE, VISION

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernels
from semu_layers import CASES, AsRun

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

H800 = PRESETS["h800"]
FLAT = Efficiencies(
    flat_gemm=0.5, flat_attention=0.4, flat_attention_backward=0.25, flat_memory=0.8, network=0.5, launch_s=0.0
)
BIG = Gemm(tokens=8192, outputs=4096, inputs=4096)


def semu(efficiencies: Efficiencies = FLAT) -> Semu:
    return Semu(H800.kind, H800.link, efficiencies)


def image_block(images: int = 12) -> Block:
    return Block(tower=MODELS["vlm-s"].chain(VISION).tower, lengths=((2704, images),))


class Plain:
    """A layer of one GEMM, whose passes and bytes are easy to tell."""

    def operators(self, tensor_degree: int) -> LayerOperators:
        return LayerOperators(
            forward=(BIG,),
            input=(replace(BIG, pass_="input"),),
            weight=(replace(BIG, pass_="weight"),),
        )


def test_an_operator_takes_the_longest_of_compute_memory_and_network():
    emulated = semu()
    assert emulated.operator_s(BIG) == pytest.approx(BIG.flops / (989e12 * 0.5))
    thin = Gemm(tokens=8192, outputs=4096, inputs=16)
    assert emulated.operator_s(thin) == pytest.approx(thin.memory_bytes / (3.35e12 * 0.5))
    assert emulated.operator_s(MemoryBound(kind="add", num_bytes=3e9)) == pytest.approx(3e9 / (3.35e12 * 0.8))
    summed = Collective(kind="all_reduce", num_bytes=64e6, num_members=4)
    assert emulated.operator_s(summed) == pytest.approx(2 * 0.75 * 64e6 / (200e9 * 0.5) + 2 * 2 * 5e-6)


def test_a_gather_and_a_scatter_send_as_much_as_an_all_reduce():
    parts = [Collective(kind=kind, num_bytes=1e6, num_members=8) for kind in ("all_gather", "reduce_scatter")]
    whole = Collective(kind="all_reduce", num_bytes=1e6, num_members=8)
    assert sum(part.network_bytes for part in parts) == whole.network_bytes
    assert semu().operator_s(Collective(kind="all_reduce", num_bytes=1e6, num_members=1)) == 0.0


def test_a_launch_is_paid_for_every_operator():
    slow = replace(FLAT, launch_s=7e-6)
    assert semu(slow).operator_s(BIG) == pytest.approx(semu().operator_s(BIG) + 7e-6)


def test_a_causal_mask_halves_attention_and_backward_is_two_and_a_half_times_it():
    whole = Attention(count=2, queries=1024, keys=1024, heads=8, key_heads=2, head_width=128)
    assert whole.flops == 4 * 2 * 1024**2 * 8 * 128
    assert replace(whole, causal=True).flops == whole.flops / 2
    assert replace(whole, backward=True).flops == 2.5 * whole.flops


COLUMNS = tuple(
    GemmColumn(
        outputs=outputs,
        inputs=inputs,
        tokens=(1024, 4096),
        forward=(0.2, 0.4),
        input=(0.3, 0.5),
        weight=(value, value),
    )
    for outputs, inputs, value in ((256, 256, 0.1), (256, 1024, 0.2), (1024, 256, 0.3), (1024, 1024, 0.4))
)


def test_efficiencies_are_joined_over_the_logarithm_of_the_size():
    emulated = semu(replace(FLAT, gemm_grid=COLUMNS))

    def reached(**sizes) -> float:
        gemm = Gemm(**{"tokens": 2048, "outputs": 512, "inputs": 512} | sizes)
        return max(gemm.flops / 989e12, gemm.memory_bytes / 3.35e12) / emulated.operator_s(gemm)

    assert reached() == pytest.approx(0.3)
    assert reached(pass_="input") == pytest.approx(0.4)
    assert reached(pass_="weight") == pytest.approx(0.25)
    assert reached(pass_="weight", outputs=1024, inputs=256) == pytest.approx(0.3)
    assert not emulated.extrapolated


def test_a_shape_that_was_measured_itself_goes_before_the_grid():
    exact = GemmColumn(outputs=512, inputs=512, tokens=(2048,), forward=(0.9,), input=(0.9,), weight=(0.9,))
    emulated = semu(replace(FLAT, gemm_grid=COLUMNS, gemm=(exact,)))
    gemm = Gemm(tokens=2048, outputs=512, inputs=512)
    assert emulated.operator_s(gemm) == pytest.approx(max(gemm.flops / 989e12, gemm.memory_bytes / 3.35e12) / 0.9)


def test_beyond_the_table_its_edge_is_taken_and_said():
    emulated = semu(replace(FLAT, gemm_grid=COLUMNS, measured_on="a test"))
    assert emulated.operator_s(BIG) == pytest.approx(BIG.flops / (989e12 * 0.4))
    assert emulated.extrapolated == {"GEMM of 8192 tokens, 4096 to 4096"}
    assert "1 operators lie beyond what was measured and have the efficiency of its edge" in emulated.leaves_out[-1]
    assert any("measured on a test; a device of another kind" in line for line in emulated.leaves_out)


def test_attention_reaches_what_its_length_and_planes_allow():
    table = AttentionTable(
        head_width=128,
        causal=False,
        planes=(4, 16),
        lengths=(1024, 4096),
        forward=((0.1, 0.3), (0.2, 0.4)),
        backward=((0.1, 0.1), (0.1, 0.1)),
    )
    emulated = semu(replace(FLAT, attention=(table,)))
    attention = Attention(count=2, queries=2048, keys=2048, heads=4, key_heads=4, head_width=128)
    assert emulated.operator_s(attention) == pytest.approx(attention.flops / (989e12 * 0.25))
    assert not emulated.extrapolated
    emulated.operator_s(replace(attention, head_width=64))
    assert emulated.extrapolated == {"attention of 2048 to 2048 tokens, 8 heads of 64"}


def test_a_table_must_be_whole():
    with pytest.raises(ProfileError, match=r"a grid of 2 x 2 shapes needs one column for each"):
        Efficiencies(gemm_grid=COLUMNS[:3])
    with pytest.raises(ProfileError, match=r"norm: sizes must be increasing"):
        MemoryTable(kind="norm", num_bytes=(4, 2), efficiency=(0.5, 0.5))
    with pytest.raises(ProfileError, match=r"expected 2 efficiencies, got 1"):
        MemoryTable(kind="norm", num_bytes=(2, 4), efficiency=(0.5,))
    with pytest.raises(ProfileError, match=r"network must lie in \(0, 1\], got 0"):
        Efficiencies(network=0)


def test_backward_is_split_into_input_and_weights():
    time = semu().layer(Plain(), 1)
    assert time.forward_s == time.input_s == time.weight_s == semu().operator_s(BIG)
    assert time.backward_s == pytest.approx(2 * time.forward_s)


def test_a_tensor_group_shares_work_and_pays_for_its_collectives():
    free = replace(FLAT, network=1.0)
    endless = replace(H800.link, bytes_per_s=1e18, latency_s=0.0)
    layer = image_block()
    alone, four = (Semu(H800.kind, endless, free).layer(layer, degree) for degree in (1, 4))
    assert four.forward_s == pytest.approx(alone.forward_s / 4, rel=1e-3)
    sends = 4 * 2 * 2704 * 12 * 1792 * 3 / 4  # two gathers and two scatters of the layer's rows
    linked = Semu(H800.kind, replace(H800.link, latency_s=0.0), free).layer(layer, 4)
    assert linked.forward_s - four.forward_s == pytest.approx(sends / 200e9)


def test_a_layers_operators_do_what_its_cost_says():
    for name, lengths, context in (("vision", ((2704, 3),), ()), ("language", ((8192, 1),), ())):
        chain = MODELS["vlm-m"].chain(name)
        for shape, _ in chain.shapes(lengths, context):
            for degree in (1, 8):
                flops = sum(operator.flops for operator in shape.operators(degree).forward)
                assert flops * degree == pytest.approx(shape.cost.forward_flops, rel=0.01)
    for shape, _ in MODELS["t2v-s"].chain("video").shapes(((4096, 2),), ((1024, 2),)):
        flops = sum(operator.flops for operator in shape.operators(4).forward)
        assert flops * 4 == pytest.approx(shape.cost.forward_flops, rel=0.01)


def test_equal_stages_are_worked_out_once():
    model = MODELS["vlm-s"]
    batch = vlm_batch(32, np.random.default_rng(0))
    emulated = emulator(model.cluster)
    profile = batch_profile(model, batch, {VISION: 12}, semu=emulated)
    assert 0 < emulated.evaluations < len(profile.curves) / 8
    evaluations = emulated.evaluations
    batch_profile(model, batch, {VISION: 12}, semu=emulated)
    assert emulated.evaluations == evaluations
    emulated.layer(image_block(), 2)
    emulated.layer(image_block(), 2)
    assert emulated.evaluations == evaluations + 1


def test_a_batchs_curves_are_those_of_one_tensor_group():
    model = MODELS["vlm-s"]
    profile = batch_profile(model, vlm_batch(4, np.random.default_rng(1)), {VISION: 12})
    for (curve,) in profile.curves:
        assert curve.num_devices == (4,)
        assert 0 < (curve.weight_time_s(4) or 0.0) <= curve.times_s(4)[1]
    assert profile.setting({}).tensor_degrees == (4,) * len(profile.curves)
    assert any("H200" in line for line in profile.leaves_out)


def test_a_curve_knows_its_part_that_may_wait_or_says_nothing_of_it():
    curve = Curve(num_devices=(2, 4), forward_s=(2.0, 1.0), backward_s=(4.0, 2.0), weight_s=(1.5, 0.5))
    assert curve.weight_time_s(4) == 0.5
    assert curve.up_to(3).weight_s == (1.5,)
    assert Curve(num_devices=(1,), forward_s=(1.0,), backward_s=(2.0,)).weight_time_s(1) is None
    with pytest.raises(ProfileError, match="must be between 0 and backward_s"):
        Curve(num_devices=(1,), forward_s=(1.0,), backward_s=(2.0,), weight_s=(2.5,))
    with pytest.raises(ProfileError, match="or none"):
        Curve(num_devices=(1,), forward_s=(1.0,), backward_s=(2.0,), weight_s=(1.0, 1.0))


def test_devices_may_have_a_host():
    assert cluster_named("h20x16").kind.peak_flops == 148e12
    assert cluster_named("h800x16").kind.host_memory_bytes * 8 == 256e9
    with pytest.raises(ClusterError, match="host_bytes_per_s must be at least 0, got -1"):
        replace(H800.kind, host_bytes_per_s=-1)


def test_the_smallest_sub_microbatch_near_the_peak_is_chosen():
    model = MODELS["vlm-s"]
    launches = replace(FLAT, launch_s=1e-4)  # a fixed cost for each kernel, so that more images are better
    emulated = Semu.of(model.cluster, launches)
    size = sub_microbatch_size(model, VISION, 2704, emulated, sizes=range(1, 49))
    assert 1 < size < 48
    assert sub_microbatch_size(model, VISION, 2704, emulated, sizes=range(1, 49), share=0.5) < size
    assert sub_microbatch_size(model, VISION, 2704, Semu.of(model.cluster, FLAT), sizes=(4, 8)) == 4


@pytest.mark.parametrize("name", ["vlm-s", "vlm-m"])
def test_a_sub_microbatch_of_the_papers_vit_has_twelve_images(name):
    model = MODELS[name]
    assert sub_microbatch_size(model, VISION, 2704, emulator(model.cluster)) == 12


@pytest.mark.parametrize(("module", "lengths", "paper_ms"), [(VISION, (2704, 8), 6.75), (LANGUAGE, (8192, 1), 10.5)])
def test_layers_of_the_37b_model_take_about_as_long_as_the_paper_says(module, lengths, paper_ms):
    """The paper names neither tensor degree nor device of these times (§1); its setup of this model has 8 and H800."""
    model = MODELS["vlm-m"]
    chain = model.chain(module)
    layer = Block(tower=chain.tower, lengths=(lengths,), causal=chain.causal)
    time = emulator(model.cluster).layer(layer, 8)
    assert (time.forward_s + time.backward_s) * 1e3 == pytest.approx(paper_ms, rel=0.1)


def test_layers_measured_on_an_h200_take_as_long_as_semu_says():
    rows = json.loads((RESULTS / "semu_layers.json").read_text())["rows"]
    h200 = PRESETS["h200"]
    emulated = Semu(h200.kind, h200.link, measured_efficiencies())
    errors = []
    for (name, module, lengths, context), row in zip(CASES, rows, strict=True):
        chain, degree = MODELS[name].chain(module), MODELS[name].tensor_degree
        block = Block(tower=chain.tower, lengths=lengths, causal=chain.causal, context=context)
        time = emulated.layer(AsRun(block, degree), degree)
        errors.append(abs((time.forward_s + time.backward_s) * 1e3 / (row["forward_ms"] + row["backward_ms"]) - 1))
    assert max(errors) < 0.1
    assert sum(errors) / len(errors) < 0.05


def test_measured_efficiencies_are_packaged():
    measured = measured_efficiencies()
    assert "H200" in measured.measured_on
    assert len(measured.gemm_grid) == 64
    assert {table.kind for table in measured.memory} >= {"norm", "activation", "add", "update"}


def test_every_gemm_of_the_recipes_was_measured_itself():
    measured = {(column.outputs, column.inputs): column.tokens for column in measured_efficiencies().gemm}
    for shape, tokens in kernels.recipe_shapes().items():
        assert tokens <= set(measured[shape])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_kernels_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernels", "-o", str(tmp_path / "kernels.json")])
    with pytest.raises(SystemExit, match="needs a GPU, torch sees none"):
        kernels.main()
