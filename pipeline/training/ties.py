"""Which parameters are one: what a model may say of it."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.engine.model import Model


def check_ties(model: Model) -> None:
    """Refuse ties that can't be kept.

    Raises:
        ValueError: a parameter is tied to itself, to one that is tied itself, to one that isn't there or has another
            shape, or one of the two alone is trained.
    """
    if not model.tied:
        return
    held = _parameters(model)
    for alias, owner in model.tied.items():
        for name in (alias, owner):
            if name not in held:
                raise ValueError(f"{alias} is tied to {owner}, but {model.name} has no parameter {name}: use its names")
        if owner in model.tied:
            raise ValueError(
                f"{alias} is tied to {owner}, which is tied itself, to {model.tied[owner]}: tie all to one that is not"
            )
        one, other = held[alias], held[owner]
        if one.shape != other.shape:
            raise ValueError(
                f"{alias} is tied to {owner}, but their shapes are {list(one.shape)} and {list(other.shape)}: "
                "tie parameters of one shape"
            )
        if one.requires_grad != other.requires_grad:
            frozen = owner if one.requires_grad else alias
            raise ValueError(f"{alias} is tied to {owner}, but only {frozen} is frozen: freeze both or none")


def _parameters(model: Model) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        built = [(layer.prefix.rstrip("."), layer.build()) for layer in model.layers]
    return {name: p for prefix, module in built for name, p in module.named_parameters(prefix, remove_duplicate=False)}
