"""What ranks tell whoever records the run: plain frozen values that pickle."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.schedule.simulate import Event


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One logged optimizer step. `step` counts from 1; `loss` and the rates are those of the whole batch.

    `bubble_measured` is the makespan bubble of this step, None where nothing was traced. `skipped` says that
    fp16 overflowed and the optimizer did not move.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None = None
    bubble_measured: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class ValidationMetrics:
    """The loss on held-out data after `step` optimizer steps (0: before the first)."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank held. Bytes; `peak_memory_bytes` is None where ranks share a process."""

    rank: int
    stages: tuple[int, ...]
    parameters: int
    peak_activation_bytes: int | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a run that went well. `events` are those of one typical step, one row a rank, in seconds."""

    train_loss: float
    validation_loss: float | None
    samples_per_second: float
    step_seconds: float
    bubble_measured: float | None
    bubble_source: str
    ranks: tuple[RankReport, ...]
    events: tuple[tuple[Event, ...], ...]
    seconds: float


Message = StepMetrics | ValidationMetrics | RankReport | Finished
