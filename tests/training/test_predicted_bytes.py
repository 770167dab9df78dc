from __future__ import annotations

import logging

import pytest

from models.loss import CrossEntropy
from pipeline.engine.boundary import TensorSpec
from pipeline.partition import uniform
from pipeline.schedule.actions import ActionType
from pipeline.training.plan import make_plan
from pipeline.training.predicted_bytes import footprint_for_a_limit, with_predicted_bytes
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import ActivationCheckpointSettings
from tests.engine.harness import CPU
from tests.engine.samples import chain, small_gpt, text
from tests.engine.test_executor import LINEAR
from tests.training.harness import prepare, settings_to_train, text_data, vector_data


def predicted_and_measured(model, data, settings):
    run = prepare(settings, model, data)
    trainer = run.trainer
    inputs, targets = data.train.inputs(0), data.train.targets(0)
    plan = with_predicted_bytes(trainer.ranks.plan, settings, model, inputs, targets, CPU)
    trainer.train()
    return plan, tuple(rank.peak_activation_bytes for rank in run.finished.ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_a_run_takes_what_was_predicted(schedule):
    settings = settings_to_train(schedule, 2, 4, 7, 1)
    plan, measured = predicted_and_measured(small_gpt(), text_data(7), settings)
    assert plan.peak_activation_bytes == measured


def test_of_replicas_each_has_its_own():
    """Three microbatches of one sample and one of two: the first replica's ranks hold more."""
    settings = settings_to_train("1f1b", 2, 2, 5, 1, dp=2)
    plan, measured = predicted_and_measured(small_gpt(), text_data(5), settings)
    assert plan.peak_activation_bytes == measured
    assert measured[0] > measured[2]


class Scalar(CrossEntropy):
    """Looks at its numbers, which fake tensors don't have."""

    def __call__(self, outputs, targets):
        return super().__call__(outputs, targets) * float(bool(targets.max().item() >= 0))


def test_without_a_prediction_a_run_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        plan, measured = predicted_and_measured(
            chain([LINEAR] * 2, loss=Scalar()), vector_data(4), settings_to_train("1f1b", 2, 2, 4, 1)
        )
    assert plan.peak_activation_bytes is None
    assert None not in measured
    (warning,) = caplog.messages
    assert "activation bytes are not predicted" in warning


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv"])
def test_a_window_with_a_limit_in_bytes_is_kept(schedule):
    """Half of what it takes to keep everything; what a run holds is what is predicted (above)."""
    model, (inputs, targets) = small_gpt(), text(8)

    def planned(**checkpointing):
        settings = settings_to_train(schedule, 2, 8, 8, 1)
        settings.activation_checkpoint = ActivationCheckpointSettings(**checkpointing)
        stages = write_schedule(settings).stages
        counts = uniform(len(model.layers), stages)
        footprint = footprint_for_a_limit(settings, model, inputs, targets, CPU, counts)
        plan = make_plan(settings, model, TensorSpec.of(inputs), CPU, footprint=footprint)
        return with_predicted_bytes(plan, settings, model, inputs, targets, CPU)

    free, tight = planned(), planned(name="always")
    limit = (max(free.peak_activation_bytes) + max(tight.peak_activation_bytes)) // 2
    windowed = planned(name="window", memory_limit=limit)
    assert max(windowed.peak_activation_bytes) <= limit
    recomputations = [
        sum(action.type is ActionType.R for row in plan.program.rows for action in row) for plan in (windowed, tight)
    ]
    assert 0 < recomputations[0] < recomputations[1]
