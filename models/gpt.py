"""GPT-2 (Radford et al. 2019): a pre-norm decoder, as an embedding, blocks and a head."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from models.loss import CrossEntropy
from models.model import Layer, Model
from models.names import Gpt2Names

STANDARD_DEVIATION = 0.02


class Embedding(nn.Module):
    """Token ids (batch, time) int64 to activations (batch, time, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        time, context = tokens.shape[1], self.positions.num_embeddings
        if time > context:
            raise ValueError(f"a sample has {time} tokens but the model's context is {context}: use context={time}")
        positions = torch.arange(time, device=tokens.device)
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return embedded


class Attention(nn.Module):
    """Causal self-attention with several heads, (batch, time, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, width / heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, time, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.residual_dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return projected


class FeedForward(nn.Module):
    """Two linear maps around a GELU (tanh form, as GPT-2's), four times wider inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expansion = nn.Linear(width, 4 * width)
        self.activation = nn.GELU(approximate="tanh")
        self.projection = nn.Linear(4 * width, width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.residual_dropout(self.projection(self.activation(self.expansion(x))))
        return projected


class Block(nn.Module):
    """Attention, then feed-forward, each normalised first and added to the residual stream (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Head(nn.Module):
    """Final LayerNorm and projection, (batch, time, width) to logits (batch, time, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


TIED: Mapping[str, str] = {"head.projection.weight": "embedding.tokens.weight"}


def gpt(
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int,
    dropout: float = 0.0,
    tie_embeddings: bool = True,
) -> Model:
    """GPT-2 with `layers` blocks; inputs and targets are token ids (batch, time <= context), int64.

    gpt2 is layers=12, width=768, heads=12, context=1024, vocabulary=50257. A size that cannot be built is a ValueError.
    """
    _check(layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability below 1, got {dropout}: use 0 for none")
    embedding = Layer("embedding", partial(Embedding, vocabulary, context, width, dropout), "embedding.")
    head = Layer("head", partial(Head, width, vocabulary), "head.")
    build_block = partial(Block, width, heads, dropout)
    blocks = (Layer(f"block.{index}", build_block, f"block.{index}.") for index in range(layers))
    return Model(
        name="gpt",
        layers=(embedding, *blocks, head),
        loss=CrossEntropy(),
        initialize=partial(initialize, layers),
        tied=dict(TIED) if tie_embeddings else {},
        stochastic=dropout > 0,
        names=Gpt2Names(heads),
    )


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"gpt needs a positive {name}, got {value}: use 1 or more")
    width, heads = sizes["width"], sizes["heads"]
    if width % heads:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - heads))
        cure = f"use heads={nearest}, or width={math.ceil(width / heads) * heads}"
        raise ValueError(f"gpt's width ({width}) is not divisible by its heads ({heads}): {cure}")


NAME = re.compile(
    r"embedding\.(?P<embedding>tokens|positions)\.weight"
    r"|(block\.\d+\.(attention|feed_forward)_norm|head\.norm)\.(?P<norm>weight|bias)"
    r"|block\.\d+\.(attention\.query_key_value|feed_forward\.expansion)\.(?P<linear>weight|bias)"
    r"|block\.\d+\.(attention|feed_forward)\.projection\.(?P<residual>weight|bias)"
    r"|head\.projection\.(?P<head>weight)"
)


def initialize(layers: int, name: str, tensor: Tensor, generator: Generator) -> None:
    """GPT-2's rules: normal 0.02, residual projections scaled by 1/sqrt(2 layers), biases zero, norms one and zero."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"gpt has no parameter {name!r}: use a name such as 'block.0.attention.projection.weight'")
    if name.endswith(".bias"):
        nn.init.zeros_(tensor)
    elif match["norm"]:
        nn.init.ones_(tensor)
    else:
        # Each block adds two projections to the residual stream; the scale keeps its variance independent of depth.
        scale = 1 / math.sqrt(2 * layers) if match["residual"] else 1.0
        nn.init.normal_(tensor, std=STANDARD_DEVIATION * scale, generator=generator)
