"""The ResNets against torchvision's: names, outputs, gradients, buffers and initialization."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import models as torchvision_models

from models.resnet import ARCHITECTURES, resnet
from tests.models.whole import initialized, whole_state


@pytest.mark.parametrize("depth", [34, 50])
def test_layers_in_sequence_equal_torchvision(depth: int) -> None:
    model = resnet(depth=depth, classes=7)
    modules = initialized(model, torch.float64)
    reference = getattr(torchvision_models, f"resnet{depth}")(num_classes=7).double()
    reference.load_state_dict(whole_state(model, modules), strict=True)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 6, 3, 3])
    outputs, expected = nn.Sequential(*modules)(images), reference(images)
    assert torch.equal(outputs, expected)
    model.loss(outputs, targets).backward()
    nn.functional.cross_entropy(expected, targets, reduction="sum").backward()
    gradients = {
        layer.prefix + name: parameter.grad
        for layer, module in zip(model.layers, modules, strict=True)
        for name, parameter in module.named_parameters()
    }
    for name, parameter in reference.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
    state = whole_state(model, modules)
    for name, buffer in reference.named_buffers():
        assert torch.equal(state[name], buffer), name


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_names_and_shapes_merge_into_torchvision(depth: int) -> None:
    model = resnet(depth=depth, classes=1000)
    with torch.device("meta"):
        state = whole_state(model, [layer.build() for layer in model.layers])
        reference = getattr(torchvision_models, f"resnet{depth}")()
    assert list(state) == list(reference.state_dict())
    reference.load_state_dict(state, strict=True, assign=True)  # refuses any other shape


def test_layer_names() -> None:
    names = [layer.name for layer in resnet(depth=18, classes=2).layers]
    blocks = [f"layer{group}.{index}" for group in (1, 2, 3, 4) for index in (0, 1)]
    assert names == ["stem", *blocks, "head"]
    assert [len(resnet(depth=depth, classes=2).layers) for depth in (50, 101, 152)] == [18, 35, 52]


@pytest.mark.parametrize("context", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_building_draws_nothing(context) -> None:
    before = torch.get_rng_state()
    with context:
        modules = [layer.build() for layer in resnet(depth=50, classes=36).layers]
        outputs = nn.Sequential(*modules)(torch.zeros(2, 3, 64, 64))
    assert outputs.shape == (2, 36)
    assert torch.equal(torch.get_rng_state(), before)


def test_initialization_follows_torchvision() -> None:
    model = resnet(depth=50, classes=100)
    state = whole_state(model, initialized(model, torch.float32))
    torch.manual_seed(0)
    reference = torchvision_models.resnet50(num_classes=100).state_dict()
    for name, tensor in state.items():
        expected = reference[name]
        if tensor.numel() > 1000 and "bn" not in name and "downsample.1" not in name:
            # Two samples of one distribution: deviations agree to a few parts in sqrt(2 n).
            assert tensor.std().item() == pytest.approx(expected.std().item(), rel=8 / math.sqrt(tensor.numel())), name
            assert tensor.mean().item() == pytest.approx(0, abs=5 * expected.std().item() / math.sqrt(tensor.numel()))
        elif name != "fc.bias":
            assert torch.equal(tensor, expected), name
    for name in ("fc.weight", "fc.bias"):
        bound = 1 / math.sqrt(2048)
        assert 0.9 * bound < state[name].abs().max().item() <= bound


@pytest.mark.parametrize("name", ["bn1.running_median", "fc.running_mean", "block.0.head.weight", "conv1.bias"])
def test_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"resnet has no parameter or buffer '{name}': use a name such as"):
        resnet(depth=18, classes=2).initialize(name, torch.zeros(3), torch.Generator())


@pytest.mark.parametrize(("depth", "nearest"), [(40, 34), (20, 18), (150, 152), (60, 50), (0, 18)])
def test_unknown_depth_names_the_nearest(depth: int, nearest: int) -> None:
    message = f"resnet has no depth {depth}, only 18, 34, 50, 101, 152: use depth={nearest}, the nearest"
    with pytest.raises(ValueError, match=message):
        resnet(depth=depth, classes=2)


def test_classes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive number of classes, got 0: use 1 or more"):
        resnet(depth=18, classes=0)


@pytest.mark.parametrize("depth", sorted(ARCHITECTURES))
def test_model_survives_pickling(depth: int) -> None:
    model = resnet(depth=depth, classes=3)
    assert pickle.loads(pickle.dumps(model)).name == model.name == f"resnet{depth}"
    assert not model.stochastic
    assert not model.tied
