"""Floating-point operations against closed forms, and against what torchvision publishes of its models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from models.model import Model
from models.resnet import resnet
from models.torchvision_models import torchvision_model
from pipeline.engine.flops import TRAINING, forward_flops
from tests.engine.samples import chain, pixels, small_gpt, text, unet


def test_a_gpt_takes_six_a_weight_and_token_and_its_attention() -> None:
    layers, width, vocabulary, batch, time = 6, 16, 32, 4, 8
    found = forward_flops(small_gpt(), text(batch)[0])
    assert found is not None
    weights, tokens = layers * 12 * width**2 + vocabulary * width, batch * time
    attention = 12 * layers * width * time  # scores and mixing, 2 products of 2 width time, thrice
    assert TRAINING * sum(found) == tokens * (6 * weights + attention)
    assert found[0] == 0
    assert found[1] == found[layers]
    assert found[-1] == 2 * tokens * vocabulary * width


@pytest.mark.parametrize(
    ("build", "published"),
    [
        (partial(resnet, depth=50, classes=1000), 4.09),
        (partial(torchvision_model, architecture="vgg16", classes=1000), 15.47),
        (partial(torchvision_model, architecture="vit_b_16", classes=1000), 17.56),
    ],
    ids=["resnet50", "vgg16", "vit_b_16"],
)
def test_torchvisions_published_numbers(build: partial[Model], published: float) -> None:
    """Billions of multiplications with their additions, for an image of 224 x 224."""
    found = forward_flops(build(), torch.zeros(2, 3, 224, 224, dtype=torch.float64))
    assert found is not None
    assert sum(found) / 2 / 2e9 == pytest.approx(published, abs=0.005)


class ByNumbers(nn.Linear):
    """What it does depends on its input's numbers."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) if value.sum() > 0 else value


def test_what_depends_on_numbers_is_not_told() -> None:
    assert forward_flops(chain([partial(ByNumbers, 4, 4)]), torch.zeros(2, 4)) is None


def test_several_tensors_go_through() -> None:
    class Halves(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            left, right = value.chunk(2, -1)
            return left, right

    class Product(nn.Module):
        def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
            return halves[0] @ halves[1].T

    assert forward_flops(chain([Halves, Product]), torch.zeros(3, 8)) == (0, 2 * 3 * 3 * 4)


def test_named_values_go_past_layers() -> None:
    found = forward_flops(unet(), pixels(2)[0])
    assert found is not None
    assert all(found)


def test_nothing_of_the_run_is_touched() -> None:
    inputs = torch.ones(4, 6, dtype=torch.float64)
    before = torch.get_rng_state()
    layers = [partial(nn.Linear, 6, 6), nn.Dropout, partial(nn.BatchNorm1d, 6, momentum=None)]
    assert forward_flops(chain(layers), inputs) == (2 * 4 * 36, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
