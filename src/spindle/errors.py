"""The errors a user can meet, as one tree.

    SpindleError            anything Spindle refuses, with one clear message
    ├── InputError          a file or argument that cannot be read as what it should be
    ├── WorkloadError       tasks, modules, layers or flows that make no sense together
    │   └── OtherWayError   a batch on which a module's code may take another way than the recorded one
    ├── ClusterError        devices, islands or links that make no sense
    ├── ProfileError        a time or a size that is unknown, refused or not allowed
    ├── PlanError           a plan that is not legal; prints the plan with the place marked
    ├── ProgramError        a program that would deadlock or use data it does not have
    ├── DoesNotFitError     no plan within the memory there is
    ├── OverBudgetError     a rank that holds more memory than it may
    ├── TrainingError       a step that went wrong: a loss that is not a number, a loader that gives the wrong batch
    └── PeerLostError       another rank ended, so this one must, too

A user's mistake is one of these; `assert` is for our own bugs.
"""


class SpindleError(Exception):
    """Base of everything Spindle raises on purpose."""


class InputError(SpindleError):
    pass


class WorkloadError(SpindleError):
    pass


class GuardError(WorkloadError):
    def __init__(self, module: object, text: str) -> None:
        super().__init__(text)
        self.module = module


class ClusterError(SpindleError):
    pass


class ProfileError(SpindleError):
    pass


class PlanError(SpindleError):
    pass


class ProgramError(SpindleError):
    pass


class DoesNotFitError(SpindleError):
    """`needed_bytes` is what the fullest device would need, where that is known; `is_bound` says that this is what it
    would need if everything was spread evenly, which no plan may reach."""

    def __init__(self, text: str, needed_bytes: int = 0, *, is_bound: bool = False) -> None:
        super().__init__(text)
        self.needed_bytes, self.is_bound = needed_bytes, is_bound


class OverBudgetError(SpindleError):
    """A rank holds more memory than it may."""


class TrainingError(SpindleError):
    pass


class PeerLostError(SpindleError):
    pass
