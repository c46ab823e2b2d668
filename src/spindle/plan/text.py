"""The text form of a plan: a line for each wave, `op*layers@devices` for each slot.

    vision*12@0-3 text*6@4
    head*1@0-3
    > F0 F1 B1 B0

Devices stand in share order (`4-7,0-3` is not `0-7`). Behind a slot, `|1` is its lane; `r3` and `o2` how many layers
are recomputed and offloaded; `~1` its round; `^0.25` a start in folded time that is later than its data and devices ask
for. A line of `>` has the order of the passes, where backward does not mirror forward: forward, backward, or the
gradients of inputs (I) and weights (W), of slots by number. Lines of `# key value` in front carry what slots do not.
Names are written as they are, with blanks as `%20` and a `>` in front as `%3E`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote, unquote

from spindle.errors import PlanError
from spindle.plan.assemble import Piece, assemble, assemble_passes
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Plan, Slot
from spindle.profile import Profile

_SLOT = re.compile(
    r"(?P<op>\S+)\*(?P<layers>\d+)@(?P<devices>[\d,-]+)"
    r"(\|(?P<lane>\d+))?(r(?P<recomputed>\d+))?(o(?P<offloaded>\d+))?(~(?P<round>\d+))?(\^(?P<start>[\d.e+-]+))?"
)
PASS_LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}
_PASS = re.compile(r"([FBIW])(\d+)")


def format_devices(devices: Sequence[int]) -> str:
    """Devices in order, rising runs as ranges: `0-3,8`."""
    parts: list[str] = []
    position = 0
    while position < len(devices):
        end = position
        while end + 1 < len(devices) and devices[end + 1] == devices[end] + 1:
            end += 1
        parts.append(f"{devices[position]}-{devices[end]}" if end > position else f"{devices[position]}")
        position = end + 1
    return ",".join(parts)


def format_plan(plan: Plan, mark: int | None = None) -> str:
    """Write the text form; `mark` is the number of a slot to mark, for errors."""
    lines = [f"# planner {plan.planner}"]
    lines += [f"# tensor {_quoted(module)} {degree}" for module, degree in plan.tensor_degrees if degree > 1]
    lines += [f"# recompute {_quoted(op)}" for op in plan.recompute]
    lines += ["# optimizer sharded"] if plan.shard_optimizer else []
    line: list[str] = []
    wave = 0
    for number, slot in enumerate(plan.slots):
        if slot.wave != wave:
            lines.append(" ".join(line))
            line, wave = [], slot.wave
        text = f"{_quoted(slot.op)}*{slot.num_layers}@{format_devices(slot.devices)}"
        text += f"|{slot.lane}" if slot.lane else ""
        text += f"r{slot.recomputed}" if slot.recomputed else ""
        text += f"o{slot.offloaded}" if slot.offloaded else ""
        text += f"~{slot.round}" if slot.round else ""
        text += f"^{slot.not_before_s!r}" if slot.not_before_s else ""
        line.append(f">>> {text} <<<" if number == mark else text)
    lines.append(" ".join(line))
    if plan.passes:
        lines.append(" ".join([">", *(f"{PASS_LETTERS[pass_.kind]}{pass_.slot}" for pass_ in plan.passes)]))
    return "\n".join(lines) + "\n"


_SAFE = "/#[]:()<>=,+!?&$'\""


def _quoted(name: str) -> str:
    """Quote a name into one word; a leading `>` would start a line of passes."""
    text = quote(name, safe=_SAFE)
    return "%3E" + text[1:] if text.startswith(">") else text


def parse_plan(text: str, profile: Profile) -> Plan:
    """Parse the text form; every line of slots is a wave."""
    position = {op.name: index for index, op in enumerate(profile.graph.metaops)}
    planner = "text"
    degrees: dict[str, int] = {}
    recompute: set[str] = set()
    shard_optimizer = False
    pieces: list[Piece] = []
    passes: list[tuple[int, str]] = []
    lines: list[int] = []  # where each pass stands
    lean = 0  # the first line with layers that are recomputed or offloaded
    wave = -1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("# "):
            words = [unquote(word) for word in line[1:].split()]
            if words[:1] == ["planner"]:
                planner = words[1]
            elif words[:1] == ["tensor"]:
                degrees[words[1]] = int(words[2])
            elif words[:1] == ["recompute"]:
                recompute.add(words[1])
            elif words == ["optimizer", "sharded"]:
                shard_optimizer = True
            continue
        if line.startswith(">"):
            parsed = [_parse_pass(word, number) for word in line[1:].split()]
            passes += parsed
            lines += [number] * len(parsed)
            continue
        wave += bool(line.strip())
        for word in line.split():
            match = _SLOT.fullmatch(word)
            if match is None:
                raise PlanError(
                    f"line {number}: {word!r} is no slot; expected op*layers@devices, such as vision*12@0-3"
                )
            op = unquote(match["op"])
            if op not in position:
                raise PlanError(f"line {number}: no op is called {op!r}; ops: {', '.join(position)}")
            lean = lean or (number if match["recomputed"] or match["offloaded"] else 0)
            pieces.append(
                Piece(
                    op=position[op],
                    num_layers=int(match["layers"]),
                    devices=_parse_devices(match["devices"]),
                    round=int(match["round"] or 0),
                    not_before_s=float(match["start"] or 0.0),
                    wave=wave,
                    lane=int(match["lane"] or 0),
                    recomputed=int(match["recomputed"] or 0),
                    offloaded=int(match["offloaded"] or 0),
                )
            )
    setting = profile.setting(degrees, frozenset(recompute), shard_optimizer)
    for (slot, _), number in zip(passes, lines, strict=True):
        if slot >= len(pieces):
            raise PlanError(f"line {number}: there is a pass of slot {slot}; slots are 0 to {len(pieces) - 1}")
    if passes:
        return assemble_passes(profile, setting, planner, pieces, passes)
    if lean:
        raise PlanError(f"line {lean}: layers are recomputed or offloaded, which only plans with passes can; write >")
    return assemble(profile, setting, planner, pieces)


def _parse_pass(word: str, line: int) -> tuple[int, str]:
    match = _PASS.fullmatch(word)
    if match is None:
        raise PlanError(f"line {line}: {word!r} is no pass; expected a letter of F, B, I, W and a slot, such as F0")
    return int(match[2]), next(kind for kind, letter in PASS_LETTERS.items() if letter == match[1])


def _parse_devices(text: str) -> tuple[int, ...]:
    devices: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        devices += range(int(first), int(last or first) + 1)
    return tuple(devices)


def marked(plan: Plan, slot: Slot) -> str:
    """The plan with one slot marked, indented for an error message."""
    number = next(index for index, candidate in enumerate(plan.slots) if candidate is slot)
    return "\n" + "".join(f"    {line}\n" for line in format_plan(plan, mark=number).splitlines())
