"""Which passes are recomputed: words, and windows against counts made action by action and against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library import forward_only, gpipe, one_f_one_b, write
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint, in_flight, peak_in_flight
from pipeline.schedule.recomputation import Window, place_recomputation, recomputed
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs, simulate
from pipeline.schedule.validate import validate
from tests.schedule.strategies import FIXED, library_schedules

F, R = ActionType.F, ActionType.R


def by_hand(*rows: str, microbatches: int, stage_to_rank: tuple[int, ...] | None = None) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", parsed, stage_to_rank or tuple(range(len(rows))), microbatches)


def within(schedule: Schedule, limit: float | tuple[float, ...], footprint: Footprint | None = None) -> Schedule:
    window = Window(limit) if footprint is None else Window(limit, footprint)
    return place_recomputation(schedule, recomputed(schedule, window))


def again(schedule: Schedule) -> list[int]:
    """How many passes each rank recomputes."""
    return [sum(action.type is R for action in row) for row in schedule.rows]


def held(schedule: Schedule, rank: int, footprint: Footprint | None = None) -> Iterator[float]:
    """What a rank holds while each action runs, counted action by action."""
    sizes = footprint or Footprint(1.0)
    left = sizes.activation if sizes.weight_gradient is None else sizes.weight_gradient
    passes = {(a.stage, a.microbatch) for a in schedule.rows[rank] if a.type is R}
    weights: dict[tuple[int, int], float] = {}
    for action in schedule.rows[rank]:
        for part in action.compute:
            key = part.stage, part.microbatch
            if part.type is F:
                weights[key] = sizes.checkpoint if key in passes else sizes.activation  # type: ignore[assignment]
            elif part.type is R:
                weights[key] = sizes.activation  # type: ignore[assignment]
        yield sum(weights.values())
        for part in action.compute:
            key = part.stage, part.microbatch
            if part.type in (ActionType.B, ActionType.W):
                del weights[key]
            elif part.type is ActionType.I:
                weights[key] = left  # type: ignore[assignment]


def most(schedule: Schedule, footprint: Footprint | None = None) -> list[float]:
    return [max(held(schedule, rank, footprint)) for rank in range(schedule.pp)]


def least(schedule: Schedule, footprint: Footprint | None = None) -> list[float]:
    """What each rank needs even if everything is recomputed."""
    return most(place_recomputation(schedule, lambda *_: True), footprint)


# Words


@pytest.mark.parametrize(
    ("word", "again"),
    [("never", ()), ("except_last", (0, 1, 2)), ("always", (0, 1, 2, 3)), ("selective", (0, 1, 2, 3))],
)
def test_checkpoint_modes(word: str, again: tuple[int, ...]) -> None:
    lowered = lower(gpipe(2, 4), activation_checkpoint=word)
    for row in lowered.rows:
        compute = [action for action in row if action.type.is_compute]
        assert tuple(action.microbatch for action in compute if action.type is R) == again
        for action, following in pairwise(compute):
            if action.type is R:
                assert following == Action(action.stage, ActionType.B, action.microbatch)


def test_an_unknown_checkpoint_mode() -> None:
    with pytest.raises(ValueError, match="activation_checkpoint is 'often': use one of never, except_last, always"):
        lower(gpipe(2, 2), activation_checkpoint="often")


def test_the_backward_of_a_pair_is_recomputed_before_the_pair() -> None:
    pair = by_hand("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", stage_to_rank=(0,), microbatches=3)
    placed = place_recomputation(pair, lambda stage, microbatch: microbatch == 0)
    assert [str(action) for action in placed.rows[0]] == ["0F0", "0F1", "0R0", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"]
    validate(placed)


# Windows


def test_a_window_on_gpipe() -> None:
    """Of 8 in flight the first 3 stay: each is gone when another is rebuilt in its place."""
    placed = within(gpipe(2, 8), 3)
    assert [str(action) for action in placed.rows[1] if action.type is R] == [f"1R{m}" for m in range(3, 8)]
    assert [again(within(gpipe(2, 8), cap)) for cap in (1, 3, 7, 8, 9)] == [[7, 7], [5, 5], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("pp", [1, 2, 4, 6])
def test_1f1b_fits_in_what_it_has_in_flight(pp: int) -> None:
    for cap in range(1, pp + 1):
        placed = within(one_f_one_b(pp, 8), cap)
        for rank, count in enumerate(again(placed)):
            assert (count == 0) == (cap >= min(8, pp - rank)), (cap, rank)


def test_limits_of_each_rank() -> None:
    assert again(within(gpipe(3, 4), (4, 1, 4))) == [0, 3, 0]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("pp", [2, 4])
def test_no_rank_holds_more_than_its_window_and_nothing_is_recomputed_in_vain(name: str, pp: int) -> None:
    schedule = write(name, pp, 8, **({"stages_per_rank": 2} if name.startswith(("interleaved", "looped")) else {}))
    needed, full = least(schedule), peak_in_flight(schedule)
    for cap in range(max(map(int, needed)), max(full) + 1):
        placed = within(schedule, cap)
        validate(placed)
        assert max(most(placed)) <= cap
        for rank, count in enumerate(again(placed)):
            assert (count == 0) == (cap >= full[rank]), "who has room recomputes nothing"
        for row in placed.rows:
            for before, action in pairwise(row):
                directly_after = action.type is R and (F, action.stage, action.microbatch) == (
                    before.type,
                    before.stage,
                    before.microbatch,
                )
                assert not directly_after, "what was just computed is never computed again"


@settings(deadline=None, derandomize=True, max_examples=80)
@given(library_schedules(4, 6), st.data())
def test_as_few_as_possible(schedule: Schedule, data: st.DataObject) -> None:
    """Against every set of passes, rank by rank."""
    rank = data.draw(st.integers(0, schedule.pp - 1))
    cap = data.draw(st.integers(int(least(schedule)[rank]), peak_in_flight(schedule)[rank]))
    found = again(within(schedule, tuple(cap if r == rank else 1000.0 for r in range(schedule.pp))))
    passes = [(a.stage, a.microbatch) for whole in schedule.rows[rank] for a in whole.compute if a.type is F]
    for fewer in combinations(passes, found[rank] - 1) if 0 < found[rank] <= 6 else ():
        dropped = set(fewer)
        tried = place_recomputation(schedule, lambda stage, microbatch, dropped=dropped: (stage, microbatch) in dropped)
        assert max(held(tried, rank)) > cap
    assert found[rank] >= 0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(library_schedules(4, 6), st.data())
def test_bytes_stay_within_the_limit(schedule: Schedule, data: st.DataObject) -> None:
    footprint = Footprint(10.0, checkpoint=data.draw(st.integers(0, 4)), weight_gradient=data.draw(st.integers(0, 12)))
    needed = least(schedule, footprint)
    limit = data.draw(st.integers(int(max(needed)), 10 * max(peak_in_flight(schedule)) + 20))
    placed = within(schedule, limit, footprint)
    assert max(most(placed, footprint)) <= limit
    assert max(simulate(placed, Costs()).peak_bytes(footprint)) <= limit, "the simulator counts the same"
    roomy = [rank for rank, peak in enumerate(most(schedule, footprint)) if peak <= limit]
    assert all(again(placed)[rank] == 0 for rank in roomy)


def test_stages_of_different_sizes() -> None:
    """The last stage's activations are large: of three microbatches one or two fit, of the first stage all."""
    footprint = Footprint((10.0, 40.0), checkpoint=1.0)
    assert again(within(gpipe(2, 3), 60, footprint)) == [0, 2]
    assert again(within(gpipe(2, 3), (30, 81), footprint)) == [0, 1]
    assert again(within(gpipe(2, 3), (29, 80), footprint)) == [1, 2]


def test_a_recomputed_pass_of_a_file_stays_and_counts() -> None:
    """Its place is given; the others make room for it."""
    schedule = by_hand("0F0 0F1 0F2 0R0 0B0 0B1 0B2", microbatches=3)
    assert again(within(schedule, 3)) == [1]
    assert again(within(schedule, 2)) == [2]
    assert again(within(schedule, 1)) == [3]


def test_a_forward_only_schedule_has_nothing_to_recompute() -> None:
    schedule = forward_only((0, 1), 5)
    assert within(schedule, 1) == schedule


def test_a_window_that_is_too_small() -> None:
    """zb_h1's last rank keeps four microbatches for their W, whatever is recomputed."""
    with pytest.raises(ValueError, match="rank 3 needs 4 even with all its microbatches recomputed: use that or more"):
        within(write("zb_h1", 4, 8), 1)
    with pytest.raises(ValueError, match=r"rank 0 needs 0\.5 even"):
        within(gpipe(1, 2), 0.25, Footprint(0.5))


def test_limits_for_other_ranks_than_there_are() -> None:
    with pytest.raises(ValueError, match="the window has 2 limits for 3 ranks: use one a rank"):
        within(gpipe(3, 4), (1, 2))


# Times


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_makespan_of_early_recomputation_of_a_part(p: int, part: float) -> None:
    """m(F+R+B) + (p-1)(F+B): an R never stands in a gradient's way, for it ran before."""
    forward, backward = 1.0, 2.0
    for m in (p, 2 * p, 16):
        for write_one in (one_f_one_b, gpipe):
            schedule = lower(write_one(p, m), activation_checkpoint="selective")
            run = simulate(schedule.compute_only(), Costs(forward, backward, recompute=part * forward))
            busy = m * (forward + part * forward + backward)
            assert run.makespan == pytest.approx(busy + (p - 1) * (forward + backward)), (m, write_one)


def test_makespan_of_a_window() -> None:
    """gpipe with k of m recomputed on every rank: only those cost an R, m(F+B) + kR + (p-1)(F+B)."""
    forward, backward, m, p = 1.0, 2.0, 8, 4
    for cap in range(1, m + 1):
        placed = within(gpipe(p, m), cap)
        (count,) = set(again(placed))
        assert count == m - cap
        run = simulate(placed, Costs(forward, backward))
        assert run.makespan == pytest.approx((m + p - 1) * (forward + backward) + count * forward), cap


def test_1f1b_with_room_for_it_takes_no_longer() -> None:
    assert simulate(within(one_f_one_b(4, 8), 4), Costs(1.0, 2.0)).makespan == 3 * (8 + 3)
    assert list(in_flight(within(one_f_one_b(2, 2), 2), 0)) == [1, 2, 2, 1]
