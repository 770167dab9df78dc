from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType
from pipeline.schedule.errors import ScheduleError
from pipeline.schedule.grid import grid
from pipeline.schedule.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b
from pipeline.schedule.lowering import add_communication, hoist_receives, lower, place_reductions
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Channel, Message, Schedule, channel, message
from pipeline.schedule.simulate import Costs, simulate
from pipeline.schedule.validate import validate
from tests.schedule.strategies import library_schedules


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def by_hand(*lines: str, stage_to_rank: tuple[int, ...], microbatches: int) -> Schedule:
    return Schedule(
        "by hand", tuple(tuple(map(Action.parse, line.split())) for line in lines), stage_to_rank, microbatches
    )


# Two stages on each of two ranks in a V: stages 1 and 2 share a rank and exchange nothing.
V = by_hand("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", stage_to_rank=(0, 1, 1, 0), microbatches=1)


def test_the_program_of_1f1b() -> None:
    assert rows(lower(one_f_one_b(2, 2), activation_checkpoint="except_last", prefetch=0)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0R0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1R0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_receives_are_posted_ahead() -> None:
    assert rows(lower(one_f_one_b(2, 3), prefetch=1)) == [
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_neighbors_on_one_rank_exchange_nothing() -> None:
    assert rows(add_communication(V)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


def test_a_split_backward_sends_after_its_input_gradient() -> None:
    split = by_hand("0F0 0I0 0W0", "1F0 1I0 1W0", stage_to_rank=(0, 1), microbatches=1)
    assert rows(lower(split, activation_checkpoint="always", prefetch=0)) == [
        "0F0 0SEND_F0 0R0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 1R0 1I0 1SEND_B0 1W0",
    ]


def test_receives_follow_the_senders_order() -> None:
    # Rank 1 consumes microbatch 1 first, but rank 0 sends microbatch 0 first.
    crossed = by_hand("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0", stage_to_rank=(0, 1), microbatches=2)
    lowered = add_communication(crossed)
    assert rows(lowered)[1].startswith("1RECV_F0 1RECV_F1 1F1 1F0 1B1")
    validate(lowered)


def test_an_overlapped_pair_receives_for_both_before_it_and_sends_for_both_after_it() -> None:
    pair = by_hand(
        "0F0 0F1 0B0 0B1",
        "1F0 (1F1;1B0)OVERLAP_F_B 1B1",
        "2F0 2B0 2F1 2B1",
        stage_to_rank=(0, 1, 2),
        microbatches=2,
    )
    lowered = add_communication(pair)
    assert rows(lowered)[1] == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 (1F1;1B0)OVERLAP_F_B 1SEND_F1 1SEND_B0 1RECV_B1 1B1 1SEND_B1"
    )
    validate(lowered)


def test_a_reduction_stays_where_it_is() -> None:
    reducing = by_hand("0F0 0B0 0REDUCE_GRAD", "1F0 1B0 1REDUCE_GRAD", stage_to_rank=(0, 1), microbatches=1)
    lowered = lower(reducing)
    assert rows(lowered) == ["0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"]
    assert not reducing.is_lowered
    validate(reducing)
    validate(lowered)


def test_each_stage_is_reduced_once_its_gradients_are_complete() -> None:
    assert rows(lower(interleaved_1f1b(2, 2, 2), prefetch=0, replicas=2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 "
        "2SEND_B1 2REDUCE_GRAD 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3REDUCE_GRAD "
        "1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]


def test_a_split_backward_is_reduced_after_its_last_w() -> None:
    split = by_hand("0F0 0I0 0F1 0W0 0B1", "1F0 1I0 1F1 1B1 1W0", stage_to_rank=(0, 1), microbatches=2)
    reducing = place_reductions(split)
    assert rows(reducing) == ["0F0 0I0 0F1 0W0 0B1 0REDUCE_GRAD", "1F0 1I0 1F1 1B1 1W0 1REDUCE_GRAD"]


def test_a_pair_that_ends_a_stage_is_followed_by_its_reduction() -> None:
    pair = by_hand("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 0B1", stage_to_rank=(0, 0), microbatches=2)
    assert rows(place_reductions(pair)) == ["0F0 1F0 (0F1;1B0)OVERLAP_F_B 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"]


def test_what_is_lowered_is_reduced_after_its_sends_and_not_twice() -> None:
    once = lower(gpipe(2, 2), prefetch=0)
    reducing = lower(once, replicas=2)
    assert rows(reducing)[1].endswith("1B1 1SEND_B1 1REDUCE_GRAD")
    assert lower(reducing, replicas=2) == reducing
    validate(reducing)


def test_one_replica_and_a_forward_only_schedule_reduce_nothing() -> None:
    assert lower(gpipe(2, 2), replicas=1) == lower(gpipe(2, 2))
    assert lower(forward_only((0, 1), 2), replicas=4) == lower(forward_only((0, 1), 2))


def test_no_replica() -> None:
    with pytest.raises(ValueError, match="replicas is 0: use 1 or more"):
        lower(gpipe(2, 2), replicas=0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(library_schedules(4, 6), st.integers(0, 3))
def test_reductions_change_neither_the_rest_nor_its_time(schedule: Schedule, prefetch: int) -> None:
    single, several = lower(schedule, prefetch=prefetch), lower(schedule, prefetch=prefetch, replicas=2)
    validate(several)
    assert several.with_rows((a for a in row if a.type is not ActionType.REDUCE_GRAD) for row in several.rows) == single
    for rank, row in enumerate(several.rows):
        reduced = [a.stage for a in row if a.type is ActionType.REDUCE_GRAD]
        assert sorted(reduced) == list(schedule.stages_of(rank))
        for stage in reduced:  # nothing but sends between a stage's last gradient and its reduction
            at = row.index(Action(stage, ActionType.REDUCE_GRAD, NO_MICROBATCH))
            before = [a for a in row[:at] if not a.type.is_send and a.type is not ActionType.REDUCE_GRAD]
            assert any(p.stage == stage and p.type in (ActionType.B, ActionType.W) for p in before[-1].compute)
    assert simulate(several, Costs(transfer=0.5)).events == simulate(single, Costs(transfer=0.5)).events
    assert grid(several) == grid(single)


def test_one_rank_needs_no_communication() -> None:
    assert lower(interleaved_1f1b(1, 4, 3)) == interleaved_1f1b(1, 4, 3)


def test_forward_only_recomputes_nothing() -> None:
    lowered = lower(forward_only((0, 1, 0, 1), 3), activation_checkpoint="always")
    assert lowered.compute_only() == forward_only((0, 1, 0, 1), 3)
    validate(lowered)


def test_a_negative_window() -> None:
    with pytest.raises(ValueError, match="prefetch is -1: use 0 or more"):
        lower(gpipe(2, 2), prefetch=-1)


def test_what_is_lowered_keeps_its_communication() -> None:
    """A file with sends and receives runs as it stands; recomputation is all that is added, and not twice."""
    once = lower(gpipe(2, 2), prefetch=0)
    assert lower(once, prefetch=4) == once
    recomputing = lower(once, activation_checkpoint="always")
    assert [str(a) for a in recomputing.rows[1] if a.type is ActionType.R] == ["1R0", "1R1"]
    assert lower(recomputing, activation_checkpoint="always") == recomputing


def test_adding_communication_twice() -> None:
    with pytest.raises(ValueError, match=r"holds sends and receives already: use compute_only\(\) first"):
        add_communication(lower(gpipe(2, 2)))


def test_a_missing_producer() -> None:
    with pytest.raises(
        ScheduleError, match="1F1 on rank 1 takes the activation of stage 0, microbatch 1, which no rank"
    ):
        add_communication(by_hand("0F0", "1F0 1F1", stage_to_rank=(0, 1), microbatches=2))


def messages(schedule: Schedule, sent: bool) -> dict[Channel, list[Message]]:
    found: dict[Channel, list[Message]] = defaultdict(list)
    for row in schedule.rows:
        for action in row:
            if action.type.is_send if sent else action.type.is_receive:
                found[channel(action, schedule.stage_to_rank)].append(message(action))
    return found


def outstanding_beyond_need(schedule: Schedule, placed: Schedule, rank: int) -> list[int]:
    """Before each compute action: receives posted, less those `placed`, the unhoisted program, has posted by then."""

    def posted(row: tuple[Action, ...]) -> list[int]:
        counts, count = [], 0
        for action in row:
            count += action.type.is_receive
            if action.type.is_compute:
                counts.append(count)
        return counts

    pairs = zip(posted(schedule.rows[rank]), posted(placed.rows[rank]), strict=True)
    return [early - needed for early, needed in pairs]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    library_schedules(5, 10, stages_per_rank=4), st.integers(0, 8), st.sampled_from(["never", "except_last", "always"])
)
def test_what_lowering_promises(schedule: Schedule, prefetch: int, checkpoint: str) -> None:
    before = schedule.to_text()
    recomputing = place_recomputation(schedule, lambda stage, microbatch: checkpoint == "always")
    placed = add_communication(recomputing)
    lowered = hoist_receives(placed, prefetch)
    assert schedule.to_text() == before
    assert lowered.compute_only() == recomputing
    assert messages(lowered, sent=True) == messages(lowered, sent=False)
    for rank in range(schedule.pp):
        window = outstanding_beyond_need(lowered, placed, rank)
        assert all(0 <= extra <= prefetch for extra in window)
        assert sorted(map(str, lowered.rows[rank])) == sorted(map(str, placed.rows[rank]))
    assert prefetch or lowered == placed


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("v", range(1, 5))
def test_every_program_is_valid(p: int, v: int) -> None:
    for m in range(1, 17):
        schedules = [interleaved_1f1b(p, m, v)] + ([gpipe(p, m), one_f_one_b(p, m)] if v == 1 else [])
        for schedule in schedules:
            lowered = lower(schedule, activation_checkpoint="except_last", prefetch=m % 4)
            validate(lowered)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 8])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_lowering_costs_no_time_without_transfer_time(v: int, prefetch: int) -> None:
    for p, m in [(2, 3), (3, 7), (4, 8)]:
        schedule = interleaved_1f1b(p, m, v)
        assert simulate(lower(schedule, prefetch=prefetch), Costs()).events == simulate(schedule, Costs()).events
