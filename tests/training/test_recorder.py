"""The run directory: what is written when, at a good end and at bad ones."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import timeline
from pipeline.schedule.library import write
from pipeline.schedule.simulate import Idle, nominal_costs, simulate
from pipeline.training.messages import Finished, Prediction, RankReport, StepMetrics, ValidationMetrics
from pipeline.training.recorder import Recorder, RunFacts, plain, write_json
from pipeline.training.speed import Speed

EVENTS = simulate(write("1f1b", 2, 4), nominal_costs(1)).events
FACTS = RunFacts(
    schedule="1f1b",
    model="gpt",
    pp=2,
    microbatches=4,
    batch_size=32,
    steps=20,
    parameters=1000,
    bubble_predicted=0.2,
    units="tokens",
    predicted=EVENTS,
    config={"pp": 2},
)
RANKS = (RankReport(0, (0,), 600, 2048, 1 << 20, 2040), RankReport(1, (1,), 400, 1024, None))
IDLE = (Idle(tail=0.25), Idle(warmup=0.125, dependency=0.125))
FINISHED = Finished(1.5, 2.5, 64.0, 0.5, 0.25, "measured", RANKS, EVENTS, 12.0, 0.125, IDLE)
PREDICTION = Prediction((3, 5, 12), 0.45, 0.05, 0.2, 0.1, (Idle(), Idle(warmup=0.5)), EVENTS, {"forward": [0.1, 0.2]})
FIELDS = (
    "status, schedule, model, pp, microbatches, batch_size, steps, train_loss, validation_loss, samples_per_second, "
    "step_seconds, bubble_predicted, bubble_measured, bubble_source, parameters, ranks, bubble_span_predicted, "
    "bubble_span_measured, step_seconds_predicted, idle, profiled, model_flops_per_step, tflops_per_second, mfu"
)


class FakeSink:
    """Notes what it is told; raises where it is asked to."""

    def __init__(self, broken: bool = False) -> None:
        self.told: list[tuple[Any, ...]] = []
        self._broken = broken

    def _note(self, *told: object) -> None:
        self.told.append(told)
        if self._broken:
            raise OSError("disk of the sink is full")

    def start(self, facts: RunFacts, directory: Path) -> None:
        self._note("start", facts, directory)

    def log_step(self, metrics: StepMetrics) -> None:
        self._note("step", metrics)

    def log_validation(self, metrics: ValidationMetrics) -> None:
        self._note("validation", metrics)

    def finish(self, summary: Mapping[str, object], figure: Path | None, failed: bool) -> None:
        self._note("finish", summary, figure, failed)


def step(number: int, loss: float = 3.0, bubble: float | None = 0.3, seconds: float = 0.5) -> StepMetrics:
    return StepMetrics(number, loss, 1.0, 1e-3, seconds, 64.0, 8192.0, bubble)


def started(directory: Path, *sinks: FakeSink) -> Recorder:
    recorder = Recorder(directory / "run", FACTS, sinks)
    recorder.start()
    return recorder


def rows(recorder: Recorder) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (recorder.directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def summary_on_disk(recorder: Recorder) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((recorder.directory / "summary.json").read_text())
    return summary


def test_a_step_is_on_disk_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder(step(1))
    recorder(step(2, loss=2.0))
    assert [(row["step"], row["loss"]) for row in rows(recorder)] == [(1, 3.0), (2, 2.0)]
    assert rows(recorder)[0]["tokens_per_second"] == 8192.0
    assert rows(recorder)[0]["seconds"] >= 0


def test_a_validation_has_a_line_of_its_own(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder(step(1))
    recorder(ValidationMetrics(1, 4.0))
    recorder(ValidationMetrics(2, 3.5))
    pairs = [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows(recorder)]
    assert pairs == [(1, 3.0, None), (1, None, 4.0), (2, None, 3.5)]
    assert rows(recorder)[1].keys() == {"step", "validation_loss", "seconds"}
    assert recorder.finish("failed", "lost")["validation_loss"] == 3.5


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder(step(1, loss=float("nan"), bubble=float("-inf")))
    recorder.finish("failed", "the loss is not finite")
    assert rows(recorder)[0]["loss"] is None
    assert rows(recorder)[0]["bubble_measured"] is None
    assert summary_on_disk(recorder)["train_loss"] is None


def test_sinks_hear_everything_in_order(tmp_path: Path) -> None:
    sink = FakeSink()
    recorder = started(tmp_path, sink)
    recorder(step(1))
    recorder(ValidationMetrics(1, 2.0))
    recorder(FINISHED)
    summary = recorder.finish("finished")
    figure = recorder.directory / "timeline.png"
    assert sink.told == [
        ("start", FACTS, recorder.directory),
        ("step", step(1)),
        ("validation", ValidationMetrics(1, 2.0)),
        ("finish", summary, figure, False),
    ]


def test_a_good_end_writes_every_field_and_the_timeline(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder(step(20))
    recorder(FINISHED)
    summary = recorder.finish("finished")
    assert summary == summary_on_disk(recorder)
    assert set(FIELDS.split(", ")) <= set(summary)
    assert summary["status"] == "finished"
    assert summary["error"] is None
    assert (summary["train_loss"], summary["validation_loss"]) == (1.5, 2.5)
    assert (summary["bubble_measured"], summary["bubble_source"]) == (0.25, "measured")
    assert summary["ranks"] == [
        {
            "rank": 0,
            "stages": [0],
            "parameters": 600,
            "peak_activation_bytes": 2048,
            "peak_memory_bytes": 1 << 20,
            "peak_activation_bytes_predicted": 2040,
        },
        {
            "rank": 1,
            "stages": [1],
            "parameters": 400,
            "peak_activation_bytes": 1024,
            "peak_memory_bytes": None,
            "peak_activation_bytes_predicted": None,
        },
    ]
    assert json.loads((recorder.directory / "timeline.json").read_text())["traceEvents"]
    assert (recorder.directory / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not list(recorder.directory.glob(".*"))


def test_how_fast_it_was_is_told_of_steps_and_of_the_run(tmp_path: Path) -> None:
    for speed, mfu in ((Speed(10**12, 8.0), 0.25), (Speed(10**12), None)):
        recorder = Recorder(tmp_path / str(mfu), replace(FACTS, speed=speed))
        recorder.start()
        recorder(step(20, seconds=0.25))
        assert (rows(recorder)[0]["tflops_per_second"], rows(recorder)[0]["mfu"]) == (4.0, mfu and 2 * mfu)
        recorder(FINISHED)
        summary = recorder.finish("finished")
        assert summary["model_flops_per_step"] == 10**12
        assert (summary["tflops_per_second"], summary["mfu"]) == (2.0, mfu)
    summary = started(tmp_path).finish("failed", "lost")
    assert (summary["model_flops_per_step"], summary["tflops_per_second"], summary["mfu"]) == (None, None, None)


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder(PREDICTION)
    recorder(step(20))
    recorder(FINISHED)
    summary = recorder.finish("finished")
    assert (summary["step_seconds"], summary["step_seconds_predicted"]) == (0.5, 0.45)
    assert (summary["bubble_span_measured"], summary["bubble_span_predicted"]) == (0.125, 0.1)
    assert summary["profiled"] == {
        "steps": [3, 5, 12],
        "outside_seconds": 0.05,
        "bubble_makespan": 0.2,
        "costs": {"forward": [0.1, 0.2]},
    }
    nothing = dict.fromkeys(("warmup", "communication", "imbalance", "dependency", "tail"), 0.0)
    assert summary["idle"] == [
        {"rank": 0, "measured": {**nothing, "tail": 0.25}, "predicted": nothing},
        {
            "rank": 1,
            "measured": {**nothing, "warmup": 0.125, "dependency": 0.125},
            "predicted": {**nothing, "warmup": 0.5},
        },
    ]


def test_the_picture_shows_the_prediction_from_the_runs_own_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(timeline, "draw", lambda *args, **named: drawn.append({"events": args[2], **named}))
    for prediction in (None, PREDICTION):
        recorder = started(tmp_path / str(prediction is None))
        if prediction:
            recorder(prediction)
        recorder(FINISHED)
        recorder.finish("finished")
    nominal, profiled = drawn
    assert "unit" not in nominal
    assert profiled["unit"] == "seconds"
    assert profiled["remark"] == "costs profiled in steps 3 to 12"
    assert profiled["idle"].rows[1][1] == "250 / 500"
    spans = json.loads((tmp_path / "False" / "run" / "timeline.json").read_text())["traceEvents"]
    lengths = [max(e["ts"] + e["dur"] for e in spans if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)]
    assert lengths[0] == lengths[1], "a prediction in seconds is not scaled"


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_bad_end_keeps_what_was_known(tmp_path: Path, status: Any) -> None:
    sink = FakeSink()
    recorder = started(tmp_path, sink)
    for number, seconds in enumerate((9.0, 1.0, 2.0), start=1):
        recorder(step(number, loss=4.0 - number, bubble=number / 10, seconds=seconds))
    recorder(RANKS[1])
    summary = recorder.finish(status, "rank 1: killed by SIGKILL")
    assert summary == summary_on_disk(recorder)
    assert set(FIELDS.split(", ")) <= set(summary)
    assert (summary["status"], summary["error"]) == (status, "rank 1: killed by SIGKILL")
    assert (summary["train_loss"], summary["validation_loss"]) == (1.0, None)
    assert (summary["step_seconds"], summary["bubble_measured"]) == (2.0, 0.2)
    assert (summary["steps"], summary["steps_done"]) == (20, 3)
    assert [rank["rank"] for rank in summary["ranks"]] == [1]
    assert sink.told[-1] == ("finish", summary, None, True)


def test_failing_before_the_first_step_still_leaves_a_summary(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    summary = recorder.finish("failed", "no rank came up")
    assert (summary["steps_done"], summary["train_loss"], summary["ranks"]) == (0, None, [])
    assert (recorder.directory / "metrics.jsonl").read_text() == ""


def test_steps_that_were_finished_but_not_logged_count(tmp_path: Path) -> None:
    assert started(tmp_path).finish("failed", "lost", steps_done=7)["steps_done"] == 7


def test_only_the_first_finish_counts(tmp_path: Path) -> None:
    sink = FakeSink()
    recorder = started(tmp_path, sink)
    recorder.finish("interrupted", "Ctrl-C")
    assert recorder.finish("failed", "and then a rank died of it")["status"] == "interrupted"
    assert [told[0] for told in sink.told] == ["start", "finish"]


def test_a_broken_sink_is_one_warning_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = FakeSink(broken=True), FakeSink()
    recorder = started(tmp_path, broken, sound)
    recorder(step(1))
    recorder.finish("failed")
    assert [told[0] for told in sound.told] == ["start", "step", "finish"]
    assert [record.getMessage() for record in caplog.records] == [
        "FakeSink failed, training goes on: disk of the sink is full"
    ]


def test_a_picture_that_fails_costs_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **named: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(timeline, "draw", fail)
    sink = FakeSink()
    recorder = started(tmp_path, sink)
    recorder(FINISHED)
    recorder.finish("finished")
    assert summary_on_disk(recorder)["status"] == "finished"
    assert sink.told[-1][2] is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_is_no_message_is_refused(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    with pytest.raises(TypeError, match=r"takes the messages of pipeline/training/messages.py, not 'hello'"):
        recorder("hello")


def test_recording_needs_a_started_recorder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, FACTS)
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        recorder(step(1))


@pytest.mark.parametrize("message", [step(1), ValidationMetrics(1, 2.0), RANKS[0], PREDICTION, FINISHED])
def test_messages_cross_processes(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_plain_leaves_json_values_and_turns_the_rest_into_them() -> None:
    value = {"a": (1, 2.5, True, None), 3: Path("x"), "b": {"c": float("inf")}}
    assert plain(value) == {"a": [1, 2.5, True, None], "3": "x", "b": {"c": None}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "finished"})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"status": "failed", "loss": float("nan")})
    assert json.loads(path.read_text()) == {"status": "finished"}
