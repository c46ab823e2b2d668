"""Everything about virtual devices that needs a GPU, as one command:

    python tests/gpu/virtual_devices.py [--devices 8] [--only PART,...] [--measure FILE]

(LOGS=FOLDER keeps the output of all ranks.)

Checks the backend on ranks that share one GPU through MPS, trains towers as deep as CLIP's, checks that a rank or a
launcher that is killed ends everything within seconds, and, if asked to, measures. Ends with exit code 0 when all of it
holds. (`all.py --backend ipc` has all other trainings.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 150


def outcome(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and output of a job; one that hangs is stopped, so that it says where."""
    try:
        out, err = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        out, err = job.communicate()
        err = f"this took more than {LIMIT_S} s\n{err}"
    return job.returncode, out, err


def launched(script: str, *arguments: str, devices: int) -> subprocess.Popen[str]:
    text = (
        "import sys; from pathlib import Path; from spindle.launch.launch import launch\n"
        "logs = Path(sys.argv[3]) if sys.argv[3] else None\n"
        "sys.exit(launch(Path(sys.argv[1]), sys.argv[4:], int(sys.argv[2]), logs, share_gpu=True))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", text, str(HERE / script), str(devices), os.environ.get("LOGS", ""), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mps_processes() -> set[str]:
    """Daemons and servers of MPS on this machine."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith("nvidia-cuda-mps"):
                names.add(path.parent.name)
        except OSError:
            continue
    return names


def wait_until_gone(before: set[str]) -> float:
    """How long what has been started for us takes to end."""
    begin_s = time.monotonic()
    while mps_processes() - before:
        assert time.monotonic() - begin_s < 20, "MPS is still there"
        time.sleep(0.05)
    return time.monotonic() - begin_s


def run_part(part: str, devices: int) -> str:
    before = mps_processes()
    job = launched("ranks.py", part, devices=devices)
    code, out, err = outcome(job)
    assert code == 0, f"exit code {code}\n{out}\n{err}"
    assert mps_processes() == before, "MPS is still there"
    return out


def kill_a_rank(devices: int, how: str) -> str:
    before = mps_processes()
    begin_s = time.monotonic()
    job = launched("ranks.py", how, devices=devices)
    code, out, err = outcome(job)
    assert code == 1, f"exit code {code}\n{out}\n{err}"
    assert err.startswith("error: rank 1 was killed by SIGKILL"), err
    noticed = [float(line.split()[1]) for line in out.splitlines() if line.startswith("noticed ")]
    assert noticed, f"{out}\n{err}"
    assert noticed[0] < 5
    wait_until_gone(before)
    return f"{how}: rank 0 noticed after {noticed[0]:.2f} s; job {time.monotonic() - begin_s:.1f} s"


def kill_the_launcher(devices: int) -> str:
    before = mps_processes()
    job = launched("ranks.py", "sleep", devices=devices)
    assert job.stdout is not None
    assert job.stdout.readline() == "asleep\n"
    assert mps_processes() - before, "MPS is not there"
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    return f"kill_the_launcher: nothing of MPS left after {wait_until_gone(before):.2f} s"


def measure(devices: int, file: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        job = launched("ranks.py", "measure", str(raw), devices=devices)
        code, out, err = outcome(job)
        assert code == 0, f"exit code {code}\n{out}\n{err}"
        file.write_text(json.dumps(json.loads(raw.read_text()), indent=1) + "\n")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    parts = {
        "checks": lambda: run_part("checks", given.devices),
        "towers": lambda: run_part("towers", given.devices),
        "kill_waiting": lambda: kill_a_rank(3, "kill_waiting"),
        "kill_on_stream": lambda: kill_a_rank(3, "kill_on_stream"),
        "kill_the_launcher": lambda: kill_the_launcher(2),
    }
    if given.measure:
        parts["measure"] = lambda: measure(given.devices, given.measure)
    failed = 0
    for name, part in parts.items():
        if given.only and name not in given.only.split(","):
            continue
        begin_s = time.monotonic()
        try:
            print(f"== {name}\n{part()}", flush=True)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"== {name} FAILED: {error}", flush=True)
        print(f"   {time.monotonic() - begin_s:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(HERE.parent.parent / "src"))
    sys.path.insert(0, str(HERE.parent.parent / "src"))
    sys.exit(main())
