"""The board that says where every rank stands, in one process and shared by several."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from pipeline.engine.executor import ActionError
from pipeline.engine.standing import BEYOND, Activity, Board, Marker, SharedBoard
from tests.engine.harness import build_ranks, microbatches_of, plan_for, settings_for, step
from tests.engine.samples import linears, vectors


def place(standing):
    return standing.activity, standing.step, standing.lap, standing.position, standing.waiting


def test_a_board_starts_with_ranks_that_have_done_nothing():
    board = Board.in_memory(2)
    assert [place(standing) for standing in board.standings()] == [(Activity.STARTING, 0, 0, 0, False)] * 2
    assert board.steps_done() == 0


def test_markers_move_apart_from_each_other():
    board = Board.in_memory(2)
    first, second = board.marker(0), board.marker(1)
    first.begin(Activity.TRAINING, 6)
    first.move(3, waiting=True)
    second.begin(Activity.EVALUATING, 0)
    second.begin(Activity.TRAINING, 7)
    second.enter(Activity.UPDATING)
    assert [place(standing) for standing in board.standings()] == [
        (Activity.TRAINING, 6, 1, 3, True),
        (Activity.UPDATING, 7, 2, BEYOND, False),
    ]
    assert all(0 <= standing.seconds < 60 for standing in board.standings())


def test_a_step_is_done_when_the_last_rank_has_done_it():
    board = Board.in_memory(2)
    first, second = board.marker(0), board.marker(1)
    first.finish_step()
    first.finish_step()
    assert board.steps_done() == 0
    second.finish_step()
    assert board.steps_done() == 1


def test_a_marker_waits_inside_and_stays_waiting_where_it_failed():
    board = Board.in_memory(1)
    marker = board.marker(0)
    marker.enter(Activity.TAKING_NORM)
    with marker.waiting():
        with marker.waiting():
            assert board.standing(0).waiting
        assert board.standing(0).waiting, "inside the outer one still"
    assert not board.standing(0).waiting
    with marker.waiting(Activity.REDUCING):
        assert board.standing(0).activity is Activity.REDUCING
    assert board.standing(0).activity is Activity.TAKING_NORM
    with pytest.raises(ConnectionError), marker.waiting():
        raise ConnectionError
    assert board.standing(0).waiting


def test_the_executor_marks_every_action_and_what_it_waits_for(monkeypatch):
    moves = []

    def move(marker, position, waiting=False):
        if marker is ranks[1].marker:
            moves.append((marker._activity, position, waiting))

    inputs, targets = vectors(4)
    model = linears(2)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)
    ranks = build_ranks(plan, model)
    monkeypatch.setattr(Marker, "move", move)
    step(ranks, microbatches_of(plan, model, inputs, targets))
    row = plan.program.rows[1]
    assert {activity for activity, _, _ in moves} == {Activity.TRAINING}
    assert moves[0] == (Activity.TRAINING, 0, False), "begin"
    assert list(dict.fromkeys(position for _, position, _ in moves)) == list(range(len(row) + 1))
    waited = {position for _, position, waiting in moves if waiting}
    forwards = {position for position, action in enumerate(row) if action.type.value == "F"}
    assert waited == {*forwards, len(row)}, "for the activations, and at the end for the sends"
    assert all((Activity.TRAINING, position, False) in moves for position in forwards), "not while it computes"


def test_a_failed_action_leaves_the_marker_there(monkeypatch):
    inputs, targets = vectors(4)
    model, board = linears(2), Board.in_memory(1)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)
    ranks = build_ranks(plan, model)
    failing = ranks[0].trainer
    failing._marker = board.marker(0)
    monkeypatch.setattr(failing, "_hand_back", lambda *_: 1 / 0)
    with pytest.raises(ActionError):
        step(ranks, microbatches_of(plan, model, inputs, targets))
    standing = board.standing(0)
    assert str(plan.program.rows[0][standing.position]) == "0B0"
    assert not standing.waiting


def mark_and_die(name):
    board = SharedBoard(2, name)
    marker = board.marker(1)
    marker.begin(Activity.TRAINING, 4)
    marker.move(9, waiting=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_a_killed_process_leaves_its_standing_and_closing_leaves_nothing():
    board = SharedBoard(2)
    try:
        process = multiprocessing.get_context("spawn").Process(target=mark_and_die, args=(board.name,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert place(board.standing(1)) == (Activity.TRAINING, 4, 1, 9, True)
        assert board.standing(0).lap == 0
    finally:
        board.close()
    with pytest.raises(FileNotFoundError):
        SharedBoard(2, board.name)
