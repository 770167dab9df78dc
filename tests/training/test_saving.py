"""A run that goes on from a checkpoint is the run that was never interrupted, also through another pipeline."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from models.gpt import gpt
from models.model import Model
from models.resnet import resnet
from pipeline.training.checkpoint import Checkpoint, find_checkpoint
from pipeline.training.messages import Prediction, StepMetrics
from pipeline.training.saving import Saving, check_continues, check_fits, other_settings
from pipeline.training.settings import OptimizerSettings, PartitionSettings
from tests.engine.samples import chain, images, small_gpt
from tests.training.harness import (
    BF16_TRUE,
    FP16,
    FP64,
    Numbers,
    SmallData,
    equal_states,
    prepare,
    relative_error,
    settings_to_train,
    text_data,
    train,
    vector_data,
)

SMALL = {"layers": 6, "width": 16, "heads": 2, "context": 8, "vocabulary": 32, "tie_embeddings": True}
SHAPE = {"microbatches": 4, "batch_size": 6, "steps": 8, "seed": 3}
SGD = OptimizerSettings("sgd", learning_rate=0.1, warmup_steps=3, weight_decay=0.1)


def dropout_gpt(tie: bool = True):
    return small_gpt(dropout=0.1, tie=tie)


def saving(folder: Path, every: int = 4, keep: int = 2) -> Saving:
    return Saving(folder / "checkpoints", every, keep, {"seed": 3})


@functools.cache
def saved_by(schedule: str, pp: int, tie: bool = True, optimizer: str = "adamw"):
    """A run of eight steps in float64, and its checkpoint after the fourth."""
    folder = Path(tempfile.mkdtemp())
    more = {"optimizer": SGD} if optimizer == "sgd" else {}
    settings = settings_to_train(schedule, pp, **SHAPE, precision=FP64, **more)
    run = train(settings, dropout_gpt(tie), text_data(6), saved=saving(folder))
    return settings, run, find_checkpoint(folder / "checkpoints" / "step-000004")


def go_on(settings, checkpoint: Checkpoint, tie: bool = True):
    return train(settings, dropout_gpt(tie), text_data(6), resumed=checkpoint)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_same_pipeline_goes_on_bit_for_bit(optimizer):
    settings, run, checkpoint = saved_by("1f1b", 2, optimizer=optimizer)
    again = go_on(settings, checkpoint)
    assert again.losses == run.losses[4:]
    assert [message.gradient_norm for message in again.of(StepMetrics)] == [
        message.gradient_norm for message in run.of(StepMetrics)[4:]
    ]
    assert [message.step for message in again.of(StepMetrics)] == [5, 6, 7, 8]
    assert equal_states(again.state(), run.state())


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("source", [("1f1b", 1), ("interleaved_1f1b", 2), ("gpipe", 4)])
@pytest.mark.parametrize("target", [("1f1b", 1), ("1f1b", 3), ("interleaved_zb", 2), ("zbv", 2)])
def test_another_pipeline_goes_on_with_the_same_run(source, target, tie):
    """Weights and the optimizer's averages go by name, whatever ranks held them; tied ones to every copy."""
    _, run, checkpoint = saved_by(*source, tie=tie)
    settings = settings_to_train(*target, **SHAPE, precision=FP64)
    again = go_on(settings, checkpoint, tie)
    assert relative_error(again.losses, run.losses[4:]) <= 1e-12
    for name, tensor in again.state().items():
        assert (tensor - run.state()[name]).abs().max() < 1e-10, name


def test_another_cut_goes_on_with_the_same_run():
    settings, run, checkpoint = saved_by("1f1b", 2)
    layers = len(small_gpt().layers)
    other = replace(settings, pp=3, partition=PartitionSettings("manual", [1, layers - 2, 1]))
    assert relative_error(go_on(other, checkpoint).losses, run.losses[4:]) <= 1e-12


def test_statistics_of_batch_norm_and_counts_come_back(tmp_path):
    numbers = Numbers(lambda step: images(6, 32))
    data = SmallData(numbers, numbers, "images", 1)
    settings = settings_to_train("1f1b", 2, 2, 6, 4, precision=FP64, validate_every=4)
    run = train(settings, resnet(depth=18, classes=10), data, saved=saving(tmp_path, every=2))
    checkpoint = find_checkpoint(tmp_path / "checkpoints" / "step-000002")
    assert "bn1.num_batches_tracked" in checkpoint.model
    other = replace(settings, pp=3, schedule=replace(settings.schedule, name="gpipe"))
    again = train(other, resnet(depth=18, classes=10), data, resumed=checkpoint)
    assert relative_error(again.losses, run.losses[2:]) <= 1e-12
    assert relative_error(again.validations, run.validations) <= 1e-12
    assert again.state()["bn1.num_batches_tracked"] == run.state()["bn1.num_batches_tracked"] == 8


def test_the_loss_scale_comes_back(tmp_path):
    settings = settings_to_train("1f1b", 2, **SHAPE, precision=replace(FP16, loss_scale=2.0**24))
    run = train(settings, dropout_gpt(), text_data(6), saved=saving(tmp_path, every=4))
    skipped = [message.skipped for message in run.of(StepMetrics)]
    assert skipped == [True] * 6 + [False] * 2, "for this to be a test"
    checkpoint = find_checkpoint(tmp_path / "checkpoints" / "step-000004")
    assert checkpoint.progress.loss_scale == 2.0**20
    again = go_on(settings, checkpoint)
    assert [message.skipped for message in again.of(StepMetrics)] == skipped[4:]
    assert again.losses == run.losses[4:]


def test_exact_copies_of_rounded_weights_come_back(tmp_path):
    settings = settings_to_train("zb_h1", 2, **SHAPE, precision=BF16_TRUE)
    run = train(settings, dropout_gpt(), text_data(6), saved=saving(tmp_path))
    again = go_on(settings, find_checkpoint(tmp_path / "checkpoints" / "step-000004"))
    assert again.losses == run.losses[4:]
    assert equal_states(again.state(), run.state())


def test_the_steps_of_a_resumed_run_count_on():
    settings, _, checkpoint = saved_by("1f1b", 2)
    run = go_on(settings, checkpoint)
    (prediction,) = run.of(Prediction)
    assert set(prediction.steps) <= {5, 6, 7, 8}
    assert run.finished.ranks[0].peak_activation_bytes


def test_a_tied_parameter_is_saved_once():
    _, _, checkpoint = saved_by("gpipe", 4)
    assert "embedding.tokens.weight" in checkpoint.model
    assert "head.projection.weight" not in checkpoint.model
    moments = [name for name in checkpoint.optimizer if name.startswith("exp_avg/")]
    assert sorted(name.partition("/")[2] for name in moments) == sorted(checkpoint.model)


def test_a_rank_reads_its_own_tensors_alone(monkeypatch):
    settings, _, checkpoint = saved_by("1f1b", 1)
    read: list[set[str]] = []
    original = Checkpoint.read

    def spy(self, section, names):
        read.append(set(names))
        return original(self, section, names)

    monkeypatch.setattr(Checkpoint, "read", spy)
    run = prepare(replace(settings, pp=3), dropout_gpt(), text_data(6), resumed=checkpoint)
    weights = [{rank.plan.tied.get(name, name) for name in rank.state_dict()} for rank in run.ranks]
    assert read[::2] == weights
    for names, held in zip(read[1::2], weights, strict=True):
        assert names == {f"{slot}/{name}" for slot in ("step", "exp_avg", "exp_avg_sq") for name in held}


def test_frozen_and_unused_parameters_and_a_rank_without_any(tmp_path):
    def frozen() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(False)

    model = chain([partial(nn.Linear, 4, 4), nn.Tanh, frozen])
    settings = settings_to_train("1f1b", 3, 2, 4, 4, precision=FP64)
    run = train(settings, model, vector_data(4), saved=saving(tmp_path, every=2))
    checkpoint = find_checkpoint(tmp_path / "checkpoints" / "step-000002")
    assert set(checkpoint.model) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not any("2." in name for name in checkpoint.optimizer)
    assert train(settings, model, vector_data(4), resumed=checkpoint).losses == run.losses[2:]


def test_a_parameter_that_is_frozen_now_needs_no_state(tmp_path):
    def build(trained: bool) -> Model:
        return chain([partial(nn.Linear, 4, 4), lambda: nn.Linear(4, 4).requires_grad_(trained)])

    settings = settings_to_train("1f1b", 2, 2, 4, 4, precision=FP64)
    run = train(settings, build(True), vector_data(4), saved=saving(tmp_path, every=2))
    again = train(settings, build(False), vector_data(4), resumed=find_checkpoint(tmp_path / "checkpoints/step-000002"))
    assert again.losses[0] == run.losses[2]
    assert again.losses[1] != run.losses[3]


# When, where, how many


def test_the_last_ones_stay_and_one_follows_the_last_step(tmp_path):
    settings = settings_to_train("1f1b", 2, **{**SHAPE, "steps": 7})
    train(settings, small_gpt(), text_data(6), saved=saving(tmp_path, every=2, keep=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000006", "step-000007"]
    assert find_checkpoint(tmp_path).progress.step == 7


def test_saving_changes_nothing(tmp_path):
    settings = settings_to_train("1f1b", 2, **SHAPE)
    plain = train(settings, dropout_gpt(), text_data(6))
    assert train(settings, dropout_gpt(), text_data(6), saved=saving(tmp_path, every=1)).losses == plain.losses


def test_settings_that_make_it_another_run_are_told():
    _, _, checkpoint = saved_by("1f1b", 2)
    config = {"seed": 3, "pp": 2, "optimizer": {"name": "sgd", "betas": (0.9, 0.95)}, "data": {"path": "x"}}
    saved = replace(checkpoint, config={**config, "optimizer": {"name": "sgd", "betas": [0.9, 0.95]}, "logger": 1})
    assert other_settings(saved, config) == []
    changed = {**config, "pp": 4, "seed": 5, "data": {"path": "y", "more": 1}, "logger": 2}
    assert other_settings(saved, changed) == ["seed=5 (was 3)", "data.path=y (was x)"]


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 4)])
def test_replicas_save_once_and_go_on_in_other_numbers(tmp_path, pp, dp):
    settings = settings_to_train("1f1b", 2, **{**SHAPE, "microbatches": 2, "batch_size": 8}, precision=FP64, dp=2)
    run = train(settings, dropout_gpt(), text_data(8), saved=saving(tmp_path))
    folder = tmp_path / "checkpoints" / "step-000004"
    assert len(list(folder.glob("model-*-of-00002.safetensors"))) == 2
    other = replace(settings, pp=pp, dp=dp, microbatches=4 // dp)
    again = train(other, dropout_gpt(), text_data(8), resumed=find_checkpoint(folder))
    assert relative_error(again.losses, run.losses[4:]) <= 1e-12


# What can't be


def test_nothing_left_to_train():
    settings, _, checkpoint = saved_by("1f1b", 2)
    check_continues(checkpoint, settings)
    with pytest.raises(ValueError, match=r"is at step 4, and steps=4 leaves nothing to train: use steps=8"):
        check_continues(checkpoint, replace(settings, steps=4))


def test_another_optimizer():
    settings, _, checkpoint = saved_by("1f1b", 2)
    with pytest.raises(ValueError, match=r"state of optimizer=adamw, of no use to sgd: use optimizer=adamw"):
        check_continues(checkpoint, replace(settings, optimizer=SGD))


@pytest.mark.parametrize(
    ("tie", "change", "message"),
    [
        (True, {"width": 32}, r"embedding.tokens.weight is 32x16 there and 32x32 here"),
        (True, {"layers": 9}, r"block.\d.attention_norm.weight is missing there and 16 here"),
        (True, {"layers": 1}, r"block.1.attention_norm.weight is 16 there and missing here"),
        (True, {"tie_embeddings": False}, r"head.projection.weight is missing there and 32x16 here"),
    ],
)
def test_another_model(tie, change, message):
    _, _, checkpoint = saved_by("1f1b", 2, tie)
    with pytest.raises(ValueError, match=message) as raised:
        check_fits(checkpoint, gpt(**{**SMALL, **change}))
    assert "use the model that it was saved with" in str(raised.value)
    words = {"layers": 4, "width": 16, "weights": None, "fresh": [], "some": ["a", "b"]}
    asked = replace(checkpoint, config={"model": words, "choices": {"model": "gpt"}})
    with pytest.raises(ValueError, match=r"use model=gpt model.layers=4 model.width=16 model.some=\[a,b\]$"):
        check_fits(asked, gpt(**{**SMALL, **change}))
    check_fits(checkpoint, gpt(**SMALL))
