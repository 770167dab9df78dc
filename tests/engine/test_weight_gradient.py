"""The split backward of plain modules equals the whole one, in whatever module they sit."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from pipeline.engine.weight_gradient import Deferral, WeightGradients, split_weight_gradients


class Twice(nn.Module):
    """One Linear on one path twice: its gradient is a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.linear(x)))


class SharedByTwo(nn.Module):
    """One parameter in two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedHead(nn.Module):
    """An embedding whose weight is the projection too, by a plain product that nobody splits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.mix(self.tokens(x)), self.tokens.weight)


class Unplain(nn.Linear):
    """A subclass may do anything in its forward, so it is left alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def vectors() -> Tensor:
    return torch.randn(4, 3, 6, dtype=torch.float64)


def maps() -> Tensor:
    return torch.randn(3, 4, 9, 9, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(0, 7, (3, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), vectors),
    "linear on a lone vector": (lambda: nn.Linear(6, 5), lambda: torch.randn(6, dtype=torch.float64)),
    "conv on a lone image": (lambda: nn.Conv2d(4, 6, 3), lambda: torch.randn(4, 9, 9, dtype=torch.float64)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), vectors),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), vectors),
    "layer norm without parameters": (lambda: nn.LayerNorm(6, elementwise_affine=False), vectors),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()), maps),
    "grouped and dilated conv": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, bias=False), maps),
    "conv with same padding": (lambda: nn.Conv2d(4, 6, 3, padding="same"), maps),
    "conv with reflected edges": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), maps),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3)), tokens),
    "embedding by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), tokens),
    "a module called twice": (Twice, vectors),
    "a weight of two modules": (SharedByTwo, vectors),
    "a weight that is used plainly too": (TiedHead, tokens),
    "a subclass": (lambda: Unplain(6, 4), vectors),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), vectors),
}


def run_split(module: nn.Module, deferral: Deferral, x: Tensor, gradient: Tensor | None = None):
    """F, I and W; the output, the input's gradient, and which parameters had a gradient before W."""
    inputs = x.clone().requires_grad_(x.is_floating_point())
    deferral.store = weights = WeightGradients()
    output = module(inputs)
    deferral.store = None
    output.backward(torch.ones_like(output) if gradient is None else gradient)
    early = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    weights.apply()
    return output, inputs.grad, early


@pytest.mark.parametrize("name", CASES)
def test_split_equals_whole(name: str):
    torch.manual_seed(0)
    build, make_inputs = CASES[name]
    whole = build().double()
    split = copy.deepcopy(whole)
    deferral = Deferral()
    split_weight_gradients(split, deferral)
    for _ in range(3):  # gradients accumulate over microbatches
        x = make_inputs()
        inputs = x.clone().requires_grad_(x.is_floating_point())
        expected = whole(inputs)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        output, input_gradient, _ = run_split(split, deferral, x, gradient)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        if inputs.grad is not None:
            torch.testing.assert_close(input_gradient, inputs.grad, rtol=1e-11, atol=1e-12)
    for (key, found), expected in zip(split.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, expected.grad, rtol=1e-11, atol=1e-12, msg=lambda text, key=key: key + text
        )
    for found, expected in zip(split.buffers(), whole.buffers(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mlp", "conv", "embedding", "a module called twice"])
def test_weights_wait_for_w(name: str):
    build, make_inputs = CASES[name]
    module, deferral = build().double(), Deferral()
    split_weight_gradients(module, deferral)
    *_, early = run_split(module, deferral, make_inputs())
    assert early == set(), "I gave a plain module's weight its gradient already"
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_other_parameters_get_theirs_in_i():
    module, deferral = Unplain(6, 4).double(), Deferral()
    split_weight_gradients(module, deferral)
    *_, early = run_split(module, deferral, vectors())
    assert early == {"weight", "bias"}


def test_frozen_parameters_get_none():
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    deferral = Deferral()
    split_weight_gradients(module, deferral)
    _, input_gradient, _ = run_split(module, deferral, vectors())
    assert input_gradient is not None
    with_gradient = {name for name, p in module.named_parameters() if p.grad is not None}
    assert with_gradient == {"1.weight", "1.bias", "2.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_low_precision_follows_autocast(dtype: torch.dtype | None):
    """Output dtypes are autocast's, gradients are float32, and equal the whole backward's to bfloat16's rounding."""
    torch.manual_seed(0)
    build, _ = CASES["mlp"]
    whole = build()
    split, deferral, x = copy.deepcopy(whole), Deferral(), torch.randn(4, 3, 6)
    split_weight_gradients(split, deferral)

    def context():
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    with context():
        expected = whole(x)
    expected.backward(torch.ones_like(expected))
    with context():
        output, *_ = run_split(split, deferral, x)
    assert output.dtype == expected.dtype
    for found, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        torch.testing.assert_close(found.grad, other.grad, rtol=2**-6, atol=2**-6)


def test_a_cast_weight_is_made_once_and_again_after_the_optimizer():
    deferral, weight = Deferral(), nn.Parameter(torch.ones(2, 2))
    first = deferral.cast(weight, torch.bfloat16)
    assert deferral.cast(weight, torch.bfloat16) is first
    with torch.no_grad():
        weight.mul_(3)
    assert torch.equal(deferral.cast(weight, torch.bfloat16), torch.full((2, 2), 3.0, dtype=torch.bfloat16))


def test_w_frees_what_it_held():
    module, deferral = nn.Linear(6, 6).double(), Deferral()
    split_weight_gradients(module, deferral)
    deferral.store = weights = WeightGradients()
    inputs = vectors()
    memory = StorageWeakRef(inputs.untyped_storage())
    output = module(inputs)
    deferral.store = None
    output.sum().backward()
    del output, inputs
    assert not memory.expired(), "W needs the input"
    weights.apply()
    assert memory.expired()


def test_without_a_store_the_backward_is_whole():
    module, deferral = nn.Linear(6, 6).double(), Deferral()
    split_weight_gradients(module, deferral)
    module(vectors()).sum().backward()
    assert module.weight.grad is not None


def test_w_counts_what_it_keeps():
    kept: list[Tensor] = []
    module, deferral = nn.Linear(6, 6).double(), Deferral()
    split_weight_gradients(module, deferral)
    deferral.store = WeightGradients(hold=lambda tensor: kept.append(tensor))
    output = module(vectors())
    output.sum().backward()
    assert [tuple(tensor.shape) for tensor in kept] == [(12, 6), (12, 6)], "the input's rows and the output's gradient"


def test_what_waits_for_w_does_not_hold_the_stage_input():
    """It did: what a node has saved comes back with its place in the graph, and a view of it keeps that alive."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    deferral = Deferral()
    split_weight_gradients(model, deferral)
    deferral.store = WeightGradients()
    inputs = torch.ones(2, 4, requires_grad=True)
    model(inputs).sum().backward()
    reference = weakref.ref(inputs)
    del inputs
    assert reference() is None
    deferral.store.apply()
    assert model[1].weight.grad is not None
