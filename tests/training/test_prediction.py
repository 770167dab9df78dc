"""Costs found in events, and what the simulator makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import pytest

from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.simulate import Costs, Event, bubbles, simulate
from pipeline.training.prediction import Profile, predict, profiled_steps
from pipeline.training.step_statistics import makespan

SIZES = (2, 2, 2, 2, 1, 1, 1, 1)
TRUE = Costs(
    forward=(1.0, 1.5), backward=(2.0, 2.5), backward_input=(1.1, 1.2), backward_weight=0.7, recompute=1.1, transfer=0.2
)


def program_of(schedule, pp=2, checkpoint="never"):
    return lower(write(schedule, pp, len(SIZES)), activation_checkpoint=checkpoint)


@dataclass
class World:
    """A run whose true costs are known: jittered, by the microbatch's size, with an overhead after every action."""

    costs: Costs
    overhead: float = 0.05
    jitter: float = 0.0
    source: random.Random | None = None

    def duration(self, action):
        part = action.compute[0]
        noise = 1 + self.jitter * (self.source.random() if self.source else 0.0)
        return self.costs.duration(action) * SIZES[part.microbatch] * noise + self.overhead

    def transfer_time(self, source, destination):
        return self.costs.transfer_time(source, destination) - self.overhead

    def step(self, program, start=100.0):
        return tuple(
            tuple(Event(e.rank, e.action, start + e.start, start + e.end - self.overhead) for e in row)
            for row in simulate(program, self).events
        )


def two_stages(costs, stages):
    """The costs of as many stages, the last one's the dearest."""
    spread = lambda times: times if isinstance(times, float) else (times[0],) * (stages - 1) + (times[1],)  # noqa: E731
    names = ("forward", "backward", "backward_input", "backward_weight", "recompute", "transfer")
    return Costs(**{name: spread(getattr(costs, name)) for name in names})


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_profile_of_a_run_predicts_it(schedule, checkpoint, pp):
    program = program_of(schedule, pp, checkpoint)
    world = World(two_stages(TRUE, program.stages))
    step = world.step(program)
    profile = Profile.of([step], program, SIZES)
    assert profile.overhead == pytest.approx([0.05] * pp)
    prediction = predict([profile], range(2, 3), [makespan(step) + 3.0], [step], turns=False)
    assert prediction.outside_seconds == pytest.approx(3.0)
    assert prediction.step_seconds == pytest.approx(makespan(step) + 3.0, rel=0.01)
    assert prediction.bubble == pytest.approx(bubbles(step, pp)[0], abs=0.01)
    assert prediction.steps == (3,)


def test_costs_are_found_again():
    program = program_of("1f1b")
    step = World(TRUE).step(program)
    profile = Profile.of([step], program, SIZES)
    (durations,) = profile.durations
    assert {(name[0][0].value, *name[0][1:]): median(seconds) for name, seconds in durations.items()} == {
        ("F", stage, size): pytest.approx(TRUE.forward[stage] * size) for stage in (0, 1) for size in (1, 2)
    } | {("B", stage, size): pytest.approx(TRUE.backward[stage] * size) for stage in (0, 1) for size in (1, 2)}
    assert profile.latency == pytest.approx({(0, 1): 0.2, (1, 0): 0.2})
    costs = profile.costs()
    assert costs["forward"] == pytest.approx([1.5, 2.25])
    assert costs["backward"] == pytest.approx([3.0, 3.75])
    assert costs["transfer"] == pytest.approx([0.2, 0.2])
    assert [costs[name] for name in ("backward_input", "backward_weight", "recompute", "overlap")] == [None] * 4


def test_jitter_costs_what_averages_do_not_show():
    """A rank waits for the slower of two: the simulation of averages would promise a shorter step."""
    program, source = program_of("1f1b", 4), random.Random(5)
    world = World(Costs(forward=1.0, backward=2.0, transfer=0.2), jitter=4.0, source=source)
    steps = [world.step(program) for _ in range(60)]
    seconds = [makespan(step) for step in steps]
    profile = Profile.of(steps[:20], program, SIZES)
    prediction = predict([profile], range(20), seconds[:20], steps[:20], turns=False)
    average = World(Costs(forward=3.0, backward=6.0, transfer=0.2))
    assert makespan(average.step(program)) < 0.95 * median(seconds[20:])
    assert prediction.step_seconds == pytest.approx(median(seconds[20:]), rel=0.02)


def test_a_step_that_the_machine_held_up_does_not_count():
    """Its durations, mixed into every simulated step, would prolong them all."""
    program = program_of("1f1b", 4)
    usual, slow = (World(Costs(forward=cost, backward=2 * cost, transfer=0.2)).step(program) for cost in (1.0, 4.0))
    steps = [usual, slow, usual, usual, slow]
    prediction = predict(
        [Profile.of(steps, program, SIZES)], range(5), [makespan(s) for s in steps], steps, turns=False
    )
    assert prediction.step_seconds == pytest.approx(makespan(usual), rel=0.01)


def test_a_prediction_is_always_the_same():
    program, source = program_of("1f1b"), random.Random(5)
    steps = [World(TRUE, jitter=1.0, source=source).step(program) for _ in range(3)]
    first, second = (
        predict([Profile.of(steps, program, SIZES)], range(3), [9.0] * 3, steps, turns=False) for _ in range(2)
    )
    assert first == second


def test_replicas_are_predicted_side_by_side():
    """One of them takes twice as long, so the step does."""
    program = program_of("1f1b")
    steps = [World(cost, overhead=0.0).step(program) for cost in (Costs(1, 2), Costs(2, 4))]
    both = tuple(row for step in steps for row in step)
    profiles = [Profile.of([step], program, SIZES) for step in steps]
    prediction = predict(profiles, range(1), [makespan(both) + 1.0], [both], turns=False)
    assert prediction.step_seconds == pytest.approx(makespan(steps[1]) + 1.0)
    assert [{event.rank for event in row} for row in prediction.events] == [{0}, {1}, {2}, {3}]
    assert prediction.idle[0].tail > prediction.idle[2].tail


def test_ranks_that_take_turns_take_the_sum_of_their_work():
    program = program_of("gpipe")
    step = World(TRUE, overhead=0.0).step(program)
    work = sum(event.end - event.start for row in step for event in row)
    prediction = predict([Profile.of([step], program, SIZES)], range(1), [work + 1.0], [step], turns=True)
    assert prediction.outside_seconds == pytest.approx(1.0)
    assert prediction.step_seconds == pytest.approx(work + 1.0)


def test_a_channel_that_nobody_waits_on_is_like_the_others():
    program = lower(write("gpipe", 2, 1), activation_checkpoint="always")
    step = World(Costs(forward=1.0, backward=2.0, recompute=50.0, transfer=0.2)).step(program)
    assert Profile.of([step], program, SIZES).latency == pytest.approx({(0, 1): 0.2, (1, 0): 0.2})


def test_of_a_single_rank_there_is_no_message():
    program = lower(write("1f1b", 1, len(SIZES)))
    step = World(Costs(forward=1.0, backward=2.0)).step(program)
    profile = Profile.of([step], program, SIZES)
    assert profile.latency == {}
    assert profile.costs()["transfer"] == [0.0]


@pytest.mark.parametrize(
    ("steps", "kept", "profiled"),
    [
        (1, 1, [0]),
        (2, 2, [1]),
        (3, 3, [2]),
        (4, 4, [2]),
        (7, 7, [2, 4, 6]),
        (1000, 4, [996, 998]),
    ],
)
def test_profiled_steps_leave_out_the_warmup_and_every_other_step(steps, kept, profiled):
    assert profiled_steps(steps, kept) == profiled


def test_profiled_steps_are_spread_over_a_long_run():
    found = profiled_steps(300, 300)
    assert len(found) == 20
    assert found[0] == 2
    assert 280 < found[-1] < 300
    assert all(later - earlier in (14, 16) for earlier, later in pairwise(found))
