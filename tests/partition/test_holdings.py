"""What a rank holds, against `pipeline.schedule.memory`."""

from __future__ import annotations

import random

import pytest

from pipeline.partition.holdings import holdings
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint, peak_activation_bytes
from pipeline.schedule.recomputation import Window
from tests.partition.test_auto import NAMES


@pytest.mark.parametrize(
    "checkpoint", ["never", "always", "except_last", Window(5)], ids=["never", "always", "except_last", "window"]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_most_that_is_held_is_the_schedules_own_figure(name, checkpoint):
    draw = random.Random(name)
    schedule = lower(write(name, 3, 6), activation_checkpoint=checkpoint)
    for _ in range(5):
        full = tuple(draw.random() + 1 for _ in range(schedule.stages))
        waiting = tuple(draw.random() for _ in range(schedule.stages))
        peaks = peak_activation_bytes(schedule, Footprint(full, checkpoint=waiting))
        for rank, peak in enumerate(peaks):
            found = max(
                sum((kept + rebuilt) * full[s] + less * waiting[s] for s, (kept, less, rebuilt) in holding.items())
                for holding in holdings(schedule, rank)
            )
            assert found == pytest.approx(peak, rel=1e-12)


def test_rank_r_of_1f1b_holds_p_minus_r_and_all_in_gpipe():
    assert [holdings(write("1f1b", 4, 8), rank) for rank in range(4)] == [
        [{rank: (4 - rank, 0, 0)}] for rank in range(4)
    ]
    assert holdings(write("gpipe", 2, 8), 1) == [{1: (8, 0, 0)}]


def test_with_recomputation_one_is_full_and_the_others_wait():
    schedule = lower(write("gpipe", 2, 4), activation_checkpoint="always")
    assert holdings(schedule, 0) == [{0: (0, 3, 1)}, {0: (0, 4, 0)}]
