"""A model out of a whole module: cut into layers, with the starting values that building the whole one gives."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from models.model import Layer


class Piece(NamedTuple):
    """A layer of a whole module; `prefix` before its own parameter names gives the whole module's."""

    name: str
    prefix: str
    module: nn.Module

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer by its name in the whole module, a shared one under each."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield self.prefix + name, parameter
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            yield self.prefix + name, buffer


class Pieces:
    """The layers of the module that `whole` builds, and its starting values.

    On the meta device `whole` is built once, which takes no memory; layers are copies of its pieces. Starting values
    are those that the whole module has after `torch.manual_seed(seed)`: the first one that is asked for builds it on
    the CPU, and its weights stay there. With `by_layer` no more than a layer is given memory: its modules'
    `reset_parameters` run under a seed of (seed, layer name).
    """

    def __init__(
        self,
        whole: Callable[[], nn.Module],
        cut: Callable[[nn.Module], Sequence[Piece]],
        seed: int,
        *,
        by_layer: bool = False,
    ) -> None:
        self.whole = whole
        self.cut = cut
        self.seed = seed
        self.by_layer = by_layer
        self._state: dict[str, Tensor] = {}

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """In the order of the forward pass, on the meta device."""
        with torch.device("meta"):
            return self.cut(self.whole())

    def __getstate__(self) -> dict[str, Any]:
        """What the rest can be built from anew."""
        return {name: value for name, value in vars(self).items() if name != "pieces"} | {"_state": {}}

    def layers(self) -> tuple[Layer, ...]:
        """In the order of the forward pass."""
        return tuple(
            Layer(
                piece.name,
                _Build(self, index),
                piece.prefix,
                takes=getattr(piece.module, "takes", ()),
                gives=getattr(piece.module, "gives", ()),
            )
            for index, piece in enumerate(self.pieces)
        )

    def tied(self) -> dict[str, str]:
        """Parameters that are one in the whole module and in several layers: alias to the first one's name."""
        owners: dict[int, str] = {}
        tied = {}
        for piece in self.pieces:
            for name, parameter in piece.module.named_parameters(piece.prefix.rstrip(".")):
                if owners.setdefault(id(parameter), name) != name:
                    tied[name] = owners[id(parameter)]
        return tied

    def initialize(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Copy the value that the module starts with; an unknown name is a ValueError."""
        if name not in self._state:
            self._state = self._built_with(name)
        tensor.detach().copy_(self._state[name])

    def _built_with(self, name: str) -> dict[str, Tensor]:
        """The starting values of the whole module, or of the layer that `name` is in."""
        having = [piece for piece in self.pieces if name in dict(piece.tensors())]
        if not having:
            example = next(known for piece in self.pieces for known, _ in piece.tensors())
            raise ValueError(f"the model has no parameter or buffer {name!r}: use a name such as {example!r}")
        if self.by_layer:
            with _seeded(_name_seed(self.seed, having[0].name)):
                pieces = [having[0]._replace(module=reset(copy.deepcopy(having[0].module)))]
        else:
            with _seeded(self.seed):
                pieces = list(self.cut(self.whole()))
        return {known: tensor.detach() for piece in pieces for known, tensor in piece.tensors()}


@dataclass(frozen=True)
class _Build:
    """Builds one layer; picklable."""

    pieces: Pieces
    index: int

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.pieces.pieces[self.index].module)


def reset(module: nn.Module) -> nn.Module:
    """Give a module of the meta device memory on the CPU, and the values of its parts' `reset_parameters`.

    Raises:
        ValueError: a part has parameters or buffers of its own and no such method.
    """
    for name, part in module.named_modules():
        if _own(part) and _reset_of(part) is None:
            raise ValueError(
                f"{type(part).__name__} {name or '(a whole layer)'} has no reset_parameters() to start its "
                f"{', '.join(_own(part))} with: give it one, or use model.initialization=whole"
            )
    module.to_empty(device="cpu")
    for part in reversed(list(module.modules())):  # a part after the parts that it may correct
        again = _reset_of(part)
        if again is not None:
            again()
    return module


def _own(part: nn.Module) -> list[str]:
    held: Mapping[str, Tensor | None] = {**part._parameters, **part._buffers}
    return [name for name, tensor in held.items() if tensor is not None]


def _reset_of(part: nn.Module) -> Callable[[], object] | None:
    # nn.MultiheadAttention's has an underscore
    found: Callable[[], object] | None = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
    return found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers on the CPU are those that follow the seed; afterwards those that were due."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        yield


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1


def flattened(sequence: nn.Sequential, prefix: str) -> Iterator[Piece]:
    """A piece for every child; plain sequences among them give theirs."""
    for key, child in sequence.named_children():
        if type(child) is nn.Sequential:
            yield from flattened(child, f"{prefix}{key}.")
        else:
            yield Piece(f"{prefix}{key}", f"{prefix}{key}.", child)
