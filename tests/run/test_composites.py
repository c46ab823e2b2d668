"""Composites, unchanged: opened into towers and other parts, with the numbers of the whole model."""

from __future__ import annotations

from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import hugging  # noqa: E402
import spindle  # noqa: E402
from comparison import assert_close  # noqa: E402
from programs import compare_steps  # noqa: E402
from spindle import Trainer, module, task  # noqa: E402
from spindle.errors import TrainingError, WorkloadError  # noqa: E402
from spindle.train import probe, trace_all  # noqa: E402
from spindle.train.record import cut_all, record_all  # noqa: E402
from sweeps import chosen, spread  # noqa: E402

torch.set_num_threads(1)  # several do nothing for tensors as small as these
pytestmark = pytest.mark.filterwarnings("ignore")

# How many layers towers have, and what the loss is: "whole", or a token mean that is split.
LLAVA = {"model.vision_tower": 5, "model.language_model": 5}
QWEN = {"model.visual": 5, "model.language_model": 5}
COMPOSITES = {
    "CLIP": ({"vision_model": 5, "text_model": 5}, "whole"),
    "SigLIP": ({"vision_model": 5, "text_model": 5}, "whole"),
    "CLAP": ({"audio_model": 7, "text_model": 5}, "whole"),
    "LLaVA": (LLAVA, "mean"),
    "LLaVA-OneVision": (LLAVA, "mean"),
    "Qwen2-VL": (QWEN, "mean"),
    "Qwen2.5-VL": (QWEN, "mean"),
    "Qwen3-VL": ({"model.visual": 7, "model.language_model": 5}, "mean"),
    "InternVL": (LLAVA, "mean"),
    "Idefics3": ({"model.vision_model": 5, "model.text_model": 5}, "mean"),
    "SmolVLM": ({"model.vision_model": 5, "model.text_model": 5}, "mean"),
    "PaliGemma": (LLAVA, "mean"),
    "Whisper": ({"model.encoder": 5, "model.decoder": 4}, "mean"),
    "BLIP-2": ({"vision_model": 5, "qformer": 5, "language_model": 5}, "mean"),
    "SigLIP 2": ({"vision_model": 5, "text_model": 5}, "whole"),
    "ViLT": ({"vilt": 5, "classifier": 4}, "whole"),
    "Idefics2": ({"model.vision_model": 5, "model.connector": 4, "model.text_model": 5}, "mean"),
    "LLaVA-NeXT": (LLAVA, "mean"),
    "VipLLaVA": (LLAVA, "mean"),
    "AltCLIP": ({"vision_model": 5, "text_model": 5}, "whole"),
    "Mistral 3": ({"model.vision_tower": 1, "model.language_model": 5}, "mean"),
    "GIT": ({"git.image_encoder": 5, "git.encoder": 3}, "mean"),
    "Gemma 3 VLM": (LLAVA, "mean"),
    "CLIPSeg": ({"clip.vision_model": 5, "clip.text_model": 5, "decoder": 4}, "whole"),
    "Wav2Vec2 CTC": ({"wav2vec2": 4}, "whole"),
    "VideoMAE pretraining": ({"videomae": 4, "decoder": 3}, "whole"),
    "Pixtral LLaVA": ({"model.vision_tower": 1, "model.language_model": 5}, "mean"),
    "Qwen2-Audio": ({"model.audio_tower": 5, "model.language_model": 5}, "mean"),
    "Llama": ({"model": 5}, "mean"),
    "routed Qwen2 MoE": ({"model": 5}, "whole"),
    "routed Qwen3 MoE": ({"model": 5}, "whole"),
    "routed Mixtral": ({"model": 5}, "whole"),
    "counted Llama": ({"model": 5}, "sum"),
    "LoRA Llama": ({"base_model.model.model": 5}, "mean"),
}

# Transformers resizes the table of positions of SigLIP 2 in float32 on CPUs: gradients agree to 1e-7 only.
COMPARED = [name for name in COMPOSITES if name not in ("SigLIP 2", "LoRA Llama")]


def opened(workload):
    """The only task of a workload, with its composite opened and cut into layers, and a batch."""
    batches = workload.batches(0)
    (recorded,) = cut_all(record_all(workload.tasks, batches), batches)
    return recorded, batches["train"]


@pytest.mark.parametrize(
    "name", ["CLIP", "routed Mixtral", "counted Llama", "LoRA Llama", *spread([*COMPOSITES][1:-3], 3)]
)
def test_a_composite_becomes_its_towers_each_in_layers(name):
    towers, loss = COMPOSITES[name]
    workload = hugging.composite(name)
    recorded, batch = opened(workload)
    layers = {call.handle.name: len(call.chain.layers) for call in recorded.calls}
    assert {path: layers.get(f"model.{path}") for path in towers} == towers
    assert loss == ("mean" if recorded.is_mean else "sum" if recorded.is_sum else "whole")
    outputs = {}
    with torch.no_grad():
        for call in recorded.calls:
            args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
            outputs[call.name] = call.chain(*args, **kwargs)
        result = recorded.loss(batch, *(outputs[source] for source in recorded.loss_sources))
        expected = workload.tasks[0](batch)
    assert torch.allclose(result.total / result.count if loss == "mean" else result, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    chosen(
        [
            (2, "CLIP"),
            (3, "Qwen3-VL"),
            (2, "counted Llama"),
            (3, "packed Qwen2.5-VL"),
            (3, "routed Mixtral"),
            (2, "CLIPSeg"),
        ],
        *((ranks, f"packed Qwen{version}-VL") for ranks, version in ((2, 2.5), (2, 2), (3, 2), (2, 3), (3, 3))),
        *((ranks, name) for ranks in (2, 3) for name in COMPARED if (ranks, name) != (3, "Qwen3-VL")),
    ),
)
def test_processes_give_the_numbers_of_one(pool, num_ranks, name):
    answers = pool.run(num_ranks, compare_steps, f"hf composite {name}", "plan 2", 2, 1.0)
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient"))


@pytest.mark.parametrize("name", chosen(["LLaVA", "Llama"], "Qwen2.5-VL"))
def test_adapters_are_trained_in_the_layers_of_their_towers(pool, name):
    pytest.importorskip("peft")
    answers = pool.run(2, compare_steps, f"hf composite LoRA {name}", "plan 3", 2, 1.0)
    assert answers[0].most_layers == 5
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient"))


class Assistant(nn.Module):
    """A vision tower and a projector of the user's own in front of a language model, which is given the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = hugging.made("CLIP vision"), hugging.ALL_MODELS["Llama"].make()
        self.projector = nn.Linear(self.vision.config.hidden_size, self.language.config.hidden_size)
        self.double()

    def forward(self, pixel_values, input_ids, labels):
        seen = self.projector(self.vision(pixel_values).last_hidden_state[:, 1:])
        embedded = torch.cat([seen, self.language.get_input_embeddings()(input_ids)], dim=1)
        labels = torch.cat([labels.new_full(seen.shape[:2], -100), labels], dim=1)
        return self.language(inputs_embeds=embedded, labels=labels)


def test_a_tower_that_returns_the_loss_is_opened_so_that_the_loss_is_divided():
    pytest.importorskip("transformers")
    model = Assistant()
    handle = spindle.module("model", model)
    batch = hugging.labelled("LLaVA", hugging.batch_of("CLIP", hugging.ROWS, 9))
    batch = {name: batch[name] for name in ("pixel_values", "input_ids", "labels")}
    train = spindle.task(batch_size=hugging.ROWS, name="train")(lambda batch: handle(**batch).loss)
    (recorded,) = cut_all(record_all([train], {"train": batch}), {"train": batch})
    layers = {call.handle.name: len(call.chain.layers) for call in recorded.calls}
    assert layers["model.vision"] == layers["model.language.model"] == 5
    assert recorded.is_mean
    outputs = {}
    for call in recorded.calls:
        args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
        outputs[call.name] = call.chain(*args, **kwargs)
    result = recorded.loss(batch, *(outputs[source] for source in recorded.loss_sources))
    assert torch.allclose(result.total / result.count, model(**batch).loss, rtol=1e-12)


@pytest.mark.parametrize("name", ["CLIP", "Qwen3-VL"])
def test_a_plan_without_weights_has_the_same_parts(name):
    def traced(device):
        with torch.device(device):
            model = module("model", hugging.ALL_MODELS[name].make().double())

        @task(batch_size=hugging.ROWS)
        def train(batch):
            return model(**batch).loss

        batch = hugging.labelled(name, hugging.batch_of(name, hugging.ROWS, 9))
        (result,) = trace_all([train], {"train": batch})
        return {call: len(layers) for call, layers in result.layers.items()}

    assert traced("meta") == traced("cpu")


def test_images_of_a_batch_are_assigned_to_samples_by_their_tokens():
    config = hugging.made("Qwen2.5-VL").config
    torch.manual_seed(0)
    declared = hugging.packed_images(4, 9)
    torch.manual_seed(0)
    batch = hugging.packed_images(4, 9, declared=False)
    assigned = spindle.hf.packed(batch, config)
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(assigned[name].lengths, declared[name].lengths)
        assert torch.equal(assigned[name].padded, declared[name].padded)
    batch["input_ids"] = batch["input_ids"].roll(1, dims=0)
    with pytest.raises(TrainingError, match="no image may belong to two samples"):
        spindle.hf.packed(batch, config)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([2, 3], r"add up to 5, but values have 6 rows"), ([6, 0], r"sample 1 has no row"), ([], r"a length for each")],
)
def test_lengths_that_cannot_be_are_refused(lengths, message):
    with pytest.raises(TrainingError, match=message):
        spindle.packed(torch.zeros(6, 2), lengths)


def test_packed_images_are_divided_over_samples():
    workload = hugging.composite("packed Qwen2.5-VL")
    batches = workload.batches(0)
    traced = trace_all(workload.tasks, batches)
    assert traced[0].whole_only == ""
    assert probe(traced, batches).coupled == {}
    assert traced[0].recorded.is_mean


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Pair(nn.Module):
    """Two towers, a temperature, and a loss over all pairs of a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Tower(), Tower()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, y):
        scores = self.first(x) @ self.second(y).T * self.temperature.exp()
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores))), "scores": scores}


def test_a_contrastive_loss_stays_whole_while_its_towers_are_divided():
    model = Pair().double()
    pair = module("pair", model)

    @task(batch_size=4)
    def match(batch):
        return pair(batch["x"], batch["y"])["loss"]

    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    (traced,) = trace_all([match], {"match": batch})
    assert not traced.recorded.is_mean
    assert not traced.whole_only
    assert {call.handle.name: call.handle.whole_batch for call in traced.recorded.calls} == {
        "pair": True,  # whose only parameter is the temperature
        "pair.first": False,
        "pair.second": False,
    }
    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.1))
    losses = [step["match"] for step in trainer.fit({"match": [batch]}, steps=3, progress=False).losses]
    assert losses[2] < losses[0]
    assert trainer.state_dict().keys() == {f"pair.{path}" for path in model.state_dict()}


class Frozen(Pair):
    """One of its towers runs without gradients, once before and once after it has read a value, if it reads any."""

    def __init__(self, *, reads_values):
        super().__init__()
        self.reads_values = reads_values

    def forward(self, x, y):
        scale = 2 if not self.reads_values or int((x > -100).sum()) else 3
        with torch.no_grad():
            first = self.first(x) * scale
            passed_on = self.first(y)
        return {"loss": (first * self.second(y) * self.second(passed_on)).square().mean()}


@pytest.mark.parametrize("reads_values", [False, True])
def test_a_tower_that_runs_without_gradients_is_not_trained(reads_values):
    torch.manual_seed(0)
    model = Frozen(reads_values=reads_values).double()
    plain = deepcopy(model)
    pair = module("pair", model)
    match = task(batch_size=4, name="match")(lambda batch: pair(batch["x"], batch["y"])["loss"])
    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.5))
    trainer.fit({"match": [batch]}, steps=2, progress=False)
    assert {"pair.first", "pair.second"} <= {op.module for op in trainer.profile.graph.metaops}
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain(**batch)["loss"].backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-12), name


class Tiled(Pair):
    """Its first tower reads the tiles of all samples, of which each sample has as many as `counts` says."""

    def forward(self, x, y, counts, labels):
        lengths = counts.tolist()
        tiles = self.first(torch.cat([tiles[:length] for tiles, length in zip(x, lengths, strict=True)]))
        first = torch.stack([tiles.mean(0) for tiles in tiles.split(lengths)])
        return {"loss": F.cross_entropy(first * self.second(y), labels)}


@pytest.mark.parametrize("counts", [[3, 3, 1, 2], [2, 2, 2, 2]])
def test_samples_may_have_different_numbers_of_rows(counts):
    torch.manual_seed(0)
    model = Tiled().double()
    plain = deepcopy(model)
    pair = module("pair", model)
    match = task(batch_size=4, name="match")(lambda batch: pair(**batch)["loss"])
    tensors = {"x": torch.randn(4, 3, 8, dtype=torch.float64), "y": torch.randn(4, 8, dtype=torch.float64)}
    batch = {**tensors, "counts": torch.tensor(counts), "labels": torch.tensor([1, 0, 3, 2])}
    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.5))
    trainer.fit({"match": [batch]}, steps=2, progress=False)
    # Rows of samples that have as many as each other can be divided. Otherwise what reads them gets all of them.
    whole = {op.module: op.cost.whole_batch for op in trainer.profile.graph.metaops}
    assert whole["pair.first"] == whole["loss.match"] == (len(set(counts)) > 1)
    assert not whole["pair.second"]
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain(**batch)["loss"].backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-9), name


class Looping(Pair):
    """Its code between its towers has a statement for each sample."""

    def forward(self, x, y):
        first = torch.cat([row * 2 for row in self.first(x).split(1)])
        return {"loss": (first * self.second(y)).square().mean()}


def test_a_composite_that_loops_over_samples_is_opened_for_any_number_of_them():
    model = Looping().double()
    pair = module("pair", model)

    @task(batch_size=4)
    def match(batch):
        return pair(batch["x"], batch["y"])["loss"]

    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    (recorded,) = cut_all(record_all([match], {"match": batch}), {"match": batch})
    assert {call.handle.name: len(call.chain.layers) for call in recorded.calls} == {"pair.first": 4, "pair.second": 4}
    part = {name: value[:3] for name, value in batch.items()}
    outputs = {}
    for call in recorded.calls:
        args, kwargs = call.arguments(part, *(outputs[source] for source in call.sources))
        outputs[call.name] = call.chain(*args, **kwargs)
    loss = recorded.loss(part, *(outputs[source] for source in recorded.loss_sources))
    assert torch.allclose(loss, model(**part)["loss"], rtol=1e-12)


class Deciding(Pair):
    """Values that one of its towers computes decide what it does."""

    def forward(self, x, y):
        first = self.first(x)
        if first.sum() > 0:
            first = first * 2
        return {"loss": (first * self.second(y)).mean()}


def test_a_composite_that_stays_one_module_says_why_and_at_which_line():
    pair = module("pair", Deciding().double())

    @task(batch_size=4)
    def match(batch):
        return pair(batch["x"], batch["y"])["loss"]

    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.1))
    profile = trainer.prepare({"match": [batch]}, progress=False)
    (notice,) = [text for text in trainer.notices if "is not opened into its towers" in text]
    assert notice.startswith("module 'pair'")
    assert "branches on values that its parts compute" in notice
    assert "test_composites.py, line" in notice
    (remark,) = profile.graph.remarks
    assert remark.closed in notice


def test_a_model_that_stays_one_layer_keeps_no_keys_and_values_for_generation():
    model = hugging.made("Mixtral")
    assert model.config.use_cache
    mixtral = module("mixtral", model, split=False)

    @task(batch_size=hugging.ROWS)
    def predict(batch):
        return mixtral(**batch).loss

    batch = hugging.labelled("Mixtral", hugging.batch_of("Mixtral", hugging.ROWS, 7))
    trainer = Trainer([predict], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.1))
    expected = deepcopy(model)(**batch).loss.item()
    (losses,) = trainer.fit({"predict": [batch]}, steps=1, progress=False).losses
    assert losses["predict"] == pytest.approx(expected, rel=1e-12)


class Packed(nn.Module):
    """A recurrent module on packed sequences: how long its output is depends on values."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


def test_a_module_whose_output_depends_on_values_may_be_followed_by_another():
    words, head = module("words", Packed().double()), module("head", nn.Linear(8, 4).double())

    @task(batch_size=4)
    def predict(batch):
        return head(words(batch["x"], batch["lengths"])).square().mean()

    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64), "lengths": torch.tensor([6, 5, 4, 6])}
    (traced,) = trace_all([predict], {"predict": batch})
    assert {call: len(layers) for call, layers in traced.layers.items()} == {"words#0": 1, "head#0": 1}


class Counting(nn.Module):
    """Divides the sum of a cross entropy by a number that it is given, or by one that it reads from its labels."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Tower(), Tower(), nn.Linear(8, 5)

    def forward(self, x, y, labels, count=None):
        loss = F.cross_entropy(self.head(self.first(x) * self.second(y)), labels, reduction="sum")
        return {"loss": loss / (int((labels != -100).sum()) if count is None else count)}


@pytest.mark.parametrize(
    ("count", "is_sum"),
    [
        (lambda batch: batch["count"], True),
        (lambda batch: 3, True),
        (lambda batch: (batch["labels"] != -100).sum(), False),
        (lambda batch: None, False),
    ],
)
def test_a_sum_is_divided_over_ranks_only_where_its_divisor_is_given(count, is_sum):
    counting = module("counting", Counting().double())

    @task(batch_size=4)
    def classify(batch):
        return counting(batch["x"], batch["y"], batch["labels"], count=count(batch))["loss"]

    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    batch |= {"labels": torch.tensor([1, -100, 0, 4]), "count": torch.tensor(3)}
    (recorded,) = cut_all(record_all([classify], {"classify": batch}), {"classify": batch})
    assert {call.handle.name for call in recorded.calls} == {f"counting.{part}" for part in ("first", "second", "head")}
    assert recorded.is_sum is is_sum
    assert not recorded.is_mean


class Remembering(Pair):
    """Keeps features of earlier batches: `how` says as what."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.queue, self.count, self.history = (
            how,
            nn.Buffer(torch.zeros(4, 8)),
            nn.Buffer(torch.zeros(())),
            [],
        )
        self.steps = 0

    def forward(self, x, y):
        first, second = self.first(x), self.second(y)
        loss = (first * second).square().mean() + (first @ self.queue.T.clone()).mean() * (self.count + 1)
        loss = loss * (self.steps + 1) + sum((first * past).mean() for past in self.history)
        match self.how:
            case "a buffer in place":
                self.count += 1
            case "another buffer":
                self.queue = torch.cat([second.detach(), self.queue])[:4]
            case "part of a buffer, at a place that is a value":
                place = int(self.count)
                self.queue[place : place + 2] = second[:2].detach()
                self.count += 2 if place == 0 else -2
            case "a list":
                self.history.append(second.detach().mean(0))
            case "a number beside values":
                self.steps += int((x > -100).sum())
        return {"loss": loss}


@pytest.mark.parametrize(
    "how",
    [
        "a buffer in place",
        "another buffer",
        "part of a buffer, at a place that is a value",
        "a list",
        "a number beside values",
    ],
)
def test_what_a_forward_keeps_for_the_next_batch_is_that_of_plain_pytorch(how):
    torch.manual_seed(0)
    model = Remembering(how).double()
    plain = deepcopy(model)
    pair = module("pair", model)
    batches = [{name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"} for _ in range(2)]

    @task(batch_size=4)
    def match(batch):
        return pair(batch["x"], batch["y"])["loss"]

    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.1))
    losses = [step["match"] for step in trainer.fit({"match": batches}, steps=2, progress=False).losses]
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for batch, loss in zip(batches, losses, strict=True):
        expected = plain(**batch)["loss"]
        assert loss == pytest.approx(expected.item(), rel=1e-9)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-9), name


class Averaging(Pair):
    """Updates parameters in its forward, through `data`, which leaves no trace on them."""

    def forward(self, x, y):
        for average, weight in zip(self.second.parameters(), self.first.parameters(), strict=True):
            average.data.mul_(0.9).add_(weight.data, alpha=0.1)
        return {"loss": (self.first(x) * self.second(y)).mean()}


class MeanTeacher(Pair):
    """Begins with a teacher that equals its student, and so is written with the values that it has."""

    def __init__(self):
        super().__init__()
        self.second.load_state_dict(self.first.state_dict())
        self.second.requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            for teacher, student in zip(self.second.parameters(), self.first.parameters(), strict=True):
                teacher.lerp_(student, 0.1)
        return {"loss": (self.first(x) * self.second(y)).mean()}


@pytest.mark.parametrize("kind", [Averaging, MeanTeacher])
def test_a_forward_that_changes_its_parameters_is_refused(kind):
    pair = module("pair", kind().double())
    match = task(batch_size=4, name="match")(lambda batch: pair(batch["x"], batch["y"])["loss"])
    batch = {name: torch.randn(4, 8, dtype=torch.float64) for name in "xy"}
    trainer = Trainer([match], optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], 0.1))
    with pytest.raises(WorkloadError, match=rf"forward of {kind.__name__} changes parameters .* in buffers"):
        trainer.fit({"match": [batch]}, steps=1, progress=False)
