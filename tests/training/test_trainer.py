from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine.stage import Stage
from pipeline.training import gradients
from pipeline.training.failures import NonFiniteError
from pipeline.training.messages import StepMetrics, ValidationMetrics
from pipeline.training.settings import OptimizerSettings, PrecisionSettings
from tests.engine.harness import placement
from tests.engine.samples import Explodes, chain, linears, small_gpt
from tests.training.harness import (
    FP16,
    FP64,
    equal_states,
    image_data,
    prepare,
    settings_to_train,
    text_data,
    train,
    vector_data,
)

BF16 = PrecisionSettings("bf16", "float32", "bfloat16")


def plain_training(model, data, settings, steps):
    """One device, the whole batch at once, torch's own clipping: the losses, norms and parameters."""
    stage = Stage(0, model.layers, model, placement(seed=settings.seed), last=True)
    held = dict(stage.named_parameters())
    for alias, owner in model.tied.items():
        stage.tie(alias, held[owner])
    parameters = list({id(p): p for _, p in stage.named_parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=settings.optimizer.learning_rate, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = data.train.inputs(step), data.train.targets(step)
        loss = stage.forward(inputs, targets, weight=model.loss.weight(targets), step=step, microbatch=0)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, settings.gradient_clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, dict(stage.named_parameters())


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("gpipe", 3), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("tie", [True, False])
def test_clipping_is_torchs_for_the_whole_model(schedule, pp, tie):
    """A tied parameter is counted once, and one factor scales every gradient of every rank."""
    model, data = small_gpt(tie=tie), text_data(6)
    optimizer = OptimizerSettings("sgd", learning_rate=0.5, warmup_steps=0, decay="constant", weight_decay=0.0)
    settings = settings_to_train(schedule, pp, 3, 6, 4, precision=FP64, optimizer=optimizer, gradient_clip=0.05)
    run = train(settings, model, data)
    losses, norms, parameters = plain_training(model, data, settings, 4)
    assert run.losses == pytest.approx(losses, rel=1e-11)
    assert [message.gradient_norm for message in run.of(StepMetrics)] == pytest.approx(norms, rel=1e-11)
    for name, tensor in run.state().items():
        assert torch.allclose(tensor, parameters[name], rtol=1e-9, atol=1e-12), name


def test_a_small_norm_is_not_clipped():
    optimizer = OptimizerSettings("sgd", learning_rate=0.1)
    runs = [
        train(
            settings_to_train("1f1b", 2, 2, 4, 3, precision=FP64, optimizer=optimizer, gradient_clip=clip),
            linears(4),
            vector_data(4),
        )
        for clip in (1e6, None)
    ]
    assert equal_states(runs[0].state(), runs[1].state())


# Validation


def test_a_validation_changes_nothing_else():
    """Weights, gradients, statistics, dropout and every training loss are those of a run without validations."""
    model, data = small_gpt(dropout=0.2), text_data(6)
    without = train(settings_to_train("1f1b", 2, 3, 6, 6), model, data)
    among = train(settings_to_train("1f1b", 2, 3, 6, 6, validate_every=2), model, data)
    assert among.losses == without.losses
    assert equal_states(among.state(), without.state())
    assert [message.step for message in among.of(ValidationMetrics)] == [2, 4, 6]
    assert without.validations == []
    assert without.finished.validation_loss is None


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_a_validation_leaves_everything_as_it_was(kind):
    model, data = (
        (small_gpt(dropout=0.2), text_data(6)) if kind == "gpt" else (resnet(depth=18, classes=10), image_data(6))
    )
    run = train(settings_to_train("interleaved_1f1b", 2, 3, 6, 1), model, data)
    before, generator = run.state(), torch.get_rng_state()
    first = run.trainer.validate(1)
    assert equal_states(run.state(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for rank in run.ranks for parameter in rank.parameters.values())
    assert run.trainer.validate(1) == first


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_a_validation_loss_is_the_mean_in_evaluation_mode(kind):
    """Computed anew: no dropout, running statistics, the mean over two held-out batches."""
    model, data = (
        (small_gpt(dropout=0.2), text_data(6)) if kind == "gpt" else (resnet(depth=18, classes=10), image_data(6))
    )
    run = train(settings_to_train("1f1b", 3, 4, 6, 2, precision=FP64, validate_every=1), model, data)
    modules = [module.eval() for rank in run.ranks for stage in rank.stages.values() for module in stage.modules]
    losses = []
    for index in range(2):
        value = data.validation.inputs(index)
        value = value.double() if value.is_floating_point() else value
        with torch.no_grad():
            for module in modules:
                value = module(value)
        targets = data.validation.targets(index)
        losses.append(nn.functional.cross_entropy(value.flatten(0, -2), targets.flatten()).item())
    assert run.validations[-1] == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert run.finished.validation_loss == run.validations[-1]


def test_a_validation_follows_the_last_step():
    run = train(settings_to_train("1f1b", 2, 2, 4, 5, validate_every=3), linears(2), vector_data(4))
    assert [message.step for message in run.of(ValidationMetrics)] == [3, 5]


# fp16's loss scale


def fp16_run(scale, steps=4, schedule="1f1b", pp=2, **more):
    precision = dataclasses.replace(FP16, loss_scale=scale)
    return prepare(settings_to_train(schedule, pp, 3, 6, steps, precision=precision, **more), small_gpt(), text_data(6))


def test_the_scale_is_taken_out_of_norm_and_step():
    """With and without fp16's scale the same run, up to fp16's rounding; plain SGD, for Adam divides a scale away."""
    sgd = OptimizerSettings("sgd", learning_rate=0.5, decay="constant")
    run = fp16_run(1024.0, optimizer=sgd)
    run.trainer.train()
    expected = train(settings_to_train("1f1b", 2, 3, 6, 4, optimizer=sgd), small_gpt(), text_data(6))
    assert run.losses == pytest.approx(expected.losses, rel=1e-2)
    norms = [[message.gradient_norm for message in each.of(StepMetrics)] for each in (run, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


def test_a_scale_keeps_small_gradients_alive():
    """In fp16 a gradient of 1e-8 is nothing; scaled it is something."""

    @dataclasses.dataclass(frozen=True)
    class Tiny:
        def __call__(self, outputs, targets):
            return outputs.float().sum() * 1e-8

        def weight(self, targets):
            return 1

    model = chain([partial(nn.Linear, 4, 4)] * 2, loss=Tiny())
    norms = []
    for scale in (1.0, 65536.0):
        precision = dataclasses.replace(FP16, loss_scale=scale)
        run = train(settings_to_train("1f1b", 2, 2, 4, 1, precision=precision), model, vector_data(4))
        norms.append(run.of(StepMetrics)[0].gradient_norm)
    assert norms[0] < norms[1] / 2


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_overflow_on_one_stage_is_one_verdict_for_all(broken, monkeypatch):
    run = fp16_run(1024.0, steps=3, pp=3)
    before = run.state()
    original = gradients.global_norm

    def poisoned(local, *others):
        if len(run.of(StepMetrics)) == 1:  # in the second step
            local[broken][0].fill_(math.inf)
        return original(local, *others)

    monkeypatch.setattr(gradients, "global_norm", poisoned)
    states = []
    send = run.trainer._report
    monkeypatch.setattr(run.trainer, "_report", lambda message: (states.append(run.state()), send(message)))
    run.trainer.train()
    assert [message.skipped for message in run.of(StepMetrics)] == [False, True, False]
    assert run.trainer._scale.value == 512
    assert not equal_states(states[0], before)
    assert equal_states(states[0], states[1]), "nothing moved on any rank"
    assert not any(torch.equal(states[1][name], states[2][name]) for name in states[1] if "projection.weight" in name)
    assert all(parameter.grad is None for rank in run.ranks for parameter in rank.parameters.values())


def test_a_huge_scale_overflows_and_is_halved_until_it_fits():
    run = fp16_run(2.0**40, steps=30, pp=2)
    run.trainer.train()
    skipped = [message.skipped for message in run.of(StepMetrics)]
    assert skipped[0]
    assert not skipped[-1]
    assert run.trainer._scale.value == 2.0 ** (40 - sum(skipped))
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses[-1] < run.losses[0]


def test_an_overflow_that_no_scale_cures_ends_the_run():
    class Infinite(nn.Linear):
        def forward(self, x):
            return super().forward(x) * math.inf

    model = chain([partial(nn.Linear, 4, 4), partial(Infinite, 4, 4)])
    precision = dataclasses.replace(FP16, loss_scale=16.0)
    with pytest.raises(NonFiniteError, match="the loss is nan at step 5"):
        train(settings_to_train("1f1b", 2, 2, 4, 50, precision=precision), model, vector_data(4))


def test_a_rank_without_gradients_takes_part():
    model = chain([nn.Identity, nn.Identity, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4)])
    for precision in (FP64, FP16):
        run = train(settings_to_train("1f1b", 2, 2, 4, 3, precision=precision), model, vector_data(4))
        assert run.ranks[0].optimizer is None
        assert run.finished.ranks[0].parameters == 0
        assert len(run.losses) == 3


def test_tied_gradients_are_summed_before_the_scale_is_taken_out():
    """Were it taken out first, one copy's overflow could be lost, and the norm's factor would differ."""
    calls = []
    run = fp16_run(1024.0, steps=1)
    originals = gradients.sum_tied_gradients, gradients.global_norm, gradients.scale_gradients
    with pytest.MonkeyPatch.context() as patch:
        for original in originals:
            patch.setattr(
                gradients,
                original.__name__,
                lambda *arguments, original=original: (calls.append(original.__name__), original(*arguments))[1],
            )
        run.trainer.train()
    assert calls == ["sum_tied_gradients", "global_norm", "scale_gradients"]
    state = run.state()
    assert torch.equal(state["embedding.tokens.weight"], state["head.projection.weight"])


def test_bf16_trains():
    precise, half = (
        train(settings_to_train("1f1b", 2, 3, 6, 5, precision=precision), small_gpt(), text_data(6))
        for precision in (FP64, BF16)
    )
    assert half.losses == pytest.approx(precise.losses, rel=2e-2)
    assert half.losses != precise.losses
    assert {tensor.dtype for tensor in half.state().values()} == {torch.float32}


# What is not a number


def test_a_gradient_that_is_not_a_number_ends_the_run():
    model = chain([partial(nn.Linear, 4, 4), partial(Explodes, 4, 4)])
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 1, first .*: lower optimizer\.learning_rate"):
        train(settings_to_train("1f1b", 2, 2, 4, 3), model, vector_data(4))


@dataclasses.dataclass(frozen=True)
class LossOnly:
    """An infinite loss with finite gradients."""

    def __call__(self, outputs, targets):
        return outputs.sum() + math.inf

    def weight(self, targets):
        return len(targets)


def test_a_loss_that_is_not_finite_ends_the_run():
    model = chain([partial(nn.Linear, 4, 4)] * 2, loss=LossOnly())
    with pytest.raises(NonFiniteError, match="the loss is inf at step 1"):
        train(settings_to_train("1f1b", 2, 2, 4, 3), model, vector_data(4))


# What is reported


def test_what_a_step_reports():
    settings = settings_to_train("1f1b", 2, 4, 8, 5, log_every=2)
    run = train(settings, small_gpt(), text_data(8))
    messages = run.of(StepMetrics)
    assert [message.step for message in messages] == [2, 4, 5]
    for message in messages:
        assert message.samples_per_second == pytest.approx(8 / message.step_seconds)
        assert message.tokens_per_second == pytest.approx(8 * 8 / message.step_seconds)
        assert 0 < message.bubble_measured < 1
    assert messages[0].learning_rate == pytest.approx(2e-3), "the second of three warmup steps"


def test_images_have_no_tokens():
    run = train(settings_to_train("1f1b", 2, 2, 4, 1), linears(2), vector_data(4))
    assert run.of(StepMetrics)[0].tokens_per_second is None


def test_batches_are_loaded_by_those_who_need_them_alone():
    """A middle rank is given no data at all; its batch holds neither inputs nor targets."""
    run = prepare(settings_to_train("1f1b", 3, 2, 4, 1), linears(3), vector_data(4))
    loads = {}
    for rank in run.ranks:
        run.trainer.ranks.ranks = (rank,)
        batch = run.trainer._batch(0)
        loads[rank.rank] = (batch.inputs is not None, batch.targets is not None)
    assert loads == {0: (True, False), 1: (False, False), 2: (False, True)}
