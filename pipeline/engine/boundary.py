"""What crosses from stage to stage: shapes and dtypes, known to both sides before the first message."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.engine.batch_norm import statistics_kept
from pipeline.engine.materialize import give_memory
from pipeline.engine.model import Layer


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of one message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec that `tensor` has."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` has this spec."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of one such message."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Autocast = Callable[[], AbstractContextManager[object]]


def boundaries(
    layers: Sequence[Layer],
    counts: Sequence[int],
    inputs: TensorSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    autocast: Autocast,
    kept: Collection[int] = (),
) -> tuple[TensorSpec, ...]:
    """What each stage receives, and last what the last stage gives to the loss: one spec more than stages.

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

    Raises:
        ValueError: a normalization would see a single value a channel, a layer refuses its input's shape, or a layer
            overwrites an input that is kept: a stage's first one, or one of `kept`.
        TypeError: a stage's output is not a tensor.
    """
    specs = [TensorSpec(inputs.shape, dtype if inputs.dtype.is_floating_point else inputs.dtype)]
    ends = {sum(counts[: stage + 1]) for stage in range(len(counts))}
    starts = {0, *ends, *kept}
    with torch.device("meta"):
        modules = [layer.build().train() for layer in layers]
    # a cumulative average asks for the number of batches so far, which a fake tensor doesn't have
    with FakeTensorMode(), torch.device(device), statistics_kept(modules):
        value = torch.empty(specs[0].shape, dtype=specs[0].dtype)
        for index, (layer, module) in enumerate(zip(layers, modules, strict=True), start=1):
            give_memory(module, device, dtype)
            received, version = value, value._version
            with autocast():
                value = _checked_forward(layer, module, value)
            if index - 1 in starts and received._version != version:
                raise ValueError(
                    f"layer {layer.name} overwrites its input, which its stage keeps for the backward: use an "
                    "operation out of place, or a cut that leaves this layer inside a stage"
                )
            if index in ends:
                specs.append(TensorSpec.of(value))
    return tuple(specs)


def _checked_forward(layer: Layer, module: nn.Module, value: Tensor) -> Tensor:
    received = TensorSpec.of(value)
    try:
        output = module(value)
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
    except (RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"layer {layer.name} refuses its input {received}: {reason}") from error
    if not isinstance(output, Tensor):
        raise TypeError(f"layer {layer.name} returns {type(output).__name__}: a layer must return one tensor")
    return output
