"""A pass in each of its forms, against the whole stage at once."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.passes import Pass
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Stage
from pipeline.engine.weight_gradient import WeightGradients
from tests.engine.harness import placement
from tests.engine.samples import chain, images, linears, small_gpt, text, vectors
from tests.engine.test_edges import Complex, Real, Turned

PARTS = {
    "everything": Recomputed(),
    "every 2nd layer": Recomputed(2),
    "every 3rd layer": Recomputed(3),
    "around costly": Recomputed(keeps_costly=True),
    "every 2nd layer around costly": Recomputed(2, keeps_costly=True),
}
TENSOR = 3 * 4 * 8
"""Bytes of three samples of `vectors` in float64."""


def staged(model, part=None, *, last=True):
    stage = Stage(0, model.layers, model, placement(), last=last, recomputed=part)
    stage.train(True)
    return stage


def run_of(stage, targets=None):
    weight = 1 if targets is None else stage.loss.weight(targets)
    return partial(stage.forward, targets=targets, weight=weight, step=1, microbatch=2)


def gradients(stage, inputs, targets, *, recomputed, split=False):
    """Loss, gradient of the input and of every parameter of one pass."""
    if split:
        stage.split_backward()
    leaf = inputs.double().requires_grad_() if inputs.is_floating_point() else inputs
    weights = WeightGradients() if split else None
    passed, run = Pass(stage, leaf, recomputed=recomputed, weights=weights), run_of(stage, targets)
    loss = passed.forward(run)
    if recomputed:
        passed.recompute(run)
    (back,) = passed.backward([torch.ones_like(loss)])
    if weights is not None:
        weights.apply()
    return loss, back, {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_gives_the_gradients_of_the_whole_with_the_same_dropout(part, split):
    model = small_gpt(dropout=0.4, tie=False)
    expected = gradients(staged(model), *text(3), recomputed=False)
    assert_same(gradients(staged(model, PARTS[part]), *text(3), recomputed=True, split=split), expected)


class Convolved(nn.Sequential):
    """As a ResNet's: what BatchNorm gives is changed in place."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))


class Pooled(nn.Module):
    def forward(self, maps):
        return maps.flatten(2).sum(2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_convolutions_and_batch_norm(part, split):
    model, batch = chain([Convolved, Convolved, Convolved, Pooled]), (images(3, 8)[0], text(3)[1][:, 0] % 3)
    plain, stage = staged(model), staged(model, PARTS[part])
    expected = gradients(plain, *batch, recomputed=False)
    assert_same(gradients(stage, *batch, recomputed=True, split=split), expected)
    for (name, found), (_, tensor) in zip(stage.named_tensors(), plain.named_tensors(), strict=True):
        assert torch.equal(found, tensor), f"{name}: statistics count a batch once"


@pytest.mark.parametrize("part", PARTS)
def test_frozen_layers(part):
    """The first two: nothing goes back beyond the third; a frozen one between others passes the gradient on."""
    model, (inputs, targets) = linears(6), vectors(3)
    results = []
    for given in (None, PARTS[part]):
        stage = staged(model, given)
        for frozen in (0, 1, 4):
            stage.modules[frozen].requires_grad_(False)
        leaf = inputs.double()  # no gradient wanted, as of a first stage's input
        passed, run = Pass(stage, leaf, recomputed=given is not None), run_of(stage, targets)
        loss = passed.forward(run)
        passed.recompute(run)
        (back,) = passed.backward([torch.ones_like(loss)])
        results.append((loss, back, {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}))
    expected, found = results
    assert set(expected[2]) == {f"{layer}.{kind}" for layer in (2, 3, 5) for kind in ("weight", "bias")}
    assert_same(found, expected)


def test_a_stage_with_nothing_to_train():
    stage = staged(linears(3), Recomputed(2))
    for module in stage.modules:
        module.requires_grad_(False)
    inputs, targets = vectors(3)
    passed, run = Pass(stage, inputs.double(), recomputed=True), run_of(stage, targets)
    loss = passed.forward(run)
    passed.recompute(run)
    assert passed.backward([torch.ones_like(loss)]) == [None]


class Stops(nn.Module):
    """Passes no gradient on."""

    def forward(self, x):
        return x.detach() * 2


@pytest.mark.parametrize("part", PARTS)
def test_a_layer_that_stops_the_gradient(part):
    model = chain([partial(nn.Linear, 4, 4), Stops, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4)])
    expected = gradients(staged(model), *vectors(3), recomputed=False)
    assert set(expected[2]) == {"2.weight", "2.bias", "3.weight", "3.bias"}
    assert_same(gradients(staged(model, PARTS[part]), *vectors(3), recomputed=True), expected)


class Overwrites(nn.Module):
    """Changes its own product in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).add_(1).relu_()


@pytest.mark.parametrize("part", PARTS)
def test_products_that_are_changed_in_place(part):
    model = chain([Overwrites] * 4)
    expected = gradients(staged(model), *vectors(3), recomputed=False)
    assert_same(gradients(staged(model, PARTS[part]), *vectors(3), recomputed=True), expected)


@pytest.mark.parametrize("part", PARTS)
def test_complex_numbers_between_recomputed_layers(part):
    model = chain([partial(Complex, 4, 4), Turned, partial(Real, 4, 4), Overwrites])
    expected = gradients(staged(model), *vectors(3), recomputed=False)
    assert_same(gradients(staged(model, PARTS[part]), *vectors(3), recomputed=True), expected)


def held(part, model, *, last=False):
    """Bytes after F, and at most until the backward's end."""
    stage = staged(model, part, last=last)
    meter = ActivationMeter(tensor for _, tensor in stage.named_tensors())
    inputs, run = vectors(3)[0].double().requires_grad_(), run_of(stage)
    passed = Pass(stage, inputs, recomputed=part is not None, meter=meter)
    output = passed.forward(run)
    after_forward = meter.peak_bytes
    passed.recompute(run)
    peak = meter.peak_bytes
    passed.backward([torch.ones_like(output)])
    return after_forward, peak, meter


class Normed(nn.Module):
    """A product and something cheap: saves its input, the product, and what Tanh gives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin().tanh()


def test_what_each_part_keeps_from_forward_to_recomputation():
    """A stage of four layers, each of which saves its input, its product and its output: the input of the next."""
    model = chain([Normed] * 4)
    each = 2 * TENSOR  # a layer's product and output; the input is the output before
    assert held(None, model)[:2] == (TENSOR + 4 * each, TENSOR + 4 * each)
    assert held(Recomputed(), model)[:2] == (TENSOR, TENSOR + 4 * each)
    # the stage's input; layers 1 and 3 whole, and their inputs, which the layers before save as their outputs, too
    assert held(Recomputed(2), model)[:2] == (TENSOR + 2 * each + 2 * TENSOR, TENSOR + 4 * each + 2 * TENSOR)
    assert held(Recomputed(keeps_costly=True), model)[:2] == (TENSOR + 4 * TENSOR, TENSOR + 4 * each)


@pytest.mark.parametrize("part", [None, *PARTS.values()])
def test_a_pass_leaves_nothing_behind(part):
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        *_, meter = held(part, small_chain())
        assert meter.bytes == 0
    finally:
        gc.enable()


def small_chain():
    return chain([Normed] * 5)


class Remembers(nn.Linear):
    """Keeps a weak reference to each of its outputs."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = []

    def forward(self, x):
        output = super().forward(x).tanh()
        self.seen.append(weakref.ref(output))
        return output


def test_a_recomputed_layers_output_is_gone_after_the_forward():
    stage = staged(chain([Remembers] * 3), Recomputed(), last=False)
    passed = Pass(stage, vectors(3)[0].double().requires_grad_(), recomputed=True)
    passed.forward(run_of(stage))
    assert [reference() for module in stage.modules for reference in module.seen] == [None] * 3
