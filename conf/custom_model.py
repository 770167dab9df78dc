"""`model=custom` with any loss: models/ cuts what the user builds, pipeline/ sums a loss over parts of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from models.custom import custom, imported
from models.model import Model
from pipeline.training.losses import as_sum


def build(*, loss: str | None, **arguments: Any) -> Model:
    """`models.custom.custom` with the loss of that name.

    Args:
        loss: module:name of a function of (outputs, targets), or of a class that is called without arguments to make
            one; None: the model's own.

    Raises:
        ValueError: there is no such loss, or it can't be summed over parts of a batch; or as `custom` does.
    """
    if loss is None:
        return custom(**arguments)
    return custom(loss=as_sum(_named(loss)), **arguments)


def _named(path: str) -> Callable[..., Tensor]:
    found: Any = imported("model.loss", path)
    try:
        loss: Callable[..., Tensor] = found() if isinstance(found, type) else found
    except TypeError as error:
        raise ValueError(
            f"model.loss={path} can't be made without arguments ({error}): name a function of (outputs, targets)"
        ) from error
    return loss
