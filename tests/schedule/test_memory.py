"""Activations in flight and bytes, by hand and against each other."""

from __future__ import annotations

from dataclasses import fields, replace
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action
from pipeline.schedule.library import forward_only, gpipe, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint, in_flight, peak_activation_bytes, peak_in_flight
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs, simulate
from tests.schedule.strategies import library_schedules


def by_hand(*rows: str, microbatches: int, stage_to_rank: tuple[int, ...] | None = None) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", parsed, stage_to_rank or tuple(range(len(rows))), microbatches)


def peaks(schedule: Schedule, footprint: Footprint, transfer: float = 0.0) -> tuple[float, ...]:
    return simulate(schedule, Costs(transfer=transfer)).peak_bytes(footprint)


def test_in_flight_along_a_row() -> None:
    assert list(in_flight(one_f_one_b(3, 4), 1)) == [1, 2, 2, 2, 2, 2, 2, 1]


def test_an_overlapped_pair_holds_both_while_it_runs() -> None:
    schedule = by_hand("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", microbatches=3)
    assert list(in_flight(schedule, 0)) == [1, 2, 3, 2, 1]


def test_reduction_holds_nothing() -> None:
    assert peak_in_flight(by_hand("0F0 0B0 0REDUCE_GRAD", microbatches=1)) == (1,)


def test_a_backward_in_halves_leaves_what_its_weights_need() -> None:
    schedule = by_hand("0F0 0I0 0F1 0I1 0W0 0W1", microbatches=2)
    assert peaks(schedule, Footprint(10.0)) == (20,)
    assert peaks(schedule, Footprint(10.0, weight_gradient=3.0)) == (13,)
    assert peaks(schedule, Footprint(10.0, weight_gradient=12.0)) == (24,)


def test_stages_weigh_their_own_bytes() -> None:
    schedule = by_hand("0F0 1F0 1B0 0B0", microbatches=1, stage_to_rank=(0, 0))
    assert peaks(schedule, Footprint((5.0, 100.0))) == (105,)


def test_a_recomputed_microbatch_keeps_its_checkpoint_alone() -> None:
    schedule = place_recomputation(gpipe(1, 4), lambda stage, microbatch: microbatch < 3)
    # The last one is kept whole, and the first one's backward finds the other two as checkpoints.
    assert peaks(schedule, Footprint(10.0, checkpoint=1.0)) == (10 + 10 + 2,)


def test_a_message_takes_a_buffer_at_both_ends() -> None:
    # Under way from 1 to 4 with rank 1 free: held by the sender until 4, by the receiver until its forward ended at 5.
    schedule = replace(by_hand("0F0 0F1 0F2", "1F0 1F1 1F2", microbatches=3), forward_only=True)
    assert peaks(schedule, Footprint(10.0, boundary=1.0), transfer=3.0) == (12, 13)
    assert peaks(schedule, Footprint(10.0, boundary=1.0)) == (10, 11)
    assert peaks(schedule, Footprint(0.0, boundary=(1.0, 50.0)), transfer=3.0) == (3, 3)


def test_a_posted_receive_takes_a_buffer_before_anything_is_sent() -> None:
    rows = ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    schedule = replace(by_hand(*rows, microbatches=2), forward_only=True)
    assert peaks(schedule, Footprint(0.0, boundary=1.0)) == (0, 2)


def test_gradients_take_buffers_of_their_boundary() -> None:
    schedule = by_hand("0F0 0B0", "1F0 1B0", microbatches=1)
    assert peaks(schedule, Footprint(0.0, boundary=(7.0, 1000.0)), transfer=1.0) == (7, 7)


def test_a_wider_window_of_receives_takes_more_memory() -> None:
    footprint = Footprint(0.0, boundary=1.0)
    by_window = [peaks(lower(one_f_one_b(4, 16), prefetch=window), footprint) for window in range(4)]
    assert by_window == sorted(by_window)
    assert by_window[0] < by_window[3]


def test_forward_only_keeps_nothing() -> None:
    assert peaks(forward_only((0, 1), 5), Footprint(10.0)) == (10, 10)


def test_activations_alone_are_what_the_order_says() -> None:
    program = lower(one_f_one_b(4, 16))
    assert peak_activation_bytes(program, Footprint(3.0, boundary=100.0)) == (12, 9, 6, 3)
    assert simulate(program, Costs(transfer=7.0)).peak_activation_bytes(Footprint(3.0)) == (12, 9, 6, 3)


def test_an_input_backward_adds_for_its_weights_before_it_frees() -> None:
    schedule = by_hand("0F0 0F1 0I0 0W0 0I1 0W1", microbatches=2)
    footprint = Footprint(10.0, weight_gradient=3.0, during_input=4.0)
    assert peaks(schedule, footprint) == peak_activation_bytes(schedule, footprint) == (24,)


def test_microbatches_of_unequal_size() -> None:
    assert peak_activation_bytes(gpipe(1, 2), [Footprint(10.0), Footprint(4.0)]) == (14,)
    with pytest.raises(ValueError, match="2 footprints for 3 microbatches"):
        peak_activation_bytes(gpipe(1, 3), [Footprint(10.0), Footprint(4.0)])


def test_an_output_that_its_stage_keeps_is_the_next_stages_input() -> None:
    """One memory as long as either stage on the rank holds it."""
    footprint = Footprint((5.0, 100.0), weight_gradient=(1.0, 50.0), kept_output=(2.0, 0.0))
    whole = by_hand("0F0 1F0 1B0 0B0", microbatches=1, stage_to_rank=(0, 0))
    assert peak_activation_bytes(whole, footprint) == (103,)
    assert peak_activation_bytes(by_hand("0F0 0B0", "1F0 1B0", microbatches=1), footprint) == (5, 100)
    # stage 0 of microbatch 0 still holds it when the other stage's I is done: 5 + 50, then 5 + 98 more
    late = by_hand("0F0 1F0 1I0 0F1 1F1 1I1 0I0 0I1 1W0 0W0 1W1 0W1", microbatches=2, stage_to_rank=(0, 0))
    assert peak_activation_bytes(late, footprint) == (158,)
    # it is among the 50 that W needs: 2 less
    needed = replace(footprint, input_for_weight=(0.0, 2.0))
    assert peak_activation_bytes(late, needed) == (156,)
    # and W keeps it when stage 0's I lets go: 1 + 50 and 103 more
    early = by_hand("0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 1W0 0W0 1W1 0W1", microbatches=2, stage_to_rank=(0, 0))
    assert peak_activation_bytes(early, needed) == peak_activation_bytes(early, footprint) == (154,)


def test_a_recomputed_output_is_not_the_next_stages_input() -> None:
    schedule = by_hand("0F0 1F0 0R0 1B0 0B0", microbatches=1, stage_to_rank=(0, 0))
    assert peak_activation_bytes(schedule, Footprint((5.0, 100.0), checkpoint=1.0, kept_output=(2.0, 0.0))) == (105,)


def test_a_recomputed_microbatch_may_keep_more_and_take_less() -> None:
    schedule = by_hand("0F0 0F1 0R0 0B0 0B1", microbatches=2)
    part = Footprint(8.0, checkpoint=4.0, during_recompute=1.0)
    assert peak_activation_bytes(schedule, Footprint(10.0, recomputed=part)) == (10 + 8 + 1,)


@pytest.mark.parametrize("name", [field.name for field in fields(Footprint) if field.name != "recomputed"])
def test_bytes_below_zero_are_refused(name: str) -> None:
    for size in (-1.0, nan):
        with pytest.raises(ValueError, match=f"bytes.{name} is {size}: use 0 or more"):
            Footprint(**{"activation": 1.0, name: size})


@settings(deadline=None, derandomize=True, max_examples=60)
@given(library_schedules(5, 9), st.booleans(), st.integers(1, 8))
def test_bytes_of_one_are_microbatches(schedule: Schedule, lowered: bool, transfer: int) -> None:
    run = simulate(lower(schedule) if lowered else schedule, Costs(transfer=transfer / 4))
    assert run.peak_bytes(Footprint(1.0)) == run.peak_in_flight
    assert run.peak_bytes(Footprint(1.0, weight_gradient=0.0)) == run.peak_in_flight_released_at_input
    assert run.peak_bytes(Footprint(1.0, boundary=0.5)) >= run.peak_in_flight
    assert run.peak_activation_bytes(Footprint(1.0, boundary=0.5)) == run.peak_in_flight
