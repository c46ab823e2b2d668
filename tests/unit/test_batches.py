"""Batches: samples of real lengths, packed into microbatches that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle.errors import InputError, WorkloadError
from spindle.recipes.data import LAION_TOKENS_PER_IMAGE, VLM_SOURCES, t2v_batch, vlm_batch
from spindle.recipes.multimodal import MODELS, batch_profile, model_flops
from spindle.workload import (
    LANGUAGE,
    VISION,
    Clip,
    Microbatch,
    Packing,
    Sample,
    pack_clips,
    pack_images,
    read_samples,
    split_evenly,
)

TIGHT = Packing()  # nothing is filled up


def microbatch(images: int) -> Microbatch:
    held = ((VISION, (2704,) * images),) if images else ()
    return Microbatch(instances=(*held, (LANGUAGE, (8192,))))


def test_a_microbatch_counts_what_it_holds():
    held = Microbatch(instances=((VISION, (2704, 2704, 2704)), (LANGUAGE, (8192,))))
    assert (held.num_images, held.num_clips, held.num_tokens) == (3, 0, 8192)
    assert held.tokens_of("audio") == ()


def test_a_microbatch_that_holds_nothing_is_refused():
    with pytest.raises(WorkloadError, match="at least one instance"):
        Microbatch(instances=((VISION, ()),))
    with pytest.raises(WorkloadError, match=r"module 'vision': every instance needs at least one token, got \[3, 0\]"):
        Microbatch(instances=((VISION, (3, 0)),))


def test_samples_come_from_a_file_of_one_object_per_line(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text(
        '{"text_tokens": 812, "images": 3}\n\n'
        '{"text_tokens": 96, "clips": [{"seconds": 7.5}, {"seconds": 3, "width": 512, "height": 320}]}\n'
    )
    assert read_samples(file) == (
        Sample(text_tokens=812, images=3),
        Sample(text_tokens=96, clips=(Clip(seconds=7.5), Clip(seconds=3.0, width=512, height=320))),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text_tokens": 5, ', r"line 2: not a JSON object on one line"),
        ("[1, 2]", r"line 2: expected an object with the fields of a Sample, got \[1, 2\]"),
        ('{"images": 3}', r"line 2: the field 'text_tokens' is missing"),
        ('{"text_tokens": 4.5}', r"line 2\.text_tokens: expected a whole number, got 4\.5"),
        ('{"text_tokens": 1, "pictures": 2}', r"line 2: unknown field 'pictures'; a Sample has text_tokens, images"),
        ('{"text_tokens": 1, "images": -2}', r"line 2: text_tokens and images must not be negative, got 1 and -2"),
        ('{"text_tokens": 1, "clips": [{"seconds": 0}]}', r"line 2\.clips\[0\]: a clip must be longer than 0 seconds"),
        ('{"text_tokens": 0}', r"line 2: a sample needs at least one token, image or clip"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line, message):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"text_tokens": 1}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_samples(file)


def test_a_file_without_samples_is_refused(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text("\n")
    with pytest.raises(InputError, match="has no samples"):
        read_samples(file)
    with pytest.raises(InputError, match="no such file"):
        read_samples(tmp_path / "none.jsonl")


def test_an_image_takes_169_tokens_of_its_sequence():
    assert [microbatch.num_tokens for microbatch in pack_images([Sample(text_tokens=100, images=2)], TIGHT)] == [438]
    packed = pack_images([Sample(text_tokens=4000, images=10), Sample(text_tokens=3000, images=10)], TIGHT)
    assert [(microbatch.num_images, microbatch.num_tokens) for microbatch in packed] == [(10, 5690), (10, 4690)]


def test_no_sequence_has_more_than_48_images():
    packed = pack_images([Sample(text_tokens=1, images=1)] * 100, TIGHT)
    assert [microbatch.num_images for microbatch in packed] == [48, 48, 4]


def test_sequences_are_filled_up_unless_told_otherwise():
    assert pack_images([Sample(text_tokens=100)])[0].num_tokens == 8192


@given(
    st.lists(st.builds(Sample, text_tokens=st.integers(1, 30_000), images=st.integers(0, 120)), min_size=1, max_size=12)
)
def test_packing_loses_nothing_and_keeps_its_limits(samples):
    packed = pack_images(samples, TIGHT)
    assert sum(microbatch.num_images for microbatch in packed) == sum(sample.images for sample in samples)
    assert sum(microbatch.num_tokens for microbatch in packed) == sum(
        sample.text_tokens + 169 * sample.images for sample in samples
    )
    assert all(microbatch.num_images <= 48 and microbatch.num_tokens <= 8192 for microbatch in packed)


def test_a_clip_has_as_many_tokens_as_its_frames_ask_for():
    # 16 frames a second, four to a token, 16 x 16 pixels to a token; 16 s at most.
    assert TIGHT.clip_tokens(Clip(seconds=2.0)) == 8 * 16 * 16
    assert TIGHT.clip_tokens(Clip(seconds=40.0)) == TIGHT.clip_tokens(Clip(seconds=16.0)) == 64 * 256
    assert TIGHT.clip_tokens(Clip(seconds=2.0, width=512)) == 8 * 16 * 32


def test_no_microbatch_has_more_than_eight_clips():
    packed = pack_clips([Sample(text_tokens=30, clips=(Clip(seconds=1.0),) * 3)] * 6, TIGHT)
    assert [(microbatch.num_clips, microbatch.num_tokens) for microbatch in packed] == [(8, 80), (8, 80), (2, 20)]
    with pytest.raises(WorkloadError, match="sample 0: text-to-video takes samples with clips"):
        pack_clips([Sample(text_tokens=30)])


def test_instances_are_split_into_uniform_parts_larger_ones_first():
    def sizes(count: int, most: int | None) -> list[int]:
        return [len(part) for part in split_evenly((1,) * count, most)]

    assert sizes(26, 12) == [9, 9, 8]
    assert sizes(30, 12) == [10, 10, 10]
    assert sizes(26, None) == [26]
    assert sizes(0, 12) == []


def test_images_follow_the_papers_data():
    batches = [vlm_batch(64, np.random.default_rng(seed)) for seed in range(4)]
    images = [microbatch.num_images for batch in batches for microbatch in batch]
    assert min(images) == 0
    assert 40 <= max(images) <= 48
    for batch in batches:
        assert 3 <= sum(microbatch.num_images == 0 for microbatch in batch) <= 16  # some are text alone
        assert len({microbatch.num_images for microbatch in batch}) > 12
    laion = next(source for source in VLM_SOURCES if source.name == "LAION-2B")
    drawn = [laion.draw(random) for random in [np.random.default_rng(0)] for _ in range(4000)]
    assert np.mean([sample.text_tokens / sample.images for sample in drawn]) == pytest.approx(
        LAION_TOKENS_PER_IMAGE, rel=0.05
    )


def test_the_heaviest_batch_of_clips_is_several_times_the_lightest():
    model = MODELS["t2v-s"]
    for seed in range(4):
        flops = [model_flops(model, [microbatch]) for microbatch in t2v_batch(64, np.random.default_rng(seed))]
        assert 3 < max(flops) / min(flops) < 6  # paper: 4.15


def test_the_same_seed_gives_the_same_batch():
    assert vlm_batch(8, np.random.default_rng(5)) == vlm_batch(8, np.random.default_rng(5))
    assert t2v_batch(8, np.random.default_rng(5)) == t2v_batch(8, np.random.default_rng(5))


def test_a_microbatch_is_a_task_with_a_call_for_each_sub_microbatch():
    graph = batch_profile(MODELS["vlm-s"], [microbatch(26), microbatch(0)], {VISION: 12}).graph
    assert list(dict.fromkeys((op.task, op.microbatch, op.batch_size) for op in graph.metaops)) == [
        ("m00", 0, 1),
        ("m01", 1, 1),
    ]
    calls = [list(dict.fromkeys(op.call for op in graph.metaops if op.task == task)) for task in graph.tasks]
    assert calls == [["vision.0", "vision.1", "vision.2", "language"], ["language"]]  # text alone skips the encoder
    crossing = [(graph.metaops[producer].call, graph.metaops[consumer].call) for producer, consumer in graph.edges]
    assert [edge for edge in crossing if edge[0] != edge[1]] == [(f"vision.{part}", "language") for part in range(3)]


def test_work_does_not_depend_on_how_a_microbatch_is_split():
    model = MODELS["vlm-s"]
    whole, parts = (batch_profile(model, [microbatch(26)], splits).graph for splits in (None, {VISION: 12}))

    def flops(graph):
        return sum(op.num_layers * op.cost.forward_flops for op in graph.metaops)

    assert flops(whole) == pytest.approx(flops(parts))
    assert 3 * flops(whole) == pytest.approx(model_flops(model, [microbatch(26)]))


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_a_batch_are_those_of_its_modules(name):
    model = MODELS[name]
    batch = vlm_batch(2, np.random.default_rng(3)) if name.startswith("vlm") else t2v_batch(2, np.random.default_rng(3))
    graph = batch_profile(model, batch).graph
    layers = {}
    for op in graph.metaops:
        for layer, used in enumerate(op.parameters, start=op.first_layer):
            layers[op.module, layer] = tuple(graph.parameters[parameter].name for parameter in used)
    assert layers == {
        (chain.name, number): layer.parameters
        for chain in model.chains
        for number, layer in enumerate(chain.module.layers)
    }


def test_a_split_of_no_module_is_refused():
    with pytest.raises(WorkloadError, match="'vlm-s' has no module 'audio'; it has vision, language"):
        batch_profile(MODELS["vlm-s"], [microbatch(1)], {"audio": 2})


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("vlm-s", (4.4, 8.0)),
        ("vlm-m", (4.4, 32.8)),
        ("vlm-l", (22.6, 72.7)),
        ("t2v-s", (7.5, 4.9)),
        ("t2v-l", (32.1, 29)),
    ],
)
def test_models_have_the_papers_sizes(name, billions):
    model = MODELS[name]
    for chain, expected in zip(model.chains, billions, strict=True):
        assert sum(parameter.num_elements for parameter in chain.parameters) / 1e9 == pytest.approx(expected, rel=0.02)
    assert model.tensor_degree * model.num_stages == model.cluster.num_devices
