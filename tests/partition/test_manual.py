from __future__ import annotations

import pytest

from pipeline.partition import manual


def test_a_manual_cut_is_taken_as_it_is():
    assert manual([1, 4, 2], 7, 3) == (1, 4, 2)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "names 0 stages, the schedule has 2: give 2 numbers that add up to 5"),
        ([5], "names 1 stages, the schedule has 2"),
        ([1, 2, 2], "names 3 stages, the schedule has 2"),
        ([0, 5], "leaves a stage empty"),
        ([6, -1], "leaves a stage empty"),
        ([2, 2], r"partition.layers=\[2, 2\] adds up to 4, the model has 5 layers"),
        ([3, 3], "adds up to 6, the model has 5 layers"),
    ],
)
def test_a_manual_cut_that_cannot_be_is_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        manual(counts, 5, 2)
