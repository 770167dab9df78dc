"""Any PyTorch loss as a sum and the weight that its mean divides by, so that parts of a batch add up.

A pipeline divides by the weight of the whole batch, once. The mean of its microbatches' means would be another number
wherever they aren't alike, and not a number at all where one of them is padding alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pipeline.engine.model import Loss
from pipeline.engine.nest import Nest, flat


def as_sum(loss: Callable[..., Tensor]) -> Loss:
    """`loss` as the engine takes it: a sum, and what the whole batch's sum is divided by.

    - With a method `weight(targets)` of its own it is taken as it is: a sum already.
    - With `reduction`, as an argument (`F.cross_entropy`, a `partial` of it) or an attribute (`nn.CrossEntropyLoss()`),
      it is called for the sum. The weight is what PyTorch's mean divides by: with an `ignore_index` the number of the
      other targets (or the sum of their classes' weights), else the number of the targets' elements.
    - Any other is taken as a mean over samples, dimension 0 of the targets.

    The mean over a batch of which nothing counts is 0, with gradients of 0, where PyTorch's is not a number. A loss
    that couples samples (a contrast over the batch, a rank among them) can't be cut into microbatches and is
    unsupported: nothing tells it from one that doesn't.

    Raises:
        ValueError: it isn't callable, gives no single number, or has parameters.
    """
    if isinstance(loss, type):
        raise ValueError(f"the loss is the class {loss.__name__}: make one of it, {loss.__name__}()")
    if not callable(loss):
        raise ValueError(f"loss={loss!r} can't be called: use a function such as F.cross_entropy, or a module")
    if callable(getattr(loss, "weight", None)):
        summed: Any = loss
        return summed  # type: ignore[no-any-return]
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ValueError(f"the loss has parameters ({type(loss).__name__}): put them into the model's last layer")
    arguments = _arguments(loss)
    reduction = arguments.get("reduction")
    if reduction is None:
        return _MeanOverSamples(loss)
    if reduction == "mean":
        return _Summed(_summing(loss), partial(_counted, loss, arguments))
    if reduction == "batchmean":
        return _Summed(_summing(loss), _samples)
    raise ValueError(f"the loss has reduction={reduction!r}, and a step gives the mean of the whole batch: use 'mean'")


def _arguments(loss: Callable[..., Tensor]) -> dict[str, Any]:
    """What a loss is set to: its attributes, or the defaults of its arguments."""
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        return {name: getattr(loss, name, None) for name in ("reduction", "ignore_index", "weight")}
    try:
        given = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except ValueError:  # of a function without a signature, written in C
        return {}
    return {name: None if argument.default is argument.empty else argument.default for name, argument in given.items()}


def _summing(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if not (isinstance(loss, nn.Module) and hasattr(loss, "reduction")):
        return partial(loss, reduction="sum")
    summing: Any = copy.copy(loss)
    summing.reduction = "sum"
    return summing  # type: ignore[no-any-return]


_BY_SAMPLE = (functional.multilabel_margin_loss, functional.multilabel_soft_margin_loss)
_BY_SAMPLE_MODULES = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
"""Whose mean is over samples though each has several targets."""


def _counted(loss: Callable[..., Tensor], arguments: dict[str, Any], targets: Tensor) -> float:
    """What the mean over these targets divides by."""
    while isinstance(loss, partial):
        loss = loss.func
    if loss in _BY_SAMPLE or isinstance(loss, _BY_SAMPLE_MODULES):
        return _samples(targets)
    ignored, classes = arguments.get("ignore_index"), arguments.get("weight")
    if ignored is None:
        return targets.numel()
    if targets.is_floating_point():  # probabilities of classes, along dimension 1
        return targets.numel() // targets.shape[1]
    counted = targets[targets != ignored]
    return counted.numel() if classes is None else float(classes[counted.to(classes.device)].sum())


def _samples(targets: Nest) -> float:
    return len(flat(targets)[0])


class _Summed:
    """A sum, from a loss that knows how."""

    def __init__(self, summing: Callable[..., Tensor], weight: Callable[[Any], float]) -> None:
        self._summing = summing
        self._weight = weight

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        return self._summing(outputs, targets)

    def weight(self, targets: Any, /) -> float:
        return self._weight(targets)


class _MeanOverSamples:
    """A sum, from a loss that gives means alone."""

    def __init__(self, mean: Callable[..., Tensor]) -> None:
        self._mean = mean

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        mean = self._mean(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim():
            shape = f"tensor of shape {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(f"the loss gave a {shape}: let it give the mean over samples, a tensor of one number")
        return mean * _samples(targets)

    def weight(self, targets: Any, /) -> float:
        return _samples(targets)
