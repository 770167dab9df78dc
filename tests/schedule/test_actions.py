from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action, ActionType

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(ActionType), st.integers(0, 10**6))


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
        *("2SEND_W5", "2.0F5", "٢F5", "2F5;", "(0F0;1B1)OVERLAP_F_B", "0UNSHARD", "0REDUCE_GRAD"),
    ],
)
def test_anything_else_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not an action: use stage, type and microbatch as in '2F5'"):
        Action.parse(word)


def test_kinds_of_types() -> None:
    assert {kind.name for kind in ActionType if kind.is_compute} == {"F", "B", "I", "W", "R"}
    assert {kind.name for kind in ActionType if kind.is_backward} == {"B", "I"}
    assert {kind.name for kind in ActionType if kind.is_send} == {"SEND_F", "SEND_B"}
    assert {kind.name for kind in ActionType if kind.is_receive} == {"RECV_F", "RECV_B"}
    assert all(kind.value == kind.name for kind in ActionType)


def test_an_action_crosses_processes() -> None:
    action = Action(1, ActionType.SEND_B, 2)
    assert pickle.loads(pickle.dumps(action)) == action
    assert {action: "found"}[pickle.loads(pickle.dumps(action))] == "found"
