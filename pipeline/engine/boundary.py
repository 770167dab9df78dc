"""What crosses from stage to stage: shapes and dtypes, known to both sides before the first message."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge

from pipeline.engine.batch_norm import statistics_kept
from pipeline.engine.materialize import give_memory
from pipeline.engine.model import Layer
from pipeline.engine.named_values import alive, carried, passed_on, taken
from pipeline.engine.nest import Nest, flat, mapped, rebuilt


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec that `tensor` has."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` has this spec."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape

    def crossing(self, dtype: torch.dtype | None) -> TensorSpec:
        """What is sent of it: floating-point numbers in `dtype`, if that is given."""
        return self if dtype is None or not self.dtype.is_floating_point else TensorSpec(self.shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


SpecNest: TypeAlias = "TensorSpec | tuple[SpecNest, ...] | list[SpecNest] | dict[Any, SpecNest] | None"


def specs_of(nest: Nest) -> SpecNest:
    """The specs of the tensors in `nest`, in such a nest."""
    specs: SpecNest = mapped(TensorSpec.of, nest)
    return specs


def in_words(nest: SpecNest) -> str:
    """The specs in `nest` one after the other."""
    return ", ".join(map(str, flat(nest))) or "nothing"


@dataclass(frozen=True)
class Boundary:
    """What one microbatch carries from a stage to the next, and which of it has a gradient that comes back.

    Args:
        nest: specs, nested as the layer before the boundary gives the tensors.
        trained: for each tensor whether a layer before the boundary trains through it.
        differentiable: for each tensor whether it is trained and the model's output depends on it.
        crossing: the dtype that floating-point tensors have on their way to another rank; None: their own.
    """

    nest: SpecNest
    trained: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    crossing: torch.dtype | None = None
    tensors: tuple[TensorSpec, ...] = field(init=False)
    gradients: tuple[TensorSpec, ...] = field(init=False)
    """Those of the tensors that are differentiable."""
    _messages: dict[str, tuple[TensorSpec, ...]] = field(init=False, repr=False, compare=False)
    _alone: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = flat(self.nest)
        object.__setattr__(self, "tensors", tensors)
        gradients = [spec for spec, wanted in zip(tensors, self.differentiable, strict=True) if wanted]
        object.__setattr__(self, "gradients", tuple(gradients))
        kinds = {"activation": self.tensors, "gradient": self.gradients}
        messages = {kind: tuple(spec.crossing(self.crossing) for spec in specs) for kind, specs in kinds.items()}
        object.__setattr__(self, "_messages", messages)
        object.__setattr__(self, "_alone", isinstance(self.nest, TensorSpec))

    def message(self, kind: Literal["activation", "gradient"]) -> tuple[TensorSpec, ...]:
        """What crosses, a transfer each: all tensors down, the gradients up."""
        return self._messages[kind]

    def value(self, tensors: Sequence[Tensor]) -> Nest:
        """What came, as the stage takes it."""
        return self._nested(self._in_their_own(self.tensors, tensors))

    def leaves(self, tensors: Sequence[Tensor]) -> Nest:
        """What came, as a stage takes it that gives its gradients back."""
        own = self._in_their_own(self.tensors, tensors)
        return self._nested(
            [tensor.requires_grad_(wanted) for tensor, wanted in zip(own, self.differentiable, strict=True)]
        )

    def returned(self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of the gradients of what came those that go back: zeros where none came up."""
        each = zip(gradients, inputs, self.differentiable, strict=True)
        return tuple([torch.zeros_like(tensor) if one is None else one for one, tensor, wanted in each if wanted])

    def outgoing(self, kind: Literal["activation", "gradient"], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """These tensors of a message (all, or none of them) as they cross."""
        if self.crossing is None:
            return tensors
        return [tensor.to(spec.dtype) for tensor, spec in zip(tensors, self._messages[kind], strict=False)]

    def spread(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that came, an entry a tensor: None where there is none."""
        remaining = iter(self._in_their_own(self.gradients, gradients))
        return [next(remaining) if wanted else None for wanted in self.differentiable]

    def _nested(self, tensors: Sequence[Tensor]) -> Nest:
        nest: Nest = tensors[0] if self._alone else rebuilt(self.nest, tensors)
        return nest

    def _in_their_own(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What came, in the dtypes that it had before it crossed."""
        if self.crossing is None:
            return tensors
        return [tensor.to(spec.dtype) for spec, tensor in zip(specs, tensors, strict=True)]


_Edge = tuple[Node, int]

Autocast = Callable[[], AbstractContextManager[object]]


def boundaries(
    layers: Sequence[Layer],
    counts: Sequence[int],
    inputs: SpecNest,
    *,
    dtype: torch.dtype,
    device: torch.device,
    autocast: Autocast,
    kept: Collection[int] = (),
    crossing: torch.dtype | None = None,
    training: bool = True,
) -> tuple[Boundary, ...]:
    """What each stage receives, and last what the last stage gives to the loss: one more than stages.

    The layers run once on fake tensors, which have no memory but follow the same dtype rules as real ones (meta
    tensors don't: under autocast a meta Linear stays float32).

    Args:
        layers: the whole model's, in order.
        counts: how many consecutive layers each stage holds.
        inputs: one microbatch of the model's input.
        dtype: the parameters' dtype; floating-point input is converted to it.
        device: the device type decides autocast's rules.
        autocast: makes the context that the run's forward passes are under.
        kept: layers inside a stage whose input is kept as well, for a recomputation of a part of the stage.
        crossing: the dtype of floating-point tensors on their way to another rank; None: their own.
        training: whether the layers normalize as in training, and stages keep their inputs.

    Raises:
        ValueError: a normalization would see a single value a channel, a layer refuses its input's shape or gives
            what is no nest of tensors, takes a named value that isn't there, or overwrites what is kept: what its
            stage received, or the input of a layer of `kept`.
    """
    edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    starts, names = {*edges, *kept}, alive(layers)
    with torch.device("meta"):
        modules = [layer.build().train(training) for layer in layers]
    # a cumulative average asks for the number of batches so far, which a fake tensor doesn't have
    with FakeTensorMode(), torch.device(device), statistics_kept(modules):
        value, named = mapped(lambda spec: _empty(spec, dtype), inputs), dict[str, Nest]()
        received = [value]
        watched: list[tuple[Tensor, int]] = []
        for index, (layer, module) in enumerate(zip(layers, modules, strict=True)):
            give_memory(module, device, dtype)
            if index in starts:
                watched = [(tensor, tensor._version) for tensor in flat((value, named))]
            with autocast():
                output = _checked_forward(layer, module, value, *taken(layer, named))
            value, named = passed_on(layer, output, named, names[index + 1])
            received.append(carried(value, named))
            if training and any(tensor._version != version for tensor, version in watched):
                raise ValueError(
                    f"layer {layer.name} overwrites what its stage received and keeps for the backward: use an "
                    "operation out of place, or a cut that leaves this layer inside a stage"
                )
        used = _edges_behind(value)
        return tuple(_boundary(received[edge], used, crossing) for edge in edges)


def _boundary(value: Nest, used: Collection[_Edge], crossing: torch.dtype | None) -> Boundary:
    """Where tensors like these cross, of which those at the edges `used` have a gradient."""
    tensors = flat(value)
    trained = tuple(tensor.requires_grad for tensor in tensors)
    wanted = [each and _edge(tensor) in used for tensor, each in zip(tensors, trained, strict=True)]
    return Boundary(specs_of(value), trained, tuple(wanted), crossing)


def _edges_behind(outputs: Nest) -> set[_Edge]:
    """The edges of the graph that the outputs' gradients go along."""
    pending = [_edge(tensor) for tensor in flat(outputs) if tensor.requires_grad]
    found = set(pending)
    while pending:
        node, _ = pending.pop()
        new = {(before, number) for before, number in node.next_functions if before is not None} - found
        found |= new
        pending += new
    return found


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _empty(spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    return torch.empty(spec.shape, dtype=dtype if spec.dtype.is_floating_point else spec.dtype)


def _checked_forward(layer: Layer, module: nn.Module, *inputs: Nest) -> Nest:
    received = in_words(specs_of(inputs))
    try:
        output: Nest = module(*inputs)
    except ValueError as error:
        if "Expected more than 1 value per channel" in str(error):
            raise ValueError(
                f"a normalization in {layer.name} would see one value a channel (input {received}): use a larger "
                "batch_size or fewer microbatches, or larger images"
            ) from error
        if "Expected more than 1 spatial element" in str(error):
            raise ValueError(
                f"a normalization in {layer.name} would see one value a channel of an image (input {received}): use "
                "larger images"
            ) from error
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"layer {layer.name} refuses its input {received}: {reason}") from error
    _check_tensors(layer, output)
    return output


def _check_tensors(layer: Layer, output: Nest) -> None:
    leaves = flat(output)
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if others or not leaves:
        raise ValueError(
            f"layer {layer.name} returns {', '.join(others) or 'nothing'}: let it return a tensor, or tensors in "
            "tuples, lists and dicts"
        )
