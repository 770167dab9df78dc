"""What the ranks of a process do with a batch together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pipeline.training.group import LocalGroup
from pipeline.training.ranks import Ranks
from tests.engine.harness import build_ranks, plain_loop, plan_for, plan_with, settings_for
from tests.engine.samples import chain, small_gpt, text, vectors
from tests.engine.test_executor import V_SHAPE

LINEAR = partial(nn.Linear, 4, 4, bias=False)


def ranks_of(model, plan):
    return Ranks(plan, build_ranks(plan, model), model.loss, LocalGroup(plan.schedule.pp))


def tied_gpt(schedule=None):
    model, (inputs, targets) = small_gpt(), text(4)
    if schedule is None:
        return model, ranks_of(model, plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)), inputs, targets
    return model, ranks_of(model, plan_with(schedule, model, inputs)), inputs, targets


def test_a_batch_is_cut_and_its_loss_is_every_samples():
    model, (inputs, targets) = chain([LINEAR] * 2), vectors(7)
    ranks = ranks_of(model, plan_for(settings_for("1f1b", 2, 4, 7), model, inputs))
    batch = ranks.cut(3, inputs, targets, loss_scale=2.0)
    assert (batch.step, batch.sizes, batch.weight, batch.loss_scale) == (3, (2, 2, 2, 1), 7, 2.0)
    assert torch.equal(torch.cat(batch.inputs), inputs)
    assert torch.equal(torch.cat(batch.targets), targets)
    expected = plain_loop(model, inputs, targets).loss.item()
    assert ranks.mean_loss(ranks.train(batch)) == pytest.approx(expected, rel=1e-12)
    assert ranks.mean_loss(ranks.evaluate(batch)) == pytest.approx(expected, rel=1e-12)


def test_a_batch_without_its_ends_has_neither_tensors_nor_a_weight_of_its_own():
    model, (inputs, _) = chain([LINEAR] * 2), vectors(4)
    batch = ranks_of(model, plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)).cut(0, None, None)
    assert (batch.inputs, batch.targets, batch.weight, batch.loss_scale) == (None, None, 1.0, 1.0)


@pytest.mark.parametrize("kind", ["apart", "together", "three copies"])
def test_the_norm_counts_a_tied_parameter_once(kind):
    """Against one whole model, in which a tied pair is one parameter."""
    if kind == "three copies":
        model = chain([LINEAR] * 4, tied={"2.weight": "0.weight", "3.weight": "0.weight"})
        inputs, targets = vectors(4)
        ranks = ranks_of(model, plan_for(settings_for("1f1b", 2, 2, 4), model, inputs))
    else:
        model, ranks, inputs, targets = tied_gpt(V_SHAPE if kind == "together" else None)
    ranks.train(ranks.cut(0, inputs, targets))
    expected = plain_loop(model, inputs, targets).gradients
    once = [gradient for name, gradient in expected.items() if name not in model.tied]
    assert ranks.gradient_norm() == pytest.approx(float(nn.utils.get_total_norm(once)), rel=1e-12)


@pytest.mark.parametrize("schedule", [None, V_SHAPE])
def test_two_steps_add_up_to_twice_the_gradient(schedule):
    """Of tied parameters too, whose sum over the ranks must not be summed once more."""
    _, ranks, inputs, targets = tied_gpt(schedule)
    batch = ranks.cut(0, inputs, targets)
    ranks.train(batch)
    once = [parameter.grad.clone() for parameter in ranks.parameters()]
    ranks.train(batch)
    for parameter, gradient in zip(ranks.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 2 * gradient, rtol=1e-12, atol=1e-15)


def test_a_gradient_is_scaled_and_dropped_once_though_it_has_two_names():
    _, ranks, inputs, targets = tied_gpt(V_SHAPE)
    names = sum(len(rank.parameters) for rank in ranks)
    assert len(ranks.parameters()) == names - 1
    ranks.train(ranks.cut(0, inputs, targets))
    before = [parameter.grad.clone() for parameter in ranks.parameters()]
    ranks.scale_gradients(0.5)
    after = [parameter.grad for parameter in ranks.parameters()]
    assert all(torch.equal(gradient, 0.5 * old) for gradient, old in zip(after, before, strict=True))
    ranks.clear_gradients()
    assert all(parameter.grad is None for parameter in ranks.parameters())
