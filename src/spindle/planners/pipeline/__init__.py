"""Planner `pipeline`: which order of passes on each pipeline rank, and with which memory choices?"""
