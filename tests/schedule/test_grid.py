from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.schedule.grid as module
from pipeline.schedule.actions import Action
from pipeline.schedule.grid import grid
from pipeline.schedule.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs
from tests.schedule.strategies import library_schedules


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_1f1b() -> None:
    assert lines(grid(one_f_one_b(4, 4))) == [
        "1f1b: 4 ranks, 4 microbatches (warmup | steady | cooldown)",
        "rank 0   F0 F1 F2|F3                   B0---   |B1---    B2---    B3---",
        "rank 1      F0 F1|F2             B0--- F3 B1---   |B2---    B3---",
        "rank 2         F0|F1       B0--- F2 B1--- F3 B2---   |B3---",
        "rank 3           |F0 B0--- F1 B1--- F2 B2--- F3 B3---|",
    ]


def test_gpipe() -> None:
    assert lines(grid(gpipe(2, 3))) == [
        "gpipe: 2 ranks, 3 microbatches (warmup | steady | cooldown)",
        "rank 0   F0 F1|F2          B0---|B1--- B2---",
        "rank 1      F0 F1|F2 B0---|B1--- B2---",
    ]


def test_several_stages_a_rank_show_their_number() -> None:
    assert lines(grid(interleaved_1f1b(2, 2)))[1:] == [
        "rank 0   0F0 0F1 2F0|2F1         2B0----    |2B1---- 0B0---- 0B1----",
        "rank 1       1F0 1F1|3F0 3B0---- 3F1 3B1----|1B0---- 1B1----",
    ]


def test_the_docstrings_picture_is_real() -> None:
    assert module.__doc__ is not None
    assert grid(one_f_one_b(2, 4)) in module.__doc__


def test_forward_only() -> None:
    assert lines(grid(forward_only((0, 1), 1))) == [
        "forward_only: 2 ranks, 1 microbatch (forward only)",
        "rank 0   F0",
        "rank 1      F0",
    ]


def test_a_lowered_schedule_looks_like_its_compute() -> None:
    assert grid(lower(one_f_one_b(3, 5))) == grid(one_f_one_b(3, 5))


def test_recomputation_shows() -> None:
    assert (
        lines(grid(lower(one_f_one_b(2, 2), activation_checkpoint="always")))[2]
        == "rank 1     |F0 R0 B0--- F1 R1 B1---|"
    )


def test_other_costs() -> None:
    assert lines(grid(one_f_one_b(2, 2), costs=Costs(backward=1.0)))[1:] == [
        "rank 0   F0|F1    B0   |B1",
        "rank 1     |F0 B0 F1 B1|",
    ]


def test_actions_of_no_time_stay_visible() -> None:
    free = grid(one_f_one_b(1, 3), costs=Costs(forward=0.0))
    assert all(word in free for word in ("F0", "B0", "F1", "B1", "F2", "B2"))


@pytest.mark.parametrize("mark", [Action.parse("1B2"), {(1, 5)}, [(1, 5)]])
def test_the_culprit_is_marked(mark: Action | set[tuple[int, int]]) -> None:
    schedule = one_f_one_b(2, 4)
    assert str(schedule.rows[1][5]) == "1B2"
    drawn = grid(schedule, mark=mark)
    assert drawn.count(">B2<") == 1
    assert ">B2<" in lines(drawn)[2]


def test_a_marked_receive_is_shown_in_program_order() -> None:
    drawn = lines(grid(lower(one_f_one_b(2, 4)), mark=Action.parse("1RECV_F2")))
    assert drawn[0] == "1f1b: 2 ranks, 4 microbatches (program order)"
    assert ">1RECV_F2<" in drawn[2]


def test_what_cannot_run_is_shown_in_program_order() -> None:
    rows = tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert lines(grid(Schedule("stuck", rows, (0, 1), 2))) == [
        "stuck: 2 ranks, 2 microbatches (program order)",
        "rank 0  0F0 0B0 0F1 0B1",
        "rank 1  1F0 1F1 1B0 1B1",
    ]


def test_a_long_row_loses_its_middle() -> None:
    drawn = lines(grid(one_f_one_b(4, 64), width=100))
    assert all(len(line) <= 100 for line in drawn)
    assert all(" ... " in line for line in drawn[1:])
    assert drawn[1].startswith("rank 0   F0  F1  F2 |F3 ")
    assert drawn[1].endswith("B63----")
    assert drawn[3].count("|") == 2


def test_a_culprit_in_the_middle_stays_in_sight() -> None:
    drawn = grid(one_f_one_b(4, 64), width=100, mark=Action.parse("2B30"))
    assert ">B30<" in lines(drawn)[3]
    assert all(len(line) <= 100 for line in lines(drawn))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    library_schedules(12, 20),
    st.integers(40, 200),
    st.floats(0.3, 7),
)
def test_no_line_is_too_long_and_nothing_is_lost(schedule: Schedule, width: int, backward: float) -> None:
    costs = Costs(backward=backward)
    assert all(len(line) <= width for line in lines(grid(schedule, costs=costs, width=width))[1:])
    drawn = lines(grid(schedule, costs=costs))[1:]
    several = schedule.stages > schedule.pp
    for row, line in zip(schedule.rows, drawn, strict=True):
        shown = [word.strip("-") for word in line.replace("|", " ").split()[2:]]
        words = [[str(a) if several else f"{a.type.value}{a.microbatch}" for a in action.compute] for action in row]
        assert shown == ["+".join(word) for word in words]


def test_an_overlapped_pair_is_one_word_over_its_slots() -> None:
    row = tuple(map(Action.parse, ["0F0", "1F0", "0F1", "(1F1;1B0)OVERLAP_F_B", "0B0", "1B1", "0B1"]))
    assert lines(grid(Schedule("pair", (row,), (0, 0), 2))) == [
        "pair: 1 rank, 2 microbatches (warmup | steady | cooldown)",
        "rank 0   0F0 1F0 0F1|1F1+1B0----|0B0---- 1B1---- 0B1----",
    ]


def test_a_marked_pair() -> None:
    row = tuple(map(Action.parse, ["0F0", "0F1", "(1F0;0B1)OVERLAP_F_B"]))
    drawn = grid(Schedule("stuck", (row,), (0, 0), 2), mark=row[2])
    assert lines(drawn)[1] == "rank 0  0F0 0F1 >(1F0;0B1)OVERLAP_F_B<"
