"""What ranks tell whoever records the run: plain frozen values that pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.schedule.simulate import Event, Idle


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One logged optimizer step. `step` counts from 1; `loss` and the rates are those of the whole batch.

    `bubble_measured` is the makespan bubble of this step, None where nothing was traced, as are the other measured
    ones; `idle` are the seconds of each rank. What is predicted is None until a prediction was made. `skipped` says
    that fp16 overflowed or something was not finite, and the optimizer did not move; `skipped_steps` counts such steps,
    this one included.
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
    bubble_span_measured: float | None = None
    idle: tuple[Idle, ...] | None = None
    step_seconds_predicted: float | None = None
    bubble_span_predicted: float | None = None
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True)
class ValidationMetrics:
    """The loss on held-out data after `step` optimizer steps (0: before the first)."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank held. Bytes; `peak_memory_bytes` is None where ranks share a process, a prediction without one."""

    rank: int
    stages: tuple[int, ...]
    parameters: int
    peak_activation_bytes: int | None
    peak_memory_bytes: int | None
    peak_activation_bytes_predicted: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator makes of the costs profiled in the run. Times are in seconds.

    `steps` are those that were profiled, counted from 1. `step_seconds` is the time of a whole step,
    of which `outside_seconds` are spent outside the pipeline: on loading a batch, the rest of the gradients' sums, the
    norm and the optimizer. `idle` and `events` (one row a rank) are those of a typical step, `costs` the medians of
    what was profiled, by the names of the configuration's `costs`, an entry a stage (of several replicas, the first's).
    """

    steps: tuple[int, ...]
    step_seconds: float
    outside_seconds: float
    bubble: float
    bubble_span: float
    idle: tuple[Idle, ...]
    events: tuple[tuple[Event, ...], ...]
    costs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a run that went well. `events` are those of one typical step, one row a rank, in seconds; `idle` are
    each rank's seconds in the middling steps. `step_seconds` is the steps' median, and a quarter of them was shorter,
    a quarter longer, than `step_quartiles`: None of a single step."""

    train_loss: float
    validation_loss: float | None
    samples_per_second: float
    step_seconds: float
    bubble_measured: float | None
    bubble_source: str
    ranks: tuple[RankReport, ...]
    events: tuple[tuple[Event, ...], ...]
    seconds: float
    bubble_span_measured: float | None = None
    idle: tuple[Idle, ...] = ()
    skipped_steps: int = 0
    step_quartiles: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Evaluating:
    """How far an evaluation is: so many samples have begun."""

    begun: int
    samples: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the held-out samples say: means over all of them, by name."""

    samples: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that follow a prompt."""

    tokens: tuple[int, ...]
    seconds: float


Message = StepMetrics | ValidationMetrics | RankReport | Prediction | Finished | Evaluating | Evaluated | Generated
