"""Idle time by cause as text."""

from __future__ import annotations

from pipeline.report.idle_text import idle_table
from pipeline.schedule.idle import Idle

NARROW = Idle(warmup=0.0101, tail=0.123)


def test_every_cause_stands_measured_beside_predicted() -> None:
    table = idle_table([NARROW, Idle()], [Idle(warmup=0.02), Idle(communication=0.00004)])
    assert table is not None
    assert table.unit == "ms"
    assert table.headings == ("rank", "idle", "warmup", "communication", "imbalance", "dependency", "tail")
    nothing = "0.0 / 0.0"
    assert table.rows == (
        ("0", "133 / 20.0", "10.1 / 20.0", nothing, nothing, nothing, "123 / 0.0"),
        ("1", nothing, nothing, nothing, nothing, nothing, nothing),
        ("all", "133 / 20.0", "10.1 / 20.0", nothing, nothing, nothing, "123 / 0.0"),
    )


def test_long_times_are_seconds_and_what_is_unknown_a_dash() -> None:
    table = idle_table([Idle(tail=2.5)], [])
    assert table is not None
    assert table.unit == "s"
    assert table.rows == (("0", "2.5 / -", *["0.0 / -"] * 4, "2.5 / -"),)
    assert idle_table([], []) is None


def test_of_many_ranks_the_first_and_the_last_are_shown() -> None:
    table = idle_table([NARROW] * 40, [])
    assert table is not None
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3", "...", "36", "37", "38", "39", "all"]
    assert {len(row) for row in table.rows} == {7}
