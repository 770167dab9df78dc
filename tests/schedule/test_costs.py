from __future__ import annotations

from math import inf, nan

import pytest

from pipeline.schedule.actions import Action
from pipeline.schedule.costs import Costs, Times, place_costs
from pipeline.schedule.library import interleaved_1f1b
from pipeline.schedule.simulate import simulate

PAIR = Action.parse("(0F3;1B2)OVERLAP_F_B")


def durations(costs: Costs, *words: str) -> list[float]:
    return [costs.duration(Action.parse(word)) for word in words]


def test_a_backward_is_its_two_halves_unless_stated() -> None:
    assert durations(Costs(), "0F0", "0B0", "0I0", "0W0", "0R0") == [1, 2, 1, 1, 1]
    halves = Costs(forward=3.0, backward_input=(1.0, 2.0), backward_weight=0.5)
    assert durations(halves, "0B0", "1B0", "1R0") == [1.5, 2.5, 3]
    assert durations(Costs(backward=7.0, recompute=0.5), "0B0", "0I0", "0R0") == [7, 1, 0.5]


def test_an_overlapped_pair_is_its_two_parts_unless_stated() -> None:
    assert Costs(forward=(1.0, 4.0), backward=(2.0, 3.0)).duration(PAIR) == 4
    assert Costs(overlap=2.5).duration(PAIR) == 2.5
    assert Costs(overlap=(2.0, 9.0)).duration(PAIR) == 2


def test_a_transfer_is_latency_and_size_over_bandwidth() -> None:
    assert Costs(transfer=0.5, boundary_bytes=100.0).transfer_time(0, 1) == 0.5
    costs = Costs(transfer=(0.5, 0.0, 0.0), bandwidth=50.0, boundary_bytes=(100.0, 200.0, 1e9))
    assert costs.transfer_time(0, 1) == 0.5 + 2
    # A gradient is as large as the activation it belongs to.
    assert costs.transfer_time(1, 0) == 2
    assert costs.transfer_time(2, 1) == costs.transfer_time(1, 2) == 4


@pytest.mark.parametrize("word", ["0SEND_F0", "0RECV_B0", "0REDUCE_GRAD"])
def test_what_takes_no_time_has_no_duration(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} has no duration: use transfer_time"):
        Costs().duration(Action.parse(word))


@pytest.mark.parametrize("name", ["forward", "backward", "backward_weight", "recompute", "overlap", "transfer"])
@pytest.mark.parametrize("times", [-1.0, nan, inf, (1.0, -0.5)])
def test_a_cost_below_zero_is_refused(name: str, times: Times) -> None:
    with pytest.raises(ValueError, match=rf"costs.{name} is (-1.0|nan|inf|-0.5): use 0 or more"):
        Costs(**{name: times})


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, nan])
def test_a_bandwidth_of_nothing_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=f"costs.bandwidth is {bandwidth}: use more than 0"):
        Costs(bandwidth=bandwidth)


def test_costs_per_stage_stay() -> None:
    costs = place_costs(Costs(forward=(1.0, 2.0, 3.0, 4.0), transfer=0.5), (0, 1, 1, 0))
    assert costs == Costs(
        (1.0, 2.0, 3.0, 4.0), None, (1.0,) * 4, (1.0,) * 4, transfer=(0.5,) * 4, boundary_bytes=(0.0,) * 4
    )


def test_costs_per_rank_are_divided_by_the_stages_a_rank_holds() -> None:
    costs = place_costs(Costs(forward=6.0, overlap=12.0, transfer=0.5), (0, 1, 1, 1, 0), per="rank")
    assert costs.forward == (3, 2, 2, 2, 3)
    assert costs.overlap == (6, 4, 4, 4, 6)
    assert costs.transfer == (0.5,) * 5
    assert costs.backward is None


def test_a_list_per_rank_has_an_entry_a_rank_or_a_stage() -> None:
    by_rank = place_costs(Costs(forward=(2.0, 4.0)), (0, 1, 1, 0), per="rank")
    by_stage = place_costs(Costs(forward=(2.0, 4.0, 4.0, 2.0)), (0, 1, 1, 0), per="rank")
    assert by_rank.forward == by_stage.forward == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("costs", "per", "problem"),
    [
        (Costs(forward=(1.0, 2.0)), "stage", "costs.forward has 2 entries for 4 stages: use one number or 4"),
        (Costs(overlap=(1.0,) * 3), "rank", "costs.overlap has 3 entries for 4 stages: use one number or 4"),
        (Costs(transfer=(1.0,) * 2), "rank", "costs.transfer has 2 entries for 4 stages"),
        (Costs(), "layer", "costs.per is 'layer': use stage or rank"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, per: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        place_costs(costs, (0, 1, 1, 0), per=per)  # type: ignore[arg-type]


def test_an_equal_model_is_compared_per_rank() -> None:
    schedule = interleaved_1f1b(4, 8, 2)
    assert simulate(schedule, place_costs(Costs(), schedule.stage_to_rank, per="rank")).makespan == 28.5
