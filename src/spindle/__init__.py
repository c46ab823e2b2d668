"""Spindle trains several multimodal tasks in one step without leaving devices idle."""

__version__ = "0.1.0"
