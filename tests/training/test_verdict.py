"""One failure out of many ranks' errors: the ranks are objects of this process around one store."""

from __future__ import annotations

import signal
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore

from pipeline.engine.standing import Activity, Board
from pipeline.training import rendezvous, roll_call
from pipeline.training import verdict as verdict_module
from pipeline.training.failures import Cause, NonFiniteError, RankFailure
from pipeline.training.roll_call import RollCall, answer_from_a_thread
from pipeline.training.signals import sigterm_raises
from pipeline.training.verdict import Verdict, as_one_failure
from tests.training.test_hang_report import PROGRAMS

pytestmark = pytest.mark.timeout(60)


class Ranks:
    """Two ranks whose boards stand at different places; those told to answer do."""

    def __init__(self, store, monkeypatch):
        self.store = store
        self.boards = [Board.in_memory(1), Board.in_memory(1)]
        self.boards[0].marker(0).enter(Activity.TAKING_NORM, 4)
        self.boards[1].marker(0).enter(Activity.UPDATING, 4)
        self._patch = monkeypatch
        self.verdicts = [Verdict(RollCall(store, rank, 2), PROGRAMS, 30) for rank in range(2)]

    def connect(self):
        return TCPStore("127.0.0.1", self.store.port, is_master=False, timeout=timedelta(seconds=30))

    def answer(self, *ranks):
        for rank in ranks:
            self._patch.setattr(rendezvous, "new_store", self.connect)
            self._patch.setattr(rendezvous, "rank", lambda rank=rank: rank)
            answer_from_a_thread(self.boards[rank])


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(roll_call, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(verdict_module, "_PATIENCE_SECONDS", 0.1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Ranks(store, monkeypatch)


def test_all_who_answer_are_listed_and_nobody_else(ranks):
    ranks.answer(1)
    silent, standing = ranks.verdicts[0].call.standings()
    assert silent is None
    assert (standing.activity, standing.step, standing.waiting) == (Activity.UPDATING, 4, False)


def test_a_rank_that_raises_tells_and_the_one_that_lost_it_hears(ranks):
    ranks.answer(0, 1)
    first = ranks.verdicts[1].on(KeyError("labels"))
    second = ranks.verdicts[0].on(ConnectionResetError("gone"))
    assert (first.rank, first.cause, first.told) == (1, Cause.RAISED, False)
    assert str(first).startswith("rank 1 raised KeyError: 'labels'\n")
    assert "rank 0  taking the gradient's norm of step 5" in str(first)
    assert "rank 1  updating the weights of step 5" in str(first)
    assert (str(second), second.told) == ("rank 1 raised KeyError: 'labels'", True)


def test_without_a_likelier_cause_the_silent_rank_is_the_failure(ranks):
    ranks.answer(0)
    failure = ranks.verdicts[0].on(ConnectionResetError("gone"))
    assert (failure.rank, failure.reason, failure.told) == (1, "gives no sign", False)
    assert failure.details.startswith("rank 0 raised ConnectionResetError: gone\nrank 0  taking the gradient's norm")


def test_sigterm_is_an_interruption_while_all_are_there(ranks):
    ranks.answer(0, 1)
    stop = SystemExit(143)
    assert ranks.verdicts[0].on(stop) is stop
    assert ranks.verdicts[1].on(ConnectionResetError("gone")).code == 130, "lost to the interruption"


def test_sigterm_is_a_failure_when_a_rank_is_gone(ranks):
    ranks.answer(0)
    failure = ranks.verdicts[0].on(SystemExit(143))
    assert isinstance(failure, RankFailure)
    assert str(failure).startswith("rank 1 gives no sign\nrank 0 was told to end\n")


def test_sigterm_after_a_failure_is_that_failure(ranks):
    ranks.answer(0, 1)
    ranks.verdicts[1].on(KeyError("labels"))
    assert str(ranks.verdicts[0].on(SystemExit(143))) == "rank 1 raised KeyError: 'labels'"


def test_a_rank_that_left_for_a_ctrl_c_is_not_lost(ranks):
    ranks.answer(0)
    stop = KeyboardInterrupt()
    assert ranks.verdicts[1].on(stop) is stop
    terminated = SystemExit(143)
    assert ranks.verdicts[0].on(terminated) is terminated


def test_what_all_ranks_say_rank_0_tells(ranks):
    errors = [NonFiniteError("the loss is inf") for _ in range(2)]
    outcomes = [verdict.on(error) for verdict, error in zip(ranks.verdicts, errors, strict=True)]
    assert all(ours is theirs for ours, theirs in zip(outcomes, errors, strict=True))
    assert [error.told for error in errors] == [False, True]


def test_a_claim_that_nothing_follows_is_still_a_failure(ranks, monkeypatch):
    monkeypatch.setattr(roll_call, "_TELLING_SECONDS", 0.1)
    assert ranks.verdicts[1].call.claim()
    assert str(ranks.verdicts[0].on(ConnectionResetError("gone"))) == "rank 1 failed"


def test_without_a_store_the_error_stays_what_it_was(caplog):
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("Broken pipe")

    error = KeyError("labels")
    assert Verdict(RollCall(Gone(), 0, 2), PROGRAMS, 30).on(error) is error
    assert "the other ranks could not be asked where they stand: Broken pipe" in caplog.text


@pytest.fixture
def only_rank(ranks, monkeypatch):
    """Rank 0 of one, whose signal handlers are put back."""
    monkeypatch.setattr(rendezvous, "rank", lambda: 0)
    monkeypatch.setattr(rendezvous, "world_size", lambda: 1)
    monkeypatch.setattr(rendezvous, "shared_store", lambda: ranks.store)
    monkeypatch.setattr(rendezvous, "new_store", ranks.connect)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield ranks
    for number, handler in before.items():
        signal.signal(number, handler)


def fails():
    raise KeyError("labels")


def test_errors_become_failures_and_signals_are_ignored_from_then_on(only_rank):
    before = signal.getsignal(signal.SIGTERM)
    as_one_failure(only_rank.boards[0], PROGRAMS, 30, lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(RankFailure, match="rank 0 raised KeyError: 'labels'"):
        as_one_failure(only_rank.boards[0], PROGRAMS, 30, fails)
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM))


def test_a_signal_just_before_signals_are_ignored_is_judged_as_well(only_rank, monkeypatch):
    """The launcher's SIGTERM came while Python left a context manager: no verdict, and `GeneratorExit` as the error."""
    monkeypatch.setattr(verdict_module, "deaf", partial(signal.raise_signal, signal.SIGTERM))
    judged = []
    monkeypatch.setattr(Verdict, "_on_signal", lambda self, error: judged.append(error) or RankFailure(1, "is gone"))
    with sigterm_raises(), pytest.raises(RankFailure, match="rank 1 is gone"):
        as_one_failure(only_rank.boards[0], PROGRAMS, 30, fails)
    assert [error.code for error in judged] == [143]
