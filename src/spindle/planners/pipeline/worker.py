"""A process that plans pipelines while others train: python -m spindle.planners.pipeline.worker

Jobs come pickled over its standard input, answers go to its standard output, each preceded by its length. A job is
answered twice: first with the natural order, then, unless another job is waiting by then, with the best order that the
search finds. The process ends when its input ends, and so with the process that started it. It does not import torch.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from spindle.errors import PlanError, SpindleError
from spindle.plan import Plan, check
from spindle.planners.colocate.planner import plan_system
from spindle.planners.options import SPREAD, PlanOptions
from spindle.planners.pipeline.planner import plan_pipeline
from spindle.profile import Profile
from spindle.program import Program, lower, verify

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A step to plan; `owning_ranks` are the devices that hold each parameter in every step, whether it is used or
    not."""

    number: int
    profile: Profile
    owning_ranks: Mapping[int, tuple[int, ...]]
    options: PlanOptions
    planner: str = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A verified program, or the reason why there is none."""

    number: int
    is_final: bool
    program: Program | None = None
    error: Exception | None = None


def planned(job: Job, options: PlanOptions) -> Program:
    """Plan a job; returns its verified program."""
    options = replace(options, is_draft=True)
    plan: Plan = (
        plan_pipeline(job.profile, options)
        if job.planner == "pipeline"
        else plan_system(job.planner, job.profile, options)
    )
    check(plan, job.profile)
    program = lower(plan, job.profile, owning_ranks=job.owning_ranks)
    verify(program, job.profile)
    return program


def natural_answer(job: Job) -> Answer:
    """The natural order of a job alone."""
    return next(answers(job, lambda: True))


def answers(job: Job, is_awaited: Callable[[], bool]) -> Iterator[Answer]:
    """Answer with the natural order first, then with the best order, unless another job is waiting."""
    try:
        natural = planned(job, replace(job.options, evaluations=1, time_limit_s=None))
        # With colocated encoders there is no search: the first answer is the best of all orders that are tried.
        is_final = any(chain.placement != SPREAD for layout in job.options.layouts for chain in layout.chains)
        yield Answer(number=job.number, is_final=is_final, program=natural)
        if not is_final and not is_awaited():
            yield Answer(number=job.number, is_final=True, program=planned(job, job.options))
    except SpindleError as error:
        yield Answer(number=job.number, is_final=True, error=error)
    except Exception as error:  # a bug of ours: report it to the rank that asked
        yield Answer(number=job.number, is_final=True, error=PlanError("".join(traceback.format_exception(error))))


def write_frame(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next value; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


def main() -> None:
    output = sys.stdout.buffer
    sys.stdout = sys.stderr  # prints must not end up among the answers
    jobs: queue.Queue[Job | None] = queue.Queue()

    def read() -> None:
        while (job := read_frame(sys.stdin.buffer)) is not None:
            jobs.put(job)
        jobs.put(None)

    threading.Thread(target=read, daemon=True).start()
    gc.disable()  # a job creates tens of thousands of objects and hardly any cyclic garbage
    while (job := jobs.get()) is not None:
        for answer in answers(job, lambda: not jobs.empty()):
            try:
                write_frame(output, answer)
            except BrokenPipeError:  # the training process is gone
                os._exit(0)
        gc.collect()
    os._exit(0)  # without waiting for the thread that may still be reading


if __name__ == "__main__":
    main()
