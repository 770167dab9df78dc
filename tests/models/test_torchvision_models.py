"""torchvision's models as layers: its names, its starting weights and, to the bit, its outputs."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torchvision import models as torchvision_models

from models.torchvision_models import torchvision_model
from tests.models.whole import initialized, whole_state

CASES = {"vgg11": 32, "vgg11_bn": 32, "vit_b_16": 32, "convnext_tiny": 32, "resnext50_32x4d": 32}


@pytest.mark.parametrize(("name", "size"), CASES.items())
def test_weights_and_outputs_are_torchvisions(name: str, size: int) -> None:
    sizes = {"image_size": size} if name.startswith("vit") else {}
    torch.manual_seed(7)
    reference = getattr(torchvision_models, name)(num_classes=10, **sizes)
    model = torchvision_model(architecture=name, classes=10, image_size=size, seed=7)
    modules = initialized(model, torch.float32)
    state, expected = whole_state(model, modules), reference.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    layers = nn.Sequential(*modules)
    for training in (True, False):
        outputs = []
        for module in (reference, layers):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(module.train(training)(images))
        assert torch.equal(*outputs)


def test_layer_names() -> None:
    def names(architecture: str) -> list[str]:
        return [layer.name for layer in torchvision_model(architecture=architecture, classes=2).layers]

    convolutions = [f"features.{index}" for index in (0, 3, 6, 8, 11, 13, 16, 18)]
    assert names("vgg11") == [*convolutions, "classifier.0", "classifier.3", "classifier.6"]
    assert names("vit_b_16") == ["patches", *(f"encoder.layers.encoder_layer_{i}" for i in range(12)), "head"]
    assert names("wide_resnet50_2")[:4] == ["stem", "layer1.0", "layer1.1", "layer1.2"]
    assert names("convnext_tiny")[:5] == ["features.0", *(f"features.1.{i}" for i in range(3)), "features.2.0"]


def test_building_a_layer_draws_nothing_and_survives_pickling() -> None:
    before = torch.get_rng_state()
    model = pickle.loads(pickle.dumps(torchvision_model(architecture="vgg11_bn", classes=2)))
    with torch.device("meta"):
        outputs = nn.Sequential(*(layer.build() for layer in model.layers))(torch.zeros(2, 3, 32, 32))
    assert outputs.shape == (2, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "vgg12"}, r"no model.architecture=vgg12: use one of .*convnext_tiny.*vit_b_16"),
        ({"classes": 0}, "vgg11 needs a positive number of classes, got 0: use 1 or more"),
        ({"architecture": "vit_b_16", "image_size": 30}, "model.image_size is 30: use 32"),
        ({"architecture": "vit_b_16", "image_size": 4}, "model.image_size is 4: use 16"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torchvision_model(**({"architecture": "vgg11", "classes": 2} | change))  # type: ignore[arg-type]


def test_unknown_parameter_and_images_of_another_size_are_refused() -> None:
    model = torchvision_model(architecture="vit_b_16", classes=2, image_size=32)
    with pytest.raises(ValueError, match=r"has no parameter or buffer 'fc.weight': use a name such as 'class_token'"):
        model.initialize("fc.weight", torch.zeros(3), torch.Generator())
    with torch.device("meta"), pytest.raises(ValueError, match=r"images of 48 x 64 .*: use model.image_size=48"):
        model.layers[0].build()(torch.zeros(1, 3, 48, 64))
