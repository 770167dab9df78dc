"""What stands at a stage's edge (frozen stages, views, what is unused or changed in place), against the plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pipeline.training.settings import ActivationCheckpointSettings, PartitionSettings
from tests.engine.harness import assert_equal_outcomes, pipelined, plain_loop, settings_for
from tests.engine.samples import chain, sentences, translator, vectors

LINEAR = partial(nn.Linear, 4, 4)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad_(False)


class Spare(nn.Linear):
    """Has a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.spare = nn.Parameter(torch.empty(3))


class View(nn.Module):
    """Gives a view of its input that is not contiguous."""

    def forward(self, x):
        return x.unflatten(1, (2, 2)).mT


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(1)


class Complex(nn.Linear):
    """Gives complex numbers."""

    def forward(self, x):
        x = super().forward(x)
        return torch.complex(x, 2 * x)


class Turned(nn.Module):
    def forward(self, z):
        return z * (1 + 2j)


class Real(nn.Linear):
    def forward(self, z):
        return super().forward(z.real * z.imag)


class Overwritten(nn.Linear):
    """Changes its own product in place, last thing before the edge."""

    def forward(self, x):
        return super().forward(x).mul_(2).tanh_()


EDGES = {
    "a frozen stage at the start": [Frozen, LINEAR, LINEAR, LINEAR],
    "a frozen stage in the middle": [LINEAR, Frozen, LINEAR, LINEAR],
    "a frozen stage at the end": [LINEAR, LINEAR, LINEAR, Frozen],
    "two frozen stages": [LINEAR, Frozen, Frozen, LINEAR],
    "all but one frozen": [Frozen, LINEAR, Frozen, Frozen],
    "no parameters in the middle": [LINEAR, nn.Tanh, nn.Identity, LINEAR],
    "its input as it is": [LINEAR, nn.Identity, nn.Identity, nn.Identity],
    "a view": [LINEAR, View, Flat, LINEAR],
    "a view through an edge": [LINEAR, View, nn.Identity, Flat],
    "complex numbers": [partial(Complex, 4, 4), Turned, partial(Real, 4, 4), LINEAR],
    "an output changed in place": [partial(Overwritten, 4, 4)] * 3 + [LINEAR],
    "an unused parameter": [Spare, Spare, Spare, Spare],
}
SCHEDULES = {"gpipe": 4, "1f1b": 4, "interleaved_1f1b": 2, "zb_h1": 4, "zbv": 2}
"""With the ranks that make four stages, one for each layer."""


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("edge", EDGES)
def test_gradients_are_the_plain_loops(edge, schedule, checkpoint):
    model, (inputs, targets) = chain(EDGES[edge]), vectors(7)
    settings = settings_for(schedule, SCHEDULES[schedule], 4, 7, checkpoint=checkpoint)
    found, expected = pipelined(settings, model, inputs, targets), plain_loop(model, inputs, targets, 4)
    assert_equal_outcomes(found, expected)


@pytest.mark.parametrize("checkpoint", ["never", "always", ActivationCheckpointSettings("selective", every=2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layers", [[4, 0, 0, 5], [1, 0, 7, 1]])
def test_a_stage_without_layers_passes_on_what_comes(layers, schedule, checkpoint):
    """A memory and a mask too."""
    model, batch = translator(), sentences(7)
    manual = PartitionSettings("manual", layers)
    settings = settings_for(schedule, SCHEDULES[schedule], 4, 7, checkpoint=checkpoint, partition=manual)
    assert_equal_outcomes(pipelined(settings, model, *batch), plain_loop(model, *batch, 4))


def test_an_unused_parameter_has_no_gradient():
    """As in one process: None, which an optimizer passes over."""
    model, batch = chain(EDGES["an unused parameter"]), vectors(7)
    found = pipelined(settings_for("1f1b", 4, 4, 7), model, *batch)
    assert set(found.gradients) == {f"{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")}
