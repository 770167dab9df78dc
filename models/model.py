"""What a model is: an ordered list of named layers, a loss and the rules its weights are drawn by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Generator, Tensor, nn

from models.names import Names


class Loss(Protocol):
    """A sum over samples (tokens), so that parts of a batch add up whatever their sizes."""

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        """Sum of the losses of the samples (tokens), 0-dim."""
        ...

    def weight(self, targets: Any, /) -> float:
        """Number of samples (tokens) that the sum runs over."""
        ...


@dataclass(frozen=True)
class Layer:
    """One indivisible piece of a model.

    `build` draws no random number under `torch.device("meta")` or FakeTensorMode; weights come from `Model.initialize`.
    `prefix` before the module's own parameter names gives the names in the whole model's state dict. Values go by name
    past other layers to those that take them (a skip connection, an encoder's memory, a mask): the module is called
    with its input and the values it `takes`, and returns its output and those it `gives`, if any.
    """

    name: str
    build: Callable[[], nn.Module]
    prefix: str
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """Layers run in order, the first on the data's inputs, the last giving the outputs that `loss` takes.

    `initialize(name, tensor, generator)` fills one parameter or buffer in place: whole-model name, CPU tensor; an
    unknown name is a ValueError. `tied` maps a parameter to the one it must stay equal to. `stochastic` says that a
    layer draws random numbers when training. `names` are those of published state dicts.
    """

    name: str
    layers: tuple[Layer, ...]
    loss: Loss
    initialize: Callable[[str, Tensor, Generator], None]
    tied: Mapping[str, str] = field(default_factory=dict)
    stochastic: bool = False
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        """Let every tied parameter name the one that it is equal to in the end.

        Raises:
            ValueError: parameters are tied in a circle.
        """
        object.__setattr__(self, "tied", {alias: self._owner(alias) for alias in self.tied})

    def _owner(self, alias: str) -> str:
        passed, name = {alias}, self.tied[alias]
        while name in self.tied:
            if name in passed:
                raise ValueError(f"{alias} is tied to itself by way of {name}: tie all to one that is not tied")
            passed.add(name)
            name = self.tied[name]
        return name
