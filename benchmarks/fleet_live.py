"""A live fleet on this machine: python benchmarks/fleet_live.py [--kills 50]

Ray with three nodes that do not exist: 3 + 3 devices of one kind, 2 of another. Six real jobs, in float64: one that
grows and shrinks beside an urgent one, two that share a node, one that moves to the other kind, one that comes late;
then a node is killed, and comes back. Reported: the parameters of each job against one undisturbed process, how often
each was resized and moved, seconds from the killed node to the next step, and whether the recorded events give the same
decisions again. Then the scheduler is killed many times, at random moments, beside a long job and short ones that
arrive meanwhile: which steps were lost or taken twice?
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, markdown, publish

sys.path.insert(0, str(ROOT / "tests"))

from live_fleets import (
    LiveTestFleet,
    fleet_file,
    largest_difference,
    processes_of,
    steps_of,
    undisturbed,
    weights_of,
)
from spindle.fleet.event_log import replay
from spindle.fleet.ray_nodes import session_processes
from spindle.fleet.store import AttemptRecord, Store

PAUSE_S = 0.15
LIMIT_S = 400.0
STEADY_STEPS = 1200


def attempts(fleet: LiveTestFleet) -> dict[str, list[AttemptRecord]]:
    with Store.open(fleet.store_path) as store:
        records = store.attempts()
    return {job: [record for record in records if record.job == job] for job in {record.job for record in records}}


def six_jobs(folder: Path) -> dict[str, Any]:
    """Two are resized, one moves to another kind, one is urgent; a node is killed."""
    machines = fleet_file(folder / "fleet.toml", a100=(3, 3), l40s=(2,))
    fleet = LiveTestFleet(folder, str(machines), "--interval", "2", "--reallocation", "2")
    lengths = {"mover": 160, "wide": 700, "pair": 400, "urgent": 40, "small": 60, "late": 40}
    folders: dict[str, Path] = {}

    def submit(name: str, *options: str) -> None:
        say(f"submit {name}")
        folders[name] = fleet.submit(name, lengths[name], "--pause", str(PAUSE_S), options=options)

    try:
        fleet.up()
        submit("mover", "--count", "1")
        fleet.wait_for_step(folders["mover"], 30)  # its rate is known
        submit("wide", "--kinds", "a100", "--count", "3-6")
        submit("pair", "--kinds", "l40s", "--count", "1-2")
        fleet.wait_for_step(folders["wide"], 10)
        submit("urgent", "--kinds", "a100", "--count", "3", "--priority", "urgent")
        submit("small", "--kinds", "l40s", "--count", "1")
        submit("late", "--count", "1")
        fleet.wait_for_end("urgent", LIMIT_S)
        wide = fleet.wait(lambda: fleet.job("wide")["phase"] == "running" and fleet.job("wide"), "wide runs", LIMIT_S)
        node = wide["nodes"][-1]
        before = len(attempts(fleet)["wide"])
        say(f"kill {node}")
        killed_s = time.time()
        fleet.kill_node(node)
        line = fleet.wait_for_step(folders["wide"], 0, attempt=before + 1)
        recovery_s = line["time_s"] - killed_s
        say(f"next step after {recovery_s:.1f} s")
        fleet.add_node(node, "a100", 3)
        phases = {name: fleet.wait_for_end(name, LIMIT_S) for name in lengths}
        rows = []
        for name, records in sorted(attempts(fleet).items()):
            reference = undisturbed(folder / "undisturbed" / name, lengths[name])
            steps = [line["step"] for line in steps_of(folders[name]) if "step" in line]
            cells = [(record.cell.kind, record.cell.num_devices) for record in records]
            rows.append(
                {
                    "job": name,
                    "phase": phases[name],
                    "cells": [record.cell.text for record in records],
                    "is_resized": len({count for _, count in cells}) > 1,
                    "is_moved": len({kind for kind, _ in cells}) > 1,
                    "num_steps": lengths[name],
                    "num_repeated": len(steps) - len(set(steps)),
                    "num_missing": lengths[name] - len(set(steps)),
                    "difference": largest_difference(weights_of(folders[name]), reference),
                }
            )
        result = replay(fleet.log())
        return {
            "jobs": rows,
            "recovery_s": recovery_s,
            "num_events": result.num_events,
            "num_actions": result.num_actions,
            "is_replayed": not result.difference,
        }
    finally:
        finish(fleet)


def killed_schedulers(folder: Path, num_kills: int) -> dict[str, Any]:
    """A scheduler that is killed at random moments."""
    machines = fleet_file(folder / "fleet.toml", a100=(3, 3), l40s=(2,))
    fleet = LiveTestFleet(folder, str(machines), "--interval", "1", "--reallocation", "2")
    generator = random.Random(0)
    shorts: list[Path] = []
    try:
        fleet.up()
        steady = fleet.submit(
            "steady", STEADY_STEPS, "--pause", str(PAUSE_S), options=("--kinds", "l40s", "--count", "1")
        )
        fleet.wait_for_step(steady, 1)
        for number in range(num_kills):
            if number % 10 == 0:  # its submission, plan and start fall into the kills that follow
                short = f"short{number}"
                shorts.append(fleet.submit(short, 20, options=("--kinds", "a100", "--count", "1")))
            time.sleep(generator.uniform(0.0, 4.0))
            fleet.kill_scheduler()
            fleet.start()
        fleet.wait(fleet.is_up, "the scheduler is up")
        phases = {path.name: fleet.wait_for_end(path.name, LIMIT_S) for path in (steady, *shorts)}
        steps = [line["step"] for line in steps_of(steady) if "step" in line]
        result = replay(fleet.log())
        return {
            "num_kills": num_kills,
            "phases": phases,
            "num_attempts": {name: len(records) for name, records in attempts(fleet).items()},
            "num_repeated": len(steps) - len(set(steps)),
            "num_missing": STEADY_STEPS - len(set(steps)),
            "num_events": result.num_events,
            "is_replayed": not result.difference,
        }
    finally:
        finish(fleet)


def finish(fleet: LiveTestFleet) -> None:
    """End a fleet; nothing may be left of it."""
    local = fleet.local()
    fleet.down()
    left = [*session_processes(local), *processes_of(fleet.folder)]
    assert not left, f"processes are left: {left}"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-live-") as name:
        for part in ("jobs", "kills"):
            (Path(name) / part).mkdir()
        data: dict[str, Any] = {"six_jobs": six_jobs(Path(name) / "jobs")}
        say(json.dumps(data))
        data["killed_schedulers"] = killed_schedulers(Path(name) / "kills", options.kills)
    jobs, kills = data["six_jobs"], data["killed_schedulers"]
    table = markdown(
        ["job", "devices, attempt after attempt", "steps", "taken twice", "missing", "parameters: error"],
        [
            [
                row["job"],
                ", ".join(row["cells"]),
                str(row["num_steps"]),
                str(row["num_repeated"]),
                str(row["num_missing"]),
                f"{row['difference']:.1e}",
            ]
            for row in jobs["jobs"]
        ],
    )
    text = (
        f"{table}\n\nThe error is that of the worst tensor against one undisturbed process, in float64. From a killed "
        f"node to the job's next step: {jobs['recovery_s']:.1f} s. {jobs['num_events']} events gave "
        f"{jobs['num_actions']} actions; replayed, {'the same' if jobs['is_replayed'] else 'DIFFERENT ones'}.\n\n"
        f"A scheduler killed {kills['num_kills']} times at random moments: of {STEADY_STEPS} steps of a job beside it "
        f"{kills['num_missing']} are missing and {kills['num_repeated']} were taken twice, in "
        f"{kills['num_attempts']['steady']} attempt; {len(kills['phases']) - 1} short jobs that arrived meanwhile: "
        f"{sum(phase == 'completed' for job, phase in kills['phases'].items() if job != 'steady')} completed. "
        f"{kills['num_events']} events, replayed: {'the same' if kills['is_replayed'] else 'DIFFERENT'} actions."
    )
    publish("fleet_live", data, text)


if __name__ == "__main__":
    main()
