from __future__ import annotations

import pytest

from pipeline.schedule.events import bubbles
from pipeline.schedule.idle import split_idle
from pipeline.schedule.library import one_f_one_b
from pipeline.schedule.simulate import Costs, simulate
from pipeline.training.step_statistics import busy, makespan, summarize

PROGRAM = one_f_one_b(2, 4)


def step(forward, backward=2.0):
    return simulate(PROGRAM, Costs(forward=forward, backward=backward)).events


def test_one_step_is_itself():
    common = summarize([step(1.0)], PROGRAM)
    assert (common.bubble, common.bubble_span) == bubbles(step(1.0), 2)
    assert common.idle == split_idle(step(1.0), PROGRAM)
    assert common.events == step(1.0)


def test_idle_times_add_up_and_a_step_that_was_held_up_does_not_count():
    steps = [step(1.0), step(1.1), step(1.2), step(50.0)]
    common = summarize(steps, PROGRAM)
    for rank, idle in enumerate(common.idle):
        expected = [split_idle(each, PROGRAM)[rank].total for each in steps[1:3]]
        assert idle.total == pytest.approx(sum(expected) / 2)
    assert common.events == step(1.2)
    middle = sorted(bubbles(each, 2)[0] for each in steps)[1:3]
    assert common.bubble == pytest.approx(sum(middle) / 2)


def test_lengths():
    assert makespan(step(1.0)) == 15.0
    assert busy(step(1.0)) == 24.0


def test_replicas_share_one_makespan():
    """The second replica is slower: the first one's ranks wait for it at the end."""
    both = (*step(1.0), *step(2.0))
    common = summarize([both], PROGRAM)
    assert common.bubble == bubbles(both, 4)[0]
    assert [idle.tail for idle in common.idle[:2]] == [
        alone.tail + makespan(step(2.0)) - makespan(step(1.0)) for alone in split_idle(step(1.0), PROGRAM)
    ]
    assert common.idle[2:] == split_idle(step(2.0), PROGRAM)
    assert sum(idle.total for idle in common.idle) == pytest.approx(4 * makespan(both) - busy(both))
