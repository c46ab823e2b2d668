"""Tests by what they need: unit, laws (hypothesis), golden. None needs a GPU, torch or more than one host."""

from hypothesis import settings

settings.register_profile("spindle", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("spindle")
