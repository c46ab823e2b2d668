"""Compares Hugging Face models trained with Spindle with plain PyTorch loops on the same GPU:

    PYTHONPATH=src python tests/gpu/hugging_face.py -o FILE.json [--only NAME,...] [--budget SECONDS] [--again]
    PYTHONPATH=src python tests/gpu/hugging_face.py -o FILE.json --table

Every model of `hugging` is trained for a few steps in one process, without and with CUDA graphs, and compared with a
loop over the unsplit model: losses, and the change of each parameter. With dropout, the run with graphs is compared
with the run without. Models that FILE.json has are skipped, unless --again. An exception is recorded, and the next
model is tried. --table writes benchmarks/results/hugging_face.md. Exit code 1 says that a model failed or that an error
is above `LIMIT`. --device cpu tries the script itself, without graphs.

Layers are not measured: plans come from a roofline.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "cpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
os.environ["HF_HUB_OFFLINE"] = "1"  # transformers would ask the hub for kernels
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers as hf  # noqa: E402
from torch import nn  # noqa: E402

import hugging  # noqa: E402
import spindle  # noqa: E402
from courses import unmeasured  # noqa: E402
from hugging_configs import VISION  # noqa: E402

STEPS = 8  # the first checks losses, two are warm-up, the fourth is captured, and four replay it
ROWS, LENGTH = 4, 9
LIMIT, LIMIT_FLOAT64 = 1e-5, 1e-9
CASE_LIMIT_S = 60
PAGE = ROOT / "benchmarks" / "results" / "hugging_face.md"
OUTPUTS = ("logits", "last_hidden_state", "logits_per_image", "logits_per_audio", "pred_masks")  # the first is trained
TASK = "fit_target"
Losses = list[float]
Parameters = dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Record:
    """The results of one model. Errors are the largest relative error of a loss or of a parameter's change."""

    name: str
    kind: str  # which of CASES
    num_layers: int = 0
    reason: str = ""  # why it is one layer
    num_slots: int = 0
    num_captured: int = 0
    not_captured: dict[str, int] = field(default_factory=dict)  # slots by reason
    notices: list[str] = field(default_factory=list)
    error_eager: float | None = None
    error_graphs: float | None = None
    error_repeated: float | None = None  # of a second plain loop, where an error is above the limit
    error_float64: float | None = None  # of Spindle in float64, likewise
    worst: str = ""  # the parameter with the largest error
    seconds: float = 0.0
    failure: str = ""  # the first line of an exception

    @property
    def is_good(self) -> bool:
        errors = [error for error in (self.error_eager, self.error_graphs) if error is not None]
        if self.failure or any(map(math.isnan, errors)):
            return False
        is_rounding = self.error_float64 is not None and self.error_float64 <= LIMIT_FLOAT64
        return is_rounding or all(error <= LIMIT for error in errors)


# Training.


def make_sgd(learning_rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=learning_rate, momentum=0.9)


def on_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def trained_output(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The output that is trained, by name."""
    output = model(**batch)
    for name in OUTPUTS:
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return name, value
    raise ValueError(f"{type(output).__name__} has none of {', '.join(OUTPUTS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Batches with targets for one output of a model, and a learning rate that changes parameters by some percent."""

    batches: list[dict[str, torch.Tensor]]  # on the CPU
    output: str
    learning_rate: float

    def loss(self, model: Any, batch: Any) -> Any:
        inputs = {name: batch[name] for name in self.batches[0] if name != "target"}
        return F.mse_loss(getattr(model(**inputs), self.output), batch["target"])


def prepare_training(model: nn.Module, batches: list[dict[str, torch.Tensor]], device: torch.device) -> Training:
    """Runs the model once, and its backward pass, to see its output and its gradient."""
    name, value = trained_output(model, on_device(batches[0], device))
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(value.shape, generator=generator).to(value.dtype) for _ in batches]
    F.mse_loss(value, targets[0].to(device)).backward()
    reached = [parameter for parameter in model.parameters() if parameter.grad is not None]
    relative_gradient = norm_of([parameter.grad for parameter in reached]) / norm_of(list(map(torch.detach, reached)))
    return Training(
        batches=[{**batch, "target": target} for batch, target in zip(batches, targets, strict=True)],
        output=name,
        learning_rate=0.003 / float(relative_gradient),
    )


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def parameters_of(model: nn.Module) -> Parameters:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def train_plainly(model: nn.Module, training: Training, device: torch.device) -> tuple[Losses, Parameters]:
    model.to(device)
    optimizer = make_sgd(training.learning_rate)(list(model.named_parameters()))
    batches = [on_device(batch, device) for batch in training.batches]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = training.loss(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], parameters_of(model)


def train_with_spindle(
    model: nn.Module, training: Training, record: Record, *, cuda_graphs: bool
) -> tuple[Losses, Parameters]:
    handle = spindle.module("model", model)

    @spindle.task(name=TASK, batch_size=ROWS)
    def fit_target(batch: Any) -> Any:
        return training.loss(handle, batch)

    trainer = spindle.Trainer([fit_target], optimizer=make_sgd(training.learning_rate), cuda_graphs=cuda_graphs)
    result = trainer.fit({TASK: training.batches}, steps=STEPS, progress=False)
    note_run(record, trainer, result)
    record.num_layers, record.reason = len(handle.chain.layers), handle.chain.reason
    return [losses[TASK] for losses in result.losses], parameters_of(model)


def note_run(record: Record, trainer: spindle.Trainer, result: Any) -> None:
    """Slots and notices of a run."""
    record.num_slots, record.num_captured = len(result.plan.slots), result.num_captured_slots
    record.not_captured = dict(Counter(result.slots_without_cuda_graph.values()))
    record.notices = list(trainer.notices)


# Errors.


def errors_of(
    actual: tuple[Losses, Parameters], expected: tuple[Losses, Parameters], before: Parameters
) -> tuple[float, str]:
    """The largest error, and where it is. A parameter's error is that of its change, relative to that change, or to a
    thousandth of the root mean square change of all parameters where it changed less."""
    losses = list(zip(actual[0], expected[0], strict=True))
    errors = {"loss": max(abs(loss - reference) / max(abs(reference), 1e-3) for loss, reference in losses)}
    changes = {name: after - before[name] for name, after in expected[1].items()}
    floor = 1e-3 * float(norm_of(list(changes.values()))) / len(changes) ** 0.5
    for name, change in changes.items():
        errors[name] = float((actual[1][name] - expected[1][name]).norm()) / max(float(change.norm()), floor)
    worst = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


# Cases. Each fills in a record.


def compare_with_plain_loop(record: Record, device: torch.device) -> None:
    """Without dropout: Spindle, without and with CUDA graphs, against a loop over the unsplit model. In float64, too,
    where float32 is above the limit, which tells rounding from wrong numbers."""
    compared = compare_in(torch.float32, record, device)
    (record.error_eager, record.worst), *graphed = compared
    if graphed:
        record.error_graphs = graphed[0][0]
        record.worst = max(compared)[1]
    if not record.is_good:
        record.error_repeated = compare_in(torch.float32, record, device, trainers=())[0][0]
        record.error_float64 = max(compare_in(torch.float64, record, device))[0]


def compare_in(
    dtype: torch.dtype, record: Record, device: torch.device, trainers: Sequence[bool] | None = None
) -> list[tuple[float, str]]:
    """The largest error, and where it is, of a Trainer with or without CUDA graphs for each of `trainers`; of a second
    plain loop where there is none."""
    initial = hugging.without_cache(hugging.made(record.name, dtype))
    before = parameters_of(initial)
    first = hugging.batch_of(record.name, ROWS, LENGTH, dtype)
    batches = [first, {name: value.flip(0) for name, value in first.items()}]  # of the same shapes
    training = prepare_training(copy.deepcopy(initial).to(device), batches, device)
    expected = train_plainly(copy.deepcopy(initial), training, device)
    if trainers is None:
        trainers = (False, True) if device.type == "cuda" else (False,)
    runs = [
        train_with_spindle(copy.deepcopy(initial), training, record, cuda_graphs=cuda_graphs)
        for cuda_graphs in trainers
    ]
    return [errors_of(run, expected, before) for run in runs or [train_plainly(initial, training, device)]]


def compare_graphs_with_eager(record: Record, device: torch.device) -> None:
    """With dropout: the run with CUDA graphs against the run without. Without a GPU, against a second run."""
    model = record.name.partition(",")[0]
    torch.manual_seed(0)
    initial = hugging.without_cache(WITH_DROPOUT[record.name]().train())
    before = parameters_of(initial)
    batches = [hugging.batch_of(model, ROWS, LENGTH, torch.float32)] * 2
    training = prepare_training(copy.deepcopy(initial).to(device), batches, device)
    eager = train_with_spindle(copy.deepcopy(initial), training, record, cuda_graphs=False)
    if len(set(eager[0])) < len(eager[0]):
        raise AssertionError(f"steps have the same loss: {eager[0]}")
    graphed = train_with_spindle(copy.deepcopy(initial), training, record, cuda_graphs=True)
    record.error_graphs, record.worst = errors_of(graphed, eager, before)


def train_three_contrastive_tasks(record: Record, device: torch.device) -> None:
    """DINOv2, ModernBERT and Wav2Vec2-BERT, dropout as configured, under bfloat16 autocast with CUDA graphs."""
    torch.manual_seed(0)
    names = {"vision": "DINOv2", "text": "ModernBERT", "audio": "Wav2Vec2-BERT"}
    handles = {key: spindle.module(key, hugging.ALL_MODELS[name].make().train()) for key, name in names.items()}

    def embed(key: str, batch: Any) -> Any:
        inputs = {name: batch[key][name] for name in batches[key]}
        return F.normalize(handles[key](**inputs).last_hidden_state.mean(1).float(), dim=-1)

    def contrastive(first: str, second: str) -> Any:
        @spindle.task(name=f"{first}_{second}", batch_size=ROWS)
        def find_partners(batch: Any) -> Any:
            logits = embed(first, batch) @ embed(second, batch).T * 10
            return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device))

        return find_partners

    batches = {key: hugging.batch_of(name, ROWS, LENGTH, torch.float32) for key, name in names.items()}
    pairs = [("vision", "text"), ("audio", "text"), ("vision", "audio")]
    trainer = spindle.Trainer(
        [contrastive(*pair) for pair in pairs],
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        autocast=torch.bfloat16,
    )
    loaders = {"_".join(pair): [{key: batches[key] for key in pair}] for pair in pairs}
    result = trainer.fit(loaders, steps=STEPS, progress=False)
    note_run(record, trainer, result)
    record.num_layers = sum(len(handle.chain.layers) for handle in handles.values())
    record.reason = "; ".join(handle.chain.reason for handle in handles.values() if handle.chain.reason)
    losses = [loss for step in result.losses for loss in step.values()]
    if not all(torch.isfinite(torch.tensor(losses))):
        raise AssertionError(f"a loss is not finite: {losses}")


WITH_DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "BERT, dropout 0.1": hugging.ALL_MODELS["BERT"].make,
    "GPT-2, dropout 0.1": hugging.ALL_MODELS["GPT-2"].make,
    "ViT, dropout 0.1": lambda: hf.ViTModel(
        hf.ViTConfig(**VISION, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    ),
    "Wav2Vec2, dropout 0.1": hugging.ALL_MODELS["Wav2Vec2"].make,
}
CASES: dict[str, tuple[Callable[[Record, torch.device], None], Sequence[str]]] = {
    "plain": (compare_with_plain_loop, tuple(hugging.ALL_MODELS)),
    "dropout": (compare_graphs_with_eager, tuple(WITH_DROPOUT)),
    "bfloat16": (train_three_contrastive_tasks, ("DINOv2 + ModernBERT + Wav2Vec2-BERT",)),
}


def run_case(kind: str, name: str, device: torch.device) -> Record:
    """A model's record; whatever goes wrong stands in it."""
    record = Record(name=name, kind=kind)
    begin_s = time.monotonic()
    torch.use_deterministic_algorithms(kind != "bfloat16", warn_only=True)  # nothing is compared there
    try:
        with unmeasured(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CASES[kind][0](record, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        record.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    record.seconds = round(time.monotonic() - begin_s, 2)
    torch.use_deterministic_algorithms(False)
    gc.collect()
    return record


# The command.


def is_usable(device: torch.device) -> bool:
    """Whether a failed case left the device, and its random number generator, as it was."""
    try:
        torch.randn(1, device=device).item()
    except RuntimeError:
        return False
    return True


def circumstances(device: torch.device) -> dict[str, str]:
    completed = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "python": platform.python_version(),
        "commit": completed.stdout.strip(),
    }


def read_records(path: Path) -> dict[str, Record]:
    if not path.exists():
        return {}
    return {row["name"]: Record(**row) for row in json.loads(path.read_text())["records"]}


def write_records(path: Path, records: Mapping[str, Record], about: Mapping[str, str]) -> None:
    data = {"about": about, "steps": STEPS, "limit": LIMIT, "records": [asdict(record) for record in records.values()]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def table_of(records: Sequence[Record]) -> str:
    header = ["model", "layers", "slots as graphs", "error, eager", "error, graphs", "seconds", "remarks"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for record in records:
        remarks = [f"**{record.failure}**"] if record.failure else []
        remarks += [f"one layer: {record.reason}"] if record.reason else []
        remarks += [f"{count} without a graph: {reason}" for reason, count in record.not_captured.items()]
        if record.error_repeated is not None:
            remarks.append(f"worst: {record.worst}; error of a second plain loop: {record.error_repeated:.0e}")
        if record.error_float64 is not None:
            remarks.append(f"error in float64: {record.error_float64:.0e}")
        cells = [
            record.name,
            str(record.num_layers or "–"),
            f"{record.num_captured} of {record.num_slots}" if record.num_slots else "–",
            *("–" if error is None else f"{error:.0e}" for error in (record.error_eager, record.error_graphs)),
            f"{record.seconds:.1f}",
            "; ".join(remark.replace("|", "\\|") for remark in remarks),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page_of(path: Path) -> str:
    about = json.loads(path.read_text())["about"]
    records = read_records(path).values()
    sections = [
        (
            "plain",
            f"Without dropout, in float32, SGD with momentum, {STEPS} steps. An error is the largest relative error of "
            "a loss or of a parameter's change, against a plain PyTorch loop over the unsplit model on this device.",
        ),
        ("dropout", "With dropout, the run with CUDA graphs against the run without them."),
        ("bfloat16", "Three contrastive tasks under bfloat16 autocast, with CUDA graphs."),
    ]
    parts = ["# Hugging Face models"]
    for kind, text in sections:
        chosen = [record for record in records if record.kind == kind]
        if chosen:
            parts += [text, table_of(chosen)]
    good = sum(record.is_good for record in records)
    parts.append(
        f"{good} of {len(records)} run, with errors of at most {LIMIT:.0e}; those above it in float32 have at most "
        f"{LIMIT_FLOAT64:.0e} in float64. "
        "`python tests/gpu/hugging_face.py`; "
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, Python {about['python']}, "
        f"commit {about['commit']}."
    )
    return "\n\n".join(parts) + "\n"


def raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError(f"took more than {CASE_LIMIT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--only", default="", help="names of models, with commas between them; or the name of a kind")
    parser.add_argument("--budget", type=float, default=float("inf"), help="starts no model after so many seconds")
    parser.add_argument("--again", action="store_true", help="runs models that the file has, too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--table", action="store_true", help=f"writes {PAGE.relative_to(ROOT)} from the file")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(page_of(options.output), encoding="utf-8")
        print(f"wrote {PAGE}")
        return 0
    begin_s = time.monotonic()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        signal.signal(signal.SIGALRM, raise_timeout)
    about, records = circumstances(device), read_records(options.output)
    cases = [(kind, name) for kind, (_, names) in CASES.items() for name in names]
    if options.only:  # names of models with dropout go on behind a comma
        only = set(options.only.split(","))
        cases = [(kind, name) for kind, name in cases if only & {kind, name.partition(",")[0]}]
    for _, name in cases:
        if options.again:
            records.pop(name, None)
    for kind, name in cases:
        if name in records:
            continue
        if time.monotonic() - begin_s > options.budget:
            print(f"the budget of {options.budget:.0f} s is spent; run again for the rest", flush=True)
            break
        signal.alarm(CASE_LIMIT_S if device.type == "cuda" else 0)
        records[name] = record = run_case(kind, name, device)
        signal.alarm(0)
        write_records(options.output, records, about)
        print(f"{name}: {record.failure or 'ran'}, {record.seconds:.1f} s", flush=True)
        if record.failure and not is_usable(device):
            left_s = options.budget - (time.monotonic() - begin_s)
            print("the device is unusable after this failure: going on in a new process", flush=True)
            arguments = ["-o", str(options.output), "--only", options.only, "--budget", str(left_s)]
            os.execv(sys.executable, [sys.executable, __file__, *arguments])
    print(table_of(list(records.values())))
    return 0 if all(record.is_good for record in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
