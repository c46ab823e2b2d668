"""Start and end the processes of a training script. Knows processes and ranks, neither torch nor plans.

Nothing is imported here: every worker imports this package before the first line of its script.
"""
