"""What do we tell people? Tables, the terminal Gantt, the figure, explanations: pure functions of plans and timelines.

Nothing is imported here, so that one who wants a number does not load the drawing.
"""
