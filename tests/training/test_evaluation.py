"""`task=evaluate`: the means over all held-out samples are those of the whole model in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from models.gpt import gpt
from models.resnet import resnet
from pipeline.training import evaluation
from pipeline.training.evaluation import means
from pipeline.training.job import run_job
from pipeline.training.messages import Evaluated, Evaluating
from pipeline.training.preparation import prepare_evaluation
from pipeline.training.saving import Saving
from tests.engine.samples import images, text
from tests.training.harness import FP64, Numbers, SmallData, settings_to_train, train
from tests.training.held_out import Record, picture_builders, pictures, result_of, text_builders, texts

GPT = partial(gpt, layers=4, width=16, heads=2, context=8, vocabulary=32, dropout=0.1)
RESNET = partial(resnet, depth=18, classes=10)


def evaluated(tmp_path, builders, schedule, pp, microbatches, batch_size, **more):
    settings = settings_to_train(
        schedule,
        pp,
        microbatches,
        batch_size,
        4,
        precision=FP64,
        **{"task": "evaluate", "launch": "in_process", "device": "cpu", **more},
    )
    return result_of(prepare_evaluation(settings, builders, 3), tmp_path)


def trained(tmp_path, build_model, data):
    """The weights of a short run in float64 as one model, and where they were saved."""
    settings = settings_to_train("1f1b", 2, 2, 4, 2, precision=FP64)
    run = train(settings, build_model(), data, saved=Saving(tmp_path / "run" / "checkpoints", 2, 1))
    layers = [m.eval() for r in run.ranks for s in r.stages.values() for m in s.modules]
    return torch.nn.Sequential(*layers), tmp_path / "run"


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "batch_size"),
    [
        ("1f1b", 1, 1, 30),
        ("1f1b", 3, 4, 6),
        ("interleaved_1f1b", 2, 8, 8),
        ("dualpipe_v", 2, 4, 4),
        ("gpipe", 2, 3, 40),
    ],
)
def test_text(tmp_path, schedule, pp, microbatches, batch_size):
    """The last of 30 samples' batches is short in the second case, and the only one in the last."""
    model, run = trained(tmp_path, GPT, texts(4, 30))
    inputs, targets = text(30, 7)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    found = evaluated(
        tmp_path, text_builders(GPT, batch_size, 30), schedule, pp, microbatches, batch_size, resume=str(run)
    )
    assert found.samples == 30
    assert found.metrics == {
        "loss": pytest.approx(expected, rel=1e-13),
        "perplexity": pytest.approx(math.exp(expected), rel=1e-12),
    }


@pytest.mark.parametrize(("schedule", "pp", "microbatches", "batch_size"), [("1f1b", 3, 2, 4), ("zbv", 2, 3, 6)])
def test_images(tmp_path, schedule, pp, microbatches, batch_size):
    """Running statistics; the last batch has one sample."""
    model, run = trained(tmp_path, RESNET, pictures(4, 13))
    inputs, targets = images(13, 32)
    with torch.no_grad():
        outputs = model(inputs.double())
    ranked = outputs.argsort(dim=-1, descending=True)
    hits = [(ranked[:, :top] == targets[:, None]).any(-1).double().mean().item() for top in (1, 5)]
    found = evaluated(
        tmp_path, picture_builders(RESNET, batch_size, 13), schedule, pp, microbatches, batch_size, resume=str(run)
    )
    assert found.metrics == {
        "loss": pytest.approx(torch.nn.functional.cross_entropy(outputs, targets).item(), rel=1e-12),
        "top1_accuracy": pytest.approx(hits[0]),
        "top5_accuracy": pytest.approx(hits[1]),
    }
    assert 0 < hits[1] < 1


def test_fresh_weights_are_those_that_a_training_run_begins_with(tmp_path):
    found = evaluated(tmp_path, text_builders(GPT, 6, 6), "1f1b", 2, 3, 6)
    settings = settings_to_train("1f1b", 2, 3, 6, 1, precision=FP64, validate_every=1)
    numbers = Numbers(lambda step: text(6, 7))
    run = train(settings, replace(GPT(), layers=GPT(dropout=0.0).layers), SmallData(numbers, numbers))
    assert found.metrics["loss"] == pytest.approx(run.losses[0], rel=1e-13)


def test_data_without_end_is_taken_as_long_as_a_validation(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.training.held_out.Whole.samples", None)
    monkeypatch.setattr("tests.training.held_out.Whole._batch", lambda self, part, step: text(4, step)[part])
    found = evaluated(tmp_path, text_builders(GPT, 4, 4), "1f1b", 2, 2, 4)
    assert found.samples == 12


def test_a_long_one_shows_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_TOLD_EVERY", 0.0)
    settings = settings_to_train("1f1b", 2, 2, 4, 4, task="evaluate", launch="in_process", device="cpu")
    record = Record()
    run_job(prepare_evaluation(settings, text_builders(GPT, 4, 10), 3), record, tmp_path / "train.log")
    assert [type(message) for message in record.messages] == [Evaluating] * 3 + [Evaluated]
    assert [(message.begun, message.samples) for message in record.messages[:3]] == [(0, 10), (4, 10), (8, 10)]


def test_in_processes_it_is_the_same(tmp_path):
    builders = text_builders(GPT, 4, 10)
    found = [
        evaluated(tmp_path, builders, "1f1b", 2, 2, 4, **{"launch": launch}) for launch in ("processes", "in_process")
    ]
    assert found[0].metrics == found[1].metrics


def test_where_nothing_counts_the_mean_is_no_number():
    assert math.isnan(means([0.0, 0.0, 0.0, 0.0], "text")["loss"])
    assert math.isnan(means([0.0, 0.0, 0.0, 0.0], "images")["top1_accuracy"])
    assert means([1e6, 1.0, 0.0, 0.0], "text")["perplexity"] == math.inf
