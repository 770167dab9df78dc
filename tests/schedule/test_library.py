"""The rows the schedules write, against the orders of torch 2.14.1's generators and runtime."""

from __future__ import annotations

import pytest

from pipeline.schedule.library import SCHEDULES, forward_only, gpipe, interleaved_1f1b, one_f_one_b, write
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.validate import validate


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def numbered(*lines: str) -> list[str]:
    """Rows of one stage a rank, written without the stage."""
    return [" ".join(f"{rank}{word}" for word in line.split()) for rank, line in enumerate(lines)]


def test_gpipe_order() -> None:
    assert rows(gpipe(2, 4)) == numbered(*["F0 F1 F2 F3 B0 B1 B2 B3"] * 2)


def test_1f1b_order() -> None:
    assert rows(one_f_one_b(2, 4)) == numbered("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    assert rows(one_f_one_b(4, 8)) == numbered(
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    )


def test_interleaved_order() -> None:
    assert rows(interleaved_1f1b(2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_groups_differ_by_one_at_most() -> None:
    # Eleven microbatches over four ranks: groups of 6 and 5, where Megatron-LM would run 4, 4 and 3.
    last_rank = rows(interleaved_1f1b(4, 11))[3]
    assert last_rank.startswith("3F0 3F1 3F2 3F3 3F4 3F5 7F0 7B0 7F1")
    assert last_rank.endswith("7F10 7B9 7B10 3B6 3B7 3B8 3B9 3B10")


def test_fewer_microbatches_than_ranks() -> None:
    assert rows(one_f_one_b(4, 2)) == numbered(*["F0 F1 B0 B1"] * 3, "F0 B0 F1 B1")
    assert rows(interleaved_1f1b(3, 1))[2] == "2F0 5F0 5B0 2B0"


def test_forward_only_order() -> None:
    assert rows(forward_only((0, 1, 0, 1), 4)) == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    ]


@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1), (0, 1, 2, 2, 1, 0)])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_forward_only_takes_any_placement(placement: tuple[int, ...], microbatches: int) -> None:
    validate(forward_only(placement, microbatches))


@pytest.mark.parametrize("placement", [(), (1,), (0, 2), (0, -1)])
def test_forward_only_refuses_a_rank_without_stages(placement: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give every rank from 0 on at least one stage"):
        forward_only(placement, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_write_by_name(name: str) -> None:
    schedule = write(name, 2, 4)
    assert schedule == SCHEDULES[name](2, 4)
    assert schedule.name == name


def test_write_passes_options_on() -> None:
    assert write("interleaved_1f1b", 2, 4, stages_per_rank=3).stages == 6


@pytest.mark.parametrize(
    ("name", "hint"),
    [("1f1B", r" \(did you mean '1f1b'\?\)"), ("g_pipe", r" \(did you mean 'gpipe'\?\)"), ("zzz", "")],
)
def test_an_unknown_name_shows_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"no schedule is called '{name}'{hint}: use one of gpipe, 1f1b, eager_1f1b, "):
        write(name, 2, 4)


@pytest.mark.parametrize(
    ("name", "option", "cure"),
    [("gpipe", "stages_per_rank", "drop it"), ("interleaved_1f1b", "waves", r"use its options \(stages_per_rank\)")],
)
def test_an_option_it_does_not_take(name: str, option: str, cure: str) -> None:
    with pytest.raises(ValueError, match=rf"schedule {name} takes no option {option} \(2\): {cure}"):
        write(name, 2, 4, **{option: 2})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches", "problem"), [(0, 4, "pp is 0"), (2, 0, "microbatches is 0")])
def test_counts_are_one_or_more(name: str, pp: int, microbatches: int, problem: str) -> None:
    with pytest.raises(ValueError, match=f"{problem}: use 1 or more"):
        write(name, pp, microbatches)


def test_stages_per_rank_is_one_or_more() -> None:
    with pytest.raises(ValueError, match="stages_per_rank is 0: use 1 or more"):
        interleaved_1f1b(2, 4, stages_per_rank=0)


def test_forward_only_needs_a_microbatch() -> None:
    with pytest.raises(ValueError, match="microbatches is 0: use 1 or more"):
        forward_only((0, 1), 0)
