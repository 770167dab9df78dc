"""task=plan: what a schedule takes, without training it: the schedule, its costs, and the assessment of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.report.plan import Assessment, assess, print_assessment, write_plan
from pipeline.schedule.costs import Costs
from pipeline.schedule.memory import Footprint
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.validate import validate
from pipeline.training.checkpointing import lowered
from pipeline.training.cutting import decide_cut
from pipeline.training.devices import choose_devices
from pipeline.training.job import Builders
from pipeline.training.partitioning import Cut
from pipeline.training.predicted_bytes import predict_footprint
from pipeline.training.schedule_choice import stated_costs, stated_footprint, write_schedule
from pipeline.training.settings import Settings


def plan(settings: Settings, directory: Path, builders: Builders | None = None) -> None:
    """Print the plan and write it into `directory`.

    Args:
        settings: checked.
        directory: gets plan.json, the pictures and the schedule as text and CSV.
        builders: make the model and the data, where costs come from a profile of them.

    Raises:
        ValueError: the schedule or its costs can't be.
    """
    schedule, cut = write_schedule(settings), None
    if builders is None:
        costs, shares = stated_costs(settings, schedule.stage_to_rank), _stated_shares(settings, schedule)
        footprint, unit = stated_footprint(settings, schedule.stage_to_rank), "units"
    else:
        costs, footprint, cut = _profiled(settings, builders)
        schedule, shares, unit = write_schedule(settings, costs), {}, "s"  # zb_auto searches anew
    validate(schedule)
    program = lowered(schedule, settings, footprint)
    validate(program)
    # without sends and receives a message is a pure latency, as published figures reckon; R stays where it was placed
    assessed = program.compute_only()
    assessment = assess(assessed, costs, footprint, memory_cap=settings.schedule.memory_cap, unit=unit, **shares)
    if cut is not None:
        assessment = replace(assessment, partition=cut.why, layers=cut.counts)
    _tell(assessment, directory)


def _profiled(settings: Settings, builders: Builders) -> tuple[Costs, Footprint | None, Cut]:
    """Seconds and bytes of the model's stages, and its cut."""
    model, data, device = builders[0](), builders[1](), choose_devices(settings).of(0)
    inputs, targets = data.train.inputs(0), data.train.targets(0)
    cut, costs = decide_cut(settings, model, inputs, targets, device)
    assert costs is not None, "the settings ask for a profile"
    return costs, predict_footprint(settings, model, inputs, targets, device, cut.counts), cut


def _stated_shares(settings: Settings, schedule: Schedule) -> dict[str, Any]:
    """What comparisons of schedules reckon with: the stated numbers as a rank's, however many stages it holds."""
    return {
        "share_costs": stated_costs(settings, schedule.stage_to_rank, "rank"),
        "share_footprint": stated_footprint(settings, schedule.stage_to_rank, "rank"),
    }


def _tell(assessment: Assessment, directory: Path) -> None:
    console = Console()
    print_assessment(assessment, console)
    for note in write_plan(directory, assessment):
        console.print(note, highlight=False, markup=False)
    console.print(f"plan.json, timeline.png, schedule.csv: {directory}", soft_wrap=True, highlight=False)
