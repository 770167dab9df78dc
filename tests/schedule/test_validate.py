from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest

from pipeline.schedule.actions import Action
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b, write
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Channel, Schedule
from pipeline.schedule.simulate import simulate
from pipeline.schedule.validate import ScheduleError, validate
from tests.schedule.strategies import FIXED


def by_hand(*lines: str, microbatches: int = 1, stage_to_rank: tuple[int, ...] | None = None) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Schedule("by hand", parsed, stage_to_rank or tuple(range(len(lines))), microbatches)


BROKEN = {
    "missing forward": (
        by_hand("0F0 0B0", "1B0"),
        "rank 1 must run stage 1 on microbatch 0 forward, with one F: its row has 1B0",
    ),
    "missing backward": (
        by_hand("0F0 0B0", "1F0"),
        "rank 1 must run stage 1 on microbatch 0 backward, with one B or with one I and one W: its row has 1F0",
    ),
    "missing microbatch": (
        by_hand("0F0 0B0", microbatches=2),
        "rank 0 must run stage 0 on microbatch 1 forward, with one F: its row has none of it",
    ),
    "input gradient without weight gradient": (by_hand("0F0 0I0"), "backward, with one B or with one I and one W"),
    "backward twice over": (by_hand("0F0 0B0 0I0 0W0"), "its row has 0F0 0B0 0I0 0W0"),
    "duplicate": (by_hand("0F0 0F0 0B0"), "0F0 appears twice on rank 0"),
    "wrong rank": (by_hand("0F0 1F0 0B0", "1B0"), "1F0 is on rank 0, but stage 1 is on rank 1"),
    "unknown stage": (by_hand("0F0 1F0 0B0"), "1F0 names stage 1, but stages are 0 to 0"),
    "unknown microbatch": (by_hand("0F0 0B0 0F1"), "0F1 names microbatch 1, but microbatches are 0 to 0"),
    "no microbatch": (by_hand("0F0 0B0", microbatches=0), "microbatches is 0: use 1 or more"),
    "rank beyond the rows": (by_hand("0F0 0B0", stage_to_rank=(1,)), "stage 0 is on rank 1, but ranks are 0 to 0"),
    "rank without a stage": (by_hand("0F0 0B0", "", stage_to_rank=(0,)), "rank 1 holds no stage: give it one"),
    "backward before forward": (by_hand("0B0 0F0"), "0B0 comes before 0F0 on rank 0, but needs it"),
    "weight gradient before input gradient": (by_hand("0F0 0W0 0I0"), "0W0 comes before 0I0 on rank 0, but needs it"),
    "recomputation after its backward": (by_hand("0F0 0B0 0R0"), "0B0 comes before 0R0 on rank 0, but needs it"),
    "recomputation before its forward": (by_hand("0R0 0F0 0B0"), "0R0 comes before 0F0 on rank 0, but needs it"),
    "neighbor on the same rank too late": (
        by_hand("1F0 0F0 1B0 0B0", stage_to_rank=(0, 0)),
        "1F0 comes before 0F0 on rank 0, but needs it",
    ),
    "neighbor's gradient on the same rank too late": (
        by_hand("0F0 1F0 0B0 1B0", stage_to_rank=(0, 0)),
        "0B0 comes before 1B0 on rank 0, but needs it",
    ),
    "backward in a forward-only schedule": (
        replace(by_hand("0F0 0B0"), forward_only=True),
        "rank 0 must run stage 0 on microbatch 0 forward only, with one F: its row has 0F0 0B0",
    ),
    "missing receive": (
        by_hand("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "rank 0 has no 0RECV_B0: the gradient of stage 1, microbatch 0, needs a send and a receive",
    ),
    "missing send": (
        by_hand("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "rank 0 has no 0SEND_F0: the activation of stage 0, microbatch 0, needs a send and a receive",
    ),
    "send before its producer": (
        by_hand("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "0SEND_F0 comes before 0F0 on rank 0, but needs it",
    ),
    "receive after its consumer": (
        by_hand("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "0B0 comes before 0RECV_B0 on rank 0, but needs it",
    ),
    "send between stages of one rank": (
        by_hand("0F0 0SEND_F0 1F0 1B0 0B0", stage_to_rank=(0, 0)),
        "0SEND_F0 on rank 0 crosses no boundary between ranks",
    ),
    "receive at the first stage": (by_hand("0RECV_F0 0F0 0B0"), "0RECV_F0 on rank 0 crosses no boundary"),
    "crossed receives": (
        by_hand(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            microbatches=2,
        ),
        "the activation that 0SEND_F0 sends from rank 0 meets 1RECV_F1 on rank 1: post a channel's receives",
    ),
    "deadlock across ranks": (
        by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2),
        "deadlock: rank 0 at 0B0 waits for the gradient of stage 1, microbatch 0, from rank 1; rank 1 at 1F1 waits for "
        "the activation of stage 0, microbatch 1, from rank 0",
    ),
    "pair of a forward and its own backward": (
        by_hand("(0F0;0B0)OVERLAP_F_B"),
        "0B0 is overlapped with 0F0 on rank 0, but needs it",
    ),
    "pair with a stage of another rank": (
        by_hand("0F0 0F1 (0F2;1B0)OVERLAP_F_B 0B0", "1F0", microbatches=3),
        "1B0 is on rank 0, but stage 1 is on rank 1",
    ),
    "part of a pair twice": (
        by_hand("0F0 0F1 (0F1;0B0)OVERLAP_F_B 0B1", microbatches=2),
        "0F1 appears twice on rank 0",
    ),
    "pairs that wait for each other": (
        by_hand("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", microbatches=2),
        "deadlock: rank 0 at (0F1;0B0)OVERLAP_F_B waits for the gradient of stage 1, microbatch 0, from rank 1; rank 1 "
        "at (1F1;1B0)OVERLAP_F_B waits for the activation of stage 0, microbatch 1, from rank 0",
    ),
    "reduction before the last backward": (
        by_hand("0F0 0F1 0B0 0REDUCE_GRAD 0B1", microbatches=2),
        "0REDUCE_GRAD comes before 0B1 on rank 0, but needs it",
    ),
    "reduction before the weight gradient": (
        by_hand("0F0 0I0 0REDUCE_GRAD 0W0"),
        "0REDUCE_GRAD comes before 0W0 on rank 0, but needs it",
    ),
    "two reductions": (by_hand("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD"), "0REDUCE_GRAD appears twice on rank 0"),
    "reduction on another rank": (
        by_hand("0F0 0B0 1REDUCE_GRAD", "1F0 1B0"),
        "1REDUCE_GRAD is on rank 0, but stage 1 is on rank 1",
    ),
    "reduction without a backward": (
        replace(by_hand("0F0 0REDUCE_GRAD"), forward_only=True),
        "0REDUCE_GRAD on rank 0 has no gradient to reduce",
    ),
    "a stage without a reduction": (
        by_hand("0F0 0B0 0REDUCE_GRAD", "1F0 1B0"),
        "rank 1 has no 1REDUCE_GRAD, but other stages are reduced: reduce the gradients of every stage, or of none",
    ),
    "deadlock of a program": (
        lower(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)),
        "deadlock: rank 0 at 0B0 waits for the gradient of stage 1, microbatch 0, from rank 1; rank 1 at 1F1 waits for "
        "the activation of stage 0, microbatch 1, from rank 0",
    ),
}


@pytest.mark.parametrize(("schedule", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_schedule_is_refused(schedule: Schedule, problem: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert problem in str(caught.value).splitlines()[0]


def one_a_kind(channel: Channel) -> Hashable:
    """torch's habit: one group for activations and one for gradients, with a connection for each pair of ranks."""
    return channel.kind, frozenset((channel.source, channel.destination))


def one_a_kind_and_direction(channel: Channel) -> Hashable:
    return channel.kind, channel.source < channel.destination, frozenset((channel.source, channel.destination))


WINDOWS = range(9)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_finishes_with_a_communicator_a_channel(name: str, pp: int) -> None:
    validate(write(name, pp, 2 * pp), prefetch=WINDOWS)
    validate(write(name, pp, 2 * pp), prefetch=WINDOWS, communicator=one_a_kind_and_direction)


def deadlocks(schedule: Schedule, window: int) -> bool:
    validate(schedule)
    try:
        validate(lower(schedule, prefetch=window), communicator=one_a_kind)
    except ScheduleError as error:
        assert "deadlock" in str(error)  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", FIXED)
def test_where_activations_flow_both_ways_one_communicator_a_kind_deadlocks(name: str, pp: int) -> None:
    schedule = write(name, pp, 2 * pp)
    # In a V, and in a loop of two ranks, a rank sends activations to the one that it takes some from.
    both_ways = pp == 2 if schedule.stage_to_rank[pp:] == tuple(range(pp)) else schedule.stages > pp
    assert [deadlocks(schedule, window) for window in WINDOWS] == [both_ways] * len(WINDOWS)


V = by_hand(
    "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1", microbatches=2, stage_to_rank=(0, 1, 1, 0)
)


def test_what_stands_first_on_a_communicator_is_named() -> None:
    program = lower(V, prefetch=0)
    validate(program)
    with pytest.raises(ScheduleError) as caught:
        validate(program, communicator=one_a_kind)
    assert str(caught.value).splitlines() == [
        "by hand: deadlock: rank 0 at 3F0 waits for the activation of stage 2, microbatch 0, from rank 1, but 3RECV_F0 "
        "stands behind 0SEND_F1 of rank 0 on one communicator, and that behind 2SEND_F0 of rank 1: they wait for each "
        "other",
        "rank 0  0F0 0SEND_F0 0F1 >0SEND_F1< >3RECV_F0< >3F0< 3B0 3SEND_B0 0RECV_B0 0B0 3RECV_F1 3F1 3B1 3SEND_B1 ...",
        "rank 1  1RECV_F0 1F0 2F0 >2SEND_F0< 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 ...",
    ]


def test_a_receive_posted_too_early_on_a_shared_communicator_is_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(lower(V, prefetch=1), communicator=one_a_kind)
    assert str(caught.value).splitlines()[0] == (
        "by hand: deadlock: rank 1 at 1F0 waits for the activation of stage 0, microbatch 0, from rank 0, but 0SEND_F0 "
        "stands behind 3RECV_F0 of rank 0 on one communicator, until rank 1 meets it"
    )


def test_a_communicator_over_all_ranks() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F0 stands behind 0RECV_B0 of rank 0 on one communicator"):
        validate(lower(one_f_one_b(2, 4)), communicator=lambda channel: "all")


def test_windows_are_for_schedules_without_communication() -> None:
    with pytest.raises(ValueError, match=r"holds sends and receives already: use compute_only\(\) first"):
        validate(lower(one_f_one_b(2, 4)), prefetch=[0])


# torch 2.14.1's Schedule1F1B._get_pipeline_order counts the last rank's forwards from 1.
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_torchs_wrong_1f1b_is_refused(microbatches: int) -> None:
    good = one_f_one_b(4, microbatches)
    wrong = " ".join(f"3F{i + 1} 3B{i}" for i in range(microbatches))
    schedule = good.with_rows([*good.rows[:3], map(Action.parse, wrong.split())])
    with pytest.raises(ScheduleError, match=f"3F{microbatches} names microbatch {microbatches}, but microbatches are"):
        validate(schedule)
    # With one more microbatch declared, its numbers are all known; then the forward of the first one is missing.
    with pytest.raises(ScheduleError, match="rank 0 must run stage 0 on microbatch"):
        validate(replace(schedule, microbatches=microbatches + 1))
    with pytest.raises(ScheduleError, match=r"rank 3 at 3B0 waits for the forward of stage 3, microbatch 0|deadlock"):
        simulate(schedule, Costs())


def test_the_culprit_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(by_hand("0F0 0B0", "1F0 1B0 1B0"))
    assert str(caught.value).splitlines() == [
        "by hand: 1B0 appears twice on rank 1",
        "rank 0  0F0 0B0",
        "rank 1  1F0 >1B0< >1B0<",
    ]


def test_a_long_error_stays_readable() -> None:
    good = one_f_one_b(16, 64)
    doubled = good.rows[9][70]
    rows = [row if rank != 9 else (*row[:71], doubled, *row[71:]) for rank, row in enumerate(good.rows)]
    with pytest.raises(ScheduleError) as caught:
        validate(good.with_rows(rows))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 120 for line in lines)
    assert f">{doubled}< >{doubled}<" in lines[1]
    assert lines[1].count("...") == 2
    assert lines[2] == "(15 more ranks)"


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 5), one_f_one_b(4, 8), interleaved_1f1b(2, 5, 3), forward_only((0, 1), 3)]
)
def test_good_schedules_pass(schedule: Schedule) -> None:
    validate(schedule)
    validate(lower(schedule))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_memory_cap(lowered: bool) -> None:
    schedule = lower(one_f_one_b(4, 8)) if lowered else one_f_one_b(4, 8)
    validate(schedule, memory_cap=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match=r"rank 1 holds up to 3 activations .*, over its cap of 2\n") as caught:
        validate(schedule, memory_cap=[4, 2, 2, 1])
    assert ">1F2<" in str(caught.value)


def test_a_memory_cap_of_forward_only() -> None:
    validate(forward_only((0, 1), 3), memory_cap=[1, 1])
    with pytest.raises(ScheduleError, match="rank 0 holds up to 1 activations"):
        validate(forward_only((0, 1), 3), memory_cap=[0, 1])


def test_a_memory_cap_for_every_rank() -> None:
    with pytest.raises(ValueError, match="memory_cap has 1 entries for 2 ranks: use one a rank"):
        validate(gpipe(2, 2), memory_cap=[4])


def test_a_schedule_error_is_a_value_error() -> None:
    assert issubclass(ScheduleError, ValueError)
