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
from pipeline.engine.nest import Microbatched


def small_gpt(dropout: float = 0.0, tie: bool = True, layers: int = 6) -> Model:
    return gpt(layers=layers, width=16, heads=2, context=8, vocabulary=32, dropout=dropout, tie_embeddings=tie)


def text(batch_size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (batch_size, 9), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def texts(lengths: Sequence[int], samples: int = 2) -> tuple[Microbatched, Microbatched]:
    """Of a microbatch of each length so many samples; those of no length are none."""
    draw = torch.Generator().manual_seed(7)
    cut = [torch.randint(0, 32, (samples if length else 0, length + 1), generator=draw) for length in lengths]
    return Microbatched(part[:, :-1] for part in cut), Microbatched(part[:, 1:] for part in cut)


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
    takes: Mapping[int, tuple[str, ...]] | None = None,
    gives: Mapping[int, tuple[str, ...]] | None = None,
    stochastic: bool = False,
    loss: object = None,
) -> Model:
    """A model of any modules in a row, named 0, 1, ...; `takes` and `gives` are by layer."""
    layers = tuple(
        Layer(str(index), build, f"{index}.", (takes or {}).get(index, ()), (gives or {}).get(index, ()))
        for index, build in enumerate(builds)
    )
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


class Down(nn.Module):
    """Halves an image; gives it as it was for a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convolution(x).tanh()
        return self.pool(x), x


class Up(nn.Module):
    """Doubles an image and joins the skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, 2, 2)
        self.convolution = nn.Conv2d(2 * outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolution(torch.cat([self.grow(x), skip], 1)).tanh()


class Pixels(nn.Conv2d):
    """A class of each pixel."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(inputs, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).movedim(1, -1)


def unet() -> Model:
    """Eight layers with skip connections over up to six of them, for `pixels`."""
    builds = [partial(Down, 3, 2), partial(Down, 2, 3), partial(Down, 3, 4), partial(nn.Conv2d, 4, 4, 1)]
    builds += [partial(Up, 4, 4), partial(Up, 4, 3), partial(Up, 3, 2), partial(Pixels, 2, 4)]
    skips = ("fine",), ("middle",), ("coarse",)
    return chain(builds, gives=dict(zip((0, 1, 2), skips, strict=True)), takes=dict(zip((6, 5, 4), skips, strict=True)))


def pixels(batch_size: int) -> tuple[Tensor, Tensor]:
    """Images and a class of each pixel."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(batch_size, 3, 8, 8, generator=draw)
    return inputs, torch.randint(0, 4, (batch_size, 8, 8), generator=draw)


class Source(nn.Module):
    """The encoder's input: vectors of a sentence, a mask of its padding, and the other sentence for the decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(9, width)

    def forward(self, sentences: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        source, target = sentences
        return self.words(source), source == 0, target


class Attention(nn.Module):
    """Each vector looks at those of `memory` that are no padding, by default at its own sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ask, self.answer = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, padding: Tensor, memory: Tensor | None = None) -> Tensor:
        keys, values = self.answer(x if memory is None else memory).chunk(2, -1)
        scores = (self.ask(x) @ keys.mT).masked_fill(padding[:, None], -torch.inf)
        return x + scores.softmax(-1) @ values


class Bridge(nn.Module):
    """The encoder's output becomes the memory, and the decoder begins with vectors of the other sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(9, width)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(target), x


def translator(width: int = 4) -> Model:
    """An encoder of two layers and a decoder of four, which take the encoder's output and its mask, for `sentences`."""
    attention = partial(Attention, width)
    builds = [partial(Source, width), attention, attention, partial(Bridge, width), *[attention] * 4]
    takes = {1: ("padding",), 2: ("padding",), 3: ("target",)} | dict.fromkeys(range(4, 8), ("padding", "memory"))
    builds.append(partial(nn.Linear, width, 9))
    return chain(builds, takes=takes, gives={0: ("padding", "target"), 3: ("memory",)})


def sentences(batch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pairs of sentences, the first padded with 0, and the next words, of which some don't count."""
    draw = torch.Generator().manual_seed(6)
    source, target, words = (torch.randint(1, 9, (batch_size, length), generator=draw) for length in (6, 5, 5))
    lengths = torch.randint(2, 7, (batch_size,), generator=draw)
    source[torch.arange(6) >= lengths[:, None]] = 0
    words[torch.rand(batch_size, 5, generator=draw) < 0.3] = -100
    return (source, target), words
