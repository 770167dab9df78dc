"""ResNet (He et al. 2015) out of torchvision's blocks: a stem, one layer a block, a head."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Generator, Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from models.loss import CrossEntropy
from models.model import Layer, Model

STEM_WIDTH = 64


@dataclass(frozen=True)
class Architecture:
    """The kind of block and how many of them each of the four groups has."""

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, int, int, int]


ARCHITECTURES = {
    18: Architecture(BasicBlock, (2, 2, 2, 2)),
    34: Architecture(BasicBlock, (3, 4, 6, 3)),
    50: Architecture(Bottleneck, (3, 4, 6, 3)),
    101: Architecture(Bottleneck, (3, 4, 23, 3)),
    152: Architecture(Bottleneck, (3, 8, 36, 3)),
}


class Stem(nn.Module):
    """Images (batch, 3, height, width) to (batch, 64, height / 4, width / 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, STEM_WIDTH, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return maps


class Head(nn.Module):
    """Maps (batch, features, height, width) to logits (batch, classes)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(features, classes)

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


def resnet(*, depth: int, classes: int) -> Model:
    """ResNet of depth 18, 34, 50, 101 or 152 for images (batch, 3, height, width) and targets (batch,) int64.

    Parameter and buffer names are those of `torchvision.models.resnet<depth>`. Another depth is a ValueError.
    """
    if depth not in ARCHITECTURES:
        nearest = min(ARCHITECTURES, key=lambda known: abs(known - depth))
        known = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"resnet has no depth {depth}, only {known}: use depth={nearest}, the nearest")
    if classes < 1:
        raise ValueError(f"resnet needs a positive number of classes, got {classes}: use 1 or more")
    architecture = ARCHITECTURES[depth]
    features = 512 * architecture.block.expansion
    return Model(
        name=f"resnet{depth}",
        layers=(
            Layer("stem", Stem, ""),
            *_block_layers(architecture),
            Layer("head", partial(Head, features, classes), ""),
        ),
        loss=CrossEntropy(),
        initialize=partial(initialize, features),
    )


def _block_layers(architecture: Architecture) -> Iterator[Layer]:
    inputs = STEM_WIDTH
    for group, count in enumerate(architecture.blocks, start=1):
        planes = STEM_WIDTH * 2 ** (group - 1)
        for index in range(count):
            stride = 2 if group > 1 and index == 0 else 1
            name = f"layer{group}.{index}"
            yield Layer(name, partial(build_block, architecture.block, inputs, planes, stride), f"{name}.")
            inputs = planes * architecture.block.expansion


def build_block(block: type[BasicBlock] | type[Bottleneck], inputs: int, planes: int, stride: int) -> nn.Module:
    """torchvision's block, with its 1x1 convolution on the shortcut where the shape changes."""
    outputs = planes * block.expansion
    if stride == 1 and inputs == outputs:
        same_shape: nn.Module = block(inputs, planes)
        return same_shape
    shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    reshaping: nn.Module = block(inputs, planes, stride, shortcut)
    return reshaping


NAME = re.compile(
    r"fc\.(?P<fc>weight|bias)"
    r"|(layer[1-4]\.\d+\.)?(conv[1-3]|downsample\.0)\.(?P<convolution>weight)"
    r"|(layer[1-4]\.\d+\.)?(bn[1-3]|downsample\.1)\.(?P<norm>weight|bias|running_mean|running_var|num_batches_tracked)"
)


def initialize(features: int, name: str, tensor: Tensor, generator: Generator) -> None:
    """torchvision's rules: convolutions kaiming normal over fan out, norms one and zero, fc as nn.Linear's default.

    `features` is fc's fan in, which its bias cannot tell from its own shape.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"resnet has no parameter or buffer {name!r}: use a name such as 'layer1.0.conv1.weight'")
    if match["fc"]:
        # kaiming_uniform_ with a = sqrt(5) is the uniform distribution over +-1/sqrt(fan in), which the bias has too.
        bound = 1 / math.sqrt(features)
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    elif match["convolution"]:
        nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)
    else:
        tensor.detach().fill_(1 if match["norm"] in ("weight", "running_var") else 0)
