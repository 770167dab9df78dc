"""What the user sees of a run: a live line on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from pipeline.report.idle_text import SHORT, idle_table
from pipeline.schedule.idle import Idle
from pipeline.training.messages import StepMetrics, ValidationMetrics
from pipeline.training.recorder import RunFacts, layout

PLAIN_SECONDS = 5.0  # between two plain lines, at least
_WIDE = 115  # columns that the live line takes with its bar and tokens/s; in fewer it goes without them


class ProgressLine:
    """Step, loss, samples/s and time left: redrawn in place on a terminal, else a plain line now and then.

    While the live line is up, log records meant for the terminal are printed above it. `console` and `clock`
    (seconds) are there for tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._steps = 0
        self._units = "samples"
        self._first: tuple[int, float] | None = None
        self._printed = float("-inf")
        self._validation: float | None = None
        self._directory = Path()

    def start(self, facts: RunFacts, directory: Path) -> None:
        self._steps, self._units, self._directory = facts.steps, facts.units, directory
        if self._console.is_terminal:
            self._start_live(facts)

    def log_step(self, metrics: StepMetrics) -> None:
        now = self._clock()
        text = self._text(metrics, now)
        if self._live is not None:
            self._live.update(self._task, completed=metrics.step, text=text)
        elif now - self._printed >= PLAIN_SECONDS or metrics.step >= self._steps:
            self._printed = now
            self._plain(f"step {metrics.step}/{self._steps} | {text}")
        self._first = self._first or (metrics.step, now)

    def log_validation(self, metrics: ValidationMetrics) -> None:
        self._validation = metrics.loss
        if self._live is None:
            self._plain(f"step {metrics.step}/{self._steps} | validation loss {metrics.loss:.4f}")

    def finish(self, summary: Mapping[str, object], figure: Path | None, failed: bool) -> None:
        """Take the live line down; after a good end, print the table."""
        self._stop_live()
        if not failed:
            self._console.print("summary", *summary_tables(summary), sep="\n")
            self._console.print(f"run directory: {self._directory}", markup=False, highlight=False, soft_wrap=True)

    def _text(self, metrics: StepMetrics, now: float) -> str:
        parts = [f"loss {metrics.loss:.4f}"]
        if metrics.skipped:
            parts.append("skipped (not finite)")
        if self._live is not None and self._validation is not None:
            parts.append(f"validation {self._validation:.4f}")
        parts.append(f"{rate_text(metrics.samples_per_second)} samples/s")
        roomy = self._live is None or self._console.width >= _WIDE
        if roomy and self._units == "tokens" and metrics.tokens_per_second is not None:
            parts.append(f"{rate_text(metrics.tokens_per_second)} tokens/s")
        if metrics.step < self._steps:
            parts.append(f"ETA {duration_text(self._seconds_left(metrics, now))}")
        return " | ".join(parts)

    def _seconds_left(self, metrics: StepMetrics, now: float) -> float:
        """At the pace so far, validations included; before there is a pace, at this step's own."""
        pace = metrics.step_seconds
        if self._first is not None and metrics.step > self._first[0]:
            pace = (now - self._first[1]) / (metrics.step - self._first[0])
        return (self._steps - metrics.step) * pace

    def _plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _start_live(self, facts: RunFacts) -> None:
        before = {sys.stdout, sys.stderr}
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *([BarColumn(bar_width=24)] if self._console.width >= _WIDE else []),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
        )
        count = facts.pp * facts.dp
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        self._task = self._live.add_task("", total=facts.steps, text=f"starting {ranks}")
        self._live.start()
        # A handler made earlier would write through the live line.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                self._moved.append((handler, handler.stream))
                handler.setStream(cast(TextIO, _AboveTheLine(self._console)))

    def _stop_live(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []
        if self._live is not None:
            self._live.stop()
            self._live = None


class _AboveTheLine(io.TextIOBase):
    """A stream whose lines appear above the live line. They aren't broken to fit: a path stays whole."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        return len(text)


def summary_tables(summary: Mapping[str, Any]) -> tuple[Table | str, ...]:
    """The end of a run as tables: what was trained, how well and how fast; what each rank held; why it was idle."""
    run = Table(show_header=False)
    for label, text in _rows(summary):
        run.add_row(label, text)
    ranks = Table()
    for name in ("rank", "stages", "parameters", "peak activations", "peak memory"):
        ranks.add_column(name, justify="right")
    for rank in summary["ranks"]:
        ranks.add_row(
            str(rank["rank"]),
            ", ".join(map(str, rank["stages"])),
            f"{rank['parameters']:,}",
            bytes_text(rank["peak_activation_bytes"]),
            bytes_text(rank["peak_memory_bytes"]),
        )
    return run, ranks, *_idle(summary["idle"])


def _skipped(steps: int) -> str:
    return f", {steps} skipped (not finite)" if steps else ""


def _idle(rows: Sequence[Mapping[str, Any]]) -> tuple[Table | str, ...]:
    found = idle_table(*([Idle(**row[kind]) for row in rows if row[kind]] for kind in ("measured", "predicted")))
    if found is None:
        return ()
    table = Table()
    for heading in found.headings:
        table.add_column(SHORT.get(heading, heading), justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(cell.replace(" / ", "/") for cell in row))
    return f"idle {found.unit} a step, measured/from profile", table


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    source = summary["bubble_source"] or "measured"
    makespan, span = (f"{percent_text(summary[name])} {source}" for name in ("bubble_measured", "bubble_span_measured"))
    profiled = summary["profiled"] or {}
    return [
        (
            "schedule",
            f"{summary['schedule']}, {layout(summary['pp'], summary['dp'])}, {summary['microbatches']} microbatches",
        ),
        ("model", f"{summary['model']}, {summary['parameters']:,} parameters"),
        ("steps", f"{summary['steps_done']} of {summary['batch_size']} samples{_skipped(summary['skipped_steps'])}"),
        ("training loss", _number(summary["train_loss"])),
        ("validation loss", _number(summary["validation_loss"])),
        ("samples/s", rate_text(summary["samples_per_second"])),
        ("compute", _compute(summary)),
        (
            "step time",
            f"{_seconds(summary['step_seconds'])} measured, {_seconds(summary['step_seconds_predicted'])} from profile",
        ),
        (
            "makespan bubble",
            f"{makespan}, {percent_text(summary['bubble_predicted'])} predicted, "
            f"{percent_text(profiled.get('bubble_makespan'))} from profile",
        ),
        ("span bubble", f"{span}, {percent_text(summary['bubble_span_predicted'])} from profile"),
    ]


def _compute(summary: Mapping[str, Any]) -> str:
    speed, share = summary["tflops_per_second"], summary["mfu"]
    if speed is None:
        return "-"
    mfu = "" if share is None else f", MFU {percent_text(share)}"
    return f"{flops_text(summary['model_flops_per_step'])} a step, {speed:.3g} TFLOP/s{mfu}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def percent_text(value: float | None) -> str:
    """A share for people: 41.2 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def rate_text(value: float | None) -> str:
    """A rate for people: 3.42, 85.1, 12,340."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bytes_text(count: int | None) -> str:
    """A number of bytes for people: 1023 B, 1.5 KiB, 12.0 MiB, 3.2 GiB."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def flops_text(count: int) -> str:
    """A number of floating-point operations for people: 999 MFLOP, 52.3 GFLOP, 1.2 TFLOP."""
    size = count / 1e6
    for unit in ("M", "G", "T"):
        if size < 999.5:
            return f"{size:.3g} {unit}FLOP"
        size /= 1000
    return f"{size:.3g} PFLOP" if size < 999.5 else f"{size:,.0f} PFLOP"


def duration_text(seconds: float) -> str:
    """A duration for people: 8s, 1m 05s, 2h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
