"""Between the backward passes and the optimizer: tied gradients summed, one norm for the whole model, clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from pipeline.engine.weight_gradient import gradient_dtype
from pipeline.training.group import Group

Parameters = Mapping[str, nn.Parameter]


def sum_tied_gradients(
    local: Mapping[int, Parameters], tied: Mapping[str, str], tied_ranks: Mapping[str, tuple[int, ...]], group: Group
) -> None:
    """Give every copy of a tied parameter the sum of the copies' gradients.

    Args:
        local: each local rank's parameters by whole-model name.
        tied: alias name -> owner name.
        tied_ranks: owner name -> the ranks that hold a copy, where those are several. Copies on one rank are one
            parameter already.
    """
    for owner, ranks in sorted(tied_ranks.items()):
        names = {owner, *(alias for alias, of in tied.items() if of == owner)}
        gradients = {}
        for rank in sorted(set(ranks) & set(local)):
            (parameter,) = {parameter for name, parameter in local[rank].items() if name in names}
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            gradients[rank] = parameter.grad
        if gradients:  # else all copies are frozen
            group.sum_gradients(ranks, gradients)


def global_norm(
    local: Mapping[int, Sequence[Tensor]], group: Group, losses: Mapping[int, Tensor | None] | None = None
) -> float:
    """The Euclidean norm over the gradients of all ranks; the same number on every rank.

    It is not finite where a loss isn't either, so that one message a step tells every rank of both.

    Args:
        local: for each local rank the gradients that it counts: its own, without copies that another rank counts.
        losses: those of the local ranks that have one.
    """
    squares = [_norm(local[rank], (losses or {}).get(rank)) ** 2 for rank in group.local]
    return math.sqrt(sum(group.gather_floats(squares)))


def _norm(gradients: Sequence[Tensor], loss: Tensor | None) -> float:
    norm = get_total_norm(gradients) if gradients else torch.zeros(())
    # on the device, so that it is waited for once; 0 x inf is not a number
    return float(norm if loss is None else norm + 0 * loss.detach())


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all in place."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)
