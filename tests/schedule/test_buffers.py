"""How many boundary buffers a rank holds."""

from __future__ import annotations

from functools import cache

import pytest

from pipeline.schedule.actions import Action
from pipeline.schedule.buffers import held_buffers, peak_buffers
from pipeline.schedule.library import SCHEDULES, forward_only, write
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import peak_in_flight
from pipeline.schedule.schedule import Schedule

written = cache(write)


def by_hand(*lines: str, microbatches: int = 1) -> Schedule:
    rows = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Schedule("by hand", rows, tuple(range(len(lines))), microbatches)


def test_an_input_is_held_to_the_backward_and_a_gradient_by_it():
    middle = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1B0 1SEND_B0 1F1"
    schedule = by_hand("", middle, "", microbatches=2)
    assert list(held_buffers(schedule, 1)) == [1, 1, 1, 2, 3, 3, 1, 1]


def test_an_input_is_held_to_the_backward_for_the_weight():
    schedule = by_hand("", "1RECV_F0 1F0 1RECV_B0 1I0 1SEND_B0 1W0 1RECV_F1", "", microbatches=2)
    assert list(held_buffers(schedule, 1)) == [1, 1, 2, 2, 1, 1, 1]


def test_an_evaluation_holds_an_input_for_its_forward_alone():
    program = lower(forward_only((0, 1, 2), 9), prefetch=2)
    assert [peak_buffers(program, rank) for rank in range(3)] == [0, 3, 3]


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_buffers_are_as_many_as_are_in_flight_and_prefetched(name, pp):
    """For 16 and 64 microbatches alike, but in gpipe and looped_bfs. Without a window a gradient is one more."""
    for window in (0, 1, 2, 5):
        peaks = []
        for microbatches in (16, 64):
            program = lower(written(name, pp, microbatches), prefetch=window)
            peaks.append([peak_buffers(program, rank) for rank in range(pp)])
            most = [held + max(window, 1) for held in peak_in_flight(program)]
            assert all(peak <= limit for peak, limit in zip(peaks[-1], most, strict=True)), (window, peaks[-1], most)
        assert name in ("gpipe", "looped_bfs") or peaks[0] == peaks[1]
