"""A schedule, assessed under costs before anything runs: as numbers, on the console, and as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from pipeline.report import timeline
from pipeline.report.rank_table import rank_table
from pipeline.report.words import counted, number, percent
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.bounds import schedule_lower_bound
from pipeline.schedule.costs import Costs
from pipeline.schedule.grid import grid
from pipeline.schedule.memory import Footprint
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Simulation, simulate
from pipeline.schedule.torch_csv import write_csv

LONGEST_GRID = 16
"""Ranks beyond which the grid says less than it takes room."""


@dataclass(frozen=True)
class Share:
    """A schedule run on a rank's share of one model, whatever the number of stages: what comparisons are of."""

    costs: Costs
    simulation: Simulation
    footprint: Footprint | None = None

    def to_json(self) -> dict[str, object]:
        """Costs by rank, the makespan under them, and the highest peaks: in microbatches (microbatch x stage, divided
        by the stages that the rank holds) and in bytes, None where not known."""
        schedule = self.simulation.schedule
        held = [len(schedule.stages_of(rank)) for rank in range(schedule.pp)]
        at_weight, at_input = (
            max(peak / count for peak, count in zip(peaks, held, strict=True))
            for peaks in (self.simulation.peak_in_flight, self.simulation.peak_in_flight_released_at_input)
        )
        return {
            "costs": rank_costs(schedule, self.costs),
            "makespan": self.simulation.makespan,
            "bubble_makespan": self.simulation.makespan_bubble,
            "bubble_span": self.simulation.span_bubble,
            "peak_in_flight": at_weight,
            "peak_in_flight_released_at_input": at_input,
            "peak_bytes": None if self.footprint is None else max(self.simulation.peak_bytes(self.footprint)),
        }


@dataclass(frozen=True)
class Assessment:
    """What a schedule does under given costs, and how far that is from the best conceivable."""

    schedule: Schedule
    costs: Costs
    """As simulated: of a stage."""
    simulation: Simulation
    lower_bound: float
    """No order of the same actions has a smaller makespan."""
    share: Share
    footprint: Footprint | None = None
    unit: str = "units"
    """Of the costs and all times."""
    partition: str | None = None
    """How a model's layers were cut, and why so; None where no model was asked."""
    layers: tuple[int, ...] | None = None
    """How many of them each stage holds."""

    @property
    def stages_per_rank(self) -> int | list[int]:
        """One number, or one a rank where they differ."""
        held = [len(self.schedule.stages_of(rank)) for rank in range(self.schedule.pp)]
        return held[0] if len(set(held)) == 1 else held

    @property
    def distance(self) -> float:
        """How far the makespan is above the lower bound, as a fraction of the bound; 0 where no bound is known."""
        return self.simulation.makespan / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """By rank; None where no footprint is known."""
        return None if self.footprint is None else self.simulation.peak_bytes(self.footprint)

    def to_json(self) -> dict[str, object]:
        """What plan.json holds. Times are in the costs' unit, peaks by rank, in flight in microbatch x stage."""
        simulation = self.simulation
        facts = {
            "schedule": self.schedule.name,
            "pp": self.schedule.pp,
            "stages_per_rank": self.stages_per_rank,
            "microbatches": self.schedule.microbatches,
            "unit": self.unit,
            "makespan": simulation.makespan,
            "bubble_makespan": simulation.makespan_bubble,
            "bubble_span": simulation.span_bubble,
            "lower_bound": self.lower_bound,
            "above_lower_bound": self.distance,
            "peak_in_flight": list(simulation.peak_in_flight),
            "peak_in_flight_released_at_input": list(simulation.peak_in_flight_released_at_input),
            "peak_bytes": None if self.peak_bytes is None else list(self.peak_bytes),
            "busy": busy(simulation),
            "idle": [asdict(idle) for idle in simulation.idle],
            "comparison": self.share.to_json(),
            "costs": asdict(self.costs),
            "partition": self.partition,
            "layers": None if self.layers is None else list(self.layers),
            "stage_to_rank": list(self.schedule.stage_to_rank),
            "actions": [[str(action) for action in row] for row in self.schedule.rows],
        }
        return {name: _plain(value) for name, value in facts.items()}


def assess(
    schedule: Schedule,
    costs: Costs,
    footprint: Footprint | None = None,
    *,
    share_costs: Costs | None = None,
    share_footprint: Footprint | None = None,
    memory_cap: int | Sequence[int] | None = None,
    unit: str = "units",
) -> Assessment:
    """Simulate `schedule` and bound its makespan.

    Args:
        schedule: compute-only or lowered.
        costs: of a stage, in `unit`.
        footprint: bytes of a stage. None: not known.
        share_costs: the same for comparisons with other schedules, where a rank's stages together must take the same
            whatever their number (`place_costs(..., per="rank")`). None: as `costs`.
        share_footprint: bytes likewise. None: as `footprint`.
        memory_cap: what the schedule was held to (microbatch x stage); counted in the lower bound.
        unit: the name of the costs' unit.

    Raises:
        ScheduleError: the ranks wait for each other forever.
    """
    simulation = simulate(schedule, costs)
    bound = schedule_lower_bound(schedule, costs, memory_cap=memory_cap)
    same = share_costs is None or share_costs == costs
    share = Share(
        costs if share_costs is None else share_costs,
        simulation if same or share_costs is None else simulate(schedule, share_costs),
        share_footprint or footprint,
    )
    return Assessment(schedule, costs, simulation, bound, share, footprint, unit)


def busy(simulation: Simulation) -> list[float]:
    """How long each rank computes."""
    return [sum(event.end - event.start for event in row) for row in simulation.events]


def rank_costs(schedule: Schedule, costs: Costs) -> dict[str, object]:
    """What one microbatch takes each rank, all its stages together, by type of action; and messages by boundary.

    A list whose entries are all equal is one number.
    """
    kinds = (ActionType.F, ActionType.B, ActionType.I, ActionType.W, ActionType.R)
    held = [schedule.stages_of(rank) for rank in range(schedule.pp)]
    result = {
        kind.value: _collapsed([sum(costs.duration(Action(stage, kind, 0)) for stage in stages) for stages in held])
        for kind in kinds
    }
    crossed = [
        costs.transfer_time(source, destination)
        for at in range(schedule.stages - 1)
        for source, destination in ((at, at + 1), (at + 1, at))
        if schedule.stage_to_rank[source] != schedule.stage_to_rank[destination]
    ]
    return {**result, "transfer": _collapsed(crossed)}


def print_assessment(assessment: Assessment, console: Console) -> None:
    """Print the grid, what each rank does and holds, and how good that is."""
    schedule = assessment.schedule
    if schedule.pp <= LONGEST_GRID:
        drawn = grid(schedule, costs=assessment.costs, width=console.width)
        console.print(drawn, highlight=False, markup=False, no_wrap=True, overflow="crop")
    else:
        console.print(title(assessment), highlight=False, markup=False)
    wide = console.width >= 100
    console.print(rank_table(assessment.simulation, assessment.peak_bytes, wide=wide))
    console.print(_summary(assessment), highlight=False, markup=False)


def title(assessment: Assessment) -> str:
    """Which schedule it is, at which size."""
    schedule, held = assessment.schedule, assessment.stages_per_rank
    stages = "" if held == 1 else f", {held} stages a rank" if isinstance(held, int) else f", {schedule.stages} stages"
    return f"{schedule.name}: pp={schedule.pp}{stages}, {counted(schedule.microbatches, 'microbatch')}"


def write_plan(directory: Path, assessment: Assessment) -> tuple[str, ...]:
    """Write plan.json, timeline.png, timeline.svg, schedule.csv (torch's form) and schedule.txt (ours, without loss).

    Returns lines for the user: what torch's form cannot say.
    """
    entries = (f"  {json.dumps(key)}: {_lines(value)}" for key, value in assessment.to_json().items())
    (directory / "plan.json").write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    pictures = [directory / "timeline.png", directory / "timeline.svg"]
    simulation, unit = assessment.simulation, assessment.unit
    timeline.draw(pictures, (), simulation.events, title=title(assessment), transfers=simulation.transfers, unit=unit)
    written = write_csv(assessment.schedule)
    (directory / "schedule.csv").write_text(written.text, encoding="utf-8")
    (directory / "schedule.txt").write_text(assessment.schedule.to_text(), encoding="utf-8")
    return written.notes


def _summary(assessment: Assessment) -> str:
    """Lines of under 80 columns."""
    simulation, unit = assessment.simulation, assessment.unit
    at_weight, at_input = (
        max(peaks) for peaks in (simulation.peak_in_flight, simulation.peak_in_flight_released_at_input)
    )
    cut = [] if assessment.partition is None else [f"partition     {assessment.partition}"]
    return "\n".join(
        [
            *cut,
            f"makespan      {number(simulation.makespan)} {unit}, {percent(assessment.distance)} above the lower bound",
            f"lower bound   {number(assessment.lower_bound)} {unit}: no order of these actions takes less",
            f"bubble        makespan {percent(simulation.makespan_bubble)}, span {percent(simulation.span_bubble)}",
            f"in flight     at most {at_weight} microbatches x stages, released after B or W",
            f"              at most {at_input} microbatches x stages, released after B or I",
        ]
    )


def _plain(value: object) -> object:
    """As JSON holds it: tuples as lists; times to 12 digits, without what rounding left behind them."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _lines(value: object) -> str:
    """JSON that a person can scroll: an entry a line where it is a list of lists or of objects."""
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(f"    {json.dumps(entry, allow_nan=False)}" for entry in value) + "\n  ]"
    return json.dumps(value, allow_nan=False)


def _collapsed(times: Sequence[float]) -> float | list[float]:
    """One number where all are equal but for rounding; 0 where there are none."""
    if all(abs(time - times[0]) <= 1e-9 * max(times) for time in times):
        return times[0] if times else 0.0
    return list(times)
