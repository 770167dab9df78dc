"""Small models and batches that the tests of the engine and of training share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from models.gpt import gpt
from models.loss import CrossEntropy
from models.model import Layer, Model


def small_gpt(dropout: float = 0.0, tie: bool = True, layers: int = 6) -> Model:
    return gpt(layers=layers, width=16, heads=2, context=8, vocabulary=32, dropout=dropout, tie_embeddings=tie)


def text(batch_size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (batch_size, 9), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def images(batch_size: int, size: int = 64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(batch_size, 3, size, size, generator=draw), torch.randint(0, 10, (batch_size,), generator=draw)


def vectors(batch_size: int, width: int = 4) -> tuple[Tensor, Tensor]:
    """For `chain`: float inputs and classes."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn(batch_size, width, generator=draw), torch.randint(0, width, (batch_size,), generator=draw)


class Explodes(nn.Linear):
    """Gives what is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.is_floating_point():  # else BatchNorm's count
        tensor.normal_(generator=generator)


def chain(
    builds: Sequence[Callable[[], nn.Module]],
    *,
    tied: Mapping[str, str] | None = None,
    stochastic: bool = False,
    loss: object = None,
) -> Model:
    """A model of any modules in a row, named 0, 1, ..."""
    layers = tuple(Layer(str(index), build, f"{index}.") for index, build in enumerate(builds))
    return Model("chain", layers, loss or CrossEntropy(), fill, tied or {}, stochastic)  # type: ignore[arg-type]


def linears(count: int, width: int = 4) -> Model:
    return chain([partial(nn.Linear, width, width)] * count)
