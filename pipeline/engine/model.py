"""What the engine asks of a model: an ordered list of named layers and a loss. Any object of this shape will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Layer(Protocol):
    """One named layer, built on demand: only the rank that holds it ever gives it memory."""

    @property
    def name(self) -> str:
        """Unique in the model ("layer1.0")."""

    @property
    def build(self) -> Callable[[], nn.Module]:
        """Makes the module; called where tensors have no memory, so it must draw no random numbers."""

    @property
    def prefix(self) -> str:
        """Put before the module's own parameter names it gives the whole model's ("layer1.0.")."""

    @property
    def takes(self) -> tuple[str, ...]:
        """Values of layers before, by name, that the module is called with after its input: `module(value, *taken)`."""

    @property
    def gives(self) -> tuple[str, ...]:
        """Values, by name, that the module returns beside its output, `(value, *given)`, for layers after it."""


class Loss(Protocol):
    """The sum over samples (tokens), so that only one place divides: the engine, by the weight of the whole batch."""

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        """The summed loss, a scalar, of the last layer's output and the targets: tensors or nests of them."""

    def weight(self, targets: Any, /) -> float:
        """What the mean over these targets divides by: the number of samples (tokens) that the sum runs over."""


class Model(Protocol):
    """A whole model as the engine sees it."""

    @property
    def name(self) -> str:
        """For tables and tags."""

    @property
    def layers(self) -> Sequence[Layer]:
        """In the order of the forward pass."""

    @property
    def loss(self) -> Loss:
        """Applied to the last layer's output."""

    @property
    def initialize(self) -> Callable[[str, Tensor, torch.Generator], None]:
        """Fills a CPU tensor with the starting value of the parameter or buffer of that whole-model name."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias parameter name -> the name of the parameter that it is tied to."""

    @property
    def stochastic(self) -> bool:
        """Whether a layer draws random numbers while training (dropout)."""
