"""The simulator: Program × Profile → Timeline, with memory."""

from spindle.simulate.costs import Costs, costs_of
from spindle.simulate.simulate import simulate

__all__ = ["Costs", "costs_of", "simulate"]
