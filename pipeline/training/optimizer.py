"""The optimizer of one rank's parameters, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeline.training.settings import OptimizerSettings

_FUSED = ("cpu", "cuda")
"""Device types that have an optimizer step of one kernel."""


def build_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """AdamW or SGD, in one kernel where the device has one; None for a rank whose stages have no parameter to train.

    Weight decay is applied to parameters with two or more dimensions: not to biases and normalizations. Both copies of
    a tied parameter have the same shape, so they are treated alike on every rank.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return None
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(parameter.device.type in _FUSED for parameter in trained) or None  # None: torch takes the next best
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=fused)
    betas = (settings.betas[0], settings.betas[1])
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused)


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) of `steps`: linear warmup, then cosine decay or constant."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * (settings.final_ratio + (1 - settings.final_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


def named_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the optimizer remembers of these parameters, by "slot/name"."""
    return {
        f"{slot}/{name}": value
        for name, parameter in parameters.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Have the optimizer remember what `named_state` gave, where and as its parameters are; its settings stay."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): position for position, parameter in enumerate(held)}
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        slot, _, name = key.partition("/")
        if id(parameters[name]) in index:  # else it is frozen now
            slots.setdefault(index[id(parameters[name])], {})[slot] = value
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
