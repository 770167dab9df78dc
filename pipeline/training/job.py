"""A whole run: from a checked plan to trained ranks, in one process or several, and the record of it."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from pipeline.engine.model import Model
from pipeline.engine.standing import Activity, Board, Marker, SharedBoard
from pipeline.engine.transport import InProcessTransport, Transport
from pipeline.training import rendezvous
from pipeline.training.allocator import keep_freed_memory
from pipeline.training.checkpoint import Checkpoint
from pipeline.training.connection import connect, own_device
from pipeline.training.determinism import deterministic
from pipeline.training.devices import Devices
from pipeline.training.failures import RankFailure
from pipeline.training.group import Group, LocalGroup
from pipeline.training.launch import launch
from pipeline.training.placement import place
from pipeline.training.plan import Plan
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks
from pipeline.training.recorder import RunFacts, Status
from pipeline.training.saving import Saving
from pipeline.training.settings import Settings
from pipeline.training.signals import sigterm_raises
from pipeline.training.trainer import Data, Trainer
from pipeline.training.utilization import speed_of
from pipeline.training.verdict import as_one_failure
from pipeline.training.watch import Watch

_log = logging.getLogger(__name__)

Report = Callable[[object], None]
Builders = tuple[Callable[[], Model], Callable[[], Data]]
"""What makes the model, and what opens the data."""


@dataclass(frozen=True)
class Team:
    """The ranks of a process, and what they need for a job's work."""

    job: Job
    model: Model
    ranks: Ranks
    report: Report
    """Takes messages; to be called where rank 0 is."""

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.ranks.group

    def open_data(self) -> Data | None:
        """The data; None where neither the first nor the last stage is local."""
        return self.job.build_data() if self.ranks.holds_first or self.ranks.holds_last else None


def train_model(team: Team) -> None:
    """The work of training."""
    job = team.job
    trainer = Trainer(
        job.settings,
        job.plan,
        team.ranks.ranks,
        team.model.loss,
        team.open_data(),
        team.group,
        validation_batches=job.validation_batches,
        shared_memory=job.devices.shared,
        report=team.report,
        saved=job.saved,
        resumed=job.resumed,
    )
    trainer.train()


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to begin. Picklable: models and data are built where they are used.

    Args:
        build_model: makes the model's description; called in every process.
        build_data: opens the data; called where the first or the last stage is.
    """

    settings: Settings
    plan: Plan
    devices: Devices
    build_model: Callable[[], Model]
    build_data: Callable[[], Data]
    validation_batches: int
    tokens: bool
    """Whether the data is text."""
    saved: Saving | None = None
    """Where checkpoints go; None: nowhere."""
    resumed: Checkpoint | None = None
    """A checkpoint to go on from; None: from the start."""
    work: Callable[[Team], None] = train_model
    """What the ranks do. Picklable."""

    def facts(self, model: str, config: Mapping[str, object]) -> RunFacts:
        """What the record of this run begins with; `model` and `config` are the user's words for it."""
        settings, plan = self.settings, self.plan
        return RunFacts(
            schedule=settings.schedule.name,
            model=model,
            pp=settings.pp,
            dp=settings.dp,
            microbatches=settings.microbatches,
            batch_size=settings.batch_size,
            steps=settings.steps,
            parameters=plan.parameters,
            bubble_predicted=plan.predicted.makespan_bubble,
            units="tokens" if self.tokens else "samples",
            predicted=plan.predicted.events,
            config=config,
            partition=plan.partition,
            layers=plan.counts,
            speed=speed_of(settings, plan, self.devices),
        )


def check_launch(settings: Settings) -> None:
    """Refuse ranks of an outer launcher (torchrun) that don't fit the settings.

    Raises:
        ValueError: their number isn't `pp` times `dp`, or the ranks should be in one process.
    """
    if not rendezvous.is_launched():
        return
    started = rendezvous.world_size()
    if settings.profiled and settings.profile is None:
        asked = "costs.source=profile" if settings.costs.source == "profile" else f"partition={settings.partition.name}"
        raise ValueError(
            f"{asked} under a launcher: every process would measure other costs. Measure once, with plain python and "
            "task=profile, then give what it leaves: profile=profile.json"
        )
    if settings.launch == "in_process":
        raise ValueError(f"launch=in_process under a launcher that started {started} processes: use plain python")
    if started != settings.ranks and settings.dp == 1:
        raise ValueError(f"the launcher started {started} processes and pp={settings.pp}: use pp={started}")
    if started != settings.ranks:
        raise ValueError(
            f"the launcher started {started} processes and pp={settings.pp} in dp={settings.dp} replicas makes "
            f"{settings.ranks}: let it start {settings.ranks}"
        )


class Record(Protocol):
    """Writes a run down."""

    def start(self) -> None:
        """Called once, before the ranks start."""

    def __call__(self, message: object) -> None:
        """Take a rank's message."""

    def finish(self, status: Status, error: str | None = None, *, steps_done: int | None = None) -> object:
        """Called once, at any kind of end."""


def run_job(job: Job, recorder: Record | None, log_file: Path) -> None:
    """Run the job to its end and record it.

    Args:
        recorder: started here and finished in every case; None on the ranks of an outer launcher that don't record.
        log_file: where local ranks log.

    Raises:
        RankFailure: a rank failed, and where all ranks stood; all of a local launch are gone.
        Exception: whatever ended the ranks of this process.
    """
    settings = job.settings
    with sigterm_raises():
        if rendezvous.is_launched():
            board = Board.in_memory(1)
            rank = partial(_run_here, job, board.marker(0))
            judged = partial(as_one_failure, board, job.plan.programs, settings.timeout)
            _record(recorder, board, lambda report: judged(partial(rank, report)))
        elif settings.launch == "in_process":
            board = Board.in_memory(settings.ranks)
            _record(recorder, board, partial(_run_in_process, job, board))
        else:
            with contextlib.closing(SharedBoard(settings.ranks)) as shared:
                _record(recorder, shared, partial(_run_in_processes, job, shared, log_file))


def _record(recorder: Record | None, board: Board, run: Callable[[Report], None]) -> None:
    """Run with what takes the messages, and record how it ends.

    No context manager: a signal that raises while Python leaves one can skip what it does on leaving.
    """
    if recorder is None:
        return run(lambda message: None)
    try:
        recorder.start()
        run(recorder)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        recorder.finish("interrupted" if interrupted else "failed", _describe(error), steps_done=board.steps_done())
        raise
    recorder.finish("finished", steps_done=board.steps_done())


def _describe(error: BaseException) -> str:
    """What summary.json says of a bad end."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, SystemExit):
        return "SIGTERM" if error.code == 128 + signal.SIGTERM else f"exit with status {error.code}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _run_in_processes(job: Job, board: SharedBoard, log_file: Path, report: Report) -> None:
    """All ranks, in local processes that move their markers on the board."""
    watch = Watch(board)
    try:
        launch(
            _run_on_board,
            (job, board.name),
            job.settings.ranks,
            on_message=report,
            on_start=watch.know,
            on_failure=watch.look,
            log_file=log_file,
        )
    except RankFailure as failure:
        raise watch.explain(failure, job.plan.programs, job.settings.timeout) from None


def _run_on_board(payload: tuple[Job, str], report: Report) -> None:
    job, name = payload
    board = SharedBoard(job.settings.ranks, name)
    _run_here(job, board.marker(rendezvous.rank()), report)


def _run_here(job: Job, marker: Marker, report: Report) -> None:
    """One rank of several processes."""
    settings, number = job.settings, rendezvous.rank()
    device = own_device(job.devices)
    marker.enter(Activity.CONNECTING)
    try:
        with marker.waiting():
            rendezvous.join(settings.timeout)
            group, transport = connect(settings, job.plan, device, job.devices.backend, marker)
        marker.enter(Activity.STARTING)
        _run_ranks(job, {number: marker}, device, transport, group, report)
    finally:
        rendezvous.leave()


def _run_in_process(job: Job, board: Board, report: Report) -> None:
    """All ranks, taking turns."""
    group = LocalGroup(job.settings.pp, job.settings.dp)
    markers = {rank: board.marker(rank) for rank in group.local}
    _run_ranks(job, markers, job.devices.of(0), InProcessTransport(), group, report)


def _run_ranks(
    job: Job, markers: Mapping[int, Marker], device: torch.device, transport: Transport, group: Group, report: Report
) -> None:
    keep_freed_memory()
    with deterministic(job.settings.deterministic, compiled=job.settings.compile):
        _build_and_work(job, markers, device, transport, group, report)


def _build_and_work(
    job: Job, markers: Mapping[int, Marker], device: torch.device, transport: Transport, group: Group, report: Report
) -> None:
    settings, model = job.settings, job.build_model()
    placement = place(settings, device)
    stages = ", ".join(map(str, sorted({stage for number in markers for stage in job.plan.stages_of(number)})))
    _log.info("this process holds %s %s, on %s", "stages" if "," in stages else "stage", stages, device)
    ranks = [
        Rank(number, job.plan, model, placement, transport, settings.optimizer, marker, add=partial(group.add, number))
        for number, marker in markers.items()
    ]
    job.work(Team(job, model, Ranks(job.plan, ranks, model.loss, group), report))
