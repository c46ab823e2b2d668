"""The text form of a plan: a line for each wave, `op*layers@devices` for each slot.

    vision*12@0-3 text*6@4
    head*1@0-3
    > F0 F1 B1 B0

Devices are in the order of their shares of the batch (`4-7,0-3` is not `0-7`). After a slot, `s4` is its sequence
degree; `|1` its lane, and `|1w2` also the lane of its weight gradients; `r3` and `o2` how many layers are recomputed
and offloaded; `~1` its round; `^0.25` a start in folded time that is later than its data and devices require. If
backward does not mirror forward, a line that starts with `>` has the order of passes: a letter (forward, backward,
input gradients, weight gradients) and the number of a slot. Lines of `# key value` at the top have what is not part of
a slot: `# quotas 64 64` are the SMs of each lane. In names, blanks are written as `%20`, and a leading `>` as `%3E`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from spindle.artifact import read_artifact, read_text_file, write_artifact, write_atomically
from spindle.errors import PlanError, ProfileError
from spindle.plan.assemble import Piece, assemble, assemble_passes
from spindle.plan.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Plan, Slot
from spindle.profile import Profile, Setting

_SLOT = re.compile(
    r"(?P<op>\S+)\*(?P<layers>\d+)@(?P<devices>\d+(-\d+)?(,\d+(-\d+)?)*)"
    r"(s(?P<sequence>\d+))?(\|(?P<lane>\d+)(w(?P<weight_lane>\d+))?)?(r(?P<recomputed>\d+))?(o(?P<offloaded>\d+))?"
    r"(~(?P<round>\d+))?(\^(?P<start>[\d.e+-]+))?",
    re.ASCII,
)
_HEADERS = {"planner": "# planner NAME", "tensor": "# tensor MODULE DEGREE", "recompute": "# recompute OP"}
_MAX_DIGITS = 9
PASS_LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}
_PASS = re.compile(r"([FBIW])(\d+)", re.ASCII)


def format_devices(devices: Sequence[int]) -> str:
    """Devices in their order, with consecutive numbers as ranges: `0-3,8`."""
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
    """The text form of a plan; for error messages, the slot with number `mark` is marked."""
    lines = [f"# planner {plan.planner}"]
    lines += [f"# tensor {_quoted(module)} {degree}" for module, degree in plan.tensor_degrees if degree > 1]
    lines += [f"# recompute {_quoted(op)}" for op in plan.recompute]
    lines += ["# optimizer sharded"] if plan.shard_optimizer else []
    lines += [f"# quotas {' '.join(map(str, plan.quotas))}"] if plan.quotas else []
    line: list[str] = []
    wave = 0
    for number, slot in enumerate(plan.slots):
        if slot.wave != wave:
            lines.append(" ".join(line))
            line, wave = [], slot.wave
        text = f"{_quoted(slot.op)}*{slot.num_layers}@{format_devices(slot.devices)}"
        text += f"s{slot.sequence_degree}" if slot.sequence_degree > 1 else ""
        text += f"|{slot.lane}" if slot.lane or slot.weight_lane is not None else ""
        text += f"w{slot.weight_lane}" if slot.weight_lane is not None else ""
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
    text = quote(name, safe=_SAFE, errors="backslashreplace")  # a file name may contain a lone surrogate
    return "%3E" + text[1:] if text.startswith(">") else text


def is_text_file(path: Path) -> bool:
    """Whether the name of a file says that it has the text form of a plan."""
    return path.suffix == ".txt"


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan: as JSON, or in its text form if the file is named `.txt`."""
    if is_text_file(path):
        write_atomically(path, format_plan(plan))
    else:
        write_artifact(path, "plan", plan)


def read_plan(path: Path, profile: Profile) -> Plan:
    """Read a plan of a profile. Raises a PlanError if it was made for another workload."""
    if is_text_file(path):
        try:
            return parse_plan(read_text_file(path), profile)
        except PlanError as error:
            raise PlanError(f"{path}, {error}") from error
    plan, graph = read_artifact(path, "plan", Plan), profile.graph
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"{path}: this plan was made for another workload: {plan.workload!r} (fingerprint {plan.fingerprint}), "
            f"expected {graph.name!r} ({graph.fingerprint}); plan this workload again"
        )
    return plan


def ops_in(text: str) -> list[str]:
    """The names of the ops in a text, where it has the text form of a plan."""
    words = (word for line in text.splitlines() if not line.startswith(("#", ">")) for word in line.split())
    return [unquote(slot["op"]) for word in words if (slot := _SLOT.fullmatch(word)) is not None]


def parse_plan(text: str, profile: Profile) -> Plan:
    """Parse the text form, in which every line of slots is a wave.

    Raises a PlanError with the line of any op, device or number that no plan of this profile can have. Whether the plan
    is legal is left to `check`.
    """
    position = profile.graph.positions
    planner = "text"
    degrees: dict[str, int] = {}
    recompute: set[str] = set()
    shard_optimizer = False
    quotas: tuple[int, ...] = ()
    pieces: list[Piece] = []
    piece_lines: list[int] = []
    passes: list[tuple[int, str]] = []
    pass_lines: list[int] = []
    first_memory_line = 0  # the first one with recomputed or offloaded layers
    wave = -1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("# "):
            words = [unquote(word) for word in line[1:].split()]
            header = words[0] if words else ""
            if header in _HEADERS and len(words) != len(_HEADERS[header].split()) - 1:
                raise PlanError(f"line {number}: expected {_HEADERS[header]}, got {line!r}")
            if header == "planner":
                planner = words[1]
            elif header == "tensor":
                degrees[words[1]] = _parse_degree(words[1], words[2], profile, number)
            elif header == "recompute":
                if words[1] not in position:
                    raise PlanError(f"line {number}: no op is called {words[1]!r}; ops: {', '.join(position)}")
                recompute.add(words[1])
            elif words == ["optimizer", "sharded"]:
                shard_optimizer = True
            elif header == "quotas":
                quotas = _parse_quotas(words[1:], line, number)
            continue
        if line.startswith(">"):
            parsed = [_parse_pass(word, number) for word in line[1:].split()]
            passes += parsed
            pass_lines += [number] * len(parsed)
            continue
        wave += bool(line.strip())
        for word in line.split():
            pieces.append(_parse_slot(word, position, wave, profile, number))
            piece_lines.append(number)
            first_memory_line = first_memory_line or (number if pieces[-1].recomputed or pieces[-1].offloaded else 0)
    setting = profile.setting(degrees, frozenset(recompute), shard_optimizer)
    _refuse_layers_and_devices(pieces, piece_lines, profile, setting)
    for (slot, _), number in zip(passes, pass_lines, strict=True):
        if slot >= len(pieces):
            raise PlanError(f"line {number}: there is a pass of slot {slot}; slots are 0 to {len(pieces) - 1}")
    if passes:
        return replace(assemble_passes(profile, setting, planner, pieces, passes), quotas=quotas)
    if first_memory_line:
        raise PlanError(
            f"line {first_memory_line}: layers are recomputed or offloaded, which only plans with passes can; write >"
        )
    return replace(assemble(profile, setting, planner, pieces), quotas=quotas)


def _parse_slot(word: str, position: Mapping[str, int], wave: int, profile: Profile, line: int) -> Piece:
    match = _SLOT.fullmatch(word)
    if match is None:
        raise PlanError(f"line {line}: {word!r} is not a slot; expected op*layers@devices, such as vision*12@0-3")
    op = unquote(match["op"])
    if op not in position:
        raise PlanError(f"line {line}: no op is called {op!r}; ops: {', '.join(position)}")
    return Piece(
        op=position[op],
        num_layers=_parse_count(match["layers"], line),
        devices=_parse_devices(match["devices"], profile.cluster.num_devices, line),
        round=_parse_count(match["round"], line),
        not_before_s=_parse_start(match["start"], line),
        wave=wave,
        lane=_parse_count(match["lane"], line),
        weight_lane=_parse_count(match["weight_lane"], line) if match["weight_lane"] else None,
        recomputed=_parse_count(match["recomputed"], line),
        offloaded=_parse_count(match["offloaded"], line),
        sequence_degree=_parse_count(match["sequence"], line) or 1,
    )


def _refuse_layers_and_devices(
    pieces: Sequence[Piece], lines: Sequence[int], profile: Profile, setting: Setting
) -> None:
    """Refuse layers that an op does not have, and numbers of devices for which its curve has no time."""
    if not pieces:
        raise PlanError("the text of a plan has no slots; expected op*layers@devices, such as vision*12@0-3")
    num_layers = [0] * len(profile.graph.metaops)
    for piece, line in zip(pieces, lines, strict=True):
        op = profile.graph.metaops[piece.op]
        num_layers[piece.op] += piece.num_layers
        if not 0 < piece.num_layers <= num_layers[piece.op] <= op.num_layers:
            raise PlanError(
                f"line {line}: {op.name} has {op.num_layers} layers, up to here its slots run {num_layers[piece.op]} "
                f"and this one {piece.num_layers}"
            )
        try:
            profile.curve(piece.op, setting).times_s(len(piece.devices))
        except ProfileError as error:
            raise PlanError(f"line {line}: {op.name}: {error}") from error


def _parse_degree(module: str, text: str, profile: Profile, line: int) -> int:
    if module not in profile.graph.modules:
        raise PlanError(f"line {line}: no module is called {module!r}; modules: {', '.join(profile.graph.modules)}")
    degree = _parse_count(text, line) if text.isascii() and text.isdecimal() else 0
    if degree not in profile.degrees_of(module):
        known = ", ".join(map(str, profile.degrees_of(module)))
        raise PlanError(f"line {line}: {module!r} can have the tensor degrees {known}, got {text}")
    return degree


def _parse_quotas(words: Sequence[str], text: str, line: int) -> tuple[int, ...]:
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        raise PlanError(
            f"line {line}: expected # quotas and the SMs of each lane, such as # quotas 64 64, got {text!r}"
        )
    return tuple(_parse_count(word, line) for word in words)


def _parse_pass(word: str, line: int) -> tuple[int, str]:
    match = _PASS.fullmatch(word)
    if match is None:
        raise PlanError(f"line {line}: {word!r} is not a pass; expected a letter of F, B, I, W and a slot, such as F0")
    return _parse_count(match[2], line), next(kind for kind, letter in PASS_LETTERS.items() if letter == match[1])


def _parse_count(digits: str | None, line: int) -> int:
    """An optional number; 0 if it is left out."""
    if digits is not None and len(digits) > _MAX_DIGITS:
        raise PlanError(f"line {line}: expected a number of up to {_MAX_DIGITS} digits, got {digits}")
    return int(digits or 0)


def _parse_start(text: str | None, line: int) -> float:
    try:
        start_s = float(text or 0.0)
    except ValueError:
        start_s = math.nan
    if not 0 <= start_s < math.inf:
        raise PlanError(f"line {line}: {text} is not a start time; expected seconds, such as ^0.25")
    return start_s


def _parse_devices(text: str, num_devices: int, line: int) -> tuple[int, ...]:
    devices: list[int] = []
    for part in text.split(","):
        ends = [_parse_count(digits, line) for digits in part.split("-")]
        first, last = ends[0], ends[-1]
        if last >= num_devices:
            raise PlanError(f"line {line}: there is no device {last}, only 0 to {num_devices - 1}")
        if last < first:
            raise PlanError(f"line {line}: {part} is not a range of devices, it ends before it begins")
        devices += range(first, last + 1)
    return tuple(devices)


def marked(plan: Plan, slot: Slot) -> str:
    """The plan with one slot marked, indented for an error message."""
    number = next(index for index, candidate in enumerate(plan.slots) if candidate is slot)
    return "\n" + "".join(f"    {line}\n" for line in format_plan(plan, mark=number).splitlines())
