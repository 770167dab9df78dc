"""From settings to a schedule and its costs: a name of the library, a file, or a function of the user's."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from pipeline.engine.segments import Recomputed
from pipeline.schedule.actions import ActionType
from pipeline.schedule.costs import Costs, Times, place_costs
from pipeline.schedule.library import options_of, write
from pipeline.schedule.memory import Footprint
from pipeline.schedule.schedule import Release, Schedule
from pipeline.schedule.torch_csv import read_csv
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.settings import ScheduleSettings, Settings

_log = logging.getLogger(__name__)


def write_schedule(settings: Settings, costs: Costs | None = None) -> Schedule:
    """The schedule that the settings name.

    Args:
        costs: what zb_auto reckons with, an entry a stage; None: the stated ones.

    Raises:
        ValueError: the name, an option, the file or the function can't be, with the cure.
    """
    chosen = settings.schedule
    if chosen.name == "file":
        schedule = _from_file(settings)
    elif chosen.name == "custom":
        schedule = _from_function(settings)
    else:
        schedule = write(chosen.name, settings.pp, settings.microbatches, **_options(settings, costs))
    return _with_release(schedule, chosen)


Per = Literal["stage", "rank"]


def stated_costs(settings: Settings, stage_to_rank: Sequence[int], per: Per | None = None) -> Costs:
    """The costs that the settings state, an entry a stage.

    Args:
        per: reads them as a stage's or as a rank's, whatever `costs.per` says.

    Raises:
        ValueError: a number below 0, or a list of another length than the stages.
    """
    chosen = settings.costs
    names = [field.name for field in fields(Costs)]
    values = {name: stated_times(f"costs.{name}", getattr(chosen, name)) for name in names}
    part, forward = recomputed_part(settings.activation_checkpoint), values["forward"]
    if values["recompute"] is None and forward is not None and part != Recomputed():
        values["recompute"] = _part(forward, part.share())
    return place_costs(Costs(**values), stage_to_rank, per or cast(Per, chosen.per))  # type: ignore[arg-type]


def stated_footprint(settings: Settings, stage_to_rank: Sequence[int], per: Per | None = None) -> Footprint | None:
    """The bytes that the settings state, an entry a stage; None where they say nothing of activations.

    Args:
        per: as in `stated_costs`; a message is as large whatever the number of stages a rank holds.
    """
    costs = settings.costs
    activation = stated_times("costs.activation_bytes", costs.activation_bytes)
    if activation is None:
        return None
    placed = place_costs(Costs(forward=activation), stage_to_rank, per or cast(Per, costs.per))
    return Footprint(
        placed.forward,
        checkpoint=_part(placed.forward, recomputed_part(settings.activation_checkpoint).kept()),
        boundary=stated_times("costs.boundary_bytes", costs.boundary_bytes) or 0.0,
    )


def _part(times: Times, part: float) -> Times:
    return tuple(time * part for time in times) if isinstance(times, tuple) else times * part


def stated_times(name: str, value: Any) -> Times | None:
    """A number, or one a stage, from what the command line gave; ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(_number(name, entry) for entry in value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value} is not a number: use one such as 1.5, or a list with one a stage")
    return float(value)


def _options(settings: Settings, costs: Costs | None) -> dict[str, Any]:
    """What the schedule takes of the settings; `write` refuses an option that was set and that it doesn't take."""
    chosen, taken = settings.schedule, options_of(settings.schedule.name)
    unset = ScheduleSettings()
    options = {
        name: getattr(chosen, name)
        for name in ("stages_per_rank", "objective", "placement", "memory_cap")
        if name in taken or getattr(chosen, name) != getattr(unset, name)
    }
    if "costs" in taken:
        ranks = range(settings.pp)
        placement = (*ranks, *reversed(ranks)) if chosen.placement == "v" else tuple(ranks)
        options["costs"] = stated_costs(settings, placement) if costs is None else costs
    return options


def _from_file(settings: Settings) -> Schedule:
    if settings.schedule.path is None:
        raise ValueError("schedule=file needs a file: give one, schedule.path=mine.csv")
    path = Path(settings.schedule.path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule.path={path} can't be read ({error}): give a CSV or text file") from error
    try:
        if text.startswith("schedule:"):
            schedule = Schedule.from_text(text)
        else:
            schedule, notes = read_csv(text, path.stem)
            for note in notes:
                _log.warning("%s", note)
    except ValueError as error:
        raise ValueError(f"schedule.path={path}: {error}") from error
    return _of_this_size(schedule, settings, f"schedule.path={path}")


def _from_function(settings: Settings) -> Schedule:
    target = settings.schedule.target
    if target is None:
        raise ValueError("schedule=custom needs a function: name one, schedule.target=module:function")
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"schedule.target={target} can't be imported ({error}): use module:function, from a folder on PYTHONPATH"
        ) from error
    schedule = function(settings.pp, settings.microbatches, settings.schedule.stages_per_rank)
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule.target={target} returned {type(schedule).__name__}: return a Schedule")
    return _of_this_size(schedule, settings, f"schedule.target={target}")


def _of_this_size(schedule: Schedule, settings: Settings, what: str) -> Schedule:
    if (schedule.pp, schedule.microbatches) != (settings.pp, settings.microbatches):
        raise ValueError(
            f"{what} has {schedule.pp} ranks and {schedule.microbatches} microbatches, the run pp={settings.pp} and "
            f"microbatches={settings.microbatches}: use pp={schedule.pp} microbatches={schedule.microbatches}"
        )
    return schedule


def _with_release(schedule: Schedule, chosen: ScheduleSettings) -> Schedule:
    overlapped = any(action.type is ActionType.OVERLAP_F_B for row in schedule.rows for action in row)
    if chosen.release != "end" and not overlapped:
        raise ValueError(
            f"schedule.release={chosen.release} is for overlapped pairs, which {schedule.name} has none of: "
            "use schedule.release=end"
        )
    return replace(schedule, release=cast(Release, chosen.release)) if overlapped else schedule
