"""The scheduler: one pure function from a state and an event to the next state and actions.

It reads no clock, no file and no random number, so the same events always give the same actions, byte for byte. An
engine calls it with every event in order, writes the actions down, executes them, and sends `Ticked` when
`State.next_round_s` has come.
"""

from __future__ import annotations

from spindle.fleet.events import Action, Event
from spindle.fleet.state import State


def schedule(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after an event, and what is to be done.

    Only `Ticked` reallocates (a round); every other event is written into the state and may make a round due: at most
    every `min_interval_s`, at least every `max_interval_s`. Events of attempts that are not the newest are ignored.
    """
    raise NotImplementedError
