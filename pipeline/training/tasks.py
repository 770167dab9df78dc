"""What a job can be asked to do: `task=NAME` is a line in the table at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pipeline.training.checkpoint import FOLDER, Checkpoint
from pipeline.training.export_task import Writer, export
from pipeline.training.job import Builders, Job, Record, run_job
from pipeline.training.plan_text import print_plan
from pipeline.training.planning import plan
from pipeline.training.preparation import prepare, prepare_evaluation, prepare_generation
from pipeline.training.profile_task import profile
from pipeline.training.progress import ProgressLine
from pipeline.training.recorder import Recorder, Sink
from pipeline.training.results import Results, show_metrics, show_text
from pipeline.training.saving import Saving, other_settings
from pipeline.training.settings import Settings
from pipeline.training.wandb_logger import WandbLogger

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What the user asked for, as a task is given it."""

    settings: Settings
    """Checked."""
    builders: Callable[[], Builders]
    """Imports the model and the data: their builders, picklable."""
    directory: Path
    """The run directory."""
    records: bool
    """Whether this process writes the run down: one of those that a launcher started."""
    model: str
    """The model's name in tables."""
    validation_batches: int
    """Held-out batches that a validation averages over; 0 where there is no data."""
    config: Callable[[], Mapping[str, object]]
    """The resolved configuration as plain values."""
    sweep: str | None
    """The sweep that the job belongs to."""
    writer: Callable[[], Writer]
    """Imports what writes weights as other programs read them."""


Run = Callable[[], None]
Task = Callable[[Order], Run]
"""Prepares: what the user asked for that can't be is a ValueError, an OSError or a MemoryError. Then it can run."""


def _train(order: Order) -> Run:
    job = prepare(order.settings, order.builders(), order.validation_batches)
    job = replace(job, saved=_saving(order))
    if job.resumed is not None and order.records:
        _tell_where_from(job.resumed)
        for setting in other_settings(job.resumed, order.config()):
            _log.warning("goes on with another setting than the checkpoint's: %s", setting)
    return partial(_run_job, job, _recorder(order, job) if order.records else None, order.directory)


def _tell_where_from(checkpoint: Checkpoint) -> None:
    _log.info("goes on from step %d: %s", checkpoint.progress.step, checkpoint.path)


def _saving(order: Order) -> Saving | None:
    settings = order.settings
    if not settings.save_every:
        return None
    folder = order.directory.resolve() / FOLDER
    return Saving(folder, settings.save_every, settings.keep_checkpoints, order.config() if order.records else {})


def _run_job(job: Job, recorder: Record | None, directory: Path) -> None:
    try:
        run_job(job, recorder, directory / "train.log")
    except (KeyboardInterrupt, SystemExit) as stop:  # Ctrl-C or SIGTERM: no error of the job, and it ends a sweep
        print(f"interrupted; what was recorded is in {directory}", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None


def _recorder(order: Order, job: Job) -> Recorder:
    """Print the plan, and make what writes the run down: the run directory, the progress line, W&B."""
    sinks: list[Sink] = [ProgressLine()]
    if (logger := order.settings.logger).name == "wandb":
        group = logger.group or order.sweep
        sinks.append(WandbLogger(project=logger.project, mode=logger.mode, group=group, tags=logger.tags))
    print_plan(job.plan, order.model, Console())
    return Recorder(order.directory, job.facts(order.model, order.config()), sinks)


def _plan(order: Order) -> Run:
    plan(order.settings, order.directory, order.builders() if order.settings.profiled else None)
    return _nothing_more


def _profile(order: Order) -> Run:
    profile(order.settings, order.directory, order.builders(), order.model)
    return _nothing_more


def _export(order: Order) -> Run:
    export(order.settings, order.builders()[0], order.writer())
    return _nothing_more


def _evaluate(order: Order) -> Run:
    job = prepare_evaluation(order.settings, order.builders(), order.validation_batches)
    results = Results(order.directory, _facts(order, job), show_metrics) if order.records else None
    return partial(_run_job, job, results, order.directory)


def _generate(order: Order) -> Run:
    job, codec = prepare_generation(order.settings, order.builders())
    show = partial(show_text, codec, order.settings.prompt, order.directory)
    return partial(
        _run_job, job, Results(order.directory, _facts(order, job), show) if order.records else None, order.directory
    )


def _facts(order: Order, job: Job) -> Mapping[str, object]:
    """What the summary of a run that trains nothing begins with."""
    settings, resumed = order.settings, job.resumed
    if resumed is not None:
        _tell_where_from(resumed)
    return {
        "task": settings.task,
        "schedule": settings.schedule.name,
        "model": order.model,
        "pp": settings.pp,
        "parameters": job.plan.parameters,
        "checkpoint": None if resumed is None else resumed.path,
        "steps_done": 0 if resumed is None else resumed.progress.step,
    }


def _nothing_more() -> None:
    """A plan, a profile or an export is made of bad input or it is done: there is nothing left to run."""


TASKS: Mapping[str, Task] = {
    "train": _train,
    "plan": _plan,
    "profile": _profile,
    "evaluate": _evaluate,
    "generate": _generate,
    "export": _export,
}
