"""How many floating-point operations a model takes, counted from its layers on tensors without memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.engine.batch_norm import statistics_kept
from pipeline.engine.model import Model
from pipeline.engine.named_values import alive, passed_on, taken
from pipeline.engine.nest import Nest, mapped

TRAINING = 3
"""A step takes the forward's operations three times: the backward has two matrix products for each of its one."""


def forward_flops(model: Model, inputs: Nest) -> tuple[int, ...] | None:
    """What each layer's forward takes for these inputs: two for a multiplication and its addition.

    Matrix products, convolutions and attention count (all of its products, those of masked places too, as is usual);
    what is done element by element doesn't. None where a layer needs numbers to tell what it does.

    Args:
        inputs: of the whole model; only shapes and dtypes matter.
    """
    with torch.device("meta"):
        modules = [layer.build().train() for layer in model.layers]
    counts, names = [], alive(model.layers)
    value, named = mapped(_without_memory, inputs), dict[str, Nest]()
    with torch.device("meta"), torch.no_grad(), statistics_kept(modules):
        for index, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
            with FlopCounterMode(display=False) as counter:
                try:
                    output = module(value, *taken(layer, named))
                except (RuntimeError, NotImplementedError):  # as of item()
                    return None
            value, named = passed_on(layer, output, named, names[index + 1])
            counts.append(int(counter.get_total_flops()))
    return tuple(counts)


def _without_memory(tensor: Tensor) -> Tensor:
    """Of a floating-point one the dtype that layers are built in."""
    dtype = torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
