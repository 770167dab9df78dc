"""The rows the schedules write, word by word, and what they refuse."""

from __future__ import annotations

import pytest

from pipeline.schedule.library import SCHEDULES, dualpipe_v, options_of, write
from pipeline.schedule.schedule import Schedule
from tests.schedule.library.tables import NAMES, orders
from tests.schedule.strategies import FIXED


def words(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


@pytest.mark.parametrize(("title", "schedule", "expected"), [pytest.param(*order, id=order[0]) for order in orders()])
def test_order(title: str, schedule: Schedule, expected: list[str]) -> None:
    assert words(schedule) == expected


def test_the_tables_cover_every_fixed_schedule() -> None:
    assert set(NAMES.values()) == {schedule.name for _, schedule, _ in orders()} == set(FIXED)
    assert set(FIXED) <= set(SCHEDULES)


@pytest.mark.parametrize("name", FIXED)
def test_one_rank(name: str) -> None:
    schedule = write(name, 1, 2)
    assert schedule.stage_to_rank == (0,) * schedule.stages
    held = "stages_per_rank" in options_of(name) or name in ("zbv", "v_half", "v_min", "dualpipe_v")
    assert schedule.stages == (2 if held else 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eager_1f1b", ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"]),
        ("zb_h1", ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", "2F0 2I0 2F1 2I1 2W0 2W1"]),
        ("zb_h2", ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", "2F0 2I0 2F1 2I1 2W0 2W1"]),
        (
            "zbv",
            [
                "0F0 0F1 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0I1 0W1",
                "1F0 1F1 4F0 4F1 4I0 4W0 4I1 4W1 1I0 1W0 1I1 1W1",
                "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1",
            ],
        ),
    ],
)
def test_fewer_microbatches_than_ranks(name: str, expected: list[str]) -> None:
    assert words(write(name, 3, 2)) == expected


def test_groups_of_interleaved_zb_differ_by_one_at_most() -> None:
    # Five microbatches over two ranks: groups of 3 and 2, where torch.pipelining refuses.
    assert words(write("interleaved_zb", 2, 5))[1].startswith("1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1F3 1I0 3W2")


@pytest.mark.parametrize(
    ("pp", "microbatches", "cure"),
    [(4, 7, "(8): use 8 or more, or pp=3"), (2, 2, "(4): use 4 or more, or pp=1"), (1, 1, "(2): use 2 or more")],
)
def test_dualpipe_v_needs_two_microbatches_a_rank(pp: int, microbatches: int, cure: str) -> None:
    with pytest.raises(ValueError, match="needs microbatches") as refused:
        dualpipe_v(pp, microbatches)
    assert str(refused.value) == f"dualpipe_v needs microbatches ({microbatches}) to be at least 2 x pp {cure}"
    dualpipe_v(pp, 2 * pp)


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_zb"])
def test_any_number_of_stages_a_rank(name: str) -> None:
    assert write(name, 2, 4).stages == 4
    assert write(name, 2, 4, stages_per_rank=3).stages == 6
    with pytest.raises(ValueError, match="stages_per_rank is 0: use 1 or more"):
        write(name, 2, 4, stages_per_rank=0)


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "dualpipe_v"])
def test_two_stages_a_rank_down_and_back_up(name: str) -> None:
    assert write(name, 3, 6).stage_to_rank == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ValueError, match=rf"schedule {name} takes no option stages_per_rank \(2\)"):
        write(name, 3, 6, stages_per_rank=2)
