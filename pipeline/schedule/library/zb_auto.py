"""An order searched for the costs and the memory at hand (after the automatic schedules of arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.bounds import lower_bound, per_rank
from pipeline.schedule.costs import CostModel, Costs, place_costs
from pipeline.schedule.library._common import check_counts
from pipeline.schedule.library.gpipe import gpipe
from pipeline.schedule.library.one_f_one_b import eager_1f1b, one_f_one_b
from pipeline.schedule.library.v_shape import v_half, v_min, zbv
from pipeline.schedule.library.zero_bubble import zb_h1, zb_h2
from pipeline.schedule.schedule import Row, Schedule
from pipeline.schedule.search.candidates import candidates
from pipeline.schedule.search.improve import Objective
from pipeline.schedule.search.problem import F, I, Problem, W
from pipeline.schedule.simulate import Simulation, simulate

Placement = Literal["line", "v"]

_FIXED: dict[Placement, tuple[Callable[[int, int], Schedule], ...]] = {
    "line": (gpipe, one_f_one_b, eager_1f1b, zb_h1, zb_h2),
    "v": (zbv, v_half, v_min),
}


def zb_auto(
    pp: int,
    microbatches: int,
    *,
    costs: CostModel | None = None,
    memory_cap: int | Sequence[int] | None = None,
    objective: Objective = "makespan",
    placement: Placement = "line",
) -> Schedule:
    """The fastest order found under `costs` that holds no more than `memory_cap` in flight, of equals that with least.

    Never slower than gpipe, 1f1b, eager_1f1b, zb_h1 and zb_h2 on the line, or zbv, v_half and v_min on the V, where
    those fit; never slower for more memory; the same on every run.

    Args:
        costs: what each stage's F, I, W (and B) and each message take; None: 1, 1, 1 and 0.
        memory_cap: activations in flight, in microbatch x stage, held from F to W; one number or one a rank.
        objective: what to make short, the makespan or the longest span of a rank from its first start to its last end.
        placement: one stage a rank in order, or two a rank, there and back.

    Raises:
        ValueError: a count below 1, an unknown objective or placement, a cap that no schedule keeps, costs with another
            number of entries than stages.
    """
    check_counts(pp, microbatches)
    _check_choice("objective", objective, ("makespan", "span"))
    _check_choice("placement", placement, ("line", "v"))
    stage_to_rank = (*range(pp), *reversed(range(pp))) if placement == "v" else tuple(range(pp))
    cap = _checked_cap(memory_cap, pp, placement)
    costs = Costs() if costs is None else costs
    if isinstance(costs, Costs):
        costs = place_costs(costs, stage_to_rank)
    found: list[tuple[float, int, float, Schedule]] = []
    for schedule in _schedules(stage_to_rank, microbatches, costs, objective, placement):
        simulation = simulate(schedule, costs)
        if cap is None or all(peak <= most for peak, most in zip(simulation.peak_in_flight, cap, strict=True)):
            lengths = (simulation.makespan, longest_span(simulation))
            first, second = lengths if objective == "makespan" else reversed(lengths)
            found.append((first, sum(simulation.peak_in_flight), second, schedule))
    return replace(min(found, key=lambda entry: entry[:3])[3], name="zb_auto")


def longest_span(simulation: Simulation) -> float:
    """The longest time of a rank from its first start to its last end."""
    return max(row[-1].end - row[0].start for row in simulation.events)


def _schedules(
    stage_to_rank: tuple[int, ...], microbatches: int, costs: CostModel, objective: Objective, placement: Placement
) -> Iterator[Schedule]:
    """All to choose from, whatever the cap: the fixed ones and those searched, also with full backwards if shorter."""
    problem = Problem.of(stage_to_rank, microbatches, costs)
    fixed = [write(problem.pp, microbatches) for write in _FIXED[placement]]
    yield from fixed
    if objective == "makespan":
        floor = lower_bound(stage_to_rank, microbatches, costs)
    else:
        work = [sum(problem.durations[kind][stage] for kind in (F, I, W)) for stage in range(problem.stages)]
        floor = microbatches * max(sum(work[stage] for stage in held) for held in problem.stages_of)
    starts = tuple(tuple(tuple(problem.codes(row)) for row in schedule.rows) for schedule in fixed)
    for rows in candidates(problem, objective, floor, starts):
        schedule = Schedule("zb_auto", tuple(map(problem.row, rows)), stage_to_rank, microbatches)
        yield schedule
        joined = schedule.with_rows(_joined(row, costs) for row in schedule.rows)
        if joined != schedule:
            yield joined


def _joined(row: Row, costs: CostModel) -> Iterator[Action]:
    """Each I directly followed by its W as one B, where a stage's B takes less than both."""
    skip = False
    for action, following in zip(row, (*row[1:], None), strict=True):
        if skip:
            skip = False
            continue
        whole = Action(action.stage, ActionType.B, action.microbatch)
        weight = Action(action.stage, ActionType.W, action.microbatch)
        if action.type is ActionType.I and following == weight:
            skip = costs.duration(whole) < costs.duration(action) + costs.duration(weight)
        yield whole if skip else action


def _check_choice(name: str, value: str, known: tuple[str, str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}: use {' or '.join(known)}")


def _checked_cap(memory_cap: int | Sequence[int] | None, pp: int, placement: Placement) -> tuple[int, ...] | None:
    least = 2 if placement == "v" else 1
    cap = per_rank(memory_cap, pp)
    if cap is not None and min(cap) < least:
        raise ValueError(
            f"memory_cap is {min(cap)} on rank {cap.index(min(cap))}, but a rank of placement={placement} holds "
            f"{least} at least (microbatch x stage): use {least} or more"
        )
    return cap
