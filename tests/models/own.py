"""What users might write: builders for `model=custom`, good and bad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import gpt
from models.model import Model


class Saves(nn.Linear):
    """Gives its input for a skip connection."""

    gives = ("kept",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Adds(nn.Linear):
    """Takes it, some layers later."""

    takes = ("kept",)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return super().forward(x + kept)


def skipping() -> list[nn.Module]:
    return [Saves(4, 4), nn.Linear(4, 4), nn.Tanh(), Adds(4, 4)]


def perceptron(width: int = 8, depth: int = 2, classes: int = 5) -> nn.Sequential:
    """Children without parameters stand between those with."""
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width), nn.Tanh(), *hidden, nn.Linear(width, classes)
    )


class Tagger(nn.Module):
    """Embeds tokens, mixes them in blocks and projects with the embedding's weight; starting values of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Scaled(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.5)

    def layers(self) -> list[Any]:
        return [("embedding", self.embedding), *self.blocks, ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        value: Tensor = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(value)
        return logits


class Scaled(nn.Module):
    """A Linear times a buffer that is in no state dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.arange(1.0, width + 1), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(value) * self.scale


def twice() -> nn.Sequential:
    """One Linear in two places."""
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 4), linear)


class Given(nn.Linear):
    """Returns its input too."""

    gives = ("skip",)

    def forward(self, value: Tensor) -> Any:
        return super().forward(value), value


class Added(nn.Module):
    """Adds what was given."""

    takes = ("skip",)

    def forward(self, value: Tensor, skip: Tensor) -> Tensor:
        return value + skip


def bare_sum() -> nn.Sequential:
    return nn.Sequential(Given(4, 4), nn.Tanh(), nn.Linear(4, 4), Added(), nn.Tanh())


def listed() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Linear(4, 2)]


def whole_model() -> Model:
    return gpt(layers=1, width=8, heads=1, context=4, vocabulary=16)


class Bare(nn.Module):
    """A module without a list of layers."""


class Keeps(nn.Module):
    """Lists what it is given."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.layers = layers


class Loose(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(2)


class Own(nn.Module):
    """A parameter that nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


class Undying(nn.Linear):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("there can be only one")


def one_norm() -> nn.Sequential:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Linear(4, 4), norm)


def two_names() -> nn.Module:
    """A layer of the list is called as a part of the module is."""
    whole = Keeps([])
    whole.layers = [("a", whole.one), ("one", nn.Linear(2, 2))]
    return whole


BAD: dict[str, Any] = {
    "number": lambda: 3,
    "nothing": nn.Sequential,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3)),
    "loose": lambda: nn.Sequential(Loose()),
    "item": lambda: nn.Sequential(nn.Linear(int(torch.ones(1).item()), 2)),
    "left_out": lambda: Keeps([nn.Linear(2, 2)]),
    "word": lambda: Keeps("one"),
    "count": lambda: Keeps(3),
    "not_modules": lambda: Keeps([nn.ReLU(), torch.relu]),
    "same_name": lambda: [("a", nn.ReLU()), ("a", nn.ReLU())],
    "no_name": lambda: [("", nn.ReLU())],
    "undying": lambda: nn.Sequential(Undying(2, 2)),
    "own": lambda: nn.Sequential(Own()),
}
bad = type("bad", (), {name: staticmethod(build) for name, build in BAD.items()})
instance = nn.Linear(2, 2)
