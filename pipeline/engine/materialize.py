"""Giving memory and starting values to the layers a rank holds, and to no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.engine.model import Layer, Model
from pipeline.engine.seeding import generator


class MakeLayer(Protocol):
    """Builds a layer with memory on a device, as `materialize` does."""

    def __call__(
        self, model: Model, layer: Layer, *, device: torch.device, dtype: torch.dtype, seed: int
    ) -> nn.Module: ...


def materialize(model: Model, layer: Layer, *, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    """Build one layer on `device` with starting values drawn from (seed, parameter name).

    Values are drawn on the CPU in float32 and then converted, so that every device and precision starts from the same
    numbers. A tied alias starts as its owner does.

    Raises:
        ValueError: the model's `initialize` left a parameter or buffer without a value.
    """
    with torch.device("meta"):
        module = layer.build()
    give_memory(module, device, dtype)
    with torch.no_grad():
        for name, tensor in named_tensors(module, layer.prefix):
            tensor.copy_(_starting_value(model, name, tensor, seed))
    return module


def named_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of `module` under its whole-model name, shared ones once."""
    yield from module.named_parameters(prefix.rstrip("."))
    yield from module.named_buffers(prefix.rstrip("."))


def _starting_value(model: Model, name: str, like: Tensor, seed: int) -> Tensor:
    owner = model.tied.get(name, name)
    if not like.is_floating_point():
        value = torch.zeros(like.shape, dtype=like.dtype)
        model.initialize(owner, value, generator(seed, owner))
        return value
    value = torch.full(like.shape, torch.nan, dtype=torch.float32)
    model.initialize(owner, value, generator(seed, owner))
    if value.isnan().any():
        raise ValueError(f"{model.name}.initialize left {name} without a value: fill every parameter and buffer")
    return value


def give_memory(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer by an empty one on `device`, floating-point ones in `dtype`.

    BatchNorm and InstanceNorm keep float32 beside parameters of fewer bits: running averages move by small steps, which
    those would lose. They take inputs of fewer bits, and give outputs like these.

    A tensor that two submodules share stays shared (`nn.Module.to_empty` would give it two memories).
    """
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=kind if tensor.is_floating_point() else tensor.dtype, device=device)

    for submodule in module.modules():
        kind = torch.float32 if isinstance(submodule, _NormBase) and dtype.itemsize < 4 else dtype
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = nn.Parameter(empty(parameter), requires_grad=parameter.requires_grad)
                submodule._parameters[key] = parameters[id(parameter)]
        for key, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[key] = buffers.setdefault(id(buffer), empty(buffer))
