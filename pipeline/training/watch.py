"""The parent's look at its ranks when one fails: where each stands on the board, and which are stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.engine.standing import Activity, Board, Standing
from pipeline.schedule.schedule import Schedule
from pipeline.training.failures import Cause, RankFailure
from pipeline.training.hang_report import HangReport, explained


class Watch:
    """Keeps what there was to see at the first sign of a failure, before the ranks are ended."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._pids: tuple[int, ...] = ()
        self._standings: tuple[Standing, ...] | None = None
        self._stopped: set[int] = set()

    def know(self, pids: tuple[int, ...]) -> None:
        """The ranks' process ids, by rank."""
        self._pids = pids

    def look(self) -> None:
        """Keep where all stand."""
        self._standings = self._board.standings()
        self._stopped = {rank for rank, pid in enumerate(self._pids) if is_stopped(pid)}

    def explain(self, failure: RankFailure, programs: Mapping[Activity, Schedule], timeout: float) -> RankFailure:
        """The failure with what was seen."""
        standings = self._board.standings() if self._standings is None else self._standings
        ends = dict.fromkeys(sorted(self._stopped), "is stopped (SIGSTOP)")
        if failure.cause is Cause.RAISED:
            ends[failure.rank] = "failed"
        elif failure.cause is Cause.DIED:
            ends[failure.rank] = failure.reason
        return explained(failure, HangReport(programs, standings, timeout, ends))


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP holds the process. False where the system has no /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"
