"""A model out of a whole module: cut into layers, with the starting values that building the whole one gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from models.model import Layer


class Piece(NamedTuple):
    """A layer of a whole module; `prefix` before its own parameter names gives the whole module's."""

    name: str
    prefix: str
    module: nn.Module


class Pieces:
    """The layers of the module that `whole` builds, and its starting values: those it has after `manual_seed(seed)`.

    On the meta device `whole` is built anew for every layer, which takes no memory. The first starting value that is
    asked for builds it once on the CPU, and its weights stay there.
    """

    def __init__(self, whole: Callable[[], nn.Module], cut: Callable[[nn.Module], Sequence[Piece]], seed: int) -> None:
        self.whole = whole
        self.cut = cut
        self.seed = seed
        self._state: dict[str, Tensor] | None = None

    def layers(self) -> tuple[Layer, ...]:
        """In the order of the forward pass."""
        with torch.device("meta"):
            pieces = self.cut(self.whole())
        return tuple(Layer(piece.name, _Build(self, index), piece.prefix) for index, piece in enumerate(pieces))

    def initialize(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Copy the value that the whole module starts with; an unknown name is a ValueError."""
        if self._state is None:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(self.seed)
                self._state = self.whole().state_dict()
        if name not in self._state:
            example = next(iter(self._state))
            raise ValueError(f"the model has no parameter or buffer {name!r}: use a name such as {example!r}")
        tensor.detach().copy_(self._state[name])


@dataclass(frozen=True)
class _Build:
    """Builds one layer; picklable."""

    pieces: Pieces
    index: int

    def __call__(self) -> nn.Module:
        return self.pieces.cut(self.pieces.whole())[self.index].module


def flattened(sequence: nn.Sequential, prefix: str) -> Iterator[Piece]:
    """A piece for every child; plain sequences among them give theirs."""
    for key, child in sequence.named_children():
        if type(child) is nn.Sequential:
            yield from flattened(child, f"{prefix}{key}.")
        else:
            yield Piece(f"{prefix}{key}", f"{prefix}{key}.", child)
