"""Mutated inputs for every reader: each is read, or refused in one line, without a traceback, in 10 s and 1 GB.

    python tests/fuzz.py                      3,000 mutations of bytes and 3,000 of fields for each reader
    python tests/fuzz.py --each 40 plan graph

Prints a line for each reader, then each kind of trouble with the smallest input that causes it; exits with 1 if there
is any. What is read is used as the command line uses it: a profile is planned, a plan is checked, lowered and verified,
a checkpoint is listed, checked and exported. Index and state have the digests of what they are mutated to: others are
refused at once. `resumed state` resumes a training from it, with a tenth as many mutations.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.util
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small
from spindle.artifact import artifact_text
from spindle.checkpoint import SavedState, export_safetensors, finish, open_checkpoint, partial_folder, write_part
from spindle.checkpoint.files import INDEX, STATE, read_state
from spindle.cli.checkpoints import _table
from spindle.cli.inputs import any_cluster, load_plan, load_profile
from spindle.errors import SpindleError
from spindle.measure.cache import Cache, Times
from spindle.plan import check, format_plan, parse_plan
from spindle.planners import PlanOptions, make_plan
from spindle.profile import Profile, roofline_profile
from spindle.program import Box, lower, verify
from spindle.recipes import MODELS, BatchOptions, step_of

LIMIT_S, LIMIT_BYTES, LONGEST_LINE = 10, 1 << 30, 500
TASKS = {"x": ["vision", "lm"], "y": ["audio", "lm"]}
CLUSTER = """name = "two hosts"
[kinds.big]
peak_flops = 312e12
memory_bytes = 80e9
memory_bytes_per_s = 2.0e12
[[islands]]
kind = "big"
count = 2
num_devices = 2
link = {bytes_per_s = 200e9, latency_s = 5e-6}
uplink = {bytes_per_s = 25e9, latency_s = 12e-6}
[[islands]]
kind = "big"
num_devices = 1
link = {bytes_per_s = 200e9}
uplink = {bytes_per_s = 25e9, collective_s = 1e-5}
"""
SAMPLES = """{"text_tokens": 812, "images": 3}
{"text_tokens": 96, "images": 70}

{"text_tokens": 20000, "images": 2}
"""
CLIPS = '{"text_tokens": 96, "clips": [{"seconds": 7.5}, {"seconds": 3, "width": 512, "height": 320}]}\n'
NUMBERS = (
    "0",
    "-1",
    "1",
    "7",
    "-0.5",
    "1e-320",
    "1e308",
    "1e999",
    "NaN",
    "-Infinity",
    str(1 << 63),
    "9" * 400,
    "9" * 5000,
)
WORDS = (*NUMBERS, "null", "true", '""', '"vision"', '"\\ud800"', '"\\u0000"', f'"{"x" * 100_000}"', "[]", "{}", "[[]]")
DEEP = "[" * 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Valid texts, and what reads one from a file."""

    texts: tuple[str, ...]
    read: Callable[[Path], object]
    suffix: str = ".json"
    share: int = 1  # one in so many mutations


def _profile() -> Profile:
    return small.workload_profile(TASKS, 4, 2)


def _planned(profile: Profile) -> None:
    make_plan(profile, "sequential", PlanOptions(evaluations=1))


def _runs(plan: Any, profile: Profile) -> None:
    check(plan, profile)
    verify(lower(plan, profile), profile)


def _packed(path: Path, model: str) -> None:
    step_of(MODELS[model], MODELS[model].cluster, BatchOptions(samples=path, num_microbatches=1))


def readers() -> dict[str, Reader]:
    profile, towers = _profile(), small.two_towers()
    plan = make_plan(profile, "sequential")
    listed = parse_plan("vision*6@0-1 text*6@2\nvision*6@0-1\nhead*1@0-3\n> F0 F1 F2 F3 B3 B2 B1 B0\n", towers)
    tensor = parse_plan(f"# tensor vision 2\n{format_plan(plan)}", profile)
    point, times = {"layer": "linear", "rows": "8"}, Times(1e-3, 2e-3)
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache({"cpu": "any"}, lambda text: None, folder=Path(folder), fresh=False)
        cache.store(point, times)
        (entry,) = (Path(folder) / "layers").iterdir()
        cached = entry.read_text()

    def find(path: Path) -> None:
        folder = path.parent / "layers"
        folder.mkdir(exist_ok=True)
        (folder / entry.name).write_bytes(path.read_bytes())
        Cache({"cpu": "any"}, lambda text: None, folder=path.parent, fresh=False).find(point)

    return {
        "workload": Reader(
            texts=(artifact_text("workload", small.workload(TASKS)),),
            read=lambda path: _planned(load_profile(str(path), None, "a800x4")),
        ),
        "cluster": Reader(
            texts=(CLUSTER,),
            read=lambda path: roofline_profile(profile.graph, any_cluster(None, str(path))),
            suffix=".toml",
        ),
        "graph": Reader(
            texts=(json.dumps(small.linear_graph(small.CASE_B, small.CASE_B_EDGES, 4), indent=1),),
            read=lambda path: _planned(load_profile(str(path), 4, None)),
        ),
        "profile": Reader(
            texts=(artifact_text("profile", profile), artifact_text("profile", towers)),
            read=lambda path: _planned(load_profile(str(path), None, None)),
        ),
        "plan": Reader(
            texts=(artifact_text("plan", plan), artifact_text("plan", tensor)),
            read=lambda path: _runs(load_plan(path, profile), profile),
        ),
        "plan with passes": Reader(
            texts=(artifact_text("plan", listed),), read=lambda path: _runs(load_plan(path, towers), towers)
        ),
        "plan text": Reader(
            texts=(format_plan(plan), format_plan(tensor)),
            read=lambda path: _runs(parse_plan(path.read_text(errors="surrogateescape"), profile), profile),
            suffix=".txt",
        ),
        "plan text with passes": Reader(
            texts=(format_plan(listed), "# recompute vision\nvision*12@0-1 text*6@2^0.25\nhead*1@0-3\n"),
            read=lambda path: _runs(parse_plan(path.read_text(errors="surrogateescape"), towers), towers),
            suffix=".txt",
        ),
        "samples": Reader(texts=(SAMPLES,), read=lambda path: _packed(path, "vlm-s"), suffix=".jsonl"),
        "clips": Reader(texts=(CLIPS,), read=lambda path: _packed(path, "t2v-s"), suffix=".jsonl"),
        "cache": Reader(texts=(cached,), read=find),
        **checkpoint_readers(),
    }


def checkpoint_readers() -> dict[str, Reader]:
    """Readers of a checkpoint's index and state, and of a training that resumes from its state."""
    folder = Path(tempfile.mkdtemp(prefix="spindle-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    small_one = _small_checkpoint(folder / "small")

    def used(checkpoint: Path) -> None:
        opened = open_checkpoint(checkpoint)
        opened.check()
        export_safetensors(opened, folder / "model.safetensors")
        _table([{"step": opened.state.step, "bytes": opened.num_bytes, "written_s": opened.state.written_s}])

    def read_state_text(path: Path) -> None:
        _replace_state(small_one, path.read_bytes())
        used(small_one)

    def read_index_text(path: Path) -> None:
        content = path.read_bytes()
        (small_one / INDEX).write_bytes(content)
        body = json.loads(valid_state)
        body["files"][INDEX] = hashlib.sha256(content).hexdigest()
        _replace_state(small_one, json.dumps(body).encode())
        used(small_one)

    valid_state, valid_index = _state_body(small_one), (small_one / INDEX).read_text()

    def read_valid_index_then(read: Callable[[Path], None]) -> Callable[[Path], None]:
        def reader(path: Path) -> None:
            (small_one / INDEX).write_text(valid_index)
            read(path)

        return reader

    found = {
        "state": Reader(texts=(valid_state,), read=read_valid_index_then(read_state_text)),
        "index": Reader(texts=(valid_index,), read=read_index_text),
    }
    if importlib.util.find_spec("torch") is not None:
        import resuming

        training = folder / "training"
        resuming.run(0, 1, resuming.Run(steps=2, folder=str(training)))
        body = _state_body(training / "step-2")

        def resume(path: Path) -> None:
            with tempfile.TemporaryDirectory(prefix="spindle-fuzz-") as copy:
                shutil.copytree(training, copy, dirs_exist_ok=True)
                _replace_state(Path(copy) / "step-2", path.read_bytes())
                resuming.run(0, 1, resuming.Run(steps=3, folder=copy))

        found["resumed state"] = Reader(texts=(body,), read=resume, share=10)
    return found


def _small_checkpoint(folder: Path) -> Path:
    """Of two ranks: a weight in two boxes, a tied name of it, and a buffer."""
    state = SavedState(
        step=4, fit=0, first_step=0, was_stopped=False, seed=0, num_ranks=2, tasks=("x",), ended_tasks=(),
        modules=("vision",), frozen=(), in_evaluation=(), aliases={"head.weight": "vision.weight"},
        variants={"x": {"0": "x"}}, checked=(), data={}, random_state=None, num_updates=4, optimizer_values={},
        groups=(), frozen_groups=(), planning="", written_s=1.7e9,
    )  # fmt: skip
    for rank in range(2):
        half = ("parameter/vision.weight", "float32", (4, 3), Box((2 * rank, 0), (2, 3)), 0, 24)
        boxes = [half, ("buffer/vision.count", "int64", (), Box((), ()), 24, 8)] if rank == 0 else [half]
        write_part(partial_folder(folder, 4), rank, memoryview(bytes(range(32 if rank == 0 else 24))), boxes, {})
    return finish(folder, state, {})


def _state_body(checkpoint: Path) -> str:
    """The state of a checkpoint without its own digest."""
    read_state(checkpoint / STATE)
    body = json.loads((checkpoint / STATE).read_bytes())
    del body["sha256"]
    return json.dumps(body)


def _replace_state(checkpoint: Path, body: bytes) -> None:
    """Write a state with the digest that it should have."""
    digest = hashlib.sha256(body).hexdigest()
    (checkpoint / STATE).write_bytes(body[:-1] + f',"sha256":"{digest}"}}\n'.encode())


def mutated_bytes(data: bytes, choose: random.Random) -> bytes:
    """One to three changes of bytes: flipped, removed, inserted, repeated, or the end cut off."""
    for _ in range(choose.randint(1, 3)):
        place, length = choose.randrange(len(data) + 1), choose.choice((1, 1, 2, 8, 60))
        match choose.randrange(6):
            case 0:
                data = data[:place] + bytes([choose.randrange(256)]) + data[place + 1 :]
            case 1:
                data = data[:place] + data[place + length :]
            case 2:
                data = data[:place] + choose.randbytes(length) + data[place:]
            case 3:
                data = data[:place] + data[place : place + length] * choose.choice((2, 3)) + data[place + length :]
            case 4:
                data = data[:place] + choose.choice(b'0123456789.,-+eE"[]{}:#*@|~^>\n ').to_bytes() + data[place + 1 :]
            case _:
                data = data[:place]
    return data


_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|[A-Za-z_]+|[\[\]{}:,@*~^|#>=]')


def mutated_fields(data: bytes, choose: random.Random) -> bytes:
    """One to three changes of fields: a value, name or sign replaced, removed, repeated or exchanged with another.

    Every second JSON text stays JSON.
    """
    text = data.decode()
    if choose.random() < 0.5:
        with suppress(ValueError):
            document = json.loads(text)
            for _ in range(choose.randint(1, 3)):
                _mutate_node(document, choose)
            return json.dumps(document).encode()
    for _ in range(choose.randint(1, 3)):
        tokens = list(_TOKENS.finditer(text))
        if not tokens:
            break
        token, another = choose.choice(tokens), choose.choice(tokens)
        kind = choose.randrange(8)
        if kind < 4:
            new = choose.choice(WORDS if token[0][0] in '"-0123456789tfn' else NUMBERS)
        elif kind == 4:
            new = choose.choice(("", token[0] * 2, f"{token[0]}, {token[0]}"))
        elif kind == 5 and token[0].lstrip("-").isdecimal() and len(token[0]) < 20:
            new = str(int(token[0]) + choose.choice((-1, 1, 10**6, 10**10)))
        elif kind == 6 and choose.random() < 0.1:
            new = DEEP
        else:
            new = another[0]
        text = text[: token.start()] + new + text[token.end() :]
    return text.encode(errors="surrogatepass")


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Containers of a JSON value, each with a key or a position in it."""
    if isinstance(tree, dict | list):
        for key, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            yield tree, key
            yield from _nodes(child)


def _mutate_node(document: Any, choose: random.Random) -> None:
    """Replace, remove or repeat a value, or exchange it with another."""
    nodes = list(_nodes(document))
    if not nodes:  # removed before
        return
    (container, key), (another, its_key) = choose.choice(nodes), choose.choice(nodes)
    match choose.randrange(5):
        case 0:
            del container[key]
        case 1:
            container[key] = json.loads(json.dumps(another[its_key]))
        case 2 if isinstance(container, list):
            container.insert(key, container[key])
        case 3 if isinstance(container[key], int | float):
            container[key] = choose.choice((-1, 0, 2, 0.5, -1.0, container[key] + 1, container[key] * 10**6))
        case _:
            with suppress(ValueError):  # a number of 5,000 digits is only a text
                container[key] = json.loads(choose.choice(WORDS))


class _TooSlowError(BaseException):
    pass


def _expired(signum: int, frame: object) -> None:
    raise _TooSlowError


def trouble_with(reader: Reader, path: Path) -> str | None:
    """What is wrong with how a reader takes this file: a traceback (its last place), a long message, or its time."""
    signal.alarm(LIMIT_S)
    try:
        reader.read(path)
    except _TooSlowError:
        return f"takes more than {LIMIT_S} s"
    except SpindleError as error:
        longest = len(str(error).splitlines()[0]) if str(error) else 0
        return f"{type(error).__name__} with a line of {longest} letters" if longest > LONGEST_LINE else None
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/spindle/" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "here"
        return f"{type(error).__name__} at {place}: {str(error)[:100]}"
    finally:
        signal.alarm(0)
    return None


def mutations(reader: Reader, each: int, seed: int) -> Iterator[bytes]:
    """As many mutations of bytes and of fields."""
    choose = random.Random(seed)
    for mutated in (mutated_bytes, mutated_fields):
        for _ in range(-(-each // reader.share)):
            yield mutated(choose.choice(reader.texts).encode(), choose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--each", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _expired)
    chosen = {name: reader for name, reader in readers().items() if not options.readers or name in options.readers}
    with tempfile.TemporaryDirectory(prefix="spindle-fuzz-") as folder:
        for reader in chosen.values():  # compiles, before memory is limited
            path = Path(folder) / f"valid{reader.suffix}"
            for text in reader.texts:
                path.write_text(text)
                reader.read(path)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES,) * 2)
        num_troubles = 0
        for name, reader in chosen.items():
            troubles: Counter[str] = Counter()
            smallest: dict[str, bytes] = {}
            path, begin_s, slowest_s = Path(folder) / f"mutated{reader.suffix}", time.monotonic(), 0.0
            for data in mutations(reader, options.each, options.seed):
                path.write_bytes(data)
                start_s = time.monotonic()
                trouble = trouble_with(reader, path)
                slowest_s = max(slowest_s, time.monotonic() - start_s)
                if trouble is not None:
                    troubles[trouble] += 1
                    smallest[trouble] = min(smallest.get(trouble, data), data, key=len)
            num_troubles += sum(troubles.values())
            took = f"{time.monotonic() - begin_s:.0f} s, slowest {slowest_s:.1f} s"
            count = 2 * -(-options.each // reader.share)
            print(f"{name}: {count} mutations, {sum(troubles.values())} with trouble ({took})", flush=True)
            for trouble, count in troubles.most_common():
                print(f"  {count} × {trouble}\n      {smallest[trouble][-300:]!r}", flush=True)
    return 1 if num_troubles else 0


if __name__ == "__main__":
    sys.exit(main())
