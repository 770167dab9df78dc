"""What a parent sees of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from pipeline.engine.standing import Activity, Board
from pipeline.training.failures import Cause, RankFailure
from pipeline.training.watch import Watch, is_stopped
from tests.training.test_hang_report import PROGRAMS

pytestmark = pytest.mark.timeout(60)


def test_a_stopped_process_is_told_from_a_running_one_and_none():
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    ("cause", "reason", "line"),
    [
        (
            Cause.DIED,
            "was killed by SIGKILL",
            "rank 1  at 1RECV_F0 of step 3 for 0.0 s: waits for no message; was killed",
        ),
        (Cause.RAISED, "raised KeyError: 1", "rank 1  at 1RECV_F0 of step 3 for 0.0 s: waits for no message; failed"),
    ],
)
def test_what_was_seen_at_the_first_sign_is_kept(cause, reason, line):
    board = Board.in_memory(2)
    markers = [board.marker(0), board.marker(1)]
    markers[1].begin(Activity.TRAINING, 2)
    watch = Watch(board)
    watch.look()
    markers[1].begin(Activity.TRAINING, 3)
    failure = watch.explain(RankFailure(1, reason, cause=cause), PROGRAMS, 30)
    assert str(failure).startswith(f"rank 1 {reason}\nrank 0  starting for 0.0 s: waits for no message\n{line}")


def test_without_a_first_sign_the_board_is_read_when_asked():
    board = Board.in_memory(2)
    board.marker(0).enter(Activity.UPDATING, 4)
    assert "rank 0  updating the weights of step 5" in str(
        Watch(board).explain(RankFailure(1, "sent rubbish"), PROGRAMS, 30)
    )
