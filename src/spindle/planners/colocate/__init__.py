"""Planner `colocate`: encoders and language model on the same devices (MegaScale-Omni)."""
