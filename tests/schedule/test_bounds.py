"""The lower bound: the closed forms it must equal, and that nothing the library writes is under it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.bounds import Backward, lower_bound, schedule_lower_bound
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import dualpipe_v, forward_only, gpipe, one_f_one_b, zb_h1, zbv
from pipeline.schedule.lowering import lower
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import simulate
from tests.schedule.strategies import library_schedules

LINE = (0, 1, 2, 3)
V = (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("transfer", [0.0, 0.1, 5.0])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 8), (8, 3)])
def test_unsplit_is_what_gpipe_attains(pp: int, microbatches: int, transfer: float) -> None:
    costs = Costs(forward=1.0, backward=2.5, transfer=transfer)
    expected = (microbatches + pp - 1) * 3.5 + 2 * (pp - 1) * transfer
    assert lower_bound(range(pp), microbatches, costs, backward="full") == pytest.approx(expected)
    assert simulate(gpipe(pp, microbatches), costs).makespan == pytest.approx(expected)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [(0.0, 27.0), (0.1, 27.3), (4.0, max(3 * 5 + 8 * 3, 3 * (2 + 8) + 8 * 2 + 1))],
)
def test_split_counts_the_way_back(transfer: float, expected: float) -> None:
    """The larger of (p-1)(F+c) + m(F+I+W) and (p-1)(F+I+2c) + m(F+I) + W."""
    assert lower_bound(LINE, 8, Costs(transfer=transfer)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pp", "microbatches", "cap", "expected"), [(4, 8, 3, 28), (4, 8, 2, 37), (2, 4, 1, 20), (4, 8, 8, 27)]
)
def test_memory_cap(pp: int, microbatches: int, cap: int, expected: float) -> None:
    assert lower_bound(range(pp), microbatches, Costs(), memory_cap=cap) == expected
    assert lower_bound(range(pp), microbatches, Costs(), memory_cap=[cap] * pp) == expected


def test_memory_cap_of_a_later_rank() -> None:
    """Rank 2 of 4, holding one: from 2 on, 8 lives of (p-r)(F+I) + W = 5."""
    assert lower_bound(LINE, 8, Costs(), memory_cap=(8, 8, 1, 8)) == 2 + 8 * 5
    assert lower_bound(LINE, 8, Costs(), memory_cap=(8, 8, 1, 8), backward="full") == 2 + 8 * 6 + 2 * 2


def test_v_placement() -> None:
    assert lower_bound(V, 8, Costs()) == 3 + 8 * 2 * 3
    assert lower_bound(V, 8, Costs(transfer=0.5)) == 3 * 1.5 + 8 * 2 * 3


def test_unequal_costs_are_bounded_by_the_slowest_rank_and_its_head() -> None:
    costs = Costs(
        forward=(1.0, 2.0, 1.0), backward_input=(1.0, 3.0, 1.0), backward_weight=(1.0, 2.0, 1.0), transfer=0.5
    )
    assert lower_bound((0, 1, 2), 4, costs) == 1.5 + 4 * 7
    # Unsplit, the gradient of rank 1's last microbatch has still to go back to rank 0.
    assert lower_bound((0, 1, 2), 4, costs, backward="full") == 1.5 + 4 * 7 + 0.5 + 2.0


def test_a_schedule_is_bounded_by_its_own_actions() -> None:
    assert schedule_lower_bound(one_f_one_b(4, 8), Costs()) == 33
    assert schedule_lower_bound(zb_h1(4, 8), Costs()) == 27
    assert schedule_lower_bound(zbv(4, 8), Costs()) == 51
    assert schedule_lower_bound(zb_h1(4, 8), Costs(), memory_cap=2) == 37
    assert schedule_lower_bound(dualpipe_v(4, 8), Costs()) == 51
    assert schedule_lower_bound(forward_only(LINE, 8), Costs(transfer=0.5)) == 8 + 3 * 1.5
    recomputed = place_recomputation(one_f_one_b(4, 8), lambda stage, microbatch: stage < 3)
    assert schedule_lower_bound(recomputed, Costs(recompute=1.0)) == 2 + 8 * 4 + 2 * 2


def test_either_backward_takes_the_shorter_one() -> None:
    """F + min(B, I + W) of work, and only what is sure to follow the last action: nothing."""
    costs = Costs(backward=1.5)
    kinds: tuple[Backward, ...] = ("split", "full", "either")
    assert [lower_bound((0, 1), 4, costs, backward=kind) for kind in kinds] == [13, 12.5, 11]


@pytest.mark.parametrize(("cap", "words"), [((2, 2), "2 entries for 4 ranks"), (0, "memory_cap is 0: use 1 or more")])
def test_caps_that_make_no_sense(cap: int | tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lower_bound(LINE, 8, Costs(), memory_cap=cap)


TIME = st.floats(0.1, 3.0)


@settings(max_examples=80, deadline=None)
@given(library_schedules(4, 8), st.tuples(TIME, TIME, TIME, TIME), st.data())
def test_no_schedule_is_under_it(
    schedule: Schedule, times: tuple[float, float, float, float], data: st.DataObject
) -> None:
    each = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    forward = data.draw(st.one_of(TIME, each))
    costs = Costs(forward, times[0], times[1], times[2], transfer=times[3])
    for program in (schedule, lower(schedule, activation_checkpoint="except_last")):
        bound = schedule_lower_bound(program, costs)
        simulation = simulate(program, costs)
        assert simulation.makespan >= bound * (1 - 1e-12)
        capped = schedule_lower_bound(program, costs, memory_cap=simulation.peak_in_flight)
        assert bound <= capped <= simulation.makespan * (1 + 1e-12)
