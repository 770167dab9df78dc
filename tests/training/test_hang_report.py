"""What is said of ranks that stand where a test puts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.engine.standing import BEYOND, Activity, Standing
from pipeline.schedule.actions import Action
from pipeline.schedule.library import forward_only, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.training.failures import Cause, RankFailure
from pipeline.training.hang_report import HangReport, explained

PROGRAM = lower(one_f_one_b(2, 4))
PROGRAMS = {Activity.TRAINING: PROGRAM, Activity.EVALUATING: lower(forward_only((0, 1), 4))}


def at(rank, word, *, waiting=False, seconds=31.0, lap=7, step=6, activity=Activity.TRAINING):
    position = PROGRAMS[activity].rows[rank].index(Action.parse(word))
    return Standing(activity, step, lap, position, waiting, seconds, step)


def doing(activity, *, waiting=False, seconds=31.0, lap=7, step=6):
    return Standing(activity, step, lap, BEYOND, waiting, seconds, step)


def report(*standings, ends=None):
    return HangReport(PROGRAMS, standings, 30.0, ends or {})


def lost(rank=0):
    return RankFailure(rank, "raised PeerError: nothing came\nmore", "Traceback", Cause.LOST_PEER)


def test_a_busy_rank_is_named_with_the_one_that_waits_for_it_and_both_are_marked():
    found = report(at(0, "0B1", waiting=True, seconds=30.0), at(1, "1B1"))
    assert found.blamed() == (
        1,
        "has been at 1B1 of step 7 for 31 s and waits for no message: if it is only slow, use a timeout above 30",
    )
    assert found.text().splitlines() == [
        "rank 0  at 0B1 of step 7 for 30 s: waits for the gradient of stage 1, microbatch 1, from rank 1, "
        "which has not sent it (it is at 1B1 of step 7)",
        "rank 1  at 1B1 of step 7 for 31 s: waits for no message",
        "1f1b: 2 ranks, 4 microbatches (warmup | steady | cooldown)",
        "rank 0   F0  |F1             B0------- F2   >B1<----- F3   B2-------     |B3-------",
        "rank 1       |F0   B0------- F1   >B1<----- F2   B2------- F3   B3-------|",
    ]


def test_a_message_is_sent_once_its_sender_is_past_the_send():
    receiver = at(1, "1F1", waiting=True)
    send = at(0, "0SEND_F1")
    for sender, sent in ((send, False), (replace(send, position=send.position + 1), True), (at(0, "0F1"), False)):
        assert ("from rank 0, which has sent it" in report(sender, receiver).text()) is sent


@pytest.mark.parametrize(
    ("sender", "sent"),
    [
        (doing(Activity.UPDATING), True),
        (doing(Activity.LOADING, lap=6), False),
        (at(0, "0F0", lap=8, step=7), True),
        (at(0, "0B3", lap=6, step=5), False),
    ],
)
def test_a_sender_in_another_program_or_outside_it_has_sent_all_or_nothing_of_this_one(sender, sent):
    text = report(sender, at(1, "1F1", waiting=True)).text()
    assert ("which has sent it" in text, "which has not sent it" in text) == (sent, not sent)


def test_where_all_wait_the_one_whose_message_was_sent_is_named():
    first, second = at(0, "0B1", waiting=True, seconds=40.0), at(1, "1F1", waiting=True)
    first = replace(first, position=PROGRAM.rows[0].index(Action.parse("0SEND_F2")) + 1)
    assert report(first, second).blamed() == (
        1,
        "has been at 1F1 of step 7 for 31 s, waiting for the activation of stage 0, microbatch 1, from rank 0, "
        "which has sent it: it got lost, or has another size than was expected",
    )


def test_where_all_wait_for_each_other_the_longest_wait_is_named():
    both = [doing(Activity.TAKING_NORM, waiting=True, seconds=seconds) for seconds in (30.0, 31.0)]
    assert report(*both).blamed() == (
        1,
        "has been taking the gradient's norm of step 7 for 31 s and waits for the other ranks, as every rank does",
    )


def test_silence_counts_more_than_a_stop_and_a_stop_more_than_being_busy():
    stopped, busy = at(0, "0F1", seconds=3.04), at(1, "1B1")
    ends = {0: "is stopped (SIGSTOP)"}
    assert report(stopped, busy, ends=ends).blamed() == (
        0,
        "is stopped (SIGSTOP); it has been at 0F1 of step 7 for 3.0 s",
    )
    assert report(stopped, None, ends=ends).blamed() == (1, "gives no sign")
    assert report(None, None).blamed() == (0, "gives no sign; rank 1 gives no sign")
    assert report(stopped, None).text().splitlines()[1] == "rank 1  gives no sign"


def test_a_sender_that_gives_no_sign_is_said_so():
    assert "from rank 0, which gives no sign" in report(None, at(1, "1F1", waiting=True)).text()


def test_a_rank_that_is_done_is_not_to_blame():
    assert report(doing(Activity.DONE), doing(Activity.REPORTING, waiting=True)).blamed()[0] == 1


def test_the_grid_is_that_of_the_last_rank_and_marks_none_that_is_elsewhere():
    validating = at(1, "1F2", activity=Activity.EVALUATING, step=0, lap=6)
    text = report(at(0, "0F0"), validating).text()
    assert "rank 1  at 1F2 of validation batch 1 for 31 s" in text
    assert "(forward only)" in text
    assert text.count(">") == 1
    assert ">F2<" in text


def test_a_receive_is_marked_by_the_action_after_it():
    text = report(at(0, "0RECV_B0"), doing(Activity.LOADING)).text()
    assert "rank 0  at 0RECV_B0 of step 7" in text
    assert text.count(">") == 1


def test_outside_the_programs_there_is_no_grid():
    lines = report(doing(Activity.STARTING), doing(Activity.CONNECTING, waiting=True)).text().splitlines()
    assert lines == [
        "rank 0  starting for 31 s: waits for no message",
        "rank 1  connecting to the other ranks for 31 s: waits for the other ranks",
    ]


def test_a_row_that_has_run_waits_for_its_sends():
    ended = replace(at(0, "0B3", waiting=True), position=len(PROGRAM.rows[0]))
    line = report(ended, at(1, "1B3")).text().splitlines()[0]
    assert line == "rank 0  at the end of step 7 for 31 s: waits until what it sent is taken"


@pytest.mark.parametrize("activity", Activity)
def test_every_activity_has_words(activity):
    standing = replace(at(0, "0F0"), activity=activity)
    assert report(standing, standing).text()


def test_a_lost_message_becomes_the_failure_of_the_rank_whose_turn_it_was():
    found = report(at(0, "0B1", waiting=True), at(1, "1B1"))
    failure = explained(lost(), found)
    assert failure.rank == 1
    assert str(failure).splitlines()[0].startswith("rank 1 has been at 1B1 of step 7 for 31 s")
    assert failure.details == f"rank 0 raised PeerError: nothing came\n{found.text()}", "no traceback"


def test_a_failure_of_its_own_keeps_its_traceback_and_one_grid():
    raised = RankFailure(1, "raised ActionError: broken\nthe grid", "Traceback\nActionError: broken\nthe grid\n")
    found = report(at(0, "0B1", waiting=True), at(1, "1B1"), ends={1: "failed"})
    failure = explained(raised, found)
    assert str(failure) == (f"rank 1 raised ActionError: broken\nTraceback\nActionError: broken\n{found.text()}")


def test_an_abort_is_told_with_the_messages_that_were_on_the_way():
    """The receives of microbatches 1 and 2 are posted before 1B0; of these rank 0 sends the first."""
    died = RankFailure(1, "was killed by SIGABRT", cause=Cause.DIED)
    found = report(at(0, "0SEND_F1"), at(1, "1SEND_B0"))
    headline = str(explained(died, found)).splitlines()[0]
    assert headline == (
        "rank 1 was killed by SIGABRT while the activation of stage 0, microbatch 1 was on the way to it: "
        "of another size, perhaps"
    )
    both = str(explained(died, report(at(0, "0B1", waiting=True), at(1, "1SEND_B0")))).splitlines()[0]
    assert "microbatch 1 and the activation of stage 0, microbatch 2 were on the way" in both


@pytest.mark.parametrize(
    ("reason", "sender", "receiver"),
    [
        ("was killed by SIGKILL", at(0, "0SEND_F1"), at(1, "1SEND_B0")),
        ("was killed by SIGABRT", at(0, "0F1"), at(1, "1SEND_B0")),
        ("was killed by SIGABRT", None, at(1, "1SEND_B0")),
        ("was killed by SIGABRT", at(0, "0SEND_F1"), doing(Activity.UPDATING)),
        ("was killed by SIGABRT", at(0, "0SEND_F1"), at(1, "1SEND_B1")),
    ],
    ids=["another signal", "not sent", "no sign", "outside", "used"],
)
def test_a_death_with_nothing_on_the_way_is_told_as_it_is(reason, sender, receiver):
    failure = explained(RankFailure(1, reason, cause=Cause.DIED), report(sender, receiver))
    assert failure.reason == reason


# Several replicas


def in_replica(number, *standings):
    """These two ranks in a replica, two ranks that are at the end of their gradients in the other."""
    done = [doing(Activity.REDUCING, waiting=True)] * 2
    return report(*standings, *done) if number == 0 else report(*done, *standings)


def test_a_rank_of_the_second_replica_waits_for_its_own_neighbor():
    found = in_replica(1, at(0, "0B1", waiting=True), at(1, "1B1"))
    assert found.blamed()[0] == 3
    waits = "summing over the replicas in step 7 for 31 s: waits for the other ranks"
    assert found.text().splitlines() == [
        f"rank 0  {waits}",
        f"rank 1  {waits}",
        "rank 2  at 0B1 of step 7 for 31 s: waits for the gradient of stage 1, microbatch 1, from rank 3, which has "
        "not sent it (it is at 1B1 of step 7)",
        "rank 3  at 1B1 of step 7 for 31 s: waits for no message",
        "1f1b: 2 ranks, 4 microbatches (warmup | steady | cooldown)",
        "rank 2   F0  |F1             B0------- F2   >B1<----- F3   B2-------     |B3-------",
        "rank 3       |F0   B0------- F1   >B1<----- F2   B2------- F3   B3-------|",
    ]


def test_the_replica_is_drawn_whose_turn_it_is():
    """Both are in the program; the first one's ranks are earlier in it, but only slow."""
    first = [at(0, "0F1"), at(1, "1F0", waiting=True)]
    second = [at(0, "0B0", waiting=True), at(1, "1B0")]
    text = report(*first, *second, ends={3: "is stopped (SIGSTOP)"}).text()
    assert ">F1<" not in text
    assert [line[:6] for line in text.splitlines()[-2:]] == ["rank 2", "rank 3"]
    assert text.splitlines()[-1].count(">") == 1


def test_where_its_replica_runs_no_program_another_is_drawn():
    found = in_replica(0, at(0, "0B1", waiting=True), at(1, "1B1", waiting=True))
    found = replace(found, ends={2: "was killed by SIGKILL"})
    assert found.blamed()[0] == 2
    assert [line[:6] for line in found.text().splitlines()[-2:]] == ["rank 0", "rank 1"]


def test_what_is_under_way_to_a_rank_of_the_second_replica_comes_from_its_neighbor():
    sender = at(0, "0SEND_F1")
    receiver = at(1, "1F1", waiting=True)
    assert [str(moved) for moved in in_replica(1, sender, receiver).under_way(3)] == [
        "the activation of stage 0, microbatch 1"
    ]
