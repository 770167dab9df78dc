"""What holds for every schedule of the library, whatever its counts and the costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs, simulate
from pipeline.schedule.validate import validate
from tests.schedule.strategies import FIXED, library_schedules

any_schedule = library_schedules(8, 20, stages_per_rank=3)
times = st.lists(st.floats(0.1, 9), min_size=24, max_size=24).map(tuple)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(any_schedule, st.integers(0, 4), st.sampled_from(["never", "except_last", "always"]))
def test_it_runs_with_any_prefetch(schedule: Schedule, prefetch: int, checkpoint: str) -> None:
    validate(schedule)
    validate(lower(schedule, prefetch=prefetch, activation_checkpoint=checkpoint))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_it_runs_with_few_microbatches(name: str, pp: int) -> None:
    for microbatches in range(2 * pp if name == "dualpipe_v" else 1, 2 * pp + 2):
        for prefetch in range(3):
            validate(lower(write(name, pp, microbatches), prefetch=prefetch))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(any_schedule, times, times, times, st.floats(0, 5))
def test_makespan_is_at_least_the_lower_bound(
    schedule: Schedule,
    forward: tuple[float, ...],
    for_input: tuple[float, ...],
    for_weight: tuple[float, ...],
    transfer: float,
) -> None:
    backward = tuple(i + w for i, w in zip(for_input, for_weight, strict=True))
    costs = Costs(forward, backward, for_input, for_weight, transfer=transfer)
    run = simulate(schedule, costs)
    ranks = schedule.stage_to_rank
    arrival, last_gradient = 0.0, 0.0
    for stage in range(schedule.stages):
        if stage in (schedule.stages_of(rank)[0] for rank in range(schedule.pp)):
            # The rank's work starts when its first stage's input arrives; a row that ends with a full backward of that
            # stage still has the stages before it to go, one that ends with W nothing.
            events = run.events[ranks[stage]]
            work = sum(costs.duration(event.action) for event in events)
            ends_unsplit = all(event.action.type in (ActionType.F, ActionType.B) for event in events)
            bound = arrival + work + (last_gradient if ends_unsplit else 0.0)
            assert run.makespan >= bound * (1 - 1e-9)
            assert events[0].start >= arrival * (1 - 1e-9)
        hop = transfer * (stage + 1 < schedule.stages and ranks[stage] != ranks[stage + 1])
        arrival += forward[stage] + hop
        last_gradient += backward[stage] + hop
    assert -1e-9 <= run.span_bubble <= run.makespan_bubble + 1e-9


@settings(deadline=None, derandomize=True, max_examples=100)
@given(any_schedule)
def test_a_stage_takes_its_microbatches_in_order(schedule: Schedule) -> None:
    taken: dict[tuple[int, str], list[int]] = defaultdict(list)
    for action in _parts(schedule):
        kind = "backward" if action.type.is_backward else action.type.value
        taken[action.stage, kind].append(action.microbatch)
    for (_, kind), microbatches in taken.items():
        backwards_reversed = schedule.name == "looped_bfs" and kind == "backward"
        assert all((a > b) if backwards_reversed else (a < b) for a, b in pairwise(microbatches))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(any_schedule)
def test_peaks_keep_to_what_the_schedules_say(schedule: Schedule) -> None:
    p, m, v = schedule.pp, schedule.microbatches, schedule.stages // schedule.pp
    most = {
        "1f1b": p,
        "eager_1f1b": 2 * p - 1,
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zbv": 2 * p,
        "v_half": 2 * ((p + 2) // 2),
        "v_min": 2 * ((p + 4) // 3),
        "dualpipe_v": 2 * p + 1,
    }
    run = simulate(schedule, Costs())
    for peak, at_input in zip(run.peak_in_flight, run.peak_in_flight_released_at_input, strict=True):
        assert at_input <= peak <= min(m * v, most.get(schedule.name, m * v))


def _parts(schedule: Schedule) -> Iterator[Action]:
    return (part for row in schedule.rows for action in row for part in action.compute)
