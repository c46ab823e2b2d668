"""Who starts the processes of a training script, and who ends them? Knows processes and ranks, neither torch nor plans.

Nothing is imported here: every worker passes through this package before the first line of its script.
"""
