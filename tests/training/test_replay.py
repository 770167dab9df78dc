from __future__ import annotations

import pytest

from pipeline.schedule.library import forward_only, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.simulate import Event, bubbles
from pipeline.training.replay import MeasuredCosts, replay


def one_after_the_other(program, duration):
    """Events as ranks that take turns leave them: no two overlap."""
    now, rows = 100.0, []
    for rank, row in enumerate(program.compute_only().rows):
        events = []
        for action in row:
            events.append(Event(rank, action, now, now + duration(action)))
            now += duration(action) + 0.25
        rows.append(events)
    return rows


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_equal_durations_give_the_schedules_own_bubble(checkpoint):
    program = lower(one_f_one_b(4, 8), activation_checkpoint=checkpoint)
    times = {"F": 1.0, "R": 1.0, "B": 2.0}
    events = replay(program, one_after_the_other(program, lambda action: times[action.type.value]))
    if checkpoint == "never":
        assert bubbles(events, 4)[0] == pytest.approx(3 / (8 + 3))
    assert max(event.end for row in events for event in row) < 60
    for row, expected in zip(events, program.compute_only().rows, strict=True):
        assert [event.action for event in row] == list(expected)


def test_durations_are_the_measured_ones():
    program = lower(forward_only((0, 1), 3))
    measured = one_after_the_other(program, lambda action: 1.0 + action.stage + 0.125 * action.microbatch)
    for row, found in zip(measured, replay(program, measured), strict=True):
        assert [event.end - event.start for event in found] == pytest.approx([e.end - e.start for e in row])
    costs = MeasuredCosts(measured)
    assert costs.transfer_time(0, 1) == 0.0
    assert costs.duration(measured[1][2].action) == 2.25
