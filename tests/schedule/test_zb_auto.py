"""zb_auto: the exact optima of small cases, never worse than the fixed schedules, never slower for more memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import ActionType
from pipeline.schedule.bounds import lower_bound, schedule_lower_bound
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.library.zb_auto import Placement, longest_span, zb_auto
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.search.candidates import candidates, ladder
from pipeline.schedule.search.greedy import Rule, greedy
from pipeline.schedule.search.improve import Objective, peak
from pipeline.schedule.search.problem import F, I, Problem, W
from pipeline.schedule.search.timing import Clock
from pipeline.schedule.simulate import simulate
from pipeline.schedule.validate import validate

FIXED: dict[Placement, tuple[str, ...]] = {
    "line": ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2"),
    "v": ("zbv", "v_half", "v_min"),
}

OPTIMA: list[tuple[Placement, int, int, dict[int, int]]] = [
    ("line", 2, 4, {1: 20, 2: 13, 3: 13}),
    ("line", 3, 6, {2: 25, 3: 20, 5: 20}),
    ("line", 4, 8, {2: 41, 3: 31, 4: 27, 7: 27}),
    ("v", 2, 4, {2: 33, 3: 27, 4: 25}),
    ("v", 3, 5, {4: 35, 5: 33, 6: 32}),
]
"""Placement, ranks, microbatches; the least makespan for each cap at F=I=W=1, as a MILP solver proved it."""

COSTS = {
    "even": Costs(),
    "paper": Costs(18.522, None, 18.086, 9.337, transfer=0.601),
    "short W": Costs(1.0, None, 1.5, 0.4, transfer=0.1),
    "long W": Costs(0.7, None, 1.0, 1.6),
    "fused": Costs(1.0, 1.6, 1.0, 1.0, transfer=0.1),
}


def value(schedule: Schedule, costs: Costs, objective: Objective) -> float:
    simulation = simulate(schedule, costs)
    return simulation.makespan if objective == "makespan" else longest_span(simulation)


def optima() -> list[tuple[Placement, int, int, int, int]]:
    return [(placement, *counts, cap, best) for placement, *counts, rows in OPTIMA for cap, best in rows.items()]


@pytest.mark.parametrize(("placement", "pp", "microbatches", "cap", "best"), optima())
def test_exact_optima(placement: Placement, pp: int, microbatches: int, cap: int, best: int) -> None:
    schedule = zb_auto(pp, microbatches, memory_cap=cap, placement=placement)
    validate(schedule, memory_cap=[cap] * pp)
    assert simulate(schedule, Costs()).makespan == best


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_exact_spans(pp: int, microbatches: int) -> None:
    """The idle time falls by one forward for each activation more, from ZB-H1's to none: 3m + 2p-1 - M."""
    for cap in range(pp, 2 * pp):
        schedule = zb_auto(pp, microbatches, memory_cap=cap, objective="span")
        assert longest_span(simulate(schedule, Costs())) == 3 * microbatches + 2 * pp - 1 - cap


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("placement", ["line", "v"])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 4), (4, 3)])
def test_never_worse_than_the_fixed(
    pp: int, microbatches: int, costs: Costs, placement: Placement, objective: Objective
) -> None:
    for name in FIXED[placement]:
        fixed = write(name, pp, microbatches)
        cap = simulate(fixed, costs).peak_in_flight
        schedule = zb_auto(pp, microbatches, costs=costs, memory_cap=cap, placement=placement, objective=objective)
        validate(schedule, memory_cap=cap)
        assert schedule.stage_to_rank == fixed.stage_to_rank
        assert value(schedule, costs, objective) <= value(fixed, costs, objective)
        assert value(schedule, costs, "makespan") >= schedule_lower_bound(schedule, costs, memory_cap=cap) * (1 - 1e-12)


def test_beats_the_fixed_where_costs_differ() -> None:
    """(8, 16) on the line: the bound itself, 54, where zb_h2 takes 54.6; (4, 8) on the V: 49 where zbv takes 51.6."""
    costs = Costs(1.0, None, 1.2, 0.6, transfer=0.2)
    line, v = zb_auto(8, 16, costs=costs), zb_auto(4, 8, costs=costs, placement="v")
    assert simulate(line, costs).makespan == pytest.approx(lower_bound(range(8), 16, costs)) == pytest.approx(54)
    assert simulate(write("zb_h2", 8, 16), costs).makespan == pytest.approx(54.6)
    assert simulate(v, costs).makespan <= 49 + 1e-9
    assert simulate(write("zbv", 4, 8), costs).makespan == pytest.approx(51.6)


def test_less_memory_than_any_fixed_schedule() -> None:
    """The search itself, where none of the fixed V schedules fits."""
    assert max(simulate(write("v_min", 8, 6), Costs()).peak_in_flight) > 6
    schedule = zb_auto(8, 6, memory_cap=6, placement="v")
    validate(schedule, memory_cap=[6] * 8)
    one_after_another = 6 * (2 * 8 * 2 + 1)
    assert simulate(schedule, Costs()).makespan < one_after_another / 2


TIME = st.sampled_from([0.5, 1.0, 1.3, 2.0])
DELAY = st.sampled_from([0.0, 0.2, 1.0])


def stage_times(stages: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(TIME, min_size=stages, max_size=stages).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, Placement, Objective, Costs, Sequence[int], Sequence[int]]:
    placement: Placement = draw(st.sampled_from(["line", "v"]))
    objective: Objective = draw(st.sampled_from(["makespan", "span"]))
    pp, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    held = 2 if placement == "v" else 1
    times = [draw(stage_times(held * pp)) for _ in range(4)]
    costs = Costs(*times, transfer=draw(DELAY))
    small = draw(st.lists(st.integers(held, 6), min_size=pp, max_size=pp))
    more = draw(st.lists(st.integers(0, 3), min_size=pp, max_size=pp))
    return pp, microbatches, placement, objective, costs, small, [a + b for a, b in zip(small, more, strict=True)]


@settings(max_examples=15, deadline=None)
@given(requests())
def test_more_memory_never_slows(
    request: tuple[int, int, Placement, Objective, Costs, Sequence[int], Sequence[int]],
) -> None:
    pp, microbatches, placement, objective, costs, small, large = request
    values = []
    for cap in (small, large, None):
        schedule = zb_auto(pp, microbatches, costs=costs, memory_cap=cap, objective=objective, placement=placement)
        validate(lower(schedule), memory_cap=cap)
        assert simulate(schedule, costs).makespan >= schedule_lower_bound(schedule, costs, memory_cap=cap) - 1e-9
        values.append(value(schedule, costs, objective))
    assert values == sorted(values, reverse=True)


def test_same_schedule_every_time() -> None:
    costs = Costs((1.0, 1.1, 0.9), None, 1.2, 0.7, transfer=0.2)
    first = zb_auto(3, 4, costs=costs, memory_cap=4)
    candidates.cache_clear()
    assert zb_auto(3, 4, costs=costs, memory_cap=4) == first


def test_of_equally_fast_ones_the_one_with_least_memory() -> None:
    assert simulate(zb_auto(4, 8), Costs()).peak_in_flight == (4, 4, 4, 4)


def test_full_backward_where_that_is_shorter() -> None:
    """A B of 1.2 in place of I and W of 1 each: as one where they follow each other."""
    costs = Costs(backward=1.2)
    schedule = zb_auto(2, 6, costs=costs)
    assert any(action.type is ActionType.B for row in schedule.rows for action in row)
    assert simulate(schedule, costs).makespan <= simulate(write("1f1b", 2, 6), costs).makespan
    assert all(action.type is not ActionType.B for row in zb_auto(2, 6).rows for action in row)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_cap": 0}, "memory_cap is 0: use 1 or more"),
        ({"memory_cap": 1, "placement": "v"}, "memory_cap is 1 on rank 0, but .* holds 2 at least .*: use 2 or more"),
        ({"memory_cap": [4, 1, 3], "placement": "v"}, "memory_cap is 1 on rank 1"),
        ({"memory_cap": [4, 4]}, "2 entries for 3 ranks"),
        ({"objective": "memory"}, "objective is 'memory': use makespan or span"),
        ({"placement": "loop"}, "placement is 'loop': use line or v"),
        ({"costs": Costs(forward=(1.0, 2.0))}, "2 entries for 3 stages"),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        zb_auto(3, 4, **options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("pp", "microbatches"), [(0, 4), (4, 0)])
def test_counts(pp: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="is 0: use 1 or more"):
        zb_auto(pp, microbatches)


@pytest.mark.parametrize("pp", [2, 3, 5])
@pytest.mark.parametrize("placement", ["line", "v"])
def test_greedy_keeps_every_cap_and_finishes(placement: Placement, pp: int) -> None:
    """Under the least cap too, whatever the rule; and its times are the simulator's."""
    costs = Costs(1.0, None, 1.3, 0.7, transfer=0.4)
    stage_to_rank = (*range(pp), *reversed(range(pp))) if placement == "v" else tuple(range(pp))
    problem = Problem.of(stage_to_rank, 4, costs)
    least = len(problem.stages_of[0])
    rules = [
        Rule(order, factor, factor, wait, hold, later, not later)
        for order, factor in product(((I, F, W), (F, I, W), (W, F, I)), (0.5, 1.5, float("inf")))
        for wait, hold, later in ((0.0, 0.0, False), (1.0, 0.5, True))
    ]
    for cap, rule in product((least, least + 1, 4 * least), rules):
        rows = greedy(problem, [cap] * pp, rule)
        schedule = Schedule("greedy", tuple(map(problem.row, rows)), stage_to_rank, 4)
        validate(schedule, memory_cap=[cap] * pp)
        assert [problem.codes(row) for row in schedule.rows] == rows
        assert tuple(peak(problem, row) for row in rows) == simulate(schedule, costs).peak_in_flight
        timing = Clock(problem).time(rows)
        assert timing is not None
        assert timing.makespan == simulate(schedule, costs).makespan
        assert timing.span == longest_span(simulate(schedule, costs))


def test_ladder_starts_at_the_least_cap_and_ends_at_all() -> None:
    line = Problem.of(range(4), 8, Costs())
    assert [cap[0] for cap in ladder(line)] == [1, 2, 3, 4, 5, 6, 7, 8]
    large = ladder(Problem.of((*range(16), *reversed(range(16))), 64, Costs()))
    assert large[0] == (2,) * 16
    assert large[-1] == (128,) * 16
    assert {(32,) * 16, (62,) * 16} <= set(large)


def test_rows_that_wait_for_each_other_have_no_times() -> None:
    problem = Problem.of((0, 1), 1, Costs())
    backward_first = [[problem.code(I, 0, 0), problem.code(F, 0, 0)], [problem.code(F, 1, 0), problem.code(I, 1, 0)]]
    assert Clock(problem).time(backward_first) is None
