from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType

number = st.integers(0, 10**6)
plain = st.sampled_from([kind for kind in ActionType if kind not in (ActionType.OVERLAP_F_B, ActionType.REDUCE_GRAD)])
pairs = st.builds(
    Action.overlap,
    st.builds(Action, number, st.just(ActionType.F), number),
    st.builds(Action, number, st.just(ActionType.B), number),
)
reductions = st.builds(Action, number, st.just(ActionType.REDUCE_GRAD), st.just(NO_MICROBATCH))
actions = st.builds(Action, number, plain, number) | pairs | reductions

PAIR = "(0F3;3B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("0F0", Action(0, ActionType.F, 0)),
        ("2F5", Action(2, ActionType.F, 5)),
        ("10B31", Action(10, ActionType.B, 31)),
        ("3I1", Action(3, ActionType.I, 1)),
        ("3W1", Action(3, ActionType.W, 1)),
        ("3R1", Action(3, ActionType.R, 1)),
        ("2SEND_F5", Action(2, ActionType.SEND_F, 5)),
        ("2RECV_F5", Action(2, ActionType.RECV_F, 5)),
        ("2SEND_B5", Action(2, ActionType.SEND_B, 5)),
        ("2RECV_B5", Action(2, ActionType.RECV_B, 5)),
        ("2REDUCE_GRAD", Action(2, ActionType.REDUCE_GRAD, NO_MICROBATCH)),
        (PAIR, Action.overlap(Action(0, ActionType.F, 3), Action(3, ActionType.B, 1))),
    ],
)
def test_a_word_is_an_action_and_back(word: str, action: Action) -> None:
    assert Action.parse(word) == action
    assert str(action) == word


@settings(deadline=None, derandomize=True, max_examples=60)
@given(actions)
def test_every_action_survives_its_word(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "word",
    [
        *(
            "",
            "F",
            "F5",
            "2F",
            "2X5",
            "2f5",
            "2F5 ",
            " 2F5",
            "2F5\n",
            "-1F0",
            "2F-1",
            "2F5B6",
            "02F5",
            "2F05",
            "2SEND5",
        ),
        *("2SEND_W5", "2.0F5", "٢F5", "2F5;", "0UNSHARD", "0REDUCE_GRAD1", "REDUCE_GRAD", "0OVERLAP_F_B1"),
        *("(0F3)OVERLAP_F_B", "(0F3;3B1;0F4)OVERLAP_F_B", "(0F3;3B1)", "(0F3;3B1)F", "0F3;3B1", "()OVERLAP_F_B"),
        *("((0F3;3B1)OVERLAP_F_B;3B1)OVERLAP_F_B", "(0F3; 3B1)OVERLAP_F_B", "(0F3;x)OVERLAP_F_B"),
    ],
)
def test_anything_else_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not an action: use stage, type and microbatch as in '2F5'"):
        Action.parse(word)


def test_an_overlapped_pair_stands_for_its_parts() -> None:
    forward, backward = Action.parse("0F3"), Action.parse("3B1")
    pair = Action.parse(PAIR)
    assert (pair.stage, pair.type, pair.microbatch) == (0, ActionType.OVERLAP_F_B, 3)
    assert pair.compute == pair.parts == (forward, backward)
    assert forward.compute == (forward,)


@pytest.mark.parametrize("word", ["(3B1;0F3)OVERLAP_F_B", "(0F3;3I1)OVERLAP_F_B", "(0F3;1F1)OVERLAP_F_B"])
def test_only_a_forward_and_a_full_backward_overlap(word: str) -> None:
    with pytest.raises(ValueError, match=r"don't overlap: use an F and a B, as in '\(0F3;3B1\)OVERLAP_F_B'"):
        Action.parse(word)


def test_kinds_of_types() -> None:
    assert {kind.name for kind in ActionType if kind.is_compute} == {"F", "B", "I", "W", "R", "OVERLAP_F_B"}
    assert {kind.name for kind in ActionType if kind.is_communication} == {"SEND_F", "SEND_B", "RECV_F", "RECV_B"}
    assert {kind.name for kind in ActionType if kind.is_backward} == {"B", "I"}
    assert {kind.name for kind in ActionType if kind.is_send} == {"SEND_F", "SEND_B"}
    assert {kind.name for kind in ActionType if kind.is_receive} == {"RECV_F", "RECV_B"}
    assert all(kind.value == kind.name for kind in ActionType)


def test_an_action_crosses_processes() -> None:
    action = Action(1, ActionType.SEND_B, 2)
    assert pickle.loads(pickle.dumps(action)) == action
    assert {action: "found"}[pickle.loads(pickle.dumps(action))] == "found"
