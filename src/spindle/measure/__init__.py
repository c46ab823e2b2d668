"""Measure layers, links and the optimizer on this machine, as a profile. Needs torch."""

from spindle.measure.layers import Kind, LayerMeter, measure_layers
from spindle.measure.machine import local_profile
from spindle.measure.update import measure_update

__all__ = ["Kind", "LayerMeter", "local_profile", "measure_layers", "measure_update"]
