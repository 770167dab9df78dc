from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType
from pipeline.schedule.library import gpipe, interleaved_1f1b, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Channel, Message, Schedule, channel, makes, message, route, takes
from tests.schedule.strategies import library_schedules

digit = st.integers(0, 9)
any_action = st.builds(Action, digit, st.sampled_from([kind for kind in ActionType if len(kind.value) < 7]), digit)
any_pair = st.builds(
    Action.overlap,
    st.builds(Action, digit, st.just(ActionType.F), digit),
    st.builds(Action, digit, st.just(ActionType.B), digit),
)
any_reduction = st.builds(Action, digit, st.just(ActionType.REDUCE_GRAD), st.just(NO_MICROBATCH))
any_schedule = st.builds(
    Schedule,
    name=st.text().filter(lambda name: "\n" not in name),
    rows=st.lists(st.lists(any_action | any_pair | any_reduction, max_size=6).map(tuple), max_size=4).map(tuple),
    stage_to_rank=st.lists(st.integers(0, 9), max_size=6).map(tuple),
    microbatches=st.integers(0, 99),
    forward_only=st.booleans(),
    release=st.sampled_from(["end", "each"]),
)
library_schedule = library_schedules(5, 9)

PAIR = "(0F3;1B1)OVERLAP_F_B"


def words(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))


def parse(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(any_schedule)
def test_text_loses_nothing(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule


@settings(deadline=None, derandomize=True, max_examples=60)
@given(library_schedule)
def test_text_loses_nothing_of_a_program(schedule: Schedule) -> None:
    program = lower(schedule, activation_checkpoint="except_last")
    assert Schedule.from_text(program.to_text()) == program


def test_text_is_readable() -> None:
    assert one_f_one_b(2, 2).to_text() == (
        "schedule: 1f1b\nstage_to_rank: 0 1\nmicrobatches: 2\nforward_only: no\n"
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    )


def test_text_names_the_release_where_it_is_not_the_usual_one() -> None:
    text = replace(one_f_one_b(2, 2), release="each").to_text()
    assert text == one_f_one_b(2, 2).to_text().replace("forward_only: no\n", "forward_only: no\nrelease: each\n")
    with pytest.raises(ValueError, match="release is 'soon': use end or each"):
        Schedule.from_text(text.replace("each", "soon"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("schedule: ", "plan: ", "where a line 'schedule: ...' must stand"),
        ("microbatches: 2\n", "", "where a line 'microbatches: ...' must stand"),
        ("microbatches: 2", "microbatches: two", "'two' in the schedule's text is not a count"),
        ("0 1\n", "0 -1\n", "'-1' in the schedule's text is not a count"),
        ("forward_only: no", "forward_only: maybe", "forward_only is 'maybe': use yes or no"),
        ("rank 1", "rank 2", "where a line 'rank 1: ...' must stand"),
        ("0F1", "0F", "'0F' is not an action"),
    ],
)
def test_a_broken_text_is_refused(old: str, new: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Schedule.from_text(one_f_one_b(2, 2).to_text().replace(old, new, 1))


def test_a_name_of_two_lines_has_no_text() -> None:
    with pytest.raises(ValueError, match="use a name of one line"):
        Schedule("a\nb", (), (), 1).to_text()


def test_counts_and_placement() -> None:
    schedule = interleaved_1f1b(2, 4, stages_per_rank=3)
    assert (schedule.pp, schedule.stages) == (2, 6)
    assert schedule.stages_of(0) == (0, 2, 4)
    assert schedule.stages_of(1) == (1, 3, 5)
    assert not schedule.is_lowered
    assert lower(schedule).is_lowered
    assert lower(schedule).compute_only() == schedule


@pytest.mark.parametrize(
    ("row", "warmup", "steady", "cooldown"),
    [
        ("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "0F0 0F1", "0F2 0B0 0F3 0B1", "0B2 0B3"),
        ("0F0 0B0 0F1 0B1", "", "0F0 0B0 0F1 0B1", ""),
        ("0F0 0F1 0B0 0B1", "0F0", "0F1 0B0", "0B1"),
        ("0F0 0F1 0R0 0B0 0R1 0B1", "0F0", "0F1 0R0 0B0", "0R1 0B1"),
        ("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2", "0F0", "0F1 0I0 0W0 0F2 0I1", "0I2 0W1 0W2"),
        (f"0F0 0F1 {PAIR} 1B0 1B1", "0F0 0F1", PAIR, "1B0 1B1"),
        (f"0F0 {PAIR} 0F4 1B0 1B1", "0F0", f"{PAIR} 0F4 1B0", "1B1"),
        ("0F0 0F1", "0F0 0F1", "", ""),
        ("", "", "", ""),
    ],
)
def test_phases(row: str, warmup: str, steady: str, cooldown: str) -> None:
    phases = Schedule("s", (parse(row),), (0,), 4).phases(0)
    assert tuple(map(words, phases)) == (warmup, steady, cooldown)


def test_phases_of_a_lowered_row_are_its_compute_phases() -> None:
    schedule = one_f_one_b(4, 8)
    assert [lower(schedule).phases(rank) for rank in range(4)] == [schedule.phases(rank) for rank in range(4)]


def test_identical_rows_have_identical_phases() -> None:
    assert one_f_one_b(4, 4).rows[0] == gpipe(4, 4).rows[0]
    assert one_f_one_b(4, 4).phases(0) == gpipe(4, 4).phases(0)


@pytest.mark.parametrize(
    ("send", "receive", "moved", "used"),
    [
        ("0SEND_F3", "1RECV_F3", Message("activation", 0, 3), Channel(0, 1, "activation")),
        ("1SEND_F3", "2RECV_F3", Message("activation", 1, 3), Channel(1, 0, "activation")),
        ("1SEND_B3", "0RECV_B3", Message("gradient", 1, 3), Channel(1, 0, "gradient")),
        ("2SEND_B3", "1RECV_B3", Message("gradient", 2, 3), Channel(0, 1, "gradient")),
    ],
)
def test_the_two_ends_of_a_transfer(send: str, receive: str, moved: Message, used: Channel) -> None:
    for end in map(Action.parse, (send, receive)):
        assert message(end) == moved
        assert channel(end, (0, 1, 0, 1)) == used
    assert route(moved, (0, 1, 0, 1)) == used


@pytest.mark.parametrize(
    ("word", "taken", "made"),
    [
        ("0F3", None, Message("activation", 0, 3)),
        ("1F3", Message("activation", 0, 3), Message("activation", 1, 3)),
        ("2F3", Message("activation", 1, 3), None),
        ("2B3", None, Message("gradient", 2, 3)),
        ("1I3", Message("gradient", 2, 3), Message("gradient", 1, 3)),
        ("0B3", Message("gradient", 1, 3), None),
        ("1W3", None, None),
        ("1R3", None, None),
    ],
)
def test_what_an_action_takes_and_makes(word: str, taken: Message | None, made: Message | None) -> None:
    action = Action.parse(word)
    assert (takes(action, 3), makes(action, 3)) == (taken, made)
    assert all(moved.boundary == min(action.stage, moved.destination_stage) for moved in [made] if moved is not None)


def test_compute_moves_no_message() -> None:
    with pytest.raises(ValueError, match="0F0 moves no message"):
        message(Action.parse("0F0"))


@pytest.mark.parametrize("word", ["0RECV_F0", "0SEND_B0", "1SEND_F0", "1RECV_B0"])
def test_no_channel_beyond_the_ends(word: str) -> None:
    with pytest.raises(ValueError, match="nothing moves from stage"):
        channel(Action.parse(word), (0, 1))
