"""A whole model from its layers: built without memory, initialized by the model's own rules, and its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.model import Model


def initialized(model: Model, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Module]:
    with torch.device("meta"):
        modules = [layer.build() for layer in model.layers]
    generator = torch.Generator().manual_seed(seed)
    for layer, module in zip(model.layers, modules, strict=True):
        module.to_empty(device="cpu")
        for name, tensor in module.state_dict(keep_vars=True).items():
            model.initialize(layer.prefix + name, tensor, generator)
        module.to(dtype)
    return modules


def whole_state(model: Model, modules: list[nn.Module]) -> dict[str, Tensor]:
    pairs = zip(model.layers, modules, strict=True)
    return {layer.prefix + name: tensor for layer, module in pairs for name, tensor in module.state_dict().items()}
