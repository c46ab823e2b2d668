"""How many instructions does the simulator execute in a second? python benchmarks/simulator_rate.py

From a Program to its Timeline, unfolding and costs included, on one core; CLIP-10 under the `paper` plan, whose many
slots make long programs.
"""

from __future__ import annotations

import statistics
import time

from common import markdown, publish
from planning_time import profile_of
from spindle.planners import make_plan
from spindle.program import instances_of, lower
from spindle.simulate import costs_of, simulate
from spindle.simulate.engine import run


def main() -> None:
    rows, data = [], []
    for num_devices in (64, 256, 1024, 8192):
        profile = profile_of(num_devices)
        program = lower(make_plan(profile, "paper"), profile)
        simulate(program, profile)
        whole, loop = [], []
        for _ in range(5):
            began = time.perf_counter()
            simulate(program, profile)
            whole.append(time.perf_counter() - began)
            instances = instances_of(program)
            costs = costs_of(program, instances, profile)
            began = time.perf_counter()
            run(*instances.arrays, costs.work)
            loop.append(time.perf_counter() - began)
        count = program.num_instructions
        rates = [count / statistics.median(times) for times in (whole, loop)]
        rendezvous = instances.num_rendezvous
        rows.append([str(num_devices), f"{count:,}", f"{rendezvous:,}", *(f"{rate:,.0f}" for rate in rates)])
        data.append({"num_devices": num_devices, "instructions": count, "rendezvous": rendezvous, "rates": rates})
    header = ["devices", "instructions", "rendezvous", "instructions/s", "in the compiled loop alone"]
    publish("simulator_rate", {"cells": data}, markdown(header, rows))


if __name__ == "__main__":
    main()
