from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pipeline.engine import costly
from pipeline.engine.activations import ActivationMeter
from pipeline.engine.costly import CostlyOutputs


def twice(function, *inputs: Tensor, hold=None) -> tuple[Tensor, Tensor, CostlyOutputs]:
    """What `function` gives in F, and in R."""
    outputs = CostlyOutputs(hold)
    with outputs.keeping():
        first = function(*inputs)
    first = first.clone()
    with outputs.handing_back():
        second = function(*inputs)
    return first, second, outputs


def test_a_product_is_not_computed_again():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    outputs = CostlyOutputs()
    with outputs.keeping():
        first = functional.linear(x, weight)
    weight.zero_()
    with outputs.handing_back():
        second = functional.linear(x, weight)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 6),
        nn.Sequential(nn.Linear(6, 6, bias=False), nn.GELU(), nn.Linear(6, 6)),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    ],
)
def test_a_recomputation_takes_no_products(layer):
    x = torch.randn(2, 3, 6, requires_grad=True)
    outputs = CostlyOutputs()
    with outputs.keeping():
        layer(x)
    with FlopCounterMode(display=False) as counter, outputs.handing_back():
        layer(x)
    assert counter.get_total_flops() == 0


def test_a_recomputation_takes_no_convolutions():
    layer, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 9, 9)
    outputs = CostlyOutputs()
    with outputs.keeping():
        layer(x)
    with FlopCounterMode(display=False) as counter, outputs.handing_back():
        layer(x)
    assert counter.get_total_flops() == 0


def test_gradients_flow_through_what_is_handed_back():
    x, layer = torch.randn(2, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    expected = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    outputs = CostlyOutputs()
    with outputs.keeping():
        layer(x)
    with outputs.handing_back():
        total = layer(x).sum()
    found = torch.autograd.grad(total, list(layer.parameters()))
    assert all(map(torch.equal, found, expected))


def test_what_is_overwritten_later_is_kept_as_it_was():
    """A ReLU in place would do no harm twice, but a sum would."""
    x, weight = torch.randn(3, 4), torch.randn(4, 4)

    def function(x):
        y = functional.linear(x, weight)
        y.view(-1)[0:2].add_(1)
        return y.mul_(y)

    first, second, _ = twice(function, x)
    assert torch.equal(first, second)


def test_an_output_that_drew_random_numbers_leaves_the_generator_where_it_was(monkeypatch):
    """As attention with dropout does on a GPU: what is drawn after it must be the same in R, which doesn't draw it."""
    monkeypatch.setattr(costly, "COSTLY", costly.COSTLY | {torch.ops.aten.native_dropout})

    def function(x):
        torch.manual_seed(3)
        return torch.ops.aten.native_dropout(x, 0.5, True)[0] + torch.rand_like(x)

    first, second, _ = twice(function, torch.ones(50))
    assert torch.equal(first, second)


def test_outputs_are_counted_until_they_are_handed_back():
    meter, x, weight = ActivationMeter([]), torch.randn(3, 4), torch.randn(5, 4)
    outputs = CostlyOutputs(meter.hold)
    with outputs.keeping():
        functional.linear(x, weight).relu()
    assert meter.peak_bytes == 3 * 5 * 4
    with outputs.handing_back():
        functional.linear(x, weight)
    later = meter.hold(torch.zeros(16))
    assert meter.peak_bytes == 64, "the product counts no more"
    assert later is not None


@pytest.mark.parametrize("now", [torch.mm, torch.bmm])
def test_a_layer_that_does_something_else_in_r_is_named(now):
    outputs, x = CostlyOutputs(), torch.ones(2, 2)
    with outputs.keeping():
        functional.linear(x, x, x[0])
    operands = (x, x) if now is torch.mm else (x[None], x[None])
    reason = r"computes aten.b?mm.default where the forward computed aten.addmm.default"
    with pytest.raises(RuntimeError, match=reason), outputs.handing_back():
        now(*operands)


def test_a_layer_that_does_more_in_r_is_named():
    reason = "where the forward computed none: a layer must do the same both times"
    with pytest.raises(RuntimeError, match=reason), CostlyOutputs().handing_back():
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
