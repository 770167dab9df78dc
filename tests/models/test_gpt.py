"""The GPT against a reference written as plain formulas, GPT-2's sizes and its rules of initialization."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.gpt import gpt
from tests.models.whole import initialized, whole_state

SMALL = {"layers": 3, "width": 24, "heads": 4, "context": 16, "vocabulary": 50}


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(state: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """GPT-2 by its formulas, with an explicit mask and softmax; nothing of the model's own modules."""
    batch, time = tokens.shape
    x = state["embedding.tokens.weight"][tokens] + state["embedding.positions.weight"][:time]
    future = torch.ones(time, time, dtype=torch.bool).triu(1)
    for index in range(layers):
        w = {name.removeprefix(f"block.{index}."): t for name, t in state.items() if name.startswith(f"block.{index}.")}
        h = norm(x, w["attention_norm.weight"], w["attention_norm.bias"])
        h = h @ w["attention.query_key_value.weight"].T + w["attention.query_key_value.bias"]
        query, key, value = (each.view(batch, time, heads, -1).transpose(1, 2) for each in h.chunk(3, dim=-1))
        scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])).masked_fill(future, -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, time, -1)
        x = x + mixed @ w["attention.projection.weight"].T + w["attention.projection.bias"]
        h = norm(x, w["feed_forward_norm.weight"], w["feed_forward_norm.bias"])
        h = gelu(h @ w["feed_forward.expansion.weight"].T + w["feed_forward.expansion.bias"])
        x = x + h @ w["feed_forward.projection.weight"].T + w["feed_forward.projection.bias"]
    return norm(x, state["head.norm.weight"], state["head.norm.bias"]) @ state["head.projection.weight"].T


@pytest.mark.parametrize("time", [16, 5])
def test_layers_in_sequence_equal_the_formulas(time: int) -> None:
    model = gpt(**SMALL, tie_embeddings=False)
    modules = initialized(model)
    state = whole_state(model, modules)
    for tensor in state.values():  # biases of zero would hide one left out
        tensor.add_(0.1 * torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(1)))
    tokens = torch.randint(50, (2, time), generator=torch.Generator().manual_seed(2))
    outputs = nn.Sequential(*modules)(tokens)
    torch.testing.assert_close(outputs, reference(state, tokens, 3, 4), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "parameters"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
    ids=["gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"],
)
def test_parameter_counts_of_the_named_sizes(layers: int, width: int, heads: int, parameters: int) -> None:
    model = gpt(layers=layers, width=width, heads=heads, context=1024, vocabulary=50257)
    with torch.device("meta"):
        sizes = {
            layer.prefix + name: parameter.shape
            for layer in model.layers
            for name, parameter in layer.build().named_parameters()
        }
    for alias, owner in model.tied.items():
        assert sizes.pop(alias) == sizes[owner]
    assert sum(size.numel() for size in sizes.values()) == parameters


def test_layer_names_and_tying() -> None:
    model = gpt(**SMALL)
    assert [layer.name for layer in model.layers] == ["embedding", "block.0", "block.1", "block.2", "head"]
    assert model.tied == {"head.projection.weight": "embedding.tokens.weight"}
    assert gpt(**SMALL, tie_embeddings=False).tied == {}


@pytest.mark.parametrize("context", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_building_draws_nothing_and_makes_no_buffer(context) -> None:
    before = torch.get_rng_state()
    with context:
        modules = [layer.build() for layer in gpt(**SMALL, dropout=0.1).layers]
        outputs = nn.Sequential(*modules)(torch.zeros(2, 16, dtype=torch.int64))
    assert outputs.shape == (2, 16, 50)
    assert not any(list(module.buffers()) for module in modules)
    assert torch.equal(torch.get_rng_state(), before)


def test_initialization_follows_gpt2() -> None:
    model = gpt(layers=8, width=128, heads=4, context=64, vocabulary=256)
    state = whole_state(model, initialized(model, dtype=torch.float32))
    for name, tensor in state.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            residual = name.startswith("block") and name.endswith("projection.weight")
            expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=0.05), name
            assert tensor.mean().item() == pytest.approx(0, abs=0.1 * expected), name


def test_initialization_depends_on_the_generator_alone() -> None:
    model = gpt(**SMALL)
    torch.manual_seed(1)
    one = whole_state(model, initialized(model, seed=3))
    torch.manual_seed(2)
    two = whole_state(model, initialized(model, seed=3))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["block.0.attention.bias", "weight", "head.projection.bias", "layer1.0.conv1.weight"])
def test_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"gpt has no parameter '{name}': use a name such as"):
        gpt(**SMALL).initialize(name, torch.zeros(3), torch.Generator())


def test_dropout_draws_in_embedding_attention_and_both_residuals() -> None:
    model = gpt(**SMALL, dropout=0.5)
    assert model.stochastic
    assert not gpt(**SMALL).stochastic
    embedding, block = initialized(model)[:2]
    x = torch.randn(2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    assert (embedding(tokens) == 0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (block.attention(x) == 0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (block.feed_forward(x) == 0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    block.attention.residual_dropout.p = 0.0
    assert not torch.equal(block.attention(x), block.attention(x))  # the attention weights' own dropout
    assert torch.equal(block.eval()(x), block(x))


def test_model_survives_pickling() -> None:
    model = pickle.loads(pickle.dumps(gpt(**SMALL)))
    assert torch.equal(initialized(model)[0].tokens.weight, initialized(gpt(**SMALL))[0].tokens.weight)


def test_sample_longer_than_the_context_is_refused() -> None:
    embedding = initialized(gpt(**SMALL))[0]
    with pytest.raises(ValueError, match="has 17 tokens but the model's context is 16: use context=17"):
        embedding(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"width \(24\) is not divisible by its heads \(5\): use heads=4, or width=25"),
        ({"layers": 0}, "positive layers, got 0"),
        ({"vocabulary": -1}, "positive vocabulary, got -1"),
        ({"dropout": 1.0}, "dropout is a probability below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout is a probability below 1, got -0.1"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        gpt(**{**SMALL, **change})
    assert "\n" not in str(caught.value)
