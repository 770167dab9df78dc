"""Idle times by hand, and that they always add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action
from pipeline.schedule.events import Event
from pipeline.schedule.idle import Idle, split_idle
from pipeline.schedule.library import one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs, simulate
from tests.schedule.strategies import library_schedules


def by_hand(*rows: str, microbatches: int) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", parsed, tuple(range(len(rows))), microbatches)


ONE = by_hand("0F0 0B0", "1F0 1B0", microbatches=1)


def test_equal_stages_without_transfers_wait_for_their_order_alone() -> None:
    # Rank 0: F until 1, waits for rank 1's F and B, its own B from 4 to 6.
    assert simulate(ONE, Costs()).idle == (Idle(dependency=3), Idle(warmup=1, tail=2))


def test_what_is_sent_and_not_there_is_communication() -> None:
    # The activation is under way from 1 to 1.5, the gradient from 4.5 to 5.
    assert simulate(ONE, Costs(transfer=0.5)).idle == (
        Idle(dependency=3.5, communication=0.5),
        Idle(warmup=1.5, tail=2.5),
    )


def test_what_a_slower_stage_takes_longer_is_imbalance() -> None:
    # Backwards of 2 and 6, 4 on average: the last 2 of the 6 that rank 0 waits for would not be with equal stages.
    costs = Costs(backward=(2.0, 6.0), transfer=0.25)
    assert simulate(ONE, costs).idle[0] == Idle(communication=0.25, imbalance=2, dependency=5.25)


def test_a_wait_that_begins_late_has_only_the_imbalance_it_sees() -> None:
    # Rank 0 has a second forward to run while rank 1 is slow, and waits for the last unit only.
    schedule = by_hand("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    run = simulate(schedule, Costs(forward=(5.0, 1.0), backward=(2.0, 6.0)))
    assert [(event.start, event.end) for event in run.events[0]] == [(0, 5), (5, 10), (12, 14), (19, 21)]
    # Before 0B0: 1B0 runs from 6 to 12. Before 0B1: 1F1 until 13, 1B1 from 13 to 19.
    assert run.idle[0] == Idle(imbalance=4, dependency=3)


def test_a_late_receive_counts_as_communication() -> None:
    schedule = by_hand("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1", microbatches=2)
    run = simulate(replace(schedule, forward_only=True), Costs(forward=(1.0, 3.0), transfer=1.0))
    # The second message was sent at 2; its receive is posted at 5.
    assert run.idle == (Idle(tail=7), Idle(warmup=2, communication=1))


def test_of_two_inputs_the_last_to_be_sent_counts() -> None:
    rows = ("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1")
    schedule = by_hand(*rows, microbatches=2)
    run = simulate(schedule, Costs(transfer=0.5))
    # Stage 0 sent at 2; stage 2 sends its gradient at 6, half a unit before it is there.
    pair = run.events[1][1]
    assert (run.events[1][0].end, pair.start, pair.end) == (2.5, 6.5, 9.5)
    assert run.idle[1].communication == 1.0
    assert run.idle[1].dependency == 7.0


def test_a_forward_released_before_its_pair_ends_is_sent_then() -> None:
    rows = ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    early = simulate(replace(by_hand(*rows, microbatches=2), release="each"), Costs(transfer=0.5))
    late = simulate(by_hand(*rows, microbatches=2), Costs(transfer=0.5))
    # The pair starts at 5 and ends at 8; its forward is done at 6.
    assert [run.events[1][2].start for run in (early, late)] == [6.5, 8.5]
    assert [run.idle[1].communication for run in (early, late)] == [0.5, 0.5]


def test_measured_events_are_split_alike() -> None:
    a, b, c = (Action.parse(word) for word in ("0F0", "1F0", "1F1"))
    schedule = replace(by_hand("0F0 0F1", "1F0 1F1", microbatches=2), forward_only=True)
    events = (
        (Event(0, a, 100.0, 101.0), Event(0, Action.parse("0F1"), 101.0, 103.0)),
        (Event(1, b, 101.5, 102.0), Event(1, c, 104.0, 104.5)),
    )
    # From 102 to 103 rank 0 still computes, its stage taking 1.5 on average, 0.5 more than both do.
    assert split_idle(events, schedule) == (
        Idle(tail=1.5),
        Idle(warmup=1.5, communication=1.0, imbalance=0.5, dependency=0.5),
    )


def test_clocks_apart_leave_nothing_in_transit_for_less_than_no_time() -> None:
    schedule = replace(ONE, rows=tuple(row[:1] for row in ONE.rows), forward_only=True)
    events = ((Event(0, Action.parse("0F0"), 0.0, 9.0),), (Event(1, Action.parse("1F0"), 5.0, 6.0),))
    assert split_idle(events, schedule) == (Idle(), Idle(warmup=5, tail=3))


def test_a_rank_without_events_is_idle_throughout() -> None:
    events = ((Event(0, Action.parse("0F0"), 1.0, 4.0),), ())
    assert split_idle(events, ONE) == (Idle(), Idle(warmup=3))
    assert split_idle(((), ()), ONE) == (Idle(), Idle())


def test_1f1b_waits_for_communication_once_a_round() -> None:
    run = simulate(one_f_one_b(2, 8), Costs(transfer=0.25))
    assert run.idle[0].communication > 0
    assert run.idle[1].communication > 0
    assert sum(idle.imbalance for idle in run.idle) == 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    library_schedules(5, 9),
    st.lists(st.tuples(*[st.integers(1, 64)] * 3), min_size=10, max_size=10),
    st.integers(0, 64),
    st.none() | st.integers(0, 3),
    st.sampled_from(["end", "each"]),
)
def test_the_five_shares_are_the_idle_time(
    schedule: Schedule, times: list[tuple[int, int, int]], transfer: int, prefetch: int | None, release: str
) -> None:
    schedule = replace(schedule, release=release)  # type: ignore[arg-type]
    if prefetch is not None:
        schedule = lower(schedule, prefetch=prefetch)
    # Sixteenths are exact in binary, so sums of them are, too.
    forward, for_input, for_weight = ([n / 16 for n in column] for column in zip(*times, strict=True))
    costs = Costs(tuple(forward), None, tuple(for_input), tuple(for_weight), transfer=transfer / 16)
    run = simulate(schedule, costs)
    for row, idle in zip(run.events, run.idle, strict=True):
        busy = sum(event.end - event.start for event in row)
        assert idle.total == pytest.approx(run.makespan - busy, abs=1e-9)
        shares = (idle.warmup, idle.communication, idle.imbalance, idle.dependency, idle.tail)
        assert all(share >= -1e-9 for share in shares)
        if transfer == 0 and prefetch is None:
            assert idle.communication == 0


@settings(deadline=None, derandomize=True, max_examples=40)
@given(library_schedules(5, 9), st.integers(0, 8))
def test_equal_stages_have_no_imbalance(schedule: Schedule, transfer: int) -> None:
    run = simulate(schedule, Costs(transfer=transfer / 8))
    assert all(idle.imbalance == 0 for idle in run.idle)
