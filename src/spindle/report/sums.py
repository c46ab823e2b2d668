"""How each device spends its time: what `page/sums.js` cannot derive itself."""

from __future__ import annotations

import numpy as np

from spindle.plan import pass_s, setting_of
from spindle.profile import Profile
from spindle.program import Backward, Program

CLASSES = ("forward", "backward", "recompute", "optimizer", "transfer", "sync", "idle")


def recompute_shares(program: Program, profile: Profile) -> np.ndarray:
    """For each instruction, the share of its time that is recomputation, by its curve."""
    setting = setting_of(program.plan, profile)
    shares = np.zeros(len(program.instructions))
    for number, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Backward) or not instruction.makes_inputs:
            continue
        slot, op = program.plan.slots[instruction.slot], program.slots[instruction.slot].op
        num_recomputed = slot.num_layers if setting.recompute[op] else slot.recomputed
        if num_recomputed:
            curve = profile.curve(op, setting)
            whole_s = pass_s(slot, instruction.part, curve, setting.recompute[op])
            shares[number] = num_recomputed * curve.times_s(len(slot.devices))[0] / whole_s if whole_s > 0 else 0.0
    return shares
