from __future__ import annotations

import random

import pytest

from pipeline.partition.timing import StageTimes, Timer
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import simulate

NAMES = ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb"]
NAMES += ["zbv", "v_half", "v_min", "dualpipe_v"]


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_the_timer_says_what_the_simulator_says(name, number):
    draw = random.Random(f"{name} {number}")
    schedule = write(name, 3, 6)
    schedule = lower(schedule, activation_checkpoint="always").compute_only() if number else schedule
    times = [StageTimes(*(draw.choice((0.0, draw.random())) for _ in range(6))) for _ in range(schedule.stages)]
    *compute, transfer = zip(*times, strict=True)
    # A message over boundary s costs as much either way: a size of its own over a bandwidth of 1.
    costs = Costs(*compute, bandwidth=1.0, boundary_bytes=transfer)
    path = Timer(schedule).longest(times)
    assert path.makespan == pytest.approx(simulate(schedule, costs).makespan, rel=1e-12)
    along = sum(n * t for counts, one in zip(path.counts, times, strict=True) for n, t in zip(counts, one, strict=True))
    assert along == pytest.approx(path.makespan, rel=1e-12)


def test_sends_and_receives_are_left_out():
    schedule = write("1f1b", 2, 4)
    times = [StageTimes(1, 2, 1, 1, 1, 0.5)] * 2
    assert Timer(lower(schedule)).longest(times) == Timer(schedule).longest(times)


def test_ranks_that_wait_for_each_other_are_refused():
    words = "schedule: knot\nstage_to_rank: 0 1\nmicrobatches: 1\nforward_only: no\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0\n"
    with pytest.raises(ValueError, match="schedule knot deadlocks"):
        Timer(Schedule.from_text(words))
