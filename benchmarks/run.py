"""Runs every benchmark and writes benchmarks/results: python benchmarks/run.py"""

from __future__ import annotations

import cells
import planning_time
import random_graphs
import simulator_rate

if __name__ == "__main__":
    random_graphs.main(100)
    cells.main()
    planning_time.main()
    simulator_rate.main()
