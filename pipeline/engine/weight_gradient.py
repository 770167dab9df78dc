"""The deferred weight gradient of plain modules: I computes gradients of inputs, W those of the weights.

    F   y = module(x)           a store is opened for the microbatch
    I   autograd's backward     gives x.grad; each split module leaves (x, y.grad) or a finished small gradient behind
    W   store.apply()           weight.grad += ..., module by module, and what was kept is freed

The modules are those of the user, inside any module; nothing is rewritten, no graph is walked. The weight gradients of
Linear, Conv2d and Embedding, products of their own, are computed in W. Those of normalizations are by-products of the
input's gradient: computed in I, added in W. Parameters of all other modules get their gradient in I.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class WeightGradients:
    """What one microbatch leaves for W in one stage.

    Args:
        hold: called with each tensor that is kept, if somebody counts; what it returns lives as long as the tensor.
    """

    def __init__(self, hold: Callable[[Tensor], object] | None = None) -> None:
        self._hold = hold
        self._pending: list[tuple[Callable[[], None], list[object]]] = []

    def defer(self, compute: Callable[[], None], *kept: Tensor) -> None:
        """Run `compute` in W; it refers to the tensors `kept`."""
        self._pending.append((compute, [self._hold(tensor) for tensor in kept] if self._hold else []))

    def apply(self) -> None:
        """Add every deferred gradient, the last layer's first, freeing what each needed."""
        self._pending.reverse()
        while self._pending:
            compute, _ = self._pending.pop()
            with torch.no_grad():
                compute()


class Deferral:
    """Says where the modules of a stage leave their weight gradients: nowhere, unless `store` is set."""

    def __init__(self) -> None:
        self.store: WeightGradients | None = None
        self._low_precision: dict[int, tuple[int, Tensor]] = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` as autocast would convert it, once for all microbatches between two steps of the optimizer."""
        if weight.dtype == dtype:
            return weight.detach()
        version, copy = self._low_precision.get(id(weight), (-1, weight))
        if version != weight._version or copy.dtype != dtype:
            copy = weight.detach().to(dtype)
            self._low_precision[id(weight)] = (weight._version, copy)
        return copy


def split_weight_gradients(root: nn.Module, deferral: Deferral) -> None:
    """Make every plain module in `root` leave its weight gradient to `deferral.store` whenever there is one.

    Only exact types are split, not subclasses, whose forward may differ; normalizations run their own forward, so they
    may be subclasses. Without a store every module's own forward runs.
    """
    for module in root.modules():
        split = _split_forward(module)
        if split is not None:
            own = module.forward
            module.forward = partial(_forward, split, own, module, deferral)


_Split = Callable[[Any, Tensor, WeightGradients, Deferral, Callable[..., Tensor]], Tensor]


def _split_forward(module: nn.Module) -> _Split | None:
    kind = type(module)
    if kind is nn.Linear:
        return _linear
    if kind is nn.Conv2d:
        return _conv2d if _pads_plainly(module) else None
    if kind is nn.Embedding:
        return _embedding if _scatters_densely(module) else None
    if kind is nn.LayerNorm or isinstance(module, _BatchNorm):
        return _normalization
    return None


def _scatters_densely(embedding: Any) -> bool:
    return embedding.max_norm is None and not embedding.sparse


def _pads_plainly(convolution: Any) -> bool:
    return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


def _forward(
    split: _Split, own: Callable[..., Tensor], module: nn.Module, deferral: Deferral, *inputs: Tensor, **more: Tensor
) -> Tensor:
    store = deferral.store
    weight = module._parameters.get("weight")
    if store is None or weight is None or not weight.requires_grad or len(inputs) != 1 or more:
        return own(*inputs, **more)
    return split(module, inputs[0], store, deferral, own)


def _operands(
    module: nn.Linear | nn.Conv2d, inputs: Tensor, deferral: Deferral
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias in the dtype that autocast wants for a matrix product; the last two without a graph."""
    kind, dtype = inputs.device.type, module.weight.dtype
    if torch.is_autocast_enabled(kind) and inputs.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        inputs = inputs.to(dtype)
    bias = None if module.bias is None else deferral.cast(module.bias, dtype)
    return inputs, deferral.cast(module.weight, dtype), bias


def _without_graph(ctx: Any) -> list[Tensor]:
    """What F saved, without its place in the graph, through which W would hold on to the stage's input."""
    return [tensor.detach() for tensor in ctx.saved_tensors]


# Linear, Conv2d, Embedding: the product is W's


def _linear(
    module: nn.Linear, inputs: Tensor, store: WeightGradients, deferral: Deferral, own: Callable[..., Tensor]
) -> Tensor:
    inputs, weight, bias = _operands(module, inputs, deferral)
    output: Tensor = _Linear.apply(inputs, module.weight, weight, bias, module, store)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        parameter: Tensor,  # an input so that a gradient is asked for even where `inputs` needs none
        weight: Tensor,
        bias: Tensor | None,
        module: nn.Linear,
        store: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module, ctx.store = module, store
        with torch.autocast(inputs.device.type, enabled=False):
            return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = _without_graph(ctx)
        flat, rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (gradient, inputs))  # a lone vector is a row
        ctx.store.defer(partial(_add_linear, ctx.module, rows, flat), rows, flat)
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None, None, None, None


def _add_linear(module: nn.Linear, rows: Tensor, gradient: Tensor) -> None:
    _add_product(module.weight, gradient.t(), rows)
    if module.bias is not None and module.bias.requires_grad:
        _add(module.bias, gradient.sum(0))


def _conv2d(
    module: nn.Conv2d, inputs: Tensor, store: WeightGradients, deferral: Deferral, own: Callable[..., Tensor]
) -> Tensor:
    if inputs.dim() != 4:  # a lone image, which convolution_backward doesn't take
        return own(inputs)
    inputs, weight, bias = _operands(module, inputs, deferral)
    output: Tensor = _Conv2d.apply(inputs, module.weight, weight, bias, module, store)
    return output


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        parameter: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: nn.Conv2d,
        store: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module, ctx.store = module, store
        with torch.autocast(inputs.device.type, enabled=False):
            return functional.conv2d(
                inputs, weight, bias, module.stride, module.padding, module.dilation, module.groups
            )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = _without_graph(ctx)
        ctx.store.defer(partial(_add_conv2d, ctx.module, weight, inputs, gradient), inputs, gradient)
        back = None
        if ctx.needs_input_grad[0]:
            back = _convolution_backward(ctx.module, weight, inputs, gradient, (True, False, False))[0]
        return back, None, None, None, None, None


def _add_conv2d(module: nn.Conv2d, weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    biased = module.bias is not None and module.bias.requires_grad
    _, of_weight, of_bias = _convolution_backward(module, weight, inputs, gradient, (False, True, biased))
    _add(module.weight, of_weight)
    if module.bias is not None and biased:
        _add(module.bias, of_bias)


def _convolution_backward(
    module: nn.Conv2d, weight: Tensor, inputs: Tensor, gradient: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient,
        inputs,
        weight,
        None if module.bias is None else [module.out_channels],
        module.stride,
        module.padding,
        module.dilation,
        False,
        (0, 0),
        module.groups,
        wanted,
    )
    return gradients


def _embedding(
    module: nn.Embedding, inputs: Tensor, store: WeightGradients, deferral: Deferral, own: Callable[..., Tensor]
) -> Tensor:
    output: Tensor = _Embedding.apply(inputs, module.weight, module, store)
    return output


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, module: nn.Embedding, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.module, ctx.store = module, store
        return functional.embedding(indices, weight.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (indices,) = ctx.saved_tensors
        ctx.store.defer(partial(_add_embedding, ctx.module, indices, gradient), indices, gradient)
        return None, None, None, None


def _add_embedding(module: nn.Embedding, indices: Tensor, gradient: Tensor) -> None:
    skipped = -1 if module.padding_idx is None else module.padding_idx
    scaled = module.scale_grad_by_freq
    _add(
        module.weight,
        torch.ops.aten.embedding_dense_backward(gradient, indices, module.num_embeddings, skipped, scaled),
    )


# Normalizations: the gradient falls out of I, and is added in W


def _normalization(
    module: nn.Module, inputs: Tensor, store: WeightGradients, deferral: Deferral, own: Callable[..., Tensor]
) -> Tensor:
    real = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
    standing_in = {name: parameter.detach().requires_grad_() for name, parameter in real.items()}
    module._parameters.update(standing_in)  # type: ignore[arg-type]
    try:
        output = own(inputs)
    finally:
        module._parameters.update(real)
    for name, parameter in real.items():
        store.defer(partial(_move_gradient, standing_in[name], parameter))
    return output


def _move_gradient(stand_in: Tensor, parameter: nn.Parameter) -> None:
    if stand_in.grad is not None:
        _add(parameter, stand_in.grad)


# Adding to .grad


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """parameter.grad += left @ right, without a copy of the product where the dtypes allow."""
    if parameter.grad is not None and parameter.grad.dtype == left.dtype:
        parameter.grad.addmm_(left, right)
    else:
        _add(parameter, left @ right)
