"""What a training run is measured by: activation peaks, the steps' times and events, and the report at its end."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from pipeline.schedule.simulate import Event, bubbles
from pipeline.training.group import Group
from pipeline.training.memory import peak_memory_bytes, reset_peak_memory
from pipeline.training.messages import Finished, RankReport
from pipeline.training.plan import Plan
from pipeline.training.rank import Rank
from pipeline.training.replay import replay

Row = tuple[Event, ...]

_KEPT_STEPS = 512
"""Steps whose events are kept for the medians and the picture; a long run shouldn't grow with its length."""


class Measurement:
    """Watches the ranks of this process; the other processes watch theirs. Some calls gather from all.

    Args:
        plan: the same in every process.
        ranks: those in this process, ascending.
        group: all ranks.
        batch_size: samples a step.
        shared_memory: several ranks use one memory, so that no rank's peak can be told.
    """

    def __init__(
        self, plan: Plan, ranks: Sequence[Rank], group: Group, *, batch_size: int, shared_memory: bool
    ) -> None:
        self._plan = plan
        self._ranks = tuple(ranks)
        self._group = group
        self._batch_size = batch_size
        self._shared_memory = shared_memory
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._events: deque[tuple[Row, ...]] = deque(maxlen=_KEPT_STEPS)
        self._activation_bytes: list[int | None] = [None] * len(self._ranks)

    def before_step(self, step: int) -> None:
        """Meter the activations of the first step: every step holds the same, and only that one pays for the hooks."""
        if step == 0:
            for rank in self._ranks:
                reset_peak_memory(rank.placement.device)
                rank.measure_activations(True)
        elif step == 1:
            self._activation_bytes = [rank.measure_activations(False) for rank in self._ranks]

    def record(self, seconds: float, rows: Sequence[Row]) -> None:
        """Keep a step's duration and the events of each local rank; ranks that took turns are replayed side by side."""
        events = tuple(rows)
        self._seconds.append(seconds)
        self._events.append(replay(self._plan.program, events) if self._replayed else events)

    def bubble(self) -> float:
        """The makespan bubble of the last step. Every process must call it."""
        (events,) = self._gather_steps([self._events[-1]])
        return bubbles(events, self._group.size)[0]

    def finish(self, train_loss: float, validation_loss: float | None, seconds: float) -> Finished:
        """The whole run, as all ranks measured it. Every process must call it."""
        steps = self._gather_steps(list(self._events))
        reports = self._group.gather([self._rank_report(index) for index in range(len(self._ranks))])
        step_seconds = statistics.median(self._seconds)
        return Finished(
            train_loss=train_loss,
            validation_loss=validation_loss,
            samples_per_second=self._batch_size / step_seconds,
            step_seconds=step_seconds,
            bubble_measured=statistics.median(bubbles(events, self._group.size)[0] for events in steps),
            bubble_source="replayed" if self._replayed else "measured",
            ranks=tuple(reports),
            events=_typical(steps),
            seconds=seconds,
        )

    @property
    def _replayed(self) -> bool:
        return len(self._ranks) > 1

    def _gather_steps(self, steps: Sequence[tuple[Row, ...]]) -> list[tuple[Row, ...]]:
        """The given steps' events with the rows of all ranks."""
        by_rank = self._group.gather([[step[index] for step in steps] for index in range(len(self._ranks))])
        return list(zip(*by_rank, strict=True))

    def _rank_report(self, index: int) -> RankReport:
        rank = self._ranks[index]
        measured = rank.measure_activations(False)
        return RankReport(
            rank=rank.rank,
            stages=self._plan.schedule.stages_of(rank.rank),
            parameters=self._plan.rank_parameters(rank.rank),
            peak_activation_bytes=self._activation_bytes[index] if measured is None else measured,
            peak_memory_bytes=None if self._shared_memory else peak_memory_bytes(rank.placement.device),
        )


def _typical(steps: Sequence[tuple[Row, ...]]) -> tuple[Row, ...]:
    """The step with the median makespan, its times counted from its first start."""
    ordered = sorted(steps, key=_makespan)
    chosen = ordered[len(ordered) // 2]
    origin = min(row[0].start for row in chosen)
    return tuple(
        tuple(Event(event.rank, event.action, event.start - origin, event.end - origin) for event in row)
        for row in chosen
    )


def _makespan(step: Sequence[Row]) -> float:
    return max(row[-1].end for row in step) - min(row[0].start for row in step)
