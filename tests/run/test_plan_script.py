"""Planning from a training script: no GPU, no weights in memory, and the workload that the script trains."""

from __future__ import annotations

import json
import runpy
import textwrap
from dataclasses import replace

import pytest

import small
from spindle.cli.main import run
from spindle.cli.script import workload_of_script
from spindle.train.bind import bind, trace_all
from spindle.train.probe import probe
from spindle.train.tensor import find_sharing
from spindle.workload import write_workload

# As people write them: a GPU by every name it has, a checkpoint, shuffled data, an evaluation before training.
SCRIPT = """
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spindle

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=3)
options = parser.parse_args()
print("the script prints")


def tower(width):
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(options.blocks))
    return nn.Sequential(nn.Linear(width, 32), *blocks)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(32, 32))
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.one.weight = self.two.weight = weight
        self.register_buffer("scale", torch.linspace(0.5, 1, 32))

    def forward(self, x):
        return self.two(self.one(x) * self.scale)


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x - x.mean(0))  # couples samples, which shapes do not show


device = "cuda" if DEVICE else "cpu"
vision = spindle.module("vision", tower(48).to(device))
text = spindle.module("text", tower(16).to(torch.device(device)))
normalise = spindle.module("normalise", nn.BatchNorm1d(32).to(device))
centre = spindle.module("centre", Centre().to(device))
tied = spindle.module("tied", Tied().cuda() if DEVICE else Tied())
if DEVICE:
    text.module.load_state_dict(torch.load(CHECKPOINT, map_location="cuda:0"))
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    with torch.device("cuda"):
        assert torch.zeros(3).pin_memory().to("cuda:0", non_blocking=True).sum().item() == 0
    vision.module.to(0)
    text.module[0].requires_grad_(False)


def contrastive(one, other):
    return nn.functional.cross_entropy(one @ other.T, torch.arange(one.shape[0], device=one.device))


@spindle.task(batch_size=8)
def image_text(batch):
    return contrastive(normalise(vision(batch[0])), tied(centre(text(batch[1].to(device)))))


@spindle.task(batch_size=6, per_sample_mean=True)
def only_text(batch):
    return text(batch[0]).square().mean()


def loader(rows, *widths):
    return DataLoader(TensorDataset(*(torch.randn(4 * rows, width) for width in widths)), rows, shuffle=True)


tasks = [image_text, only_text]
loaders = {"image_text": loader(8, 48, 16), "only_text": loader(6, 16)}
if __name__ == "__main__":
    trainer = spindle.Trainer(tasks, optimizer=lambda named: torch.optim.AdamW([one for _, one in named]))
    print(trainer.evaluate(loaders))
    trainer.fit(loaders, steps=2)
    raise SystemExit("it trains")
"""


@pytest.fixture(autouse=True)
def preloaded():
    from preloaded import preloaded_ranks  # needs torch

    with preloaded_ranks():
        yield


@pytest.fixture
def write(tmp_path):
    def written(text, **values):
        path = tmp_path / "train.py"
        settings = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        path.write_text(settings + textwrap.dedent(text))
        return str(path)

    return written


@pytest.fixture
def script(write, tmp_path, monkeypatch):
    """The script for a GPU; and a checkpoint, as the same script without one has it."""
    import torch

    monkeypatch.setattr("sys.argv", ["train.py"])
    names = runpy.run_path(write(SCRIPT, DEVICE=False))
    torch.save(names["text"].module.state_dict(), tmp_path / "text.pt")
    return write(SCRIPT, DEVICE=True, CHECKPOINT=str(tmp_path / "text.pt"))


def test_a_script_is_planned_for_machines_one_does_not_have(write, capfd):
    given = f"'{write(SCRIPT, DEVICE=False)}' --blocks 5"  # with arguments of its own
    assert run(["plan", given, "--cluster", "h100x16", "--planner", "sequential", "--json"]) == 0
    shown, notices = capfd.readouterr()
    plan = json.loads(shown)
    assert plan["cluster"] == "h100x16"
    assert any(slot["op"] == "image_text/vision#0[1:6]" for slot in plan["slots"]), plan["slots"]
    assert "the script prints" in notices
    assert "module 'normalise' runs on one device at a time in image_text: it normalises over its batch" in notices
    assert "module 'centre' runs on one device at a time in image_text: its samples influence each other" in notices
    assert "it trains" not in notices


def test_the_planned_workload_is_the_one_that_the_script_trains(script, write, monkeypatch):
    asked = workload_of_script(script)
    monkeypatch.setattr("sys.argv", ["train.py"])
    names = runpy.run_path(write(SCRIPT, DEVICE=False))
    names["text"].module[0].requires_grad_(False)
    examples = {name: next(iter(loader)) for name, loader in names["loaders"].items()}
    traced = trace_all(names["tasks"], examples)
    assert asked == bind("training", traced, probe(traced, examples)).workload
    assert any(cost.whole_batch for _, cost in asked.tasks[0].calls[1].costs)  # batch normalisation
    assert asked.num_steps == 2
    assert asked.tasks[1].calls[0].costs[0][1].forward_flops > 0


def test_ten_billion_parameters_take_no_memory(write, tmp_path, capfd):
    peak = tmp_path / "peak"
    large = write(
        """
        import atexit, pathlib, resource

        import torch
        from torch import nn

        import spindle

        def note():
            pathlib.Path(PEAK).write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))

        atexit.register(note)

        def block():
            return nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192))

        model = spindle.module("model", nn.Sequential(*(block() for _ in range(20))).bfloat16().cuda())

        @spindle.task(batch_size=16, per_sample_mean=True)
        def predict(batch):
            return model(batch).square().mean()

        trainer = spindle.Trainer([predict], optimizer=lambda named: torch.optim.AdamW([one for _, one in named]))
        trainer.fit({"predict": [torch.zeros(16, 8192).bfloat16()]}, steps=1)
        """,
        PEAK=str(peak),
    )
    workload = workload_of_script(large)
    assert "as if module 'model' did not couple its samples: a layer of it is too large" in capfd.readouterr().err
    assert sum(parameter.num_elements for parameter in workload.parameters) > 10e9
    assert int(peak.read_text()) < 1_500_000  # KiB; torch itself takes a third of it
    write_workload(tmp_path / "workload.json", workload)
    assert run(["bound", str(tmp_path / "workload.json"), "--cluster", "h100x16"]) == 0


def test_a_pretrained_model_is_planned_without_reading_its_weights(write, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    config = transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    training = write(
        """
        import torch
        from transformers import Qwen2ForCausalLM

        import spindle

        language = spindle.module("language", Qwen2ForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16))

        @spindle.task(batch_size=4)
        def predict(batch):
            return language(input_ids=batch).logits.square().mean()

        loader = [torch.zeros(4, 8, dtype=torch.int64)]
        if __name__ == "__main__":
            assert language.module.lm_head.weight.is_meta
            trainer = spindle.Trainer([predict], optimizer=lambda named: torch.optim.AdamW([one for _, one in named]))
            trainer.fit({"predict": loader}, steps=1)
        """,
        FOLDER=str(tmp_path / "qwen"),
    )
    asked = workload_of_script(training)
    names = runpy.run_path(training)
    examples = {"predict": names["loader"][0]}
    traced = trace_all([names["predict"]], examples)
    sharing = find_sharing(traced, examples, has_values=True)
    assert sharing.most == {"language": 2}  # it has two heads for keys and values
    assert asked == bind("training", traced, sharing=sharing).workload
    assert len(asked.modules[0].layers) == 5


def test_tensor_degrees_and_planner_of_a_trainer_hold_for_its_plan(write, capfd):
    training = write(
        """
        import torch
        from torch import nn

        import spindle

        class Feed(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

            def forward(self, x):
                return x + self.down(self.up(x).relu())

        plan = {"*.up": "colwise", "*.down": "rowwise"}
        model = spindle.module("model", nn.Sequential(Feed(), Feed()), tensor_parallel=plan)

        @spindle.task(batch_size=16, per_sample_mean=True)
        def predict(batch):
            return model(batch).square().mean()

        def make(named):
            return torch.optim.AdamW([one for _, one in named])

        planning = spindle.Planning(planner="sequential", tensor_parallel_degrees={"model": 4})
        trainer = spindle.Trainer([predict], optimizer=make, planning=planning)
        trainer.fit({"predict": [torch.zeros(16, 32)]}, steps=1)
        """
    )
    assert run(["plan", training, "--cluster", "h100x8", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["planner"] == "sequential"
    assert ["model", 4] in plan["tensor_degrees"]
    assert run(["plan", training, "--cluster", "h100x2"]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "train.py: tensor degree 4 is given for module 'model', which can have 1, 2" in message


def test_a_planner_that_only_the_script_can_run_is_replaced_with_a_notice(tmp_path, capfd):
    workload = replace(small.workload({"see": ["vision"]}), planner="pipeline")
    write_workload(path := tmp_path / "workload.json", workload)
    reason = "the script's planner 'pipeline' plans the microbatches of each step, which only the running script has"
    assert run(["plan", str(path), "--cluster", "h100x2", "--json"]) == 0
    written = capfd.readouterr()
    assert json.loads(written.out)["planner"] == "wavefront"
    assert f"planned with 'wavefront': {reason}" in written.err
    assert run(["plan", str(path), "--cluster", "h100x2", "--planner", "paper"]) == 0
    assert reason not in capfd.readouterr().err
    assert run(["compare", str(path), "--cluster", "h100x2"]) == 0
    assert f"the plan of the script itself is not compared: {reason}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import spindle", "ended without a call of spindle.Trainer.fit, so there is nothing to plan; give a script"),
        ("1 / 0", "it failed with the error above, so there is nothing to plan"),
        (
            "import torch\ntorch.nn.Linear(2, 2)(torch.randn(2, 2))",
            ".py, line 2 (torch.nn.Linear(2, 2)(torch.randn(2, 2))): RuntimeError: Tensor on device meta is not on the "
            "expected device cpu! No spindle.Trainer.fit was reached; up to there, a script that is planned runs "
            "without weights and without a GPU. Give a script that trains with a spindle.Trainer",
        ),
        (
            "import torch\nassert torch.cuda.is_available()",
            "line 2 (assert torch.cuda.is_available()): AssertionError No spindle.Trainer.fit was reached; up to there",
        ),
        ("open('meta')", "it failed with the error above, so there is nothing to plan"),
    ],
)
def test_a_script_that_cannot_be_planned_says_why(write, capfd, text, message):
    assert run(["bound", write(text), "--cluster", "h100x16"]) == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert message in shown
    assert ("Traceback" in shown) == (text in ("1 / 0", "open('meta')"))


def test_code_that_looks_at_values_is_told_to_be_measured(write, capfd):
    looks = write(
        """
        import torch
        import spindle

        class Looks(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) * (2 if x.sum() > 0 else 1)

        model = spindle.module("model", Looks(4, 4))

        @spindle.task(batch_size=2)
        def predict(batch):
            return model(batch).square().mean()

        trainer = spindle.Trainer([predict], optimizer=lambda named: None)
        trainer.fit({"predict": [torch.zeros(2, 4)]}, steps=1)
        """
    )
    assert run(["bound", looks, "--cluster", "h100x16"]) == 2
    assert "task 'predict' cannot be followed without values" in capfd.readouterr().err


@pytest.mark.parametrize("autocast", [None, "torch.bfloat16"])
def test_a_cast_in_a_task_is_tried_as_it_will_train(write, capfd, autocast):
    casts = write(
        f"""
        import torch
        import spindle

        model = spindle.module("model", torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))

        @spindle.task(batch_size=2)
        def predict(batch):
            return model(batch.bfloat16()).float().square().mean()

        trainer = spindle.Trainer([predict], optimizer=lambda named: None, autocast={autocast})
        trainer.fit({{"predict": [torch.randn(2, 4)]}}, steps=1)
        """
    )
    assert run(["bound", casts, "--cluster", "h100x16"]) == 0
    said = (
        "trying it on two samples failed (train.py, line 9 (return model(batch.bfloat16()).float().square().mean()): "
        "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float)"
    )
    assert (said in " ".join(capfd.readouterr().err.split())) == (autocast is None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}"], "train.py: times of layers depend on the machines: give --cluster (a800x32, or a .toml file)"),
        (["{}", "--devices", "4"], "give --cluster instead of --devices 4 (a800x4, or a .toml file)"),
        (["no.py", "--cluster", "h100x8"], "no.py: no such file"),
    ],
)
def test_what_is_missing_is_said_before_the_script_runs(write, capfd, arguments, message):
    path = write("raise SystemExit('it ran')")
    assert run(["plan", *(argument.format(path) for argument in arguments)]) == 2
    stderr = capfd.readouterr().err
    assert message in stderr
    assert "it ran" not in stderr
