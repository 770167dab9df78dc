"""Steps that are not finite: named, and left out or the end."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.compilation import Compiler
from pipeline.training import nonfinite
from pipeline.training.failures import NonFiniteError
from pipeline.training.messages import StepMetrics
from pipeline.training.precision import LossScale
from pipeline.training.settings import OptimizerSettings
from tests.engine.samples import chain, vectors
from tests.training.harness import FP16, Numbers, SmallData, equal_states, prepare, settings_to_train, train

SGD = OptimizerSettings("sgd", learning_rate=0.01, warmup_steps=2)


class Squares(nn.Module):
    """Of large numbers infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square() / 8


class InfiniteBack(nn.Module):
    """The gradient of large numbers is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clamp(-4, 4)
        if out.requires_grad:
            factor = torch.where(x.detach().abs().max() > 1e20, math.inf, 1.0)
            out.register_hook(lambda gradient: gradient * factor)
        return out


class Damped(nn.Linear):
    """Finite for large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-4, 4))


def data_with(bad: dict[int, int], batch_size: int = 6) -> SmallData:
    """One sample of each step in `bad` (from 0) is large."""

    def make(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = vectors(batch_size)
        if step in bad:
            inputs[bad[step]] = 1e25
        return inputs, targets

    return SmallData(Numbers(make), Numbers(make), "vectors", 1)


LINEAR, NORM = partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4, momentum=0.5)
FORWARD = chain([LINEAR, nn.Identity, Squares, LINEAR])
BACKWARD = chain([LINEAR, InfiniteBack, partial(Damped, 4, 4), LINEAR])


def described(model, **more) -> str:
    """The error of a run of four layers on two ranks, whose second step's second microbatch is bad."""
    settings = settings_to_train(more.pop("schedule", "1f1b"), 2, 3, 6, 4, optimizer=SGD, **more)
    with pytest.raises(NonFiniteError) as caught:
        train(settings, model, data_with({1: 3}))
    return str(caught.value)


PLACES = {
    "gpipe": "stage 1, rank 1",
    "1f1b": "stage 1, rank 1",
    "zb_h1": "stage 1, rank 1",
    "interleaved_1f1b": "stage 2, rank 0",
    "dualpipe_v": "stage 2, rank 1",
}


@pytest.mark.parametrize("schedule", PLACES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "selective"])
def test_the_layer_whose_output_is_first_not_finite_is_named(schedule, checkpoint):
    settings = settings_to_train(schedule, 2, 4, 8, 4, optimizer=SGD, checkpoint=checkpoint)
    with pytest.raises(NonFiniteError) as caught:
        train(settings, FORWARD, data_with({1: 3}, 8))
    assert str(caught.value) == (
        f"the loss is nan at step 2, first the output of layer 2 ({PLACES[schedule]}, microbatch 1): lower "
        "optimizer.learning_rate, or leave such steps out with on_nonfinite=skip"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_layer_whose_gradient_is_first_not_finite_is_named(schedule, checkpoint):
    found = described(BACKWARD, schedule=schedule, checkpoint=checkpoint)
    first = "first the gradient of the output of layer 1 (stage 0, rank 0, microbatch 1)"
    assert found.startswith(f"the gradient's norm is inf at step 2, {first}"), found


def test_a_weight_whose_gradient_alone_is_not_finite_is_named():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.scale.requires_grad and torch.is_grad_enabled():
                scale = self.scale * 1
                scale.register_hook(lambda gradient: gradient * math.nan)
                return x * scale
            return x * self.scale

    found = described(chain([LINEAR, Scaled, LINEAR, LINEAR]))
    assert "step 1, first the gradient of 1.scale (layer 1, stage 0, rank 0)" in found


def test_a_loss_that_is_not_finite_though_its_input_is_is_named():
    @dataclasses.dataclass(frozen=True)
    class Infinite:
        def __call__(self, outputs, targets):
            return outputs.square().sum() + math.inf

        def weight(self, targets):
            return len(targets)

    assert "the loss is inf at step 1, first the loss (stage 1, rank 1, microbatch 0)" in described(
        chain([LINEAR] * 4, loss=Infinite())
    )


def test_a_step_that_is_not_logged_is_looked_at_too():
    assert "at step 2, first the output of layer 2 (stage 1, rank 1, microbatch 1)" in described(FORWARD, log_every=100)


def test_compiled_layers_are_watched_too():
    settings = settings_to_train("1f1b", 2, 3, 6, 4, optimizer=SGD)
    run = prepare(settings, FORWARD, data_with({1: 3}), compiler=Compiler("aot_eager"))
    with pytest.raises(NonFiniteError, match=r"first the output of layer 2 \(stage 1, rank 1, microbatch 1\)"):
        run.trainer.train()


def test_a_norm_that_overflows_by_itself_is_told_as_such():
    @dataclasses.dataclass(frozen=True)
    class Steep:
        def __call__(self, outputs, targets):
            return outputs.sum() * 1e25

        def weight(self, targets):
            return 1

    found = described(
        chain([LINEAR] * 4, loss=Steep()), precision=dataclasses.replace(FP16, autocast=None, loss_scale=1)
    )
    assert "the gradient's norm is inf at step 1, though every layer's output and gradient is finite" in found


# Skipping


def optimizer_states(run):
    return [
        {key: value.clone() for key, value in rank.optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for rank in run.ranks
        for parameter in rank.parameters.values()
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("schedule", "checkpoint", "batch_norm"),
    [
        ("1f1b", "never", "microbatch"),
        ("zb_h1", "never", "deferred"),
        ("gpipe", "always", "microbatch"),
        ("interleaved_1f1b", "selective", "deferred"),
    ],
)
def test_a_skipped_step_leaves_all_as_it_was(schedule, checkpoint, batch_norm, optimizer, monkeypatch, caplog):
    model = chain([Squares, NORM, LINEAR, LINEAR, NORM])
    chosen = dataclasses.replace(SGD, name=optimizer)
    settings = settings_to_train(
        schedule, 2, 3, 6, 5, optimizer=chosen, checkpoint=checkpoint, on_nonfinite="skip", batch_norm=batch_norm
    )
    run = prepare(settings, model, data_with({1: 3, 2: 0}))
    states, moments, report = [], [], run.trainer._report

    def note(message) -> None:
        if isinstance(message, StepMetrics):
            states.append(run.state())
            moments.append(optimizer_states(run))
        report(message)

    monkeypatch.setattr(run.trainer, "_report", note)
    with caplog.at_level(logging.WARNING):
        run.trainer.train()
    steps = run.of(StepMetrics)
    assert [step.skipped for step in steps] == [False, True, True, False, False]
    assert [step.skipped_steps for step in steps] == [0, 1, 2, 2, 2]
    assert run.finished.skipped_steps == 2
    assert equal_states(states[0], states[1])
    assert equal_states(states[0], states[2])
    assert not equal_states(states[0], states[3])
    for first, second in zip(moments[0], moments[2], strict=True):
        assert equal_states(first, second)
    assert all(tensor.isfinite().all() for tensor in run.state().values())
    (warning,) = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert warning.startswith("the loss is"), "said once for steps in a row"
    assert warning.endswith(": this step is skipped")


def test_skipping_without_an_end_ends_the_run(monkeypatch):
    monkeypatch.setattr(nonfinite, "_MOST_IN_A_ROW", 3)
    settings = settings_to_train("1f1b", 2, 3, 6, 9, optimizer=SGD, on_nonfinite="skip")
    with pytest.raises(NonFiniteError, match=r"at step 6, .* \(3 steps in a row were skipped\)$"):
        train(settings, FORWARD, data_with(dict.fromkeys((0, 1, 3, 4, 5), 3)))


def test_an_overflow_leaves_statistics_as_they_were():
    """fp16's skipped steps too."""
    settings = settings_to_train("1f1b", 2, 3, 6, 1, precision=dataclasses.replace(FP16, loss_scale=2.0**60))
    run = prepare(settings, chain([LINEAR, NORM, LINEAR, LINEAR]), data_with({}))
    before = run.state()
    run.trainer.train()
    assert run.of(StepMetrics)[0].skipped
    assert equal_states(run.state(), before)


def test_buffers_are_kept_only_where_a_step_may_be_skipped(monkeypatch):
    for on_nonfinite, kept in (("stop", False), ("skip", True)):
        run = train(
            settings_to_train("1f1b", 2, 3, 6, 2, on_nonfinite=on_nonfinite), chain([NORM, LINEAR]), data_with({})
        )
        assert bool(run.ranks[0]._kept) is kept


def test_a_scale_does_not_fall_below_1():
    scale = LossScale.start(3.0)
    for expected in (1.5, 1.0, 1.0):
        scale.update(overflow=True)
        assert scale.value == expected
    assert not scale.can_shrink
