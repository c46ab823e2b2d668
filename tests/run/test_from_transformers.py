"""What a script with `transformers.Trainer` has, here: its arguments, dataset, collator and processor, weights from and
for `from_pretrained`, LoRA adapters. The numbers are those of `transformers.Trainer`."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import spindle  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402

torch.set_num_threads(1)  # several do nothing for tensors as small as these

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "transformers"
QUIET = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def started(folder: Path, *command: object) -> str:
    """What a Python process prints, which must succeed. Not a copy of this one: the loaders have workers."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore")
def test_a_script_after_has_the_weights_of_the_script_before(tmp_path, monkeypatch):
    """One process of transformers.Trainer with 8 samples for a device, two here with 4 for each."""
    pytest.importorskip("datasets")
    after = (SCRIPTS / "after.py").read_text(encoding="utf-8")
    assert "per_device_train_batch_size=8" in after
    (tmp_path / "after.py").write_text(after.replace("per_device_train_batch_size=8", "per_device_train_batch_size=4"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "tiny"])
    for script in ("make_model.py", "before.py"):
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    theirs, untrained = weights(tmp_path / "tiny-trained"), weights(tmp_path / "tiny")
    shown = started(tmp_path, "-m", "spindle", "launch", "-n", "2", "after.py", "tiny")
    ours = weights(tmp_path / "tiny-trained")
    assert ours.keys() == theirs.keys() == untrained.keys()
    assert max(float((untrained[name] - theirs[name]).abs().max()) for name in theirs) > 1e-2
    for name in theirs:
        assert torch.allclose(ours[name], theirs[name], atol=2e-4), name
    first, *_, last = map(float, re.findall(r"^caption +([\d. ]+)$", shown, flags=re.MULTILINE)[0].split())
    assert last < 0.8 * first


def test_the_scripts_differ_by_at_most_ten_lines():
    shown = runpy.run_path(str(ROOT / "docs" / "examples.py"))
    changed = [line for line in shown["difference"]("transformers") if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) <= 10


def arguments(**given):
    return hf.TrainingArguments(use_cpu=True, max_steps=10, **given)


def test_options_are_those_of_the_arguments():
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2), "ln_f": torch.nn.LayerNorm(2)})
    given = arguments(learning_rate=0.1, weight_decay=0.3, warmup_steps=5, max_grad_norm=0, bf16=True, seed=7)
    options = spindle.hf.options(given)
    optimizer = options["optimizer"](list(model.named_parameters()))
    decay = {len(group["params"]): group["weight_decay"] for group in optimizer.param_groups}
    assert decay == {1: 0.3, 3: 0.0}  # biases and norms without
    scheduler = options["lr_scheduler"](optimizer)
    rates = []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.08, 0.06, 0.04, 0.02])
    assert (options["max_grad_norm"], options["autocast"], options["seed"]) == (None, torch.bfloat16, 7)
    assert spindle.hf.options(arguments())["gradient_accumulation_steps"] == 1


# Newer versions of transformers have renamed it.
RECOMPUTE = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in hf.TrainingArguments.__dataclass_fields__
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({RECOMPUTE: True}, rf": {RECOMPUTE}=True \(use spindle.module\(..., activation_checkpointing=True\)\)$"),
        ({"eval_strategy": "steps", "eval_steps": 5}, r"eval_strategy='steps' \(call trainer.evaluate"),
        ({"save_steps": 5, "neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0 \(leave it out\); save_steps=5 "),
        ({"optim": "adafactor"}, r"optim='adafactor' \(expected one of adamw_torch"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, r"step_lr_scheduler"),
    ],
)
def test_arguments_without_a_meaning_here_are_refused_by_name(given, message):
    with pytest.raises(TrainingError, match=message):
        spindle.hf.options(arguments(**given))


def test_arguments_that_switch_off_what_is_missing_here_are_taken():
    spindle.hf.options(arguments(save_strategy="no", save_steps=5, eval_strategy="no", report_to="none"))


def test_epochs_become_steps_and_batches_are_shuffled_alike():
    given = hf.TrainingArguments(
        use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    with pytest.raises(TrainingError, match=r"spindle\.hf\.num_steps\(arguments, loader\)"):
        spindle.hf.options(given)
    samples = [{"x": torch.tensor([number])} for number in range(18)]
    first, second = (spindle.hf.loader(given, samples) for _ in range(2))
    assert spindle.hf.num_steps(given, first) == 6
    spindle.hf.options(given, steps=6)
    order = [int(x) for batch in first for x in batch["x"]]
    assert order == [int(x) for batch in second for x in batch["x"]]
    assert order != sorted(order)
    assert sorted(order) == list(range(18))


def train_lora(rank: int, num_ranks: int):
    """Losses and parameters of a Llama with adapters, and which of them changed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=20)).double()
    model = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    language = spindle.module("language", model)

    @spindle.task(batch_size=4, per_sample_mean=True)
    def predict(batch):
        logits = language(input_ids=batch).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    trainer = spindle.Trainer(
        [predict], optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
    )
    batches = [torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(number)) for number in range(3)]
    result = trainer.fit({"predict": batches}, steps=6, progress=False)
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    num_layers = sum(op.num_layers for op in result.graph.metaops if op.module == "language")
    return [losses["predict"] for losses in result.losses], after, changed, num_layers


def test_lora_adapters_alone_are_trained_as_in_one_process(pool):
    pytest.importorskip("peft")
    losses, expected, changed, num_layers = pool.run(1, train_lora)[0]
    assert num_layers > 3
    assert changed == {name for name in expected if "lora_" in name}
    for ours, parameters, trained, _ in pool.run(2, train_lora):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert trained == changed
        for name, parameter in parameters.items():
            assert torch.allclose(parameter, expected[name], rtol=1e-9, atol=1e-12), name
