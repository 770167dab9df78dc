"""torchvision's VGG, ViT, ConvNeXt and wide ResNets, cut into layers; names are those of its state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models as torchvision_models
from torchvision.models.convnext import ConvNeXt
from torchvision.models.resnet import ResNet
from torchvision.models.vgg import VGG
from torchvision.models.vision_transformer import Encoder, VisionTransformer

from models.loss import CrossEntropy
from models.model import Model
from models.names import TorchvisionNames
from models.pieces import Piece, Pieces, flattened

PREFIXES = ("vgg", "vit_", "convnext_", "resnext", "wide_resnet")


def torchvision_model(*, architecture: str, classes: int, image_size: int = 224, seed: int = 0) -> Model:
    """`torchvision.models.<architecture>` for images (batch, 3, height, width) and targets (batch,) int64.

    Starting weights are those of torchvision's own function after `torch.manual_seed(seed)`. `image_size` is what a
    vision transformer takes; the others take any. Another architecture is a ValueError.
    """
    known = [name for name in torchvision_models.list_models(torchvision_models) if name.startswith(PREFIXES)]
    if architecture not in known:
        raise ValueError(f"there is no model.architecture={architecture}: use one of {', '.join(known)}")
    if classes < 1:
        raise ValueError(f"{architecture} needs a positive number of classes, got {classes}: use 1 or more")
    arguments: dict[str, Any] = {"num_classes": classes}
    if architecture.startswith("vit_"):
        patch = int(architecture.rpartition("_")[2])
        if image_size < patch or image_size % patch:
            raise ValueError(
                f"{architecture} cuts images into {patch} x {patch} pixels and model.image_size is {image_size}: "
                f"use {max(1, round(image_size / patch)) * patch}"
            )
        arguments["image_size"] = image_size
    pieces = Pieces(partial(_whole, architecture, arguments), cut, seed)
    return Model(
        architecture, pieces.layers(), CrossEntropy(), pieces.initialize, stochastic=True, names=TorchvisionNames()
    )


def _whole(architecture: str, arguments: dict[str, Any]) -> nn.Module:
    module: nn.Module = getattr(torchvision_models, architecture)(**arguments)
    return module


def cut(whole: nn.Module) -> list[Piece]:
    """The layers of a VGG, a ResNet, a vision transformer or a ConvNeXt."""
    if isinstance(whole, VGG):
        return list(_vgg(whole))
    if isinstance(whole, ConvNeXt):
        head = nn.Sequential(OrderedDict(avgpool=whole.avgpool, classifier=whole.classifier))
        return [*flattened(whole.features, "features."), Piece("head", "", head)]
    if isinstance(whole, ResNet):
        return list(_resnet(whole))
    assert isinstance(whole, VisionTransformer), "one of PREFIXES"
    blocks = flattened(whole.encoder.layers, "encoder.layers.")
    return [Piece("patches", "", Patches(whole)), *blocks, Piece("head", "", ClassTokenHead(whole))]


def _vgg(whole: VGG) -> Iterator[Piece]:
    """A layer begins at each convolution and at each Linear: what follows overwrites its input in place."""
    for name, sequence in (("features", whole.features), ("classifier", whole.classifier)):
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if name == "classifier":
            parts.update(avgpool=whole.avgpool, flatten=nn.Flatten(1))
        first = "0"
        for key, module in sequence.named_children():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and key != "0":
                yield Piece(f"{name}.{first}", f"{name}.", nn.Sequential(parts))
                parts, first = OrderedDict(), key
            parts[key] = module
        yield Piece(f"{name}.{first}", f"{name}.", nn.Sequential(parts))


def _resnet(whole: ResNet) -> Iterator[Piece]:
    """A stem, a layer a block, a head."""
    stem = OrderedDict(conv1=whole.conv1, bn1=whole.bn1, relu=whole.relu, maxpool=whole.maxpool)
    yield Piece("stem", "", nn.Sequential(stem))
    for group in ("layer1", "layer2", "layer3", "layer4"):
        yield from flattened(whole.get_submodule(group), f"{group}.")
    head = OrderedDict(avgpool=whole.avgpool, flatten=nn.Flatten(1), fc=whole.fc)
    yield Piece("head", "", nn.Sequential(head))


class Patches(nn.Module):
    """Images (batch, 3, size, size) to tokens (batch, 1 + patches, width): the class token and one a patch."""

    def __init__(self, whole: VisionTransformer) -> None:
        super().__init__()
        self.size = whole.image_size
        self.class_token = whole.class_token
        self.conv_proj = whole.conv_proj
        self.encoder = _Positions(whole.encoder)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.size, self.size):
            height, width = images.shape[2:]
            raise ValueError(
                f"images of {height} x {width} pixels and model.image_size={self.size}: "
                f"use model.image_size={height}, or images of that size"
            )
        patches = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        embedded: Tensor = self.encoder(tokens)
        return embedded


class _Positions(nn.Module):
    """Adds the position embedding, under the names it has in torchvision's encoder."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.pos_embedding = encoder.pos_embedding
        self.dropout = encoder.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(tokens + self.pos_embedding)
        return embedded


class ClassTokenHead(nn.Module):
    """Tokens (batch, 1 + patches, width) to logits (batch, classes), from the class token."""

    def __init__(self, whole: VisionTransformer) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"ln": whole.encoder.ln})
        self.heads = whole.heads

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.encoder["ln"](tokens)[:, 0])
        return logits
