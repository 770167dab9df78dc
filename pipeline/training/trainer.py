"""The training loop: batches in, steps of the pipeline, one optimizer step each, metrics out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.engine.executor import Microbatches, StepResult
from pipeline.engine.model import Loss
from pipeline.engine.nest import Nest
from pipeline.engine.standing import Activity
from pipeline.training import nonfinite, saving
from pipeline.training.checkpoint import Checkpoint, Progress
from pipeline.training.failures import NonFiniteError
from pipeline.training.group import Group
from pipeline.training.measurement import Measurement
from pipeline.training.messages import Prediction, StepMetrics, ValidationMetrics
from pipeline.training.optimizer import learning_rate
from pipeline.training.plan import Plan
from pipeline.training.precision import LossScale
from pipeline.training.prediction import PREDICTED_AFTER
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks
from pipeline.training.saving import Saving
from pipeline.training.settings import Settings

_log = logging.getLogger(__name__)


class Codec(Protocol):
    """Text as tokens, and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class Split(Protocol):
    """Batches by number: a pure function of the step, so that nothing has to be replayed to resume."""

    @property
    def samples(self) -> int | None:
        """How many there are, none twice in the batches up to there; None: they are drawn without end."""

    def inputs(self, step: int, samples: slice = ..., /) -> Nest:
        """The whole batch's input, on the CPU: a tensor, or a nest of tensors whose first dimension is the samples."""

    def targets(self, step: int) -> Nest:
        """The whole batch's targets, on the CPU, likewise."""


class Data(Protocol):
    """A data set's two parts."""

    @property
    def train(self) -> Split:
        """To learn from."""

    @property
    def validation(self) -> Split:
        """Held out."""

    @property
    def kind(self) -> str:
        """ "text" or "images"."""

    @property
    def units_per_sample(self) -> int:
        """Tokens in a sample of text, else 1."""

    @property
    def classes(self) -> int:
        """What a target can be: the vocabulary, or the number of image classes."""

    @property
    def codec(self) -> Codec | None:
        """What the tokens stand for, where that is known."""


class Trainer:
    """Trains with the ranks of this process; the other processes run the same loop with theirs.

    Args:
        settings: checked.
        plan: the same in every process.
        ranks: those in this process, ascending.
        loss: the model's, for its weight.
        data: None where neither the first nor the last stage is local.
        group: all ranks.
        validation_batches: that a validation averages over.
        shared_memory: several ranks use one memory, so that no rank's peak can be told.
        report: takes messages; called where rank 0 is.
        saved: where checkpoints go; None: nowhere.
        resumed: a checkpoint to go on from; None: from the start.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        ranks: Sequence[Rank],
        loss: Loss,
        data: Data | None,
        group: Group,
        *,
        validation_batches: int,
        shared_memory: bool,
        report: Callable[[object], None],
        saved: Saving | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        self.settings = settings
        self.ranks = Ranks(plan, ranks, loss, group)
        self._data = data
        self._group = group
        self._validation_batches = validation_batches
        self._report = report
        self._reports = 0 in group.local
        self._scale = LossScale.start(settings.precision.loss_scale)
        self._skips = nonfinite.Skips()
        self._may_skip = settings.on_nonfinite == "skip" or self._scale.dynamic
        self._saved = saved
        self._first_step = 0
        if resumed is not None:
            self._resume(resumed)
        self._measurement = Measurement(
            plan,
            self.ranks.ranks,
            group,
            batch_size=settings.batch_size,
            shared_memory=shared_memory,
            first_step=self._first_step,
        )
        self._prediction: Prediction | None = None

    def train(self) -> None:
        """Run every step.

        Raises:
            NonFiniteError: a loss or gradient is not finite (but for an overflow that a smaller loss scale may cure).
            ActionError: an action of the program failed.
        """
        settings = self.settings
        if settings.compile:
            self._compile()
        began = time.perf_counter()
        train_loss, validation_loss = math.nan, None
        for step in range(self._first_step, settings.steps):
            self._measurement.before_step(step)
            logged = (step + 1) % settings.log_every == 0 or step + 1 == settings.steps
            train_loss = self._train_step(step, logged)
            last = step + 1 == settings.steps
            if settings.validate_every and (last or (step + 1) % settings.validate_every == 0):
                validation_loss = self.validate(step + 1)
            if self._saved is not None and self._saved.is_due(step + 1, settings.steps):
                self._saved.save(self._progress(step + 1), self.ranks.ranks, self._group)
        self.ranks.enter(Activity.REPORTING)
        self._predict()
        finished = self._measurement.finish(train_loss, validation_loss, time.perf_counter() - began, self._skips.total)
        if self._reports:
            self._report(finished)
        self.ranks.enter(Activity.DONE)

    def _resume(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.progress
        for rank in self.ranks:
            saving.load(checkpoint, rank, optimizer=True)
            rank.marker.resume(progress.step)
        self._scale.resume(progress.loss_scale, progress.good_steps)
        self._first_step = progress.step

    def _progress(self, step: int) -> Progress:
        return Progress(step, self.settings.optimizer.name, self._scale.value, self._scale.good_steps)

    def _compile(self) -> None:
        """Compile before anybody waits for a message."""
        began, batch = time.perf_counter(), self._batch(0)
        for rank, part in zip(self.ranks, self.ranks.parts(batch), strict=True):
            rank.rehearse(part, evaluates=self.settings.validate_every > 0)
        _log.info("compiled in %.1f s", time.perf_counter() - began)
        self._group.meet()

    def validate(self, step: int) -> float:
        """The mean loss over the first held-out batches; weights, statistics and RNG stay."""
        losses = []
        for index in range(self._validation_batches):
            results = self.ranks.evaluate(self._batch(index, validation=True))
            self.ranks.enter(Activity.LOGGING)
            losses.append(self.ranks.mean_loss(results))
        loss = sum(losses) / len(losses)
        if self._reports:
            self._report(ValidationMetrics(step, loss))
        return loss

    def _train_step(self, step: int, logged: bool) -> float:
        began = time.perf_counter()
        batch = self._batch(step)
        if self._may_skip:
            self.ranks.keep_buffers()
        results = self.ranks.train(batch)
        norm, skipped = self._update(batch, results)
        seconds = time.perf_counter() - began
        self._measurement.record(seconds, [result.events for result in results])
        if step + 1 == self._first_step + PREDICTED_AFTER:
            self._predict()
        return self._log_step(step, results, norm, skipped, seconds) if logged else math.nan

    def _predict(self) -> None:
        prediction = self._measurement.prediction()
        if prediction is not None:
            self._prediction = prediction
            self._report(prediction)

    def _batch(self, index: int, validation: bool = False) -> Microbatches:
        """The batch as the local ranks need it: stages that take no input load none."""
        self.ranks.enter(Activity.LOADING, index)
        part = None if self._data is None else self._data.validation if validation else self._data.train
        inputs = part.inputs(index, self.ranks.samples) if part is not None and self.ranks.holds_first else None
        targets = part.targets(index) if part is not None and self.ranks.holds_last else None
        return self.ranks.cut(index, inputs, targets, loss_scale=1.0 if validation else self._scale.value)

    def _update(self, batch: Microbatches, results: Sequence[StepResult]) -> tuple[float, bool]:
        """Take the norm, clip, step the optimizers. The norm, and whether the step was skipped."""
        norm = self.ranks.gradient_norm(results) / self._scale.value
        skipped = not math.isfinite(norm)
        if skipped:
            self._skip(batch, results, norm)
        self.ranks.enter(Activity.UPDATING)
        if not skipped:
            self._step_optimizers(batch.step, self._factor(norm))
        self.ranks.clear_gradients()
        for rank in self.ranks:
            rank.marker.finish_step()
        self._scale.update(overflow=skipped)
        self._skips.update(skipped=skipped)
        return norm, skipped

    def _skip(self, batch: Microbatches, results: Sequence[StepResult], norm: float) -> None:
        """Leave everything as it was before the step, or stop."""
        if not self._scale.can_shrink:
            self._tell(batch, self.ranks.mean_loss(results), norm)
        self.ranks.restore_buffers()

    def _tell(self, batch: Microbatches, loss: float, norm: float) -> None:
        """Say where a step stopped being finite: as an error, or as a warning, once for steps in a row."""
        stop = self._skips.must_stop(self.settings.on_nonfinite)
        if stop is None and self._skips.in_a_row:
            return
        what = nonfinite.describe(loss, norm, batch.step, nonfinite.find(self.ranks, batch))
        if stop is not None:
            raise NonFiniteError(f"{what}: lower optimizer.learning_rate{stop}")
        if self._reports:
            _log.warning("%s: this step is skipped", what)

    def _factor(self, norm: float) -> float:
        """What gradients are multiplied by: the loss scale taken out, and the norm clipped."""
        limit = self.settings.gradient_clip
        clip = 1.0 if limit is None or norm <= limit else limit / (norm + 1e-6)
        return clip / self._scale.value

    def _step_optimizers(self, step: int, factor: float) -> None:
        rate = learning_rate(self.settings.optimizer, step, self.settings.steps)
        self.ranks.scale_gradients(factor)
        for rank in self.ranks:
            rank.step(rate)

    def _log_step(self, step: int, results: Sequence[StepResult], norm: float, skipped: bool, seconds: float) -> float:
        self.ranks.enter(Activity.LOGGING)
        loss = self.ranks.mean_loss(results)
        last, prediction = self._measurement.last_step(), self._prediction
        if self._reports:
            samples = self.settings.batch_size / seconds
            self._report(
                StepMetrics(
                    step=step + 1,
                    loss=loss,
                    gradient_norm=norm,
                    learning_rate=learning_rate(self.settings.optimizer, step, self.settings.steps),
                    step_seconds=seconds,
                    samples_per_second=samples,
                    tokens_per_second=self._tokens(samples),
                    bubble_measured=last.bubble,
                    skipped=skipped,
                    skipped_steps=self._skips.total,
                    bubble_span_measured=last.bubble_span,
                    idle=last.idle,
                    step_seconds_predicted=None if prediction is None else prediction.step_seconds,
                    bubble_span_predicted=None if prediction is None else prediction.bubble_span,
                )
            )
        return loss

    def _tokens(self, samples: float) -> float | None:
        if self._data is None or self._data.kind != "text":
            return None
        return samples * self._data.units_per_sample
