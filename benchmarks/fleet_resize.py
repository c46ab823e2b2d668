"""Seconds lost to a resize, beside a stop and start: python benchmarks/fleet_resize.py [--rounds 5]

Ray on this machine with one node of three devices that do not exist. One job trains in float64; an urgent job takes
two of its devices again and again, so it is resized to one rank and back to more. In every other round its next
attempt is prepared while it trains on (a live resize); in the others the scheduler is told that the engine cannot do
so, and stops it before it starts it. Lost: from the last step of an attempt to the first of the next, less a usual
step. Both happen in turns in one fleet, beside whatever else the machine does. At the end: the parameters against one
undisturbed process, and the steps that are missing or were taken twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, markdown, publish

sys.path.insert(0, str(ROOT / "tests"))

from live_fleets import LiveTestFleet, fleet_file, largest_difference, steps_of, undisturbed, weights_of

LIMIT_S = 300.0
PAUSE_S = 0.6
STEPS = 4000
LIVE, COLD = "live", "stop and start"


class ComparedFleet(LiveTestFleet):
    """A fleet whose engine prepares nothing while there is a file `cold`."""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, __file__, "--scheduler", str(self.folder / "cold"), *arguments]


def scheduler(cold: Path, arguments: list[str]) -> int:
    from spindle.cli.main import run
    from spindle.fleet.ray_engine import RayEngine

    prepare = RayEngine.prepare
    RayEngine.prepare = lambda self, start: not cold.exists() and prepare(self, start)  # type: ignore[method-assign]
    return run(["fleet", "up", *arguments])


def resizes(folder: Path, num_rounds: int) -> dict[str, Any]:
    machines = fleet_file(folder / "fleet.toml", a100=(3,))
    fleet = ComparedFleet(folder, str(machines), "--interval", "1", "--reallocation", "1")
    kinds: dict[int, str] = {}  # of resizes, by attempt
    try:
        fleet.up()
        _urgent(fleet, "first")  # so that both cells are planned before the first measured resize
        arguments = ("--pause", str(PAUSE_S), "--scales", "--every", "1000")
        wide = fleet.submit("wide", STEPS, *arguments, options=("--count", "1-3"))
        _wait_for_steps(fleet, wide, 25, attempt=1)  # its rate is known
        _end(fleet, "first")
        attempt = _next_attempt(fleet, wide, 1)
        for number in range(num_rounds * 2):
            kind = (LIVE, COLD, COLD, LIVE)[number % 4]
            (folder / "cold").touch() if kind == COLD else (folder / "cold").unlink(missing_ok=True)
            for name in (f"urgent{number}", ""):
                _urgent(fleet, name) if name else _end(fleet, f"urgent{number}")
                attempt = _next_attempt(fleet, wide, attempt)
                kinds[attempt] = kind
                say(f"{kind}: attempt {attempt}, {fleet.job('wide')['cell']}")
        (wide / "fast").touch()
        phase = fleet.wait_for_end("wide", LIMIT_S)
        lines = [line for line in steps_of(wide) if "step" in line]
        steps = [line["step"] for line in lines]
        return {
            "phase": phase,
            "lost": [{"kind": kinds[each], **_lost(lines, each)} for each in sorted(kinds)],
            "num_missing": STEPS - len(set(steps)),
            "num_repeated": len(steps) - len(set(steps)),
            "difference": largest_difference(weights_of(wide), undisturbed(folder / "undisturbed" / "wide", STEPS)),
        }
    finally:
        fleet.down()


def _urgent(fleet: LiveTestFleet, name: str) -> None:
    options = ("--kinds", "a100", "--count", "2", "--priority", "urgent")
    folder = fleet.submit(name, 100_000, "--pause", "0.5", options=options)
    fleet.wait(lambda: any("step" in line for line in steps_of(folder)), f"{name} trains", LIMIT_S)


def _end(fleet: LiveTestFleet, name: str) -> None:
    code, text = fleet.call("stop", name)
    assert code == 0, text


def _next_attempt(fleet: LiveTestFleet, folder: Path, before: int) -> int:
    """Wait until a later attempt has taken enough steps for its rate to be known; its number."""

    def later() -> int:
        return max((line["attempt"] for line in steps_of(folder) if "step" in line), default=0)

    fleet.wait(lambda: later() > before, f"attempt {before + 1}", LIMIT_S)
    _wait_for_steps(fleet, folder, 25, attempt=later())
    return later()


def _wait_for_steps(fleet: LiveTestFleet, folder: Path, count: int, attempt: int) -> None:
    fleet.wait(
        lambda: sum("step" in line and line["attempt"] == attempt for line in steps_of(folder)) >= count,
        f"{count} steps of attempt {attempt}",
        LIMIT_S,
    )


def _lost(lines: list[dict[str, Any]], attempt: int) -> dict[str, float]:
    """Seconds between two attempts, less a step of the second."""
    last = [line["time_s"] for line in lines if line["attempt"] < attempt][-1]  # of one that took steps
    own = [line["time_s"] for line in lines if line["attempt"] == attempt]
    step_s = statistics.median(end - begin for begin, end in itertools.pairwise(own))
    return {"lost_s": own[0] - last - step_s, "step_s": step_s}


def shown(data: dict[str, Any]) -> str:
    lost = {kind: [each["lost_s"] for each in data["lost"] if each["kind"] == kind] for kind in (LIVE, COLD)}
    medians = {kind: statistics.median(times_s) for kind, times_s in lost.items()}
    table = markdown(
        ["resize", "how often", "seconds lost: median", "least", "most"],
        [
            [kind, str(len(times_s)), *(f"{value:.1f}" for value in (medians[kind], min(times_s), max(times_s)))]
            for kind, times_s in lost.items()
        ],
    )
    return (
        f"{table}\n\nA live resize loses {medians[LIVE] / medians[COLD]:.2f} of what a stop and start loses. One job "
        f"of {STEPS} steps, resized to one rank and back: {data['num_missing']} steps are missing, "
        f"{data['num_repeated']} were taken twice; parameters against one undisturbed process, worst tensor, float64: "
        f"{data['difference']:.1e}."
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, with two resizes each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-resize-") as name:
        data = resizes(Path(name), options.rounds)
    say(json.dumps(data))
    publish("fleet_resize", data, shown(data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scheduler"]:
        sys.exit(scheduler(Path(sys.argv[2]), sys.argv[3:]))
    main()
