"""One clock for all ranks, between processes; the arithmetic is in tests/engine/test_clock_offset.py."""

from __future__ import annotations

import pytest

from pipeline.training.clocks import SharedClock
from pipeline.training.group import LocalGroup
from pipeline.training.launch import launch
from tests.training import clock_targets as targets

pytestmark = pytest.mark.timeout(120)


def test_one_process_has_one_clock():
    clock = SharedClock(LocalGroup(3))
    clock.update()
    times = [1.5, 2.5]
    assert clock.to_rank_0(times) is times


def test_a_clock_that_is_ahead_and_drifts_is_turned_into_rank_0s():
    found = {}
    launch(targets.times, None, 2, on_message=lambda message: found.update([message]))
    assert found[0] == 0.0
    assert found[1] < 5e-3


def test_a_run_whose_ranks_have_different_clocks_is_measured_by_one():
    messages = []
    launch(targets.train, 3, 2, on_message=messages.append)
    (finished,) = messages
    sent = {event.action.microbatch: event.end for event in finished.events[0] if event.action.type.name == "F"}
    arrived = {event.action.microbatch: event.start for event in finished.events[1] if event.action.type.name == "F"}
    for microbatch, start in arrived.items():
        assert -5e-3 < start - sent[microbatch] < 5.0, "targets.AHEAD would show"
    assert 0 < finished.bubble_span_measured < 1
    assert max(event.end for row in finished.events for event in row) < 10.0
