"""How long does it take to plan a script of ten billion parameters, and how much memory does it need?

python benchmarks/planned_script.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from common import markdown, publish

SCRIPT = Path(__file__).resolve().parent / "scripts" / "ten_billion.py"
CLUSTER = "h100x16"


def main() -> None:
    rows, data = [], {}
    for verb in ("plan", "bound"):
        begin_s = time.perf_counter()
        command = [sys.executable, "-m", "spindle", verb, str(SCRIPT), "--cluster", CLUSTER]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - begin_s
        # Of the largest of all processes so far: the script's own, or the one that plans.
        peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        data[verb] = {"wall_s": wall_s, "peak_bytes": peak_bytes}
        rows.append([f"spindle {verb}", f"{wall_s:.1f} s", f"{peak_bytes / 1e6:.0f} MB"])
    publish("planned_script", data, markdown(["command", "wall", "largest process so far"], rows))


if __name__ == "__main__":
    main()
