"""The progress line and the table at the end, on a terminal and without one."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.schedule.idle import Idle
from pipeline.training.messages import StepMetrics, ValidationMetrics
from pipeline.training.progress import ProgressLine, bytes_text, duration_text, flops_text, rate_text, summary_tables
from pipeline.training.recorder import RunFacts

FACTS = RunFacts("1f1b", "gpt", 2, 8, 32, 100, 1_234_567, 0.111, "tokens")
SUMMARY: dict[str, Any] = {
    "status": "finished",
    "schedule": "1f1b",
    "model": "gpt",
    "pp": 2,
    "dp": 1,
    "microbatches": 8,
    "batch_size": 32,
    "parameters": 1_234_567,
    "steps_done": 100,
    "skipped_steps": 0,
    "train_loss": 2.3,
    "validation_loss": None,
    "samples_per_second": 12345.6,
    "step_seconds": 0.5,
    "model_flops_per_step": 1_234_567_890_123,
    "tflops_per_second": 2.469,
    "mfu": 0.412,
    "bubble_measured": 0.154,
    "bubble_source": "replayed",
    "bubble_predicted": 0.111,
    "step_seconds_predicted": 0.48,
    "bubble_span_measured": 0.143,
    "bubble_span_predicted": 0.131,
    "profiled": {"bubble_makespan": 0.149},
    "idle": [
        {"rank": 0, "measured": Idle(dependency=0.0609), "predicted": Idle(dependency=0.0741)},
        {"rank": 1, "measured": Idle(tail=0.123), "predicted": Idle(warmup=0.0101)},
    ],
    "ranks": [
        {"rank": 0, "stages": [0, 2], "parameters": 600, "peak_activation_bytes": 3 << 20, "peak_memory_bytes": None}
    ],
}


for row in SUMMARY["idle"]:
    row.update({kind: asdict(row[kind]) for kind in ("measured", "predicted")})


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, loss: float = 3.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(number, loss, 1.0, 1e-3, 0.5, 64.0, 8192.0, 0.2, skipped)


def plain_line(facts: RunFacts = FACTS) -> tuple[ProgressLine, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    line = ProgressLine(Console(file=output, width=100), clock)
    line.start(facts, Path("outputs/run"))
    return line, clock, output


def test_without_a_terminal_lines_come_every_few_seconds() -> None:
    line, clock, output = plain_line()
    for number in range(1, 101):
        clock.now += 1.0
        line.log_step(step(number))
    lines = output.getvalue().splitlines()
    assert [int(text.split()[1].split("/")[0]) for text in lines] == [*range(1, 101, 5), 100]
    assert lines[1] == "step 6/100 | loss 3.0000 | 64 samples/s | 8,192 tokens/s | ETA 1m 34s"
    assert lines[-1] == "step 100/100 | loss 3.0000 | 64 samples/s | 8,192 tokens/s"
    assert "\x1b" not in output.getvalue()


def test_the_time_left_follows_the_real_pace() -> None:
    line, clock, output = plain_line()
    line.log_step(step(10))  # no pace yet: 90 steps of 0.5 s
    clock.now = 20.0
    line.log_step(step(20))  # 2 s a step, with whatever came between
    assert re.findall(r"ETA (.*)", output.getvalue()) == ["45s", "2m 40s"]


def test_validations_and_skipped_steps_are_shown() -> None:
    line, _, output = plain_line()
    line.log_step(step(1, loss=float("nan"), skipped=True))
    line.log_validation(ValidationMetrics(1, 2.75))
    first, second = output.getvalue().splitlines()
    assert "loss nan | skipped (not finite)" in first
    assert second == "step 1/100 | validation loss 2.7500"


def test_samples_alone_for_images() -> None:
    line, _, output = plain_line(RunFacts("gpipe", "resnet152", 2, 8, 32, 100, 1, 0.1, "samples"))
    line.log_step(step(1))
    assert "samples/s" in output.getvalue()
    assert "tokens" not in output.getvalue()


def test_the_summary_shows_loss_bubbles_and_ranks() -> None:
    line, _, output = plain_line()
    line.finish(SUMMARY, None, failed=False)
    text = output.getvalue()
    for part in ("1f1b, pp=2, 8 microbatches", "1,234,567 parameters", "2.3000", "12,346", "15.4 % replayed"):
        assert part in text
    assert "0.5 s measured, 0.48 s from profile" in text
    assert "15.4 % replayed, 11.1 % predicted, 14.9 % from profile" in text
    assert "14.3 % replayed, 13.1 % from profile" in text
    assert re.search(r"0 │ +0, 2 │ +600 │ +3.0 MiB │ +- ", text)
    assert re.search(r"1 │ +123/10.1 │ +0.0/10.1 │ +0.0/0.0 │ +0.0/0.0 │ +0.0/0.0 │ 123/0.0 │", text)
    assert text.endswith("run directory: outputs/run\n")


def test_the_summary_of_replicas_says_how_many() -> None:
    line, _, output = plain_line()
    line.finish({**SUMMARY, "dp": 2}, None, failed=False)
    assert "1f1b, pp=2, dp=2, 8 microbatches" in output.getvalue()


def test_the_summary_says_how_many_steps_were_skipped() -> None:
    line, _, output = plain_line()
    line.finish({**SUMMARY, "skipped_steps": 3}, None, failed=False)
    assert "100 of 32 samples, 3 skipped (not finite)" in output.getvalue()


def test_a_run_that_was_not_profiled_has_a_summary_all_the_same() -> None:
    line, _, output = plain_line()
    unknown = dict.fromkeys(("step_seconds_predicted", "bubble_span_measured", "bubble_span_predicted"))
    line.finish({**SUMMARY, **unknown, "profiled": None, "idle": []}, None, failed=False)
    assert "- replayed, - from profile" in output.getvalue()
    assert "idle" not in output.getvalue()


def test_a_failed_run_has_no_summary() -> None:
    line, _, output = plain_line()
    line.finish({**SUMMARY, "status": "failed"}, None, failed=True)
    assert output.getvalue() == ""


@pytest.fixture
def handler() -> Iterator[logging.StreamHandler[Any]]:
    """A console handler made before the line goes up, as a logging set-up makes it."""
    made = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(made)
    yield made
    logging.getLogger().removeHandler(made)


def test_on_a_terminal_one_line_is_redrawn_and_log_records_stay_above(handler: logging.StreamHandler[Any]) -> None:
    stream = handler.stream
    output = io.StringIO()
    line = ProgressLine(Console(file=output, width=120, force_terminal=True, color_system=None))
    line.start(FACTS, Path("outputs/run"))
    try:
        logging.getLogger("test").warning("rank 1 is slow")
        line.log_validation(ValidationMetrics(7, 2.5))
        line.log_step(step(7, loss=2.6))
    finally:
        line.finish(SUMMARY, None, failed=False)
    text = output.getvalue()
    assert "starting 2 ranks" in text
    assert "rank 1 is slow\n" in text
    assert re.search(r"step 7/100 .* loss 2.6000 \| validation 2.5000 \| 64 samples/s \| 8,192 tokens/s \| ETA", text)
    assert handler.stream is stream
    assert sys.stderr is stream


@pytest.mark.parametrize(("width", "wide"), [(80, False), (120, True)])
def test_the_live_line_fits_the_terminal(width: int, wide: bool) -> None:
    output = io.StringIO()
    line = ProgressLine(Console(file=output, width=width, force_terminal=True, color_system=None))
    line.start(FACTS, Path("outputs/run"))
    try:
        line.log_validation(ValidationMetrics(7, 2.5))
        line.log_step(step(7))
    finally:
        line.finish(SUMMARY, None, failed=True)
    last = [text for text in output.getvalue().splitlines() if "step 7/100" in text][-1]
    assert "ETA 46s" in last
    assert ("tokens/s" in last) == wide


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (65, "1m 05s"), (3599.7, "1h 00m"), (7620, "2h 07m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (1023, "1023 B"), (1536, "1.5 KiB"), (12 << 20, "12.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_bytes(count: int | None, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (3.4217, "3.42"), (85.06, "85.1"), (999.9, "1,000"), (12340.4, "12,340")]
)
def test_rates(value: float | None, text: str) -> None:
    assert rate_text(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 MFLOP"),
        (52_340_000, "52.3 MFLOP"),
        (999_900_000_000, "1 TFLOP"),
        (1_500_000_000_000, "1.5 TFLOP"),
        (10**17, "100 PFLOP"),
        (10**19, "10,000 PFLOP"),
    ],
)
def test_flops_for_people(count: int, text: str) -> None:
    assert flops_text(count) == text


def test_what_is_not_known_of_the_speed_is_left_out() -> None:
    for change, text in (
        ({}, "1.23 TFLOP a step, 2.47 TFLOP/s, MFU 41.2 %"),
        ({"mfu": None}, "1.23 TFLOP a step, 2.47 TFLOP/s "),
        ({"tflops_per_second": None}, "compute         | - "),
    ):
        console = Console(file=io.StringIO(), width=100)
        console.print(summary_tables({**SUMMARY, **change})[0])
        shown = console.file.getvalue().replace("\u2502", "|")  # type: ignore[attr-defined]
        assert text in shown
