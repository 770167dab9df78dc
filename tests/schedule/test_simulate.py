"""Simulated figures against closed forms, published tables and other people's simulations."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.errors import ScheduleError
from pipeline.schedule.events import bubble
from pipeline.schedule.library import SCHEDULES, forward_only, gpipe, interleaved_1f1b, one_f_one_b, write
from pipeline.schedule.lowering import lower
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs, Event, bubbles, nominal_costs, simulate
from tests.schedule.strategies import library_schedules

RANKS = range(1, 9)
MICROBATCHES = range(1, 17)
LATENCIES = [0.0, 0.1, 0.7, 2.5]
FORWARD, BACKWARD = 1.0, 2.0


def by_hand(*rows: str, microbatches: int, stage_to_rank: tuple[int, ...] | None = None) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", parsed, stage_to_rank or tuple(range(len(rows))), microbatches)


def recomputed(schedule: Schedule) -> Schedule:
    return place_recomputation(schedule, lambda stage, microbatch: True)


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("p", RANKS)
def test_gpipe_closed_form(p: int, latency: float) -> None:
    for m in MICROBATCHES:
        run = simulate(gpipe(p, m), Costs(FORWARD, BACKWARD, transfer=latency))
        makespan = (m + p - 1) * (FORWARD + BACKWARD) + 2 * (p - 1) * latency
        assert run.makespan == pytest.approx(makespan)
        assert run.makespan_bubble == pytest.approx(1 - m * (FORWARD + BACKWARD) / makespan)
        assert run.peak_in_flight == (m,) * p


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("p", RANKS)
def test_1f1b_closed_form(p: int, latency: float) -> None:
    for m in range(p, 17):
        run = simulate(one_f_one_b(p, m), Costs(FORWARD, BACKWARD, transfer=latency))
        makespan = (m + p - 1) * (FORWARD + BACKWARD) + 2 * latency * (m + p - 2 - ceil((m - 1) / p))
        assert run.makespan == pytest.approx(makespan)
        assert run.makespan_bubble == pytest.approx(1 - m * (FORWARD + BACKWARD) / makespan)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_peak_and_both_bubbles(p: int) -> None:
    for m in MICROBATCHES:
        run = simulate(one_f_one_b(p, m), Costs(FORWARD, BACKWARD))
        assert run.makespan == pytest.approx((m + p - 1) * (FORWARD + BACKWARD))
        assert run.peak_in_flight == run.peak_in_flight_released_at_input == tuple(min(m, p - r) for r in range(p))
        # Rank 0 runs from the first forward to the last backward, so its span is the makespan.
        assert run.makespan_bubble == run.span_bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_closed_form(p: int, v: int) -> None:
    for m in MICROBATCHES:
        run = simulate(interleaved_1f1b(p, m, v), Costs(FORWARD, BACKWARD))
        assert len(run.events[0]) == 2 * m * v
        if m < p:  # No closed form: it finishes, that's all.
            continue
        assert run.makespan == pytest.approx((m * v + p - 1) * (FORWARD + BACKWARD))
        assert run.makespan_bubble == pytest.approx((p - 1) / (m * v + p - 1))
        first_group = ceil(m / max(1, m // p))
        assert run.peak_in_flight == tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * first_group + 1) for r in range(p))


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_interleaved_closed_form_with_latency(p: int, m: int, v: int) -> None:
    latency = 0.1
    run = simulate(interleaved_1f1b(p, m, v), Costs(FORWARD, BACKWARD, transfer=latency))
    assert run.makespan == pytest.approx((m * v + p - 1) * (FORWARD + BACKWARD) + 2 * (v * p - 1) * latency)


@pytest.mark.parametrize("p", RANKS)
def test_early_recomputation_closed_form(p: int) -> None:
    for m in range(p, 17):
        run = simulate(recomputed(one_f_one_b(p, m)), Costs(FORWARD, BACKWARD))
        busy = m * (2 * FORWARD + BACKWARD)
        assert run.makespan == pytest.approx(busy + (p - 1) * (FORWARD + BACKWARD))
        assert run.makespan_bubble == pytest.approx(1 - busy / run.makespan)
        assert run.peak_in_flight == tuple(min(m, p - r) for r in range(p))


def test_events_by_hand() -> None:
    schedule = by_hand("0F0 0B0", "1F0 1B0", microbatches=1)
    run = simulate(schedule, Costs(forward=(1.0, 3.0), backward=(2.0, 5.0), transfer=(0.25, 0.5)))
    forward0, backward0, forward1, backward1 = (Action.parse(word) for word in ("0F0", "0B0", "1F0", "1B0"))
    assert run.events == (
        (Event(0, forward0, 0.0, 1.0), Event(0, backward0, 9.75, 11.75)),
        (Event(1, forward1, 1.25, 4.25), Event(1, backward1, 4.25, 9.25)),
    )
    assert run.makespan == 11.75
    assert run.makespan_bubble == run.span_bubble == pytest.approx(1 - 11 / (2 * 11.75))


def test_split_backward_by_hand() -> None:
    # The weight gradient fills the wait for the other rank, and keeps the activation until it ran.
    schedule = by_hand("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", microbatches=2)
    run = simulate(schedule, Costs())
    assert [event.start for event in run.events[0]] == [0, 1, 3, 4, 5, 6]
    assert [event.start for event in run.events[1]] == [1, 2, 3, 4, 5, 6]
    assert (run.peak_in_flight, run.peak_in_flight_released_at_input) == ((2, 2), (2, 1))
    assert run.makespan_bubble == pytest.approx(1 - 12 / 14)
    assert run.span_bubble == pytest.approx(1 - 12 / 14)


def test_the_two_bubbles_differ_where_ranks_start_and_end_apart() -> None:
    a, b = Action.parse("0F0"), Action.parse("1F0")
    events = ((Event(0, a, 10.0, 12.0),), (Event(1, b, 12.0, 14.0),))
    assert bubbles(events, 2) == (0.5, 0.0)


def test_bubbles_of_nothing() -> None:
    assert bubbles(((), ()), 2) == (0.0, 0.0)


def test_recomputation_does_not_wait_for_the_gradient() -> None:
    run = simulate(by_hand("0F0 0R0 0B0", "1F0 1R0 1B0", microbatches=1), Costs(recompute=0.5))
    assert [(event.start, event.end) for event in run.events[0]] == [(0, 1), (1, 1.5), (4.5, 6.5)]


def test_neighbors_on_one_rank_pay_no_transfer() -> None:
    schedule = by_hand("0F0 1F0 1B0 0B0", microbatches=1, stage_to_rank=(0, 0))
    assert simulate(schedule, Costs(transfer=100.0)).makespan == 6


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1)])
def test_forward_only_holds_one(placement: tuple[int, ...]) -> None:
    run = simulate(forward_only(placement, 6), Costs())
    assert run.peak_in_flight == run.peak_in_flight_released_at_input == (1,) * len(run.events)


def test_an_overlapped_pair_waits_for_both_inputs_and_releases_both_outputs_at_its_end() -> None:
    rows = ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    run = simulate(by_hand(*rows, microbatches=2), Costs(transfer=0.5))
    assert [(event.start, event.end) for event in run.events[0]] == [(0, 1), (5, 8), (12, 14)]
    assert [event.start for event in run.events[1]] == [1.5, 2.5, 8.5, 9.5]
    assert (run.peak_in_flight, run.makespan_bubble) == ((2, 1), pytest.approx(1 - 12 / 28))


@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_a_pair_may_release_its_forward_first(prefetch: int | None) -> None:
    rows = ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    schedule = replace(by_hand(*rows, microbatches=2), release="each")
    if prefetch is not None:
        schedule = lower(schedule, prefetch=prefetch)
    run = simulate(schedule, Costs(transfer=0.5))
    # The pair starts at 5; its forward is done at 6, there at 6.5.
    assert [event.start for event in run.events[1]] == [1.5, 2.5, 6.5, 7.5]
    shorter = simulate(schedule, Costs(transfer=0.5, overlap=0.75))
    assert (shorter.events[0][1].end, shorter.events[1][2].start) == (5.75, 6.25)


def test_a_stated_overlap_saves_its_time() -> None:
    schedule = by_hand("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2", microbatches=3)
    assert [simulate(schedule, Costs(overlap=overlap)).makespan for overlap in (None, 2.5)] == [9, 8]


def measured() -> list[dict[str, str]]:
    with (Path(__file__).parent / "measured_1f1b_8xA100.csv").open() as file:
        return list(csv.DictReader(file))


# Eight A100s, a GPT of about 4 billion parameters, 1F1B: the artifact of arXiv 2411.05288, 16 configurations.
@pytest.mark.parametrize("row", measured(), ids=lambda row: row["configuration"])
def test_measured_iterations(row: dict[str, str]) -> None:
    forward, backward = (
        tuple(int(time) / 1000 for time in row[f"{way}_us_per_stage"].split()) for way in ("forward", "backward")
    )
    microbatches = int(row["microbatches"])
    run = simulate(one_f_one_b(8, microbatches), Costs(forward, backward))
    iteration = float(row["iteration_ms"])
    assert -0.02 <= run.makespan / iteration - 1 <= 0.001
    busy = microbatches * (sum(forward) + sum(backward))
    printed = float(row["bubble_percent"].rstrip("%"))
    assert 100 * bubble(busy, 8, iteration) == pytest.approx(printed, abs=0.0051)
    assert 100 * run.makespan_bubble == pytest.approx(printed, abs=1.2)


def test_there_are_sixteen_measured_runs() -> None:
    assert len(measured()) == 16


def test_bandwidth_adds_to_latency() -> None:
    schedule = by_hand("0F0 0B0", "1F0 1B0", microbatches=1)
    run = simulate(schedule, Costs(transfer=0.25, bandwidth=4.0, boundary_bytes=(3.0, 99.0)))
    assert [run.events[1][0].start, run.events[0][1].start] == [2, 6]


def test_a_late_receive_delays_its_message() -> None:
    # Rank 1 posts its second receive after three units of other work: that message, sent at 2, starts to move at 5.
    schedule = by_hand("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1", microbatches=2)
    run = simulate(schedule, Costs(forward=(1.0, 3.0), transfer=1.0))
    assert [(event.start, event.end) for event in run.events[1]] == [(2, 5), (6, 9)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 8), (4, 9)])
def test_with_a_wide_window_lowering_costs_no_time(name: str, p: int, m: int) -> None:
    schedule, costs = write(name, p, m), Costs(transfer=0.3)
    lowered = simulate(lower(schedule, prefetch=1000), costs)
    assert lowered.events == simulate(schedule, costs).events


def test_a_deadlock_names_who_waits_for_whom() -> None:
    schedule = by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs())
    assert str(caught.value).splitlines() == [
        "by hand: deadlock: rank 0 at 0B0 waits for the gradient of stage 1, microbatch 0, from rank 1; "
        "rank 1 at 1F1 waits for the activation of stage 0, microbatch 1, from rank 0",
        "rank 0  0F0 >0B0< 0F1 0B1",
        "rank 1  1F0 >1F1< 1B0 1B1",
    ]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "which has sent it, but its receive is not posted"),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"),
            "gradient of stage 1, microbatch 0, from rank 1, which has",
        ),
        (("0B0 0F0",), "rank 0 at 0B0 waits for the forward of stage 0, microbatch 0, from this rank"),
        (("0F0 0W0 0I0",), "rank 0 at 0W0 waits for the backward of stage 0, microbatch 0, from this rank"),
        (("0SEND_F0 0F0", "1F0"), "rank 0 at 0SEND_F0 waits for the forward of stage 0"),
    ],
)
def test_what_never_comes_is_named(rows: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        simulate(by_hand(*rows, microbatches=1), Costs())


def test_a_message_that_nobody_meets_holds_up_the_next_on_its_communicator() -> None:
    rows = ("1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1", "0F0 0SEND_F0 0F1 0SEND_F1")
    schedule = by_hand(*rows, microbatches=2, stage_to_rank=(1, 0, 1))
    assert len(simulate(schedule, Costs()).events[0]) == 2
    problem = "but 1RECV_F1 stands behind 1SEND_F0 of rank 0 on one communicator, which rank 1 never meets"
    with pytest.raises(ScheduleError, match=problem) as caught:
        simulate(schedule, Costs(), communicator=lambda channel: channel.kind)
    assert "rank 0  1RECV_F0 1F0 >1SEND_F0< >1RECV_F1< >1F1<" in str(caught.value)


def test_a_shared_communicator_keeps_its_order_in_time() -> None:
    schedule = replace(lower(forward_only((0, 1, 2), 3), prefetch=0), name="line")
    costs = Costs(forward=(1.0, 1.0, 10.0))
    apart = simulate(schedule, costs)
    shared = simulate(schedule, costs, communicator=lambda channel: channel.kind)
    # Rank 1's second send meets rank 2's receive at 12; its third receive stands behind it, though sent at 3.
    assert [event.start for event in apart.events[1]] == [1, 2, 3]
    assert [event.start for event in shared.events[1]] == [1, 2, 12]


def test_a_circle_leaves_out_who_merely_waits_for_it() -> None:
    schedule = by_hand("0F0 0B0", "1F0 1B0 1F1", "2F0 2F1 2B0", microbatches=2)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 1 at 1B0 [^;]*; rank 2 at 2F1 [^;]*$"):
        simulate(replace(schedule, name="three"), Costs())


def test_crossed_receives_are_named() -> None:
    schedule = by_hand("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2)
    problem = "the activation that 0SEND_F0 sends from rank 0 meets 1RECV_F1 on rank 1: post a channel's receives"
    with pytest.raises(ScheduleError, match=problem):
        simulate(schedule, Costs())


def test_nominal_costs_spread_a_ranks_share() -> None:
    costs = nominal_costs(4)
    actions = [Action(2, kind, 0) for kind in (ActionType.F, ActionType.B, ActionType.I, ActionType.W, ActionType.R)]
    assert [costs.duration(action) for action in actions] == [0.25, 0.5, 0.25, 0.25, 0.25]
    assert costs.transfer_time(0, 1) == 0
    assert simulate(interleaved_1f1b(4, 8), nominal_costs(2)).makespan == pytest.approx(28.5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    library_schedules(5, 9),
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=10, max_size=10),
    st.floats(0, 3),
)
def test_makespan_is_at_least_the_critical_path(
    schedule: Schedule, times: list[tuple[float, float]], transfer: float
) -> None:
    forward, backward = zip(*times, strict=True)
    half = tuple(time / 2 for time in backward)
    run = simulate(schedule, Costs(forward, backward, half, half, transfer=transfer))
    ranks = schedule.stage_to_rank
    split = any(action.type is ActionType.I for row in schedule.rows for action in row)
    hops = sum(here != there for here, there in pairwise(ranks))
    through_all_stages = sum(f + b / (1 + split) for f, b in times[: len(ranks)]) + 2 * transfer * hops
    work = [schedule.microbatches * sum(pair) for pair in times]
    busiest_rank = max(sum(work[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.pp))
    assert run.makespan >= max(through_all_stages, busiest_rank) * (1 - 1e-9)
    assert -1e-9 <= run.span_bubble <= run.makespan_bubble + 1e-9
    for events in run.events:
        assert all(earlier.end <= later.start for earlier, later in pairwise(events))
