"""Plain modules whose backward comes in two parts, in whatever module they sit; nothing of the user's is rewritten.

The weight gradients of Linear, Conv2d and Embedding, products of their own, are computed in W. Those of normalizations
are by-products of the input's gradient: computed in I, added in W. All other parameters get their gradient in I, as do
those that something else must see getting it: parameters with hooks, and those that are not leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from pipeline.engine.casts import cast
from pipeline.engine.weight_gradient import AddedAtOnce, Deferral, WeightGradients, gradient_dtype


def split_weight_gradients(root: nn.Module, deferral: Deferral) -> None:
    """Make every plain module in `root` leave its weight gradient to `deferral.store` whenever there is one.

    Subclasses of Linear, Conv2d and Embedding are split if they inherit the forward. Normalizations run their own
    forward, so it may be any. Without a store every module's own forward runs.
    """
    for module in root.modules():
        split = _split_forward(module)
        if split is not None:
            module.forward = partial(_forward, split, module.forward, module, _names(module), deferral)


def add_at_once(root: nn.Module, at_once: AddedAtOnce) -> None:
    """Make every large Linear in `root` add to the weight's gradient within its product, in a whole backward.

    autograd makes the product and then adds it, which reads and writes three matrices of the weight's size more: 5 % of
    a step where a microbatch is small beside the weights. Under autocast, whose products are of another dtype than the
    gradient, nothing changes.
    """
    for module in root.modules():
        if isinstance(module, nn.Linear) and _split_forward(module) is _linear and module.weight.numel() >= LARGE:
            own, names = module.forward, _names(module)
            module.forward = partial(_forward_at_once, own, module, names, at_once)  # type: ignore[method-assign]


def whole_again(root: nn.Module) -> None:
    """Undo both in every module of `root`."""
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in (_forward, _forward_at_once):
            own = forward.args[1 if forward.func is _forward else 0]
            del module.forward
            if own != module.forward:  # somebody else had put one of his own there
                module.forward = own


LARGE = 1 << 18
"""Elements of a weight from which on adding at once gains more than a function of autograd in Python costs."""


def _forward_at_once(
    own: Callable[..., Tensor], module: nn.Linear, names: Sequence[str], at_once: AddedAtOnce, input: Tensor
) -> Tensor:
    cast = torch.is_autocast_enabled(input.device.type)
    if cast or not torch.is_grad_enabled() or not _wait(module._parameters, names):
        return own(input)
    return _linear(module, at_once, own, input)


def _names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, parameter in module._parameters.items() if parameter is not None)


_Split = Callable[..., Tensor]
"""Called with the module, the store, the module's own forward, and what the forward takes (mostly `input`)."""


def _split_forward(module: Any) -> _Split | None:
    if isinstance(module, nn.LayerNorm | _BatchNorm):
        return _normalization
    if _inherits(module, nn.Linear, "forward"):
        return _linear
    if _inherits(module, nn.Conv2d, "forward", "_conv_forward"):
        return _conv2d
    if _inherits(module, nn.Embedding, "forward") and module.max_norm is None and not module.sparse:
        return _embedding
    return None


def _inherits(module: Any, plain: type[nn.Module], *methods: str) -> bool:
    """Whether `module` computes what `plain` does, on parameters that are its own (not computed from others)."""
    weight = module._parameters.get("weight")
    if not isinstance(module, plain) or weight is None or weight.is_complex() or parametrize.is_parametrized(module):
        return False
    return all(getattr(type(module), name) is getattr(plain, name) and name not in vars(module) for name in methods)


def _forward(
    split: _Split,
    own: Callable[..., Tensor],
    module: nn.Module,
    names: Sequence[str],
    deferral: Deferral,
    *inputs: Any,
    **more: Any,
) -> Tensor:
    store = deferral.store
    if store is None or not torch.is_grad_enabled() or not _wait(module._parameters, names):
        return own(*inputs, **more)
    return split(module, store, own, *inputs, **more)


def _wait(parameters: dict[str, nn.Parameter | None], names: Sequence[str]) -> bool:
    """Whether all of the parameters that get a gradient, and the weight is one, may get it as late as in W."""
    for name in names:
        parameter = parameters.get(name)
        if parameter is None or not parameter.is_leaf:  # computed from others: parametrized, or a functional call's
            return False
        if not parameter.requires_grad:
            if name == "weight":
                return False
        elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return False
    return True


def _operands(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """These in the dtype that autocast wants for a matrix product; weight and bias without a graph."""
    kind, dtype = inputs.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and inputs.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        inputs = inputs.to(dtype)
    return inputs, cast(weight, dtype), None if bias is None else cast(bias, dtype)


# Linear, Conv2d, Embedding: the product is W's.
#
# Each is a function of autograd whose inputs include the parameter, so that it is asked for a gradient even where
# `inputs` needs none. What F saved is detached for W, which would otherwise hold on to the graph.


def _linear(module: nn.Linear, store: WeightGradients, own: Callable[..., Tensor], input: Tensor) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    inputs, *operands = _operands(input, weight, bias)
    output: Tensor = _Linear.apply(inputs, weight, bias, (*operands, store))
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        parameter: Tensor,
        bias_parameter: Tensor | None,
        rest: tuple[Tensor, Tensor | None, WeightGradients],
    ) -> Tensor:
        weight, bias, store = rest
        ctx.save_for_backward(inputs, weight)
        ctx.left = parameter, bias_parameter, store
        return _no_view(functional.linear(inputs, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        parameter, bias, store = ctx.left
        if not store.taken:
            return *_plain_backward(ctx.needs_input_grad, gradient, inputs, parameter), None
        rows, flat = _rows(inputs.detach()), _rows(gradient)
        store.defer(partial(_add_linear, parameter, bias, rows, flat), rows, flat)
        return gradient.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, None


def _plain_backward(
    needed: Sequence[bool], gradient: Tensor, inputs: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """All of a Linear's gradients as autograd gives them, with a graph where one is asked for."""
    flat = _rows(gradient)
    return (
        gradient.matmul(weight.to(gradient.dtype)) if needed[0] else None,
        flat.t().mm(_rows(inputs)).to(weight.dtype) if needed[1] else None,
        flat.sum(0).to(weight.dtype) if needed[2] else None,
    )


def _no_view(output: Tensor) -> Tensor:
    """The same memory. Linear's output may be a view (of rows), and in-place operations may not follow such."""
    return output.data


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])  # a lone vector is a row


def _add_linear(weight: Tensor, bias: Tensor | None, rows: Tensor, gradient: Tensor) -> None:
    _add_product(weight, gradient.t(), rows)
    if bias is not None and bias.requires_grad:
        _add(bias, gradient.sum(0))


def _conv2d(module: nn.Conv2d, store: WeightGradients, own: Callable[..., Tensor], input: Tensor) -> Tensor:
    padding: Sequence[int] | str = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        input, padding = _padded(module, input), (0, 0)
    if input.dim() != 4:  # a lone image, which convolution_backward doesn't take
        return _convolved(module, input.unsqueeze(0), padding, store).squeeze(0)
    return _convolved(module, input, padding, store)


def _padded(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    widths = module._reversed_padding_repeated_twice
    return functional.pad(inputs, widths, mode=mode) if any(widths) else inputs


def _convolved(module: nn.Conv2d, inputs: Tensor, padding: Sequence[int], store: WeightGradients) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    inputs, *operands = _operands(inputs, weight, bias)
    geometry = (module.stride, padding, module.dilation, module.groups)
    output: Tensor = _Conv2d.apply(inputs, weight, (*operands, bias, geometry, store))
    return output


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        parameter: Tensor,
        rest: tuple[Tensor, Tensor | None, Tensor | None, _Geometry, WeightGradients],
    ) -> Tensor:
        weight, bias, bias_parameter, geometry, store = rest
        ctx.save_for_backward(inputs, weight)
        ctx.left = parameter, bias_parameter, geometry, store
        return torch.conv2d(inputs, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        parameter, bias, geometry, store = ctx.left
        inputs = inputs.detach()
        store.defer(partial(_add_conv2d, parameter, bias, geometry, weight, inputs, gradient), inputs, gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _convolution_backward(gradient, inputs, weight, geometry, (True, False, False))[0], None, None


_Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation, groups."""


def _add_conv2d(
    parameter: Tensor, bias: Tensor | None, geometry: _Geometry, weight: Tensor, inputs: Tensor, gradient: Tensor
) -> None:
    biased = bias is not None and bias.requires_grad
    _, of_weight, of_bias = _convolution_backward(gradient, inputs, weight, geometry, (False, True, biased))
    _add(parameter, of_weight)
    if bias is not None and biased:
        _add(bias, of_bias)


def _convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: _Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    bias_shape = [weight.shape[0]] if wanted[2] else None
    gradients: tuple[Tensor, Tensor, Tensor] = _aten_convolution_backward(
        gradient, inputs, weight, bias_shape, stride, padding, dilation, False, (0, 0), groups, wanted
    )
    return gradients


_aten_convolution_backward = torch.ops.aten.convolution_backward.default  # found once: the look-up costs as much again


def _embedding(module: nn.Embedding, store: WeightGradients, own: Callable[..., Tensor], input: Tensor) -> Tensor:
    output: Tensor = _Embedding.apply(input, module.weight, (module, store))
    return output


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, parameter: Tensor, rest: tuple[nn.Embedding, WeightGradients]) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.left = parameter, *rest
        return _no_view(functional.embedding(indices, parameter.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        parameter, module, store = ctx.left
        store.defer(partial(_add_embedding, parameter, module, indices, gradient), indices, gradient)
        return None, None, None


def _add_embedding(weight: Tensor, module: nn.Embedding, indices: Tensor, gradient: Tensor) -> None:
    skipped = -1 if module.padding_idx is None else module.padding_idx
    scaled = module.scale_grad_by_freq
    _add(weight, torch.ops.aten.embedding_dense_backward(gradient, indices, weight.shape[0], skipped, scaled))


# Normalizations: the gradient falls out of I, and is added in W


def _normalization(
    module: nn.Module, store: WeightGradients, own: Callable[..., Tensor], *inputs: Any, **more: Any
) -> Tensor:
    parameters = module._parameters
    real = {name: p for name, p in parameters.items() if p is not None and p.requires_grad}
    standing_in = {name: parameter.detach().requires_grad_() for name, parameter in real.items()}
    parameters.update(standing_in)  # type: ignore[arg-type]
    try:
        output = own(*inputs, **more)
    finally:
        parameters.update(real)
    store.defer(partial(_move_gradients, tuple(standing_in.values()), tuple(real.values())))
    return output


def _move_gradients(standing_in: Sequence[Tensor], real: Sequence[Tensor]) -> None:
    for stand_in, parameter in zip(standing_in, real, strict=True):
        if stand_in.grad is not None:
            _add(parameter, stand_in.grad)


# Adding to .grad


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad.add_(gradient)


def _add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """parameter.grad += left @ right, without a copy of the product where the dtypes allow."""
    total = parameter.grad
    if total is not None and total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        _add(parameter, left.mm(right))
