"""Small models and batches that the tests of the engine and of training share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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


class Fork(nn.Module):
    """Of numbers, a row of its table and a mask a dict: a view, a tensor twice, integers, the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(5, 4)

    def forward(self, given: Mapping[str, Tensor]) -> dict[str, object]:
        made = self.linear(given["numbers"])
        looked_up = self.table(given["row"])
        skip = looked_up, [looked_up, given["mask"]]
        return {"made": made.unflatten(1, (2, 2)).mT, "skip": skip, "row": given["row"]}


class Between(nn.Module):
    """Trains on one of the tensors and passes the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, given: dict[str, Any]) -> dict[str, object]:
        _, (_, mask) = given["skip"]
        return {**given, "made": self.linear(given["made"]).tanh() * mask[:, :1, None]}


class Join(nn.Module):
    """All of it together: the logits, and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        one, (other, mask) = given["skip"]
        made = self.linear(given["made"].flatten(1) + one * mask)
        return made, (made - other * given["row"][:, None]).sin()


@dataclass(frozen=True)
class Both:
    """Cross entropy of the first output, and the second's squares where its targets say so."""

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        return CrossEntropy()(outputs[0], targets["class"]) + (outputs[1].square() * targets["counts"][:, None]).sum()

    def weight(self, targets: Mapping[str, Tensor]) -> int:
        return len(targets["class"])


def nested() -> Model:
    """Four layers with nests between them."""
    return chain([Fork, Between, Between, Join], loss=Both())


def nests(batch_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For `nested`: numbers, integers and booleans."""
    draw = torch.Generator().manual_seed(4)
    numbers, classes = vectors(batch_size)
    inputs = {
        "numbers": numbers,
        "row": torch.randint(0, 5, (batch_size,), generator=draw),
        "mask": torch.rand(batch_size, 4, generator=draw) < 0.7,
    }
    return inputs, {"class": classes, "counts": torch.rand(batch_size, generator=draw) < 0.5}
