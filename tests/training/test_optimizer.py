from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine.stage import Stage
from pipeline.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from pipeline.training.settings import OptimizerSettings
from tests.engine.harness import assert_close, placement
from tests.engine.samples import small_gpt


def decayed(model):
    """The names of the parameters that are decayed, and of those that are not."""
    stage = Stage(0, model.layers, model, placement(), last=True)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    optimizer = build_optimizer(OptimizerSettings(weight_decay=0.1), [p for _, p in stage.named_parameters()])
    groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert set().union(*groups.values()) == set(names.values())
    return groups[0.1], groups[0.0]


def test_biases_and_norms_are_not_decayed():
    for model in (small_gpt(), resnet(depth=18, classes=10)):
        yes, no = decayed(model)
        assert all(name.endswith("weight") and "norm" not in name and ".bn" not in name for name in yes)
        assert all(name.endswith("bias") or "norm" in name or "bn" in name or "downsample.1" in name for name in no)
        assert {"embedding.tokens.weight", "head.projection.weight"} <= yes or "fc.weight" in yes


def test_adamw_and_sgd_take_their_settings():
    parameters = [nn.Parameter(torch.ones(2, 2))]
    adamw = build_optimizer(OptimizerSettings(betas=[0.5, 0.6], weight_decay=0.2), parameters)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["betas"] == (0.5, 0.6)
    sgd = build_optimizer(OptimizerSettings("sgd", momentum=0.3, weight_decay=0.2), parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["momentum"] == 0.3
    assert [group["weight_decay"] for group in (*adamw.param_groups, *sgd.param_groups)] == [0.2, 0.2]


def test_a_rank_may_have_nothing_to_train():
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert build_optimizer(OptimizerSettings(), []) is None
    assert build_optimizer(OptimizerSettings(), [frozen]) is None


def test_frozen_parameters_stay():
    frozen, free = nn.Parameter(torch.ones(2, 2), requires_grad=False), nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(OptimizerSettings(weight_decay=0.5), [frozen, free])
    free.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2, 2))
    assert not torch.equal(free, torch.ones(2, 2))


def test_warmup_rises_to_the_highest_and_cosine_falls():
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=4, final_ratio=0.1)
    rates = [learning_rate(settings, step, 13) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.2), "the last step's is the final ratio"


def test_constant_stays_after_the_warmup():
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=2, decay="constant")
    assert [learning_rate(settings, step, 5) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup", [0, 1, 3, 9])
def test_short_runs_and_long_warmups(warmup):
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=warmup)
    rates = [learning_rate(settings, step, 3) for step in range(3)]
    assert all(0 < rate <= 1 for rate in rates)


def test_a_rate_reaches_every_group():
    optimizer = build_optimizer(OptimizerSettings(), [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters after ten steps with drawn gradients."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(10):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_fused_step_is_the_plain_one(name, dtype):
    def parameters():
        draw = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((33, 17), (5,), (2, 3, 3, 3))]

    ours, theirs = parameters(), parameters()
    fused = build_optimizer(OptimizerSettings(name), ours)
    plain = build_optimizer(OptimizerSettings(name), theirs)
    for group in plain.param_groups:
        group["fused"], group["foreach"] = False, False
    assert [group["fused"] for group in fused.param_groups] == [True, True]
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-6
    for found, expected in zip(trained(fused, ours), trained(plain, theirs), strict=True):
        assert_close("parameter", found, expected, tolerance)


def test_where_no_fused_step_is_torch_chooses():
    optimizer = build_optimizer(OptimizerSettings(), [nn.Parameter(torch.ones(2, 2, device="meta"))])
    assert optimizer.param_groups[0]["fused"] is None
