from __future__ import annotations

from functools import partial

import torch
import torchvision
from torch import nn

from models.resnet import resnet
from tests.engine.harness import build_ranks, microbatches_of, plan_for, settings_for, step
from tests.engine.samples import chain, images, linears, vectors


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
    first, _ = ranks_of(chain([nn.Identity, partial(nn.Linear, 4, 4)]), vectors(4)[0])
    assert first.optimizer is None
    first.step(0.1)
    first.clear_gradients()
