from __future__ import annotations

import pytest

from tests.benchmarks.cases import EMPTY
from tests.benchmarks.overhead import measure


def test_a_row_counts_every_compute_action_and_times_all_three() -> None:
    row = measure(EMPTY, "1f1b", rounds=2)
    assert row["actions"] == 2 * 8 * 2
    assert all(float(row[column]) > 0 for column in ("in_process_us", "us", "torch_us", "plain_us"))
    assert float(row["ratio"]) == pytest.approx(float(row["torch_us"]) / float(row["us"]))
