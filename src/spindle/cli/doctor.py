"""`spindle doctor`: what this machine can train, and what stands in the way."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from spindle.cli.options import AsJson

OK, LIMITED, MISSING = "ok", "limited", "missing"
_MIN_TORCH = (2, 11)
_MIN_SHARED_MEMORY = 256 << 20
_LIMIT_S = 120.0
_EXTRAS = {  # by distribution; each of these is enough
    ("transformers",): "Hugging Face models (spindle-train[hf])",
    ("tensorboard",): "the TensorBoard writer (spindle-train[tensorboard])",
    ("wandb",): "the Weights & Biases writer (spindle-train[wandb])",
    ("mlflow", "mlflow-skinny"): "the MLflow writer (spindle-train[mlflow])",
    ("ray",): "live fleets on Ray (spindle-train[fleet])",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One part of the machine: what was found, what that allows, and what to do next.

    `state` is `ok`, `limited` (training starts, something else does not work) or `missing` (training cannot start).
    """

    name: str
    state: str
    value: str
    allows: str
    next_step: str = ""


def doctor(
    links: Annotated[
        bool, typer.Option("--links/--no-links", metavar="", help="Measure the link between two ranks.")
    ] = True,
    as_json: AsJson = False,
) -> int:
    """Check what this machine can train: Python, torch, GPUs, NCCL, MPS, links between ranks, cores, shared memory and
    caches.

    Each line says what was found and what it allows, and what to do if something is missing. Two ranks exchange
    messages for a few seconds to measure their link. The exit code is 1 if training cannot start. Examples:

    spindle doctor

    spindle doctor --no-links --json
    """
    from spindle.cli.terminal import show, show_json

    checks = tuple(check_machine(measures_links=links))
    can_train = all(check.state != MISSING for check in checks)
    if as_json:
        show_json({"can_train": can_train, "checks": [asdict(check) for check in checks]})
    else:
        show(_table(checks), "", _verdict(checks))
    return 0 if can_train else 1


def check_machine(*, measures_links: bool) -> Iterator[Check]:
    """All checks, in the order in which one depends on another."""
    yield _check_python()
    torch = _torch_facts()
    torch_check = _check_torch(torch)
    yield torch_check
    gpus = [] if isinstance(torch, str) else torch["gpus"]
    yield _check_gpus(gpus)
    if gpus:
        assert not isinstance(torch, str)
        yield _check_nccl(torch["nccl"])
        yield _check_mps()
    if measures_links and torch_check.state != MISSING:
        yield _check_links(len(gpus))
    yield _check_cores()
    yield _check_shared_memory()
    yield _check_temporary_folder()
    if not isinstance(torch, str):
        yield _check_cache(Path(torch["cache_folder"]))
    yield _check_extras()


def _check_python() -> Check:
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if os.name != "posix":
        step = "use Linux or macOS, or the Windows Subsystem for Linux"
        return Check(name="Python", state=LIMITED, value=value, allows="planning, one process", next_step=step)
    return Check(name="Python", state=OK, value=value, allows="planning and training")


def _torch_facts() -> dict[str, Any] | str:
    """What torch says of itself, or why it cannot be imported. In a process of its own, which a broken build may
    end."""
    command = [sys.executable, "-P", "-m", "spindle.measure.environment"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing torch took more than {_LIMIT_S:.0f} s"
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"importing torch ended with exit code {done.returncode}"


def _check_torch(facts: dict[str, Any] | str) -> Check:
    install = "pip install 'spindle-train[train]'"
    if isinstance(facts, str):
        is_absent = "No module named 'torch'" in facts
        value = "not installed" if is_absent else facts
        step = install if is_absent else f"repair torch: {install} --force-reinstall"
        return Check(name="torch", state=MISSING, value=value, allows="planning only", next_step=step)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    value = f"{facts['version']} ({build})"
    least = ".".join(map(str, _MIN_TORCH))
    if tuple(int(part) for part in facts["version"].split(".")[:2]) < _MIN_TORCH:
        step = f"torch {least} or later: {install} --upgrade"
        return Check(name="torch", state=MISSING, value=value, allows="planning only", next_step=step)
    if not facts["distributed"]:
        step = "a build of torch with torch.distributed"
        return Check(name="torch", state=LIMITED, value=value, allows="one process", next_step=step)
    return Check(name="torch", state=OK, value=value, allows="training on one and several processes")


def _check_gpus(gpus: list[dict[str, Any]]) -> Check:
    from spindle.display import num_bytes

    if not gpus:
        driver = shutil.which("nvidia-smi")
        allows = "CPU processes that talk through gloo; plans for GPUs elsewhere (spindle plan --cluster h100x8)"
        step = "a CUDA build of torch: this machine has an NVIDIA driver" if driver else ""
        return Check(name="GPUs", state=LIMITED if driver else OK, value="none", allows=allows, next_step=step)
    value = "; ".join(f"{gpu['name']}, {num_bytes(gpu['memory_bytes'])}" for gpu in gpus)
    if len(gpus) == 1:
        allows = "python train.py, with lanes and CUDA graphs"
    else:
        allows = f"torchrun --nproc-per-node {len(gpus)} train.py"
    return Check(name="GPUs", state=OK, value=value, allows=allows)


def _check_nccl(nccl: str | None) -> Check:
    if nccl is None:
        step = "a build of torch with NCCL"
        return Check(name="NCCL", state=LIMITED, value="none", allows="one GPU", next_step=step)
    return Check(name="NCCL", state=OK, value=nccl, allows="one process per GPU, on several hosts too")


def _check_mps() -> Check:
    from spindle.launch.mps import PROGRAM

    path = shutil.which(PROGRAM)
    if path is None:
        step = f"{PROGRAM}, which comes with the NVIDIA driver, on PATH"
        return Check(name="MPS", state=LIMITED, value="none", allows="no virtual devices", next_step=step)
    return Check(name="MPS", state=OK, value=path, allows="one GPU as several (spindle launch --virtual-devices 8)")


def _check_links(num_gpus: int) -> Check:
    """Let two ranks exchange messages, as the first fit would measure them: through NCCL if there are two GPUs."""
    from spindle.display import num_bytes, seconds

    script = Path(__file__).parents[1] / "measure" / "environment.py"
    command = [sys.executable, "-P", "-m", "spindle.cli", "launch", "-n", "2", str(script), "--links"]
    # One GPU cannot be shared by two ranks of NCCL: the ranks then talk through the host.
    environment = os.environ | ({} if num_gpus != 1 else {"CUDA_VISIBLE_DEVICES": ""})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_LIMIT_S:.0f} s"
    else:
        try:
            link = json.loads(done.stdout.splitlines()[-1])
            value = (
                f"{num_bytes(link['bytes_per_s'])}/s, {seconds(link['latency_s'])} latency, "
                f"two ranks through {link['backend']}"
            )
            return Check(name="Links", state=OK, value=value, allows="training on several processes")
        except (ValueError, IndexError):
            reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
    step = "loopback must be reachable; with NCCL, see the output of NCCL_DEBUG=INFO"
    return Check(name="Links", state=LIMITED, value=reason, allows="one process only", next_step=step)


def _check_cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    value = f"{cores}, {memory / 2**30:.1f} GiB of memory"
    return Check(name="Cores", state=OK, value=value, allows=f"up to {cores} CPU processes at full speed")


def _check_shared_memory() -> Check:
    from spindle.display import num_bytes

    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(name="Shared memory", state=OK, value="no /dev/shm", allows="checkpoints on disk only")
    free = shutil.disk_usage(folder).free
    value = f"{num_bytes(free)} free in {folder}"
    if free < _MIN_SHARED_MEMORY:
        step = "a larger /dev/shm (docker run --shm-size=8g)"
        allows = "no worker processes of DataLoaders"
        return Check(name="Shared memory", state=LIMITED, value=value, allows=allows, next_step=step)
    return Check(name="Shared memory", state=OK, value=value, allows="DataLoader workers, checkpoints in memory")


def _check_temporary_folder() -> Check:
    """The launcher's own files: without them no job starts."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            free = shutil.disk_usage(folder).free
            (Path(folder) / "probe").write_bytes(b"\0" * 4096)
            parent = Path(folder).parent
    except OSError as error:
        step = "set TMPDIR to a folder that can be written"
        reason = error.strerror or str(error)
        return Check(name="Temporary files", state=MISSING, value=reason, allows="planning only", next_step=step)
    from spindle.display import num_bytes

    value = f"{num_bytes(free)} free in {parent}"
    return Check(name="Temporary files", state=OK, value=value, allows="spindle launch")


def _check_cache(folder: Path) -> Check:
    from spindle.display import num_bytes

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    value = f"{folder} ({num_bytes(size)})"
    if not os.access(nearest, os.W_OK | os.X_OK):
        step = "set XDG_CACHE_HOME to a folder that can be written"
        allows = "layers are measured again in every run"
        return Check(name="Cache", state=LIMITED, value=value, allows=allows, next_step=step)
    return Check(name="Cache", state=OK, value=value, allows="layers are measured once")


def _check_extras() -> Check:
    installed, absent = [], []
    for distributions, purpose in _EXTRAS.items():
        versions = [f"{name} {number}" for name in distributions if (number := _version(name))]
        if versions:
            installed.append(versions[0])
        else:
            absent.append(purpose)
    allows = f"not installed: {', '.join(absent)}" if absent else "all writers, Hugging Face models, live fleets"
    return Check(name="Extras", state=OK, value=", ".join(installed) or "none", allows=allows)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _table(checks: tuple[Check, ...]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "", "found", "allows"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "")
    marks = {OK: "✓", LIMITED: "!", MISSING: "✗"}
    for check in checks:
        allows = f"{check.allows}\nnext: {check.next_step}" if check.next_step else check.allows
        table.add_row(marks[check.state], check.name, check.value, allows)
    return table


def _verdict(checks: tuple[Check, ...]) -> str:
    missing = [check.name for check in checks if check.state == MISSING]
    if missing:
        return f"Training cannot start: {', '.join(missing)}. Planning works."
    return "Training can start: spindle init two-tower -o train.py writes a script to begin with."
