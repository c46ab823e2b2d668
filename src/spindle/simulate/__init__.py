"""The simulator: Program × Profile → Timeline, with memory."""

from spindle.simulate.accumulation import accumulated, simulate_step
from spindle.simulate.costs import Costs, costs_of
from spindle.simulate.simulate import simulate

__all__ = ["Costs", "accumulated", "costs_of", "simulate", "simulate_step"]
