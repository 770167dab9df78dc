"""One failure of a job out of the errors of its ranks, where no parent collects them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.engine.standing import Activity, Board, Standing
from pipeline.schedule.schedule import Schedule
from pipeline.training import rendezvous
from pipeline.training.failures import Cause, RankFailure, RunFailure
from pipeline.training.hang_report import HangReport, explained
from pipeline.training.rank_process import account
from pipeline.training.roll_call import RollCall, answer_from_a_thread
from pipeline.training.signals import deaf

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 1.0  # for a likelier cause than a lost peer to show up


def as_one_failure(
    board: Board, programs: Mapping[Activity, Schedule], timeout: float, run: Callable[[], None]
) -> None:
    """Run; turn an error into what it is in the light of the other ranks; answer when they ask.

    Args:
        board: holds this rank's standing alone.
        programs: what all ranks run, by activity.
        timeout: seconds that a message may take, for the report.
        run: this rank's part.

    Raises:
        RankFailure: a rank failed or was lost; where all stood is in it on the rank that tells.
        KeyboardInterrupt, SystemExit: this rank was interrupted, and no failure of another rank was the reason.
    """
    call = RollCall(rendezvous.shared_store(), rendezvous.rank(), rendezvous.world_size())
    answer_from_a_thread(board)
    try:
        try:
            run()
        except BaseException:
            deaf()  # the launcher's signal may come before this: then its SystemExit goes the same way
            raise
    except BaseException as error:
        raise Verdict(call, programs, timeout).on(error) from error


@dataclass(frozen=True)
class Verdict:
    """What an error of this rank is. The first rank with a failure that isn't another's consequence tells it."""

    call: RollCall
    programs: Mapping[Activity, Schedule]
    timeout: float

    def on(self, error: BaseException) -> BaseException:
        """The error to end with."""
        try:
            if isinstance(error, RunFailure):  # all ranks raise the same
                error.told = self.call.rank != 0
                return error
            if isinstance(error, KeyboardInterrupt):
                self.call.interrupt()
                return error
            return self._on_signal(error) if isinstance(error, SystemExit) else self._on_failure(error)
        except RuntimeError as lost:
            _log.warning("the other ranks could not be asked where they stand: %s", lost)
            return error

    def _on_signal(self, error: SystemExit) -> BaseException:
        """SIGTERM: the user's, or the launcher's because another rank has failed or was killed."""
        if self.call.is_claimed():
            return self.call.told()
        standings = self.call.standings()
        if self.call.is_interrupted() or None not in standings:
            self.call.interrupt()
            return error
        return self._tell(RankFailure(self.call.rank, "was told to end", cause=Cause.LOST_PEER), standings)

    def _on_failure(self, error: BaseException) -> BaseException:
        report = account(error)
        if report.cause is Cause.LOST_PEER and self.call.is_claimed(_PATIENCE_SECONDS):
            return self.call.told()
        if self.call.is_interrupted():
            return SystemExit(130)
        return self._tell(RankFailure(self.call.rank, f"raised {report.reason}", report.details, report.cause))

    def _tell(self, failure: RankFailure, standings: Sequence[Standing | None] | None = None) -> RankFailure:
        if not self.call.claim():
            return self.call.told()
        ends = {failure.rank: "failed"} if failure.cause is Cause.RAISED else {}
        report = HangReport(self.programs, standings or self.call.standings(), self.timeout, ends)
        full = explained(failure, report)
        self.call.tell(full)
        return full
