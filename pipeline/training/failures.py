"""How a run ends badly: errors that say all there is to say, so that whoever shows them adds no traceback."""

from __future__ import annotations

import enum


class RunFailure(RuntimeError):
    """What ended a run. Every rank that raises one as it stands says the same."""

    told = False
    """Whether another process has said it to the user."""


class NonFiniteError(RunFailure):
    """The loss or the gradient is infinite or not a number."""


class Cause(enum.IntEnum):
    """How likely a failure is the cause and not a consequence; the value sorts, `patience` is in seconds."""

    DIED = 0
    RAISED = 1
    LOST_PEER = 2

    @property
    def patience(self) -> float:
        """How long a likelier cause may take to show up. A dead process is noticed later than its closed sockets."""
        return (0.0, 0.5, 3.0)[self]


class RankFailure(RunFailure):
    """The one rank whose failure ended the job.

    `reason` reads after the rank's name ("was killed by SIGKILL"), `details` is its traceback, or where the ranks
    stood, or empty.
    """

    def __init__(self, rank: int, reason: str, details: str = "", cause: Cause = Cause.RAISED) -> None:
        super().__init__(rank, reason, details, cause)  # all of them, so that it survives pickling
        self.rank = rank
        self.reason = reason
        self.details = details
        self.cause = cause

    def __str__(self) -> str:
        if not self.details:
            return f"rank {self.rank} {self.reason}"
        # the details end with the whole message: a grid in it needn't be shown twice
        return f"rank {self.rank} {self.reason.splitlines()[0]}\n{self.details.rstrip()}"
