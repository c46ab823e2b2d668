"""The errors a user can meet, as one tree.

    SpindleError            anything that Spindle refuses, with one clear message
    ├── InputError          a file or argument that cannot be read
    ├── WorkloadError       tasks, modules, layers or flows that are inconsistent
    │   └── GuardError      a batch for which a module's forward may take a different branch than the recorded one
    ├── ClusterError        devices, islands or links that are inconsistent
    ├── FleetError          jobs, cells, quotas, traces or events of a fleet that are inconsistent
    │   └── StoreError      the store of a fleet cannot be read or written: its disk is full, say
    ├── ProfileError        a time or size that is unknown or not allowed
    ├── PlanError           a plan that is not legal; prints the plan with the place marked
    ├── ProgramError        a program that would deadlock, or use data that it does not have
    ├── DoesNotFitError     no plan fits into memory
    ├── OverBudgetError     a rank exceeds its memory limit
    ├── CheckpointError     a checkpoint that is damaged, or that this training cannot resume from
    │   └── SupersededError a newer attempt of the job saves its checkpoints
    ├── TrainingError       a step that failed: a loss that is not finite, a loader that yields a wrong batch
    └── PeerLostError       another rank has ended, so this rank ends, too

Users' mistakes raise one of these; `assert` is for bugs of Spindle.
"""

_LONGEST_LINE, _LINE_END = 500, 120


class SpindleError(Exception):
    """Base of all errors that Spindle raises deliberately."""


class _ContentError(SpindleError):
    """Base of errors that quote what a file or an argument contains, which may be of any length.

    The middle of a first line that is too long is left out: its beginning says where, its end what to do.
    """

    def __init__(self, text: str = "") -> None:
        line, newline, rest = text.partition("\n")
        if len(line) > _LONGEST_LINE:
            line = f"{line[: _LONGEST_LINE - _LINE_END - 5]} ... {line[-_LINE_END:]}"
        super().__init__(line + newline + rest)


class InputError(_ContentError):
    pass


class WorkloadError(_ContentError):
    pass


class GuardError(WorkloadError):
    def __init__(self, module: object, text: str) -> None:
        super().__init__(text)
        self.module = module


class ClusterError(_ContentError):
    pass


class FleetError(_ContentError):
    pass


class StoreError(FleetError):
    pass


class ProfileError(_ContentError):
    pass


class PlanError(_ContentError):
    pass


class ProgramError(SpindleError):
    pass


class DoesNotFitError(SpindleError):
    """`needed_bytes` is what the fullest device would need, if known. With `is_bound` it is a lower bound: what each
    device would need if everything were spread evenly."""

    def __init__(self, text: str, needed_bytes: int = 0, *, is_bound: bool = False) -> None:
        super().__init__(text)
        self.needed_bytes, self.is_bound = needed_bytes, is_bound


class OverBudgetError(SpindleError):
    """A rank has exceeded its memory limit."""


class CheckpointError(_ContentError):
    pass


class SupersededError(CheckpointError):
    pass


class TrainingError(SpindleError):
    pass


class PeerLostError(SpindleError):
    pass
