"""The text form of a program: its plan, a line of dashes, then what each rank runs on each lane.

    rank 0-3 compute F0 F2 B2[0:12] B0[0:4] U
    rank 0 transfer X0 Y0

F forward, B backward, X exchange, Y exchange of gradients, S synchronise gradients, G gather parameters, U update; the
numbers are slots, links and buckets. Ranks with the same list share a line.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spindle.errors import ProgramError
from spindle.plan import format_devices, format_plan, parse_plan
from spindle.profile import Profile
from spindle.program.instructions import code, lane_name
from spindle.program.lower import lower
from spindle.program.program import Program, lane_from_pairs


def format_program(program: Program, profile: Profile) -> str:
    lines = [format_plan(program.plan).rstrip(), "---"]
    codes = [code(instruction) for instruction in program.instructions]
    for number, lane in enumerate(program.lanes):
        name = lane_name(number)
        ranks_with: dict[tuple[int, ...], list[int]] = {}
        for rank in range(program.num_ranks):
            ranks_with.setdefault(tuple(lane.of_rank(rank).tolist()), []).append(rank)
        for numbers, ranks in ranks_with.items():
            if numbers:
                lines.append(" ".join(["rank", format_devices(ranks), name, *(codes[number] for number in numbers)]))
    return "\n".join(lines) + "\n"


def parse_program(text: str, profile: Profile) -> Program:
    """Parse the text form: lower its plan, but take the order of instructions on each rank from the text."""
    plan_text, _, lane_text = text.partition("---\n")
    program = lower(parse_plan(plan_text, profile), profile)
    number_of = {code(instruction): number for number, instruction in enumerate(program.instructions)}
    pairs: dict[str, list[tuple[int, int]]] = {lane_name(number): [] for number in range(len(program.lanes))}
    for line in lane_text.splitlines():
        word, ranks, name, *codes = line.split()
        if word != "rank" or name not in pairs:
            raise ProgramError(f"expected 'rank RANKS LANE INSTRUCTIONS', got {line!r}")
        for word in codes:
            if word not in number_of:
                raise ProgramError(f"{word!r} is not an instruction of this program; it has {', '.join(number_of)}")
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                pairs[name] += [(number_of[code], rank) for code in codes]
    lanes = []
    for instructions in pairs.values():
        columns = np.array(instructions, dtype=np.int64).reshape(-1, 2)
        lanes.append(lane_from_pairs(program.num_ranks, columns[:, 0], columns[:, 1]))
    return replace(program, lanes=tuple(lanes))
