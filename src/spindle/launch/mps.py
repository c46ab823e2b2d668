"""One GPU as several devices: NVIDIA's MPS, started for one job and always stopped again.

    launcher ──▶ keeper: this module as a program ──▶ nvidia-cuda-mps-control -d ──▶ nvidia-cuda-mps-server
        └── a pipe ──┘

The keeper lives in a session of its own and does nothing but wait for the end of the pipe, which comes when the
launcher is done, and also when it was killed. Then it asks the daemon to quit, kills what is left of what it has
started, and removes the daemon's folder. It adopts whatever its descendants leave behind (`PR_SET_CHILD_SUBREAPER`), so
that it ends those processes and no others.

MPS limits multiprocessors, not memory: `run.world` holds every rank to its share of that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from spindle.errors import InputError

VIRTUAL_VARIABLE = "SPINDLE_VIRTUAL_DEVICES"
PROGRAM = "nvidia-cuda-mps-control"
MAX_DEVICES = 48  # clients that one server takes
_QUEUES_VARIABLE, _NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 96  # from host to GPU, for all clients together
START_S = 20.0
QUIT_S = 5.0
KEEPER_S = 30.0
_READY, _ERROR = "ready ", "error "
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextmanager
def shared_gpu(num_devices: int) -> Iterator[dict[str, str]]:
    """What ranks that share one GPU find in their environment. Inside, MPS runs; afterwards nothing of it does."""
    check_machine(num_devices)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "spindle.launch.mps"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    folder = None
    try:
        assert keeper.stdout is not None
        said = keeper.stdout.readline().rstrip("\n")
        if not said.startswith(_READY):
            why = said.removeprefix(_ERROR) or "its keeper ended without a word"
            raise InputError(f"MPS cannot be started: {why}")
        folder = Path(said.removeprefix(_READY))
        yield _client_environment(folder, num_devices)
    finally:
        _dismiss(keeper, folder)


def check_machine(num_devices: int) -> None:
    """Refuses what cannot work here, and says what would."""
    instead = "without one, start processes on the CPU: spindle launch -n N"
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InputError(f"expected 1 to {MAX_DEVICES} virtual devices, got {num_devices}")
    if sys.platform != "linux":
        raise InputError(f"virtual devices need MPS, which NVIDIA has for Linux only; {instead}")
    if shutil.which("nvidia-smi") is None:
        raise InputError(f"virtual devices need an NVIDIA GPU, but there is no nvidia-smi on the PATH; {instead}")
    if not (found := _gpus()).startswith("GPU "):
        raise InputError(f"virtual devices need an NVIDIA GPU, but nvidia-smi -L says: {found or 'nothing'}; {instead}")
    if shutil.which(PROGRAM) is None:
        raise InputError(
            f"virtual devices need MPS, but there is no {PROGRAM} on the PATH; it comes with NVIDIA's driver "
            "(nvidia-compute-utils on Ubuntu and Debian, nvidia-driver-cuda on Fedora); a container must be given it"
        )


def _gpus() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]


def _client_environment(folder: Path, num_devices: int) -> dict[str, str]:
    return _daemon_environment(folder) | {
        "CUDA_VISIBLE_DEVICES": "0",  # the daemon shows its clients one GPU, by a number of its own
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // num_devices),
        # A stream that waits for another rank holds up what shares its queue; clients get two unless they ask for more.
        _QUEUES_VARIABLE: os.environ.get(_QUEUES_VARIABLE, str(min(32, _NUM_QUEUES // num_devices))),
        VIRTUAL_VARIABLE: str(num_devices),
    }


def _daemon_environment(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def _dismiss(keeper: subprocess.Popen[str], folder: Path | None) -> None:
    """Lets the keeper clean up; does its first part ourselves if somebody has killed it."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with suppress(OSError):
        keeper.stdin.close()
    try:
        code = keeper.wait(timeout=KEEPER_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        code = keeper.wait()
    keeper.stdout.close()
    if code != 0 and folder is not None and folder.exists():
        _quit(folder)
        shutil.rmtree(folder, ignore_errors=True)


# The keeper.


def keep() -> int:
    """Starts MPS, says where, and stops it when nobody holds the other end of our input any more."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    _adopt_orphans()
    try:
        folder = Path(tempfile.mkdtemp(prefix="spindle-mps-"))
    except OSError as error:
        print(f"{_ERROR}no temporary folder can be made ({error.strerror})", flush=True)
        return 0
    try:
        trouble = _start(folder)
        print(f"{_ERROR}{trouble}" if trouble else f"{_READY}{folder}", flush=True)
        if not trouble:
            sys.stdin.read()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _adopt_orphans() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _start(folder: Path) -> str | None:
    """Starts the daemon; says in one line why it did not."""
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    said = folder / "start.log"  # not a pipe: the daemon would hold it open
    try:
        with said.open("wb") as file:
            done = subprocess.run(
                [PROGRAM, "-d"],
                env=os.environ | _daemon_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=START_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"{PROGRAM} -d is not done after {START_S:g} s"
    except OSError as error:
        return f"{PROGRAM}: {error.strerror}"
    if done.returncode == 0:
        return None
    words = " ".join(said.read_text(errors="replace").split())
    return f"{PROGRAM} -d ended with exit code {done.returncode}{': ' if words else ''}{words}"


def _stop(folder: Path) -> None:
    _quit(folder)
    end_s = time.monotonic() + QUIT_S
    while (left := _descendants()) and time.monotonic() < end_s:
        time.sleep(0.02)
    while left:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = _descendants()
        if time.monotonic() > end_s + QUIT_S:  # stuck in the kernel; they end when they come back
            return


def _quit(folder: Path) -> None:
    """Asks the daemon of this folder to end. It does when it has no clients left."""
    environment: Mapping[str, str] = os.environ | _daemon_environment(folder)
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [PROGRAM],
            env=environment,
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=QUIT_S,
            check=False,
        )


def _descendants() -> list[int]:
    """Processes that we, or those we have started, have started; dead ones are laid to rest."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                # The name, in parentheses, may hold anything; after it come the state and the parent.
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found += sorted(new)
    return found


if __name__ == "__main__":
    sys.exit(keep())
