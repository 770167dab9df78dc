"""What a training run is measured by: activation peaks, the steps' times and events, and the report at its end."""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Sequence

from pipeline.schedule.simulate import Event
from pipeline.training.clocks import SharedClock
from pipeline.training.group import Group
from pipeline.training.memory import peak_memory_bytes, reset_peak_memory
from pipeline.training.messages import Finished, Prediction, RankReport
from pipeline.training.plan import Plan
from pipeline.training.prediction import Profile, predict, profiled_steps, spread
from pipeline.training.rank import Rank
from pipeline.training.replay import replay
from pipeline.training.step_statistics import Rows, StepStatistics, of_replicas, summarize

_KEPT_STEPS, _GATHERED_STEPS = 512, 64
"""Steps whose times are kept, and of how many of them the end tells: a long run shouldn't grow with its length."""

Times = array
"""Start and end of each of a rank's compute actions in turn, in seconds: what they were, the program says."""


class Measurement:
    """Watches the ranks of this process; the other processes watch theirs. Some calls gather from all.

    Args:
        plan: the same in every process.
        ranks: those in this process, ascending.
        group: all ranks.
        batch_size: samples a step.
        shared_memory: several ranks use one memory, so that no rank's peak can be told.
        first_step: the run's, counted from 0.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[Rank],
        group: Group,
        *,
        batch_size: int,
        shared_memory: bool,
        first_step: int = 0,
    ) -> None:
        self._plan = plan
        self._ranks = tuple(ranks)
        self._group = group
        self._batch_size = batch_size
        self._shared_memory = shared_memory
        self._first_step = first_step
        self._clock = SharedClock(group)
        self._actions = plan.program.compute_only().rows * plan.dp
        self._recorded = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._times: deque[tuple[Times[float], ...]] = deque(maxlen=_KEPT_STEPS)
        self._activation_bytes: list[int | None] = [None] * len(self._ranks)

    def before_step(self, step: int) -> None:
        """Meter the activations of the first step: every step holds the same, and only that one pays for the hooks."""
        if step == self._first_step:
            for rank in self._ranks:
                reset_peak_memory(rank.placement.device)
                rank.measure_activations(True)
        elif step == self._first_step + 1:
            self._activation_bytes = [rank.measure_activations(False) for rank in self._ranks]

    def record(self, seconds: float, rows: Sequence[Sequence[Event]]) -> None:
        """Keep a step's duration and the events of each local rank; ranks that took turns are replayed side by side."""
        events = self._side_by_side(rows) if self._replayed else rows
        self._recorded += 1
        self._seconds.append(seconds)
        self._times.append(tuple(array("d", [t for event in row for t in (event.start, event.end)]) for row in events))

    def last_step(self) -> StepStatistics:
        """The last step, and all clocks set right for the next. Every process must call it."""
        last = summarize(self._gather_steps([self._times[-1]]), self._plan.program)
        for rank in self._ranks:
            rank.tie_clock()
        return last

    def prediction(self) -> Prediction | None:
        """Where rank 0 is: what the steps so far say of one. Every process must call it."""
        profiled = profiled_steps(self._recorded, len(self._times))
        at = [step - self._recorded for step in profiled]
        steps = self._gather_steps([self._times[index] for index in at])
        if 0 not in self._group.local:
            return None
        numbered = [self._first_step + step for step in profiled]
        seconds = [self._seconds[index] for index in at]
        return predict(self._profiles(steps), numbered, seconds, steps, turns=self._replayed)

    def finish(self, train_loss: float, validation_loss: float | None, seconds: float, skipped_steps: int) -> Finished:
        """The whole run, as all ranks measured it. Every process must call it."""
        common = summarize(self._gather_steps(spread(self._times, _GATHERED_STEPS)), self._plan.program)
        reports = self._group.gather([self._rank_report(index) for index in range(len(self._ranks))])
        step_seconds = statistics.median(self._seconds)
        return Finished(
            train_loss=train_loss,
            validation_loss=validation_loss,
            samples_per_second=self._batch_size / step_seconds,
            step_seconds=step_seconds,
            bubble_measured=common.bubble,
            bubble_source="replayed" if self._replayed else "measured",
            ranks=tuple(reports),
            events=common.events,
            seconds=seconds,
            bubble_span_measured=common.bubble_span,
            idle=common.idle,
            skipped_steps=skipped_steps,
            step_quartiles=_quartiles(self._seconds),
        )

    def _side_by_side(self, rows: Sequence[Sequence[Event]]) -> Sequence[Sequence[Event]]:
        program = self._plan.program
        return [row for own in of_replicas(rows, program) for row in replay(program, own)]

    def _profiles(self, steps: Sequence[Rows]) -> list[Profile]:
        """Of each replica."""
        plan = self._plan
        replicas = zip(*(of_replicas(step, plan.program) for step in steps), strict=True)
        return [
            Profile.of(own, plan.program, plan.microbatch_sizes[plan.microbatches_of(replica * plan.schedule.pp)])
            for replica, own in enumerate(replicas)
        ]

    @property
    def _replayed(self) -> bool:
        return len(self._ranks) > 1

    def _gather_steps(self, steps: Sequence[tuple[Times[float], ...]]) -> list[Rows]:
        """The given steps' events with the rows of all ranks, by one clock."""
        self._clock.update()
        mine = [[array("d", self._clock.to_rank_0(step[index])) for step in steps] for index in range(len(self._ranks))]
        return [self._rows(times) for times in zip(*self._group.gather(mine), strict=True)]

    def _rows(self, step: Sequence[Times[float]]) -> Rows:
        return tuple(
            tuple(Event(rank, *event) for event in zip(actions, times[::2], times[1::2], strict=True))
            for rank, (actions, times) in enumerate(zip(self._actions, step, strict=True))
        )

    def _rank_report(self, index: int) -> RankReport:
        rank = self._ranks[index]
        measured = rank.measure_activations(False)
        predicted = self._plan.peak_activation_bytes
        return RankReport(
            rank=rank.rank,
            stages=self._plan.stages_of(rank.rank),
            parameters=self._plan.rank_parameters(rank.rank),
            peak_activation_bytes=self._activation_bytes[index] if measured is None else measured,
            peak_activation_bytes_predicted=None if predicted is None else predicted[rank.rank],
            peak_memory_bytes=None if self._shared_memory else peak_memory_bytes(rank.placement.device),
        )


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
