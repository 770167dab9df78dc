"""Weights in low precision with exact copies: the optimizer moves the copies, and the weights are the copies rounded.

A weight in bfloat16 has 8 bits: a step of less than 1/512 of it would be lost, and so would a microbatch's gradient
beside the sum of those before it. So the copies, the gradients and what the optimizer remembers have float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Masters:
    """The tensors that an optimizer moves in the place of a rank's parameters; the parameters themselves where those
    are exact already, or not trained.

    From here on the gradients of parameters with a copy are added up in the copy's dtype.

    Args:
        parameters: each once.
        dtype: of the copies; None: there are none.

    Raises:
        ValueError: this torch can't add up gradients in another dtype than the parameter's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = [
            p for p in parameters if dtype is not None and p.requires_grad and p.dtype.itemsize < dtype.itemsize
        ]
        self._copies = [nn.Parameter(parameter.detach().to(dtype)) for parameter in self._parameters]
        self._of = dict(zip(self._parameters, self._copies, strict=True))
        for parameter in self._parameters:
            _add_up_in(parameter, dtype)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer moves in the place of `parameter`."""
        return self._of.get(parameter, parameter)

    def take_gradients(self) -> None:
        """Let the optimizer see the gradients."""
        for parameter, copy in self._of.items():
            copy.grad = parameter.grad

    def drop_gradients(self) -> None:
        """Let go what was taken."""
        for copy in self._copies:
            copy.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Give every parameter its copy's value, rounded."""
        if self._copies:
            torch._foreach_copy_(tuple(self._parameters), tuple(self._copies))


def _add_up_in(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    if not hasattr(parameter, "grad_dtype"):
        raise ValueError(
            f"precision.masters needs torch 2.10, which adds up gradients in float32, and this is {torch.__version__}: "
            "use precision=bf16, or a newer torch"
        )
    parameter.grad_dtype = dtype
