"""One GPU as several devices: NVIDIA MPS, started for one job and always stopped afterwards.

    launcher ──▶ supervisor: this module as a program ──▶ nvidia-cuda-mps-control -d ──▶ nvidia-cuda-mps-server
        └── a pipe ──┘

The supervisor runs in a session of its own and waits for the end of the pipe, which comes when the launcher is done, or
was killed. Then it asks the daemon to quit, kills what is left of its descendants, and removes the daemon's folder. It
is a subreaper (`PR_SET_CHILD_SUBREAPER`), so orphans of its descendants become its children, and it ends these
processes and no others.

MPS limits multiprocessors, not memory: `run.world` limits each rank to its share of memory.
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
MAX_DEVICES = 48  # limit of clients of one MPS server
_QUEUES_VARIABLE, _NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 96  # from host to GPU, for all clients together
START_S = 20.0
QUIT_S = 5.0
SUPERVISOR_S = 30.0
_READY, _ERROR = "ready ", "error "
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextmanager
def shared_gpu(num_devices: int) -> Iterator[dict[str, str]]:
    """A context in which MPS runs. Yields the environment of ranks that share the GPU."""
    check_machine(num_devices)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    supervisor = subprocess.Popen(
        [sys.executable, "-P", "-m", "spindle.launch.mps"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    folder = None
    try:
        assert supervisor.stdout is not None
        answer = supervisor.stdout.readline().rstrip("\n")
        if not answer.startswith(_READY):
            reason = answer.removeprefix(_ERROR) or "its supervisor ended without a message"
            raise InputError(f"MPS cannot be started: {reason}")
        folder = Path(answer.removeprefix(_READY))
        yield _client_environment(folder, num_devices)
    finally:
        _stop_supervisor(supervisor, folder)


def check_machine(num_devices: int) -> None:
    """Raise an InputError if virtual devices cannot work on this machine."""
    instead = "without one, start processes on the CPU: spindle launch -n N"
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InputError(f"expected 1 to {MAX_DEVICES} virtual devices, got {num_devices}")
    if sys.platform != "linux":
        raise InputError(f"virtual devices need MPS, which exists for Linux only; {instead}")
    if shutil.which("nvidia-smi") is None:
        raise InputError(f"virtual devices need an NVIDIA GPU, but there is no nvidia-smi on the PATH; {instead}")
    if not (listed := _gpus()).startswith("GPU "):
        raise InputError(
            f"virtual devices need an NVIDIA GPU, but nvidia-smi -L says: {listed or 'nothing'}; {instead}"
        )
    if shutil.which(PROGRAM) is None:
        raise InputError(
            f"virtual devices need MPS, but there is no {PROGRAM} on the PATH; it comes with NVIDIA's driver "
            "(nvidia-compute-utils on Ubuntu and Debian, nvidia-driver-cuda on Fedora); containers need it mounted"
        )


def _gpus() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]


def _client_environment(folder: Path, num_devices: int) -> dict[str, str]:
    return _daemon_environment(folder) | {
        "CUDA_VISIBLE_DEVICES": "0",  # the daemon's only GPU, which has number 0 for its clients
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // num_devices),
        # A stream that waits for another rank blocks streams in the same hardware queue; by default a client gets two.
        _QUEUES_VARIABLE: os.environ.get(_QUEUES_VARIABLE, str(min(32, _NUM_QUEUES // num_devices))),
        VIRTUAL_VARIABLE: str(num_devices),
    }


def _daemon_environment(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def _stop_supervisor(supervisor: subprocess.Popen[str], folder: Path | None) -> None:
    """Let the supervisor clean up. If it was killed, ask the daemon to quit from here."""
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with suppress(OSError):
        supervisor.stdin.close()
    try:
        code = supervisor.wait(timeout=SUPERVISOR_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        code = supervisor.wait()
    supervisor.stdout.close()
    if code != 0 and folder is not None and folder.exists():
        _quit(folder)
        shutil.rmtree(folder, ignore_errors=True)


# The supervisor process.


def supervise() -> int:
    """Start MPS, print its folder, and stop it when our stdin reaches its end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    _adopt_orphans()
    try:
        folder = Path(tempfile.mkdtemp(prefix="spindle-mps-"))
    except OSError as error:
        print(f"{_ERROR}cannot create a temporary folder ({error.strerror})", flush=True)
        return 0
    try:
        problem = _start(folder)
        print(f"{_ERROR}{problem}" if problem else f"{_READY}{folder}", flush=True)
        if not problem:
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
    """Start the daemon. Returns one line that says why it did not start, or None."""
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    log = folder / "start.log"  # not a pipe: the daemon would keep it open
    try:
        with log.open("wb") as file:
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
        return f"{PROGRAM} -d has not finished after {START_S:g} s"
    except OSError as error:
        return f"{PROGRAM}: {error.strerror}"
    if done.returncode == 0:
        return None
    output = " ".join(log.read_text(errors="replace").split())
    return f"{PROGRAM} -d ended with exit code {done.returncode}{': ' if output else ''}{output}"


def _stop(folder: Path) -> None:
    _quit(folder)
    end_s = time.monotonic() + QUIT_S
    while (remaining := _descendants()) and time.monotonic() < end_s:
        time.sleep(0.02)
    while remaining:
        for pid in remaining:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        remaining = _descendants()
        if time.monotonic() > end_s + QUIT_S:  # stuck in a system call; they end when it returns
            return


def _quit(folder: Path) -> None:
    """Ask the daemon of this folder to quit. It does so when it has no clients left."""
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
    """The pids of all our descendants, after reaping those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                # The name, in parentheses, may contain anything; the state and the parent come after it.
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    descendants: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        descendants += sorted(generation)
    return descendants


if __name__ == "__main__":
    sys.exit(supervise())
