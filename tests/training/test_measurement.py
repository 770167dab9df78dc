from __future__ import annotations

import pytest

from pipeline.schedule.library import one_f_one_b
from pipeline.schedule.simulate import Event
from pipeline.training.measurement import Measurement
from pipeline.training.messages import Prediction, StepMetrics
from tests.engine.samples import linears, small_gpt
from tests.training.harness import prepare, settings_to_train, text_data, train, vector_data


def test_what_the_end_reports():
    run = train(settings_to_train("1f1b", 2, 4, 8, 4), small_gpt(), text_data(8))
    finished = run.finished
    assert finished.train_loss == run.losses[-1]
    assert finished.bubble_source == "replayed"
    assert [report.rank for report in finished.ranks] == [0, 1]
    assert [report.stages for report in finished.ranks] == [(0,), (1,)]
    assert [report.parameters for report in finished.ranks] == [
        sum(p.numel() for p in rank.parameters.values()) for rank in run.ranks
    ]
    assert all(report.peak_memory_bytes is None for report in finished.ranks), "the ranks share a memory"
    assert min(event.start for row in finished.events for event in row) == 0
    for row, program in zip(finished.events, run.trainer.ranks.plan.program.compute_only().rows, strict=True):
        assert [event.action for event in row] == list(program)


@pytest.mark.parametrize("steps", [1, 3])
def test_activation_peaks_follow_what_is_in_flight(steps):
    peaks = {
        schedule: [
            report.peak_activation_bytes
            for report in train(settings_to_train(schedule, 2, 4, 8, steps), linears(4), vector_data(8)).finished.ranks
        ]
        for schedule in ("gpipe", "1f1b")
    }
    # two Linears on two samples of four float32: what is between them; inputs and targets are views of the batch
    assert peaks["gpipe"][0] == 4 * 32
    assert peaks["1f1b"][0] == 2 * 32
    # input, middle, log-probabilities and a weight
    assert peaks["gpipe"][1] == 4 * (3 * 32 + 4)
    assert peaks["1f1b"][1] == 3 * 32 + 4


def test_only_the_first_step_is_measured():
    run = train(settings_to_train("1f1b", 2, 2, 4, 3), linears(2), vector_data(4))
    assert all(rank.trainer.meter is None for rank in run.ranks)


def measured_alone(*steps):
    """What a run of one rank ends with, each step given as its duration and its events' times (start, end)."""
    trainer = prepare(settings_to_train("1f1b", 1, 1, 4, 1), linears(2), vector_data(4)).trainer
    group = trainer._group
    measurement = Measurement(trainer.ranks.plan, trainer.ranks.ranks, group, batch_size=4, shared_memory=False)
    bubbles = []
    for seconds, times in steps:
        row = zip(one_f_one_b(1, 1).rows[0], times, strict=True)
        measurement.record(seconds, [tuple(Event(0, action, start, end) for action, (start, end) in row)])
        bubbles.append(measurement.last_step().bubble)
    return measurement.finish(1.5, None, 9.0, 0), bubbles


def test_the_end_tells_of_the_median_step():
    short = (3.0, [(10.0, 11.0), (11.0, 12.0)])
    middle = (1.0, [(20.0, 21.0), (22.0, 24.0)])
    long = (2.0, [(30.0, 31.0), (39.0, 40.0)])
    finished, bubbles = measured_alone(long, short, middle)
    assert bubbles == pytest.approx([0.8, 0.0, 0.25])
    assert [(event.start, event.end) for event in finished.events[0]] == [(0.0, 1.0), (2.0, 4.0)]
    assert (finished.step_seconds, finished.samples_per_second) == (2.0, 2.0)
    assert finished.step_quartiles == (1.5, 2.5)
    assert measured_alone(long)[0].step_quartiles is None
    assert finished.bubble_measured == pytest.approx(0.25)
    assert (finished.train_loss, finished.validation_loss, finished.seconds) == (1.5, None, 9.0)


def test_a_rank_alone_in_its_process_is_measured_as_it_is():
    finished, _ = measured_alone((1.0, [(0.0, 1.0), (1.0, 2.0)]))
    assert finished.bubble_source == "measured"
    assert finished.ranks[0].peak_memory_bytes > 0


def test_a_prediction_comes_in_the_run_and_at_its_end(monkeypatch):
    monkeypatch.setattr("pipeline.training.trainer.PREDICTED_AFTER", 4)
    run = train(settings_to_train("1f1b", 2, 4, 8, 7), small_gpt(), text_data(8))
    early, final = run.of(Prediction)
    assert (early.steps, final.steps) == ((3,), (3, 5, 7))
    assert run.messages.index(early) < run.messages.index(run.of(StepMetrics)[3])
    assert [message.step_seconds_predicted is None for message in run.of(StepMetrics)] == [True] * 3 + [False] * 4
    # ranks that take turns: a step is all of their work, and what is outside
    work = sum(event.end - event.start for row in run.finished.events for event in row)
    assert final.step_seconds > 0.5 * work
    assert final.outside_seconds > 0
    assert [len(row) for row in final.events] == [8, 8]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_is_predicted_from_its_last_step(steps):
    run = train(settings_to_train("zb_h1", 2, 4, 8, steps), linears(4), vector_data(8))
    (prediction,) = run.of(Prediction)
    assert prediction.steps == (steps,)
    assert 0 < prediction.step_seconds < 60


def test_each_logged_step_has_its_idle_times():
    run = train(settings_to_train("1f1b", 2, 4, 8, 2), linears(4), vector_data(8))
    for message in run.of(StepMetrics):
        busy = 1 - message.bubble_measured
        idle = sum(idle.total for idle in message.idle)
        assert len(message.idle) == 2
        assert idle > 0
        assert 0 < busy < 1
        assert 0 < message.bubble_span_measured <= message.bubble_measured


def test_a_long_run_tells_of_steps_from_its_beginning_to_its_end():
    steps = [(1.0, [(10.0 * at, 10.0 * at + 1), (10.0 * at + 1, 10.0 * at + 2 + at / 1000)]) for at in range(300)]
    finished, _ = measured_alone(*steps)
    # the middle of 64 steps spread over 300
    assert finished.events[0][1].end == pytest.approx(2.15, abs=0.005)
