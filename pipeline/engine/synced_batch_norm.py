"""BatchNorm over replicas: a microbatch is normalized by what it and its like in the other replicas have in common.

As torch.nn.SyncBatchNorm, which is for GPUs alone. Replicas run one program, so each waits in a forward, and again in
its backward, until the others have come to the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.engine.batch_norm import Moments, combined
from pipeline.engine.reduction import Replicas


class Synced(_BatchNorm):
    """What a BatchNorm of any dimension becomes: see `synchronize`."""

    replicas: Replicas

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            count, mean, squares = _moments(input.detach(), self.replicas)
            self._move(count, mean, squares)
            spread = (squares / count + self.eps).rsqrt()
        normalized: Tensor = _Normalized.apply(input, self.weight, self.bias, mean, spread, count, self.replicas)
        return normalized

    def _move(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        """The running averages, alike on all replicas; not in a recomputation."""
        averages, steps = (self.running_mean, self.running_var), self.num_batches_tracked
        if not self.track_running_stats or steps is None:
            return
        steps += 1
        share = 1 / steps.double() if self.momentum is None else self.momentum
        for average, came in zip(averages, (mean, squares / (count - 1).clamp(min=1)), strict=True):
            assert average is not None, "it is tracked"
            average.copy_(average.double() * (1 - share) + came * share)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as the class that it was made of, which syncs nothing."""
        state = {name: value for name, value in self.__dict__.items() if name != "replicas"}
        return _blank, (type(self).__bases__[1],), state


class _Normalized(Function):
    """(input - mean) * spread * weight + bias, where mean and spread come from the inputs of all replicas."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        count: Tensor,
        replicas: Replicas,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, spread, count)
        ctx.replicas, ctx.biased = replicas, bias is not None
        output = _standardized(input, mean, spread)
        if weight is not None:
            output = output * _channels(weight, input)
        if bias is not None:
            output = output + _channels(bias, input)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, spread, count = ctx.saved_tensors
        standard, (gradient,) = _standardized(input, mean, spread), gradients
        gradient = gradient.to(standard.dtype)
        of_bias = gradient.sum(_others(input))
        of_weight = (gradient * standard).sum(_others(input))
        everywhere = ctx.replicas.add("gradient", torch.cat([of_bias, of_weight]).double())()
        shift, scale = (_channels(part, input) for part in (everywhere / count).chunk(2))
        factor = spread if weight is None else spread * weight
        of_input = (gradient - shift - standard * scale) * _channels(factor, input)
        own = of_input.to(input.dtype), None if weight is None else of_weight, of_bias if ctx.biased else None
        return (*own, None, None, None, None)


def synchronize(roots: Iterable[nn.Module], replicas: Replicas) -> None:
    """Make every BatchNorm in `roots` one over the replicas, an instance of a subclass of its class."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, Synced):
                kind: Any = type(module)
                module.__class__ = _synced(kind)
                assert isinstance(module, Synced)
                module.replicas = replicas


@functools.cache
def _synced(kind: Any) -> type[Synced]:
    return type(f"Synced{kind.__name__}", (Synced, kind), {})


def _blank(kind: Any) -> nn.Module:
    made: nn.Module = kind.__new__(kind)
    return made


def _moments(input: Tensor, replicas: Replicas) -> Moments:
    """Of what all replicas have, float64."""
    variance, mean = torch.var_mean(_wide(input), _others(input), correction=0)
    count = torch.full((1,), input.numel() // input.shape[1], dtype=torch.float64, device=input.device)
    rows = replicas.gather("moments", torch.cat([count, mean.double(), variance.double() * count]))()
    return reduce(combined, [Moments(row[0], *row[1:].chunk(2)) for row in rows])


def _standardized(input: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    wide = _wide(input)
    return (wide - _channels(mean, input).to(wide.dtype)) * _channels(spread, input).to(wide.dtype)


def _wide(input: Tensor) -> Tensor:
    return input.float() if input.dtype.itemsize < 4 else input


def _channels(each: Tensor, input: Tensor) -> Tensor:
    """A number a channel, to be combined with the input, in the type that is computed in."""
    return each.to(_wide(input[:0]).dtype).view(1, -1, *[1] * (input.dim() - 2))


def _others(input: Tensor) -> list[int]:
    return [dimension for dimension in range(input.dim()) if dimension != 1]
