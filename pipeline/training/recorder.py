"""The run directory: metrics.jsonl, summary.json and the timeline, and the sinks that are told the same.

One recorder a job: in the launcher, or on rank 0 where an outer launcher started the ranks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import IO, Literal, Protocol

from pipeline.report.idle_text import idle_table
from pipeline.schedule.simulate import Event
from pipeline.training.messages import Finished, Prediction, RankReport, StepMetrics, ValidationMetrics
from pipeline.training.speed import Speed
from pipeline.training.step_statistics import Rows

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class RunFacts:
    """What is known before the first step.

    `bubble_predicted` is the makespan bubble under the costs that `predicted` was simulated with; `predicted` are
    the simulated events, one row a rank, in nominal units. `config` is the resolved configuration as plain values.
    """

    schedule: str
    model: str
    pp: int
    microbatches: int
    batch_size: int
    steps: int
    parameters: int
    bubble_predicted: float
    units: Literal["tokens", "samples"] = "samples"
    predicted: tuple[tuple[Event, ...], ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    dp: int = 1
    partition: str = ""
    """How the layers were cut, and why so."""
    layers: tuple[int, ...] = ()
    """How many of them each stage holds."""
    speed: Speed = field(default_factory=Speed)


class Sink(Protocol):
    """Somebody who follows the run: the progress line, W&B."""

    def start(self, facts: RunFacts, directory: Path) -> None:
        """Called once, before the ranks start."""

    def log_step(self, metrics: StepMetrics) -> None:
        """Called for every logged step, steps rising."""

    def log_validation(self, metrics: ValidationMetrics) -> None:
        """Called for every validation."""

    def finish(self, summary: Mapping[str, object], figure: Path | None, failed: bool) -> None:
        """Called once, at any kind of end; `figure` is timeline.png where there is one."""


class Recorder:
    """Writes a run down as it happens. Call `start()`, then the recorder with each message, then `finish()`.

    metrics.jsonl: one object a logged step, flushed line by line: the fields of StepMetrics, `tflops_per_second`, `mfu`
    and `seconds` since the start. A validation has a line of its own: `step`, `validation_loss` and `seconds`. NaN and
    infinity are written as null, in all files.
    """

    def __init__(self, directory: Path, facts: RunFacts, sinks: Sequence[Sink] = ()) -> None:
        self.directory = directory
        self.facts = facts
        self._sinks = tuple(sinks)
        self._metrics: IO[str] | None = None
        self._started = time.perf_counter()
        self._steps: list[StepMetrics] = []
        self._validation: ValidationMetrics | None = None
        self._ranks: dict[int, RankReport] = {}
        self._prediction: Prediction | None = None
        self._finished: Finished | None = None
        self._summary: dict[str, object] | None = None
        self._warned: set[int] = set()

    def start(self) -> None:
        """Open metrics.jsonl and start the sinks."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # Line buffered: what a killed job has logged is on disk.
        self._metrics = (self.directory / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._tell(lambda sink: sink.start(self.facts, self.directory))
        self._started = time.perf_counter()

    def __call__(self, message: object) -> None:
        """Record one message of a rank. Raises TypeError for anything but the types of messages.py."""
        match message:
            case StepMetrics():
                self._record_step(message)
            case ValidationMetrics():
                self._record_validation(message)
            case RankReport():
                self._ranks[message.rank] = message
            case Prediction():
                self._prediction = message
            case Finished():
                self._finished = message
                self._ranks.update({report.rank: report for report in message.ranks})
            case _:
                raise TypeError(f"a recorder takes the messages of pipeline/training/messages.py, not {message!r}")

    def finish(self, status: Status, error: str | None = None, *, steps_done: int | None = None) -> dict[str, object]:
        """Write summary.json and the timeline, finish the sinks; returns the summary. A second call changes nothing.

        `steps_done`: finished steps; None where nobody counted them: the last one that was logged.
        """
        if self._summary is not None:
            return self._summary
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._summary = summary = {
            key: plain(value) for key, value in self._summarize(status, error, steps_done).items()
        }
        # The figures come after the numbers: a picture that fails must not cost them.
        write_json(self.directory / "summary.json", summary)
        figure = self._draw_timeline()
        self._tell(lambda sink: sink.finish(summary, figure, status != "finished"))
        return summary

    def _record_step(self, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        self._write_line({**asdict(metrics), **self.facts.speed.of(metrics.step_seconds)})
        self._tell(lambda sink: sink.log_step(metrics))

    def _record_validation(self, metrics: ValidationMetrics) -> None:
        self._validation = metrics
        self._write_line({"step": metrics.step, "validation_loss": metrics.loss})
        self._tell(lambda sink: sink.log_validation(metrics))

    def _write_line(self, row: Mapping[str, object]) -> None:
        if self._metrics is None:
            raise RuntimeError("the recorder isn't open: call start() before the first message, none after finish()")
        seconds = round(time.perf_counter() - self._started, 3)
        self._metrics.write(json.dumps(plain({**row, "seconds": seconds}), allow_nan=False) + "\n")

    def _summarize(self, status: Status, error: str | None, steps_done: int | None) -> dict[str, object]:
        facts = self.facts
        return {
            "status": status,
            "error": error,
            "schedule": facts.schedule,
            "model": facts.model,
            "pp": facts.pp,
            "dp": facts.dp,
            "microbatches": facts.microbatches,
            "batch_size": facts.batch_size,
            "steps": facts.steps,
            "steps_done": self._logged_steps() if steps_done is None else steps_done,
            **self._results(),
            "model_flops_per_step": facts.speed.flops_per_step,
            **facts.speed.of(self._step_seconds()),
            "bubble_predicted": facts.bubble_predicted,
            **self._predictions(),
            "parameters": facts.parameters,
            "partition": facts.partition,
            "layers": list(facts.layers),
            "ranks": [asdict(self._ranks[rank]) for rank in sorted(self._ranks)],
        }

    def _logged_steps(self) -> int:
        return self._steps[-1].step if self._steps else 0

    def _step_seconds(self) -> float | None:
        return self._finished.step_seconds if self._finished else _median([step.step_seconds for step in self._steps])

    def _results(self) -> dict[str, object]:
        """The measured part: as the ranks say at a good end, else from the steps logged before the bad one."""
        done = self._finished
        if done is not None:
            return {
                "skipped_steps": done.skipped_steps,
                "train_loss": done.train_loss,
                "validation_loss": done.validation_loss,
                "samples_per_second": done.samples_per_second,
                "step_seconds": self._step_seconds(),
                "step_quartiles": done.step_quartiles,
                "bubble_measured": done.bubble_measured,
                "bubble_span_measured": done.bubble_span_measured,
                "bubble_source": done.bubble_source,
                "seconds": done.seconds,
            }
        bubbles = [step.bubble_measured for step in self._steps if step.bubble_measured is not None]
        spans = [step.bubble_span_measured for step in self._steps if step.bubble_span_measured is not None]
        return {
            "skipped_steps": self._steps[-1].skipped_steps if self._steps else 0,
            "train_loss": self._steps[-1].loss if self._steps else None,
            "validation_loss": self._validation.loss if self._validation else None,
            "samples_per_second": _median([step.samples_per_second for step in self._steps]),
            "step_seconds": self._step_seconds(),
            "step_quartiles": None,
            "bubble_measured": _median(bubbles),
            "bubble_span_measured": _median(spans),
            "bubble_source": None,
            "seconds": round(time.perf_counter() - self._started, 3),
        }

    def _predictions(self) -> dict[str, object]:
        """What the costs profiled in the run promise, beside what was measured; None before they were profiled."""
        predicted = self._prediction
        return {
            "step_seconds_predicted": None if predicted is None else predicted.step_seconds,
            "bubble_span_predicted": None if predicted is None else predicted.bubble_span,
            "idle": self._idle(),
            "profiled": None
            if predicted is None
            else {
                "steps": predicted.steps,
                "outside_seconds": predicted.outside_seconds,
                "bubble_makespan": predicted.bubble,
                "costs": predicted.costs,
            },
        }

    def _idle(self) -> list[dict[str, object]]:
        """Each rank's idle seconds by cause, in a typical step."""
        measured = self._finished.idle if self._finished else ()
        predicted = self._prediction.idle if self._prediction else ()
        return [
            {
                "rank": rank,
                "measured": None if done is None else asdict(done),
                "predicted": None if expected is None else asdict(expected),
            }
            for rank, (done, expected) in enumerate(zip_longest(measured, predicted))
        ]

    def _draw_timeline(self) -> Path | None:
        """timeline.json and timeline.png; the picture's path, or None where no step was measured."""
        measured = self._finished.events if self._finished else ()
        if not any(measured):
            return None
        # Imported here: matplotlib takes half a second that a run which fails early need not pay. The first time on a
        # machine it builds a font cache, which is no news to the user.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)
        facts = self.facts
        title = f"{facts.schedule}, {facts.model}, {layout(facts.pp, facts.dp)}, {facts.microbatches} microbatches"
        figure = self.directory / "timeline.png"
        try:
            self._draw(figure, measured, title)
        except Exception:
            log.warning("the timeline could not be drawn; the run's numbers are in summary.json", exc_info=True)
            return None
        return figure

    def _draw(self, figure: Path, measured: Rows, title: str) -> None:
        """The prediction is the one from the run's own costs, in seconds, else the nominal one that came before."""
        from pipeline.report import timeline, trace

        predicted, spans = self._prediction, self.directory / "timeline.json"
        if predicted is None:
            trace.write_trace(spans, measured, self.facts.predicted)
            timeline.draw(figure, measured, self.facts.predicted, title=title)
            return
        first, last = predicted.steps[0], predicted.steps[-1]
        remark = f"costs of step {first}" if first == last else f"costs profiled in steps {first} to {last}"
        idle = idle_table(self._finished.idle if self._finished else (), predicted.idle)
        trace.write_trace(spans, measured, predicted.events, seconds=1.0)
        timeline.draw(figure, measured, predicted.events, title=title, unit="seconds", remark=remark, idle=idle)

    def _tell(self, call: Callable[[Sink], None]) -> None:
        """Whoever follows the run must not end it: a sink's first error is one warning, the others are silent."""
        for index, sink in enumerate(self._sinks):
            try:
                call(sink)
            except Exception as error:
                if index not in self._warned:
                    log.warning("%s failed, training goes on: %s", type(sink).__name__, error)
                self._warned.add(index)


def layout(pp: int, dp: int) -> str:
    """How many ranks there are, in the words of the configuration."""
    return f"pp={pp}" if dp == 1 else f"pp={pp}, dp={dp}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def plain(value: object) -> object:
    """`value` as JSON can hold it: tuples as lists, paths as text, NaN and infinity as None (null)."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` atomically: a reader, or a crash, sees the old file or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
