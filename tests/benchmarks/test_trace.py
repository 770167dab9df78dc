from __future__ import annotations

from tests.benchmarks.trace import MICROBATCHES, measure, models, table, trace_seconds


def test_a_trace_takes_less_than_a_hundredth_of_a_step() -> None:
    """Of the smallest model: `share`, because a ratio of two times wants a quiet machine."""
    row = measure("tiny gpt", models()["tiny gpt"], "1f1b", steps=2)
    assert row["actions"] == 4 * MICROBATCHES
    assert 0 < float(row["share"]) < 0.01
    assert float(row["ratio"]) > 0
    assert len(table([row]).splitlines()) == 2


def test_reading_no_events_takes_next_to_nothing() -> None:
    assert trace_seconds([], repeat=5) < 1e-3
