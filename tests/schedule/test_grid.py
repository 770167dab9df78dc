from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.schedule.grid as module
from pipeline.schedule.actions import Action
from pipeline.schedule.grid import grid
from pipeline.schedule.library import dualpipe_v, forward_only, gpipe, interleaved_1f1b, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs
from tests.schedule.strategies import library_schedules


def lines(text: str) -> list[str]:
    return text.splitlines()


def words(schedule: Schedule) -> list[list[str]]:
    """What is written for each rank's actions."""
    several = schedule.stages > schedule.pp
    return [
        ["+".join(str(a) if several else f"{a.type.value}{a.microbatch}" for a in action.compute) for action in row]
        for row in schedule.rows
    ]


def rank_text(text: str, rank: int) -> str:
    """A rank's line, or its lines in all blocks; a blank stands for what was left out."""
    label = re.compile(rf"rank +{rank}(?!\d)")
    return " ".join(label.sub("", line, count=1) for line in lines(text) if label.match(line))


def shown(text: str, rank: int) -> list[str]:
    """The words in a rank's lines."""
    stripped = (word.strip("-><") for word in rank_text(text, rank).replace("|", " ").split())
    return [word for word in stripped if word]


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


def test_a_wide_grid_is_wrapped_into_blocks_of_time() -> None:
    assert lines(grid(one_f_one_b(4, 8), width=80)) == [
        "1f1b: 4 ranks, 8 microbatches (warmup | steady | cooldown)",
        "rank 0   F0 F1 F2|F3                   B0--- F4 B1--- F5",
        "rank 1      F0 F1|F2             B0--- F3 B1--- F4 B2---",
        "rank 2         F0|F1       B0--- F2 B1--- F3 B2--- F4 B3-",
        "rank 3           |F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4",
        "",
        "rank 0   B2--- F6 B3--- F7 B4---   |B5---    B6---    B7---",
        "rank 1   F5 B3--- F6 B4--- F7 B5---   |B6---    B7---",
        "rank 2  --- F5 B4--- F6 B5--- F7 B6---   |B7---",
        "rank 3   B4--- F5 B5--- F6 B6--- F7 B7---|",
    ]


def test_of_many_blocks_the_steady_ones_are_left_out() -> None:
    drawn = lines(grid(one_f_one_b(2, 64), width=60))
    assert drawn == [
        "1f1b: 2 ranks, 64 microbatches (warmup | steady | cooldown)",
        "rank 0   F0 |F1          B0----- F2  B1----- F3  B2--",
        "rank 1      |F0  B0----- F1  B1----- F2  B2----- F3",
        "         ... 172 slots left out ...",
        "rank 0   F61 B60---- F62 B61---- F63 B62----    |B63----",
        "rank 1  ---- F61 B61---- F62 B62---- F63 B63----|",
    ]


@pytest.mark.parametrize(("microbatches", "blocks", "left_out"), [(2, 1, False), (8, 3, False), (9, 2, True)])
def test_up_to_three_blocks_are_all_shown(microbatches: int, blocks: int, left_out: bool) -> None:
    """A line has room for eight slots, a microbatch takes three."""
    drawn = grid(one_f_one_b(1, microbatches), width=len("rank 0  ") + 8 * len(" F0") + 1)
    assert sum(line.startswith("rank 0 ") for line in lines(drawn)) == blocks
    assert ("left out" in drawn) == left_out


@pytest.mark.parametrize("word", ["2F30", "2B30", "0B12", "3F50"])
def test_a_culprit_in_the_middle_stays_in_sight(word: str) -> None:
    action = Action.parse(word)
    drawn = lines(grid(one_f_one_b(4, 64), width=80, mark=action))
    assert [line.startswith(f"rank {action.stage} ") for line in drawn if f">{word[1:]}<" in line] == [True]
    assert sum("left out" in line for line in drawn) == 2
    assert max(map(len, drawn)) <= 80


def test_where_no_edge_spares_a_pair_slots_are_as_wide_as_it() -> None:
    schedule = dualpipe_v(6, 20)
    narrow, wide = grid(schedule, width=40), grid(schedule, width=80)
    assert rank_text(narrow, 0).startswith("   0F0        0F1 ")
    assert rank_text(wide, 0).startswith("   0F0   0F1 ")
    for rank, row in enumerate(words(schedule)):
        assert set(shown(narrow, rank)) | set(shown(wide, rank)) <= set(row)


@pytest.mark.parametrize("width", [1, 15, 20, 25])
def test_words_are_whole_even_where_a_line_has_room_for_one_slot(width: int) -> None:
    schedule = dualpipe_v(2, 4)
    drawn = grid(schedule, width=width)
    for rank, row in enumerate(words(schedule)):
        assert set(shown(drawn, rank)) <= set(row)
    assert shown(drawn, 0)[0] == "0F0"


def test_a_long_title_is_wrapped() -> None:
    assert lines(grid(one_f_one_b(2, 2), width=40))[:2] == [
        "1f1b: 2 ranks, 2 microbatches (warmup |",
        "steady | cooldown)",
    ]
    sends = grid(lower(one_f_one_b(2, 2)), width=40, mark=Action.parse("1RECV_F1"))
    assert lines(sends)[:2] == ["1f1b: 2 ranks, 2 microbatches (program", "order)"]
    assert max(map(len, lines(sends))) <= 40


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    library_schedules(12, 20),
    st.integers(40, 200),
    st.floats(0.3, 7),
    st.data(),
)
def test_every_width_shows_whole_words_bars_and_the_culprit(
    schedule: Schedule, width: int, backward: float, data: st.DataObject
) -> None:
    costs = Costs(backward=backward)
    rank = data.draw(st.integers(0, schedule.pp - 1))
    at = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    unlimited = grid(schedule, costs=costs)
    wrapped = grid(schedule, costs=costs, width=width, mark={(rank, at)})
    assert all(len(line) <= width for line in lines(wrapped))
    assert f">{words(schedule)[rank][at]}<" in rank_text(wrapped, rank)
    for each, row in enumerate(words(schedule)):
        assert shown(unlimited, each) == row
        assert rank_text(wrapped, each).count("|") >= rank_text(unlimited, each).count("|")
        seen = shown(wrapped, each)
        if "left out" in wrapped:
            row = [word for word in row if word in seen]
        assert seen == row


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


def test_ranks_are_called_by_their_numbers_among_all():
    schedule = one_f_one_b(2, 2)
    assert grid(schedule, first_rank=10).replace("rank 10", "rank 0").replace("rank 11", "rank 1") == grid(schedule)
    in_order = grid(lower(schedule), mark={(1, 0)}, first_rank=10)
    assert [line.partition("  ")[0] for line in in_order.splitlines()[1:]] == ["rank 10", "rank 11"]
