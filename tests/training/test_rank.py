from __future__ import annotations

from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from models.resnet import resnet
from pipeline.training.gradients import global_norm, sum_tied_gradients
from pipeline.training.group import LocalGroup
from tests.engine.harness import build_ranks, microbatches_of, plain_loop, plan_for, plan_with, settings_for, step
from tests.engine.samples import chain, images, linears, small_gpt, text, vectors
from tests.engine.test_executor import V_SHAPE


def ranks_of(model, inputs, schedule="1f1b", pp=2):
    return build_ranks(plan_for(settings_for(schedule, pp, 2, 4), model, inputs), model)


def test_who_holds_the_ends():
    ranks = ranks_of(linears(6), vectors(4)[0], "interleaved_1f1b", 3)
    assert [rank.holds_first for rank in ranks] == [True, False, False]
    assert [rank.holds_last for rank in ranks] == [False, False, True]
    assert [sorted(rank.stages) for rank in ranks] == [[0, 3], [1, 4], [2, 5]]
    (alone,) = ranks_of(linears(2), vectors(4)[0], pp=1)
    assert alone.holds_first
    assert alone.holds_last


def test_state_dicts_of_trained_ranks_load_into_torchvisions():
    model, (inputs, targets) = resnet(depth=18, classes=10), images(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs, torch.float32)
    ranks = build_ranks(plan, model, dtype=torch.float32)
    step(ranks, microbatches_of(plan, model, inputs, targets))
    for rank in ranks:
        rank.step(0.01)
    first, second = (rank.state_dict() for rank in ranks)
    assert not first.keys() & second.keys()
    whole = torchvision.models.resnet18(num_classes=10)
    whole.load_state_dict({**first, **second}, strict=True)
    value = inputs
    for rank in ranks:
        for stage in rank.stages.values():
            for module in stage.modules:
                value = module.eval()(value)
    assert torch.allclose(whole.eval()(inputs), value, atol=1e-5)


LINEAR = partial(nn.Linear, 4, 4, bias=False)


@pytest.mark.parametrize("kind", ["apart", "together", "three copies"])
def test_the_norm_counts_a_tied_parameter_once(kind):
    """Against one whole model, in which a tied pair is one parameter."""
    if kind == "three copies":
        model, (inputs, targets) = (
            chain([LINEAR] * 4, tied={"2.weight": "0.weight", "3.weight": "0.weight"}),
            vectors(4),
        )
    else:
        model, (inputs, targets) = small_gpt(), text(4)
    plan = (
        plan_with(V_SHAPE, model, inputs)
        if kind == "together"
        else plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)
    )
    ranks = build_ranks(plan, model)
    step(ranks, microbatches_of(plan, model, inputs, targets))
    group = LocalGroup(2)
    sum_tied_gradients({rank.rank: rank.parameters for rank in ranks}, plan.tied, plan.tied_ranks(), group)
    found = global_norm({rank.rank: rank.counted_gradients(plan.tied_ranks()) for rank in ranks}, group)
    expected = plain_loop(model, inputs, targets).gradients
    once = [gradient for name, gradient in expected.items() if name not in model.tied]
    assert found == pytest.approx(float(nn.utils.get_total_norm(once)), rel=1e-12)


def test_a_gradient_is_scaled_once_though_it_has_two_names():
    model, (inputs, targets) = small_gpt(), text(4)
    (rank,) = ranks_of(model, inputs, pp=1)
    step([rank], microbatches_of(rank.plan, model, inputs, targets))
    assert len(rank.gradients()) == len(rank.parameters) - 1
    rank.clear_gradients()
    assert rank.gradients() == []


def test_the_optimizer_moves_what_the_rank_holds():
    model, (inputs, targets) = linears(4), vectors(4)
    ranks = ranks_of(model, inputs)
    before = {name: p.detach().clone() for rank in ranks for name, p in rank.parameters.items()}
    step(ranks, microbatches_of(ranks[0].plan, model, inputs, targets))
    ranks[0].step(0.1)
    assert ranks[0].optimizer.param_groups[0]["lr"] == 0.1
    moved = [not torch.equal(p, before[name]) for name, p in ranks[0].parameters.items()]
    assert all(moved)
    assert all(torch.equal(p, before[name]) for name, p in ranks[1].parameters.items())


def test_a_rank_with_nothing_to_train_steps_all_the_same():
    first, _ = ranks_of(chain([nn.Identity, LINEAR]), vectors(4)[0])
    assert first.optimizer is None
    first.step(0.1)
    first.clear_gradients()
