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
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from pipeline.engine import split_modules
from pipeline.engine.split_modules import add_at_once, split_weight_gradients
from pipeline.engine.weight_gradient import AddedAtOnce, Deferral, WeightGradients


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


class Named(nn.Linear):
    """A subclass that computes what its parent does."""


class Standardized(nn.Conv2d):
    """Weight standardization: a forward of its own under the parent's."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(dim=(1, 2, 3), keepdim=True), bias)


class ChannelsLast(nn.LayerNorm):
    """As in ConvNeXt: normalizes the channels of maps."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Conditioned(nn.LayerNorm):
    """A norm with a second input, as diffusion models have."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = nn.Linear(width, width)

    def forward(self, input: Tensor, condition: Tensor) -> Tensor:
        return super().forward(input) + self.shift(condition)


class Conditioning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Conditioned(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, condition=x.mean(1, keepdim=True))


class ByHand(nn.Module):
    """A Linear whose parameters are used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.proj.weight, self.proj.bias)


class SelfAttention(nn.MultiheadAttention):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(input=self.linear(input=x))


class Overwriting(nn.Module):
    """In-place operations right behind split modules; the first one's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(functional.relu_(self.first(x.detach()))).mul_(2)
        return functional.relu_(self.last(x))


class ScaledTokens(nn.Module):
    """As in the first transformer: embeddings are scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x).mul_(2)


class HalfFrozen(nn.Module):
    """One call without a graph, one with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.norm(self.linear(x))
        return self.norm(self.linear(x)) - target


class Checkpointed(nn.Module):
    """Drops its activations and computes them again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(name: str, module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, name, Doubled())


def vectors() -> Tensor:
    return torch.randn(4, 3, 6, dtype=torch.float64)


def complex_vectors() -> Tensor:
    return torch.randn(4, 6, dtype=torch.complex128)


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
    "conv with same padding": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(2, 1)), maps),
    "conv with valid padding": (lambda: nn.Conv2d(4, 6, 3, padding="valid", stride=2), maps),
    "conv with circular edges": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), maps),
    "conv with reflected edges": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), maps),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3)), tokens),
    "embedding by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), tokens),
    "a module called twice": (Twice, vectors),
    "a weight of two modules": (SharedByTwo, vectors),
    "a weight that is used plainly too": (TiedHead, tokens),
    "a subclass": (lambda: Unplain(6, 4), vectors),
    "a subclass with the forward it inherits": (lambda: Named(6, 4), vectors),
    "an override for one convolution": (lambda: Standardized(4, 6, 3), maps),
    "a norm in a shape of its own": (lambda: ChannelsLast(4), maps),
    "a norm with a second input": (Conditioning, vectors),
    "a weight used by hand": (ByHand, vectors),
    "attention's out_proj, used by hand": (lambda: SelfAttention(6), vectors),
    "called by keyword": (ByKeyword, vectors),
    "overwritten outputs": (Overwriting, vectors),
    "overwritten maps": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 2, 1)), maps),
    "overwritten embeddings": (ScaledTokens, tokens),
    "a complex weight": (lambda: nn.Linear(6, 4, dtype=torch.complex128), complex_vectors),
    "a weight computed from others": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), vectors),
    "a weight with a power iteration": (lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), vectors),
    "a bias computed from another": (lambda: parametrized("bias", nn.Linear(6, 4)), vectors),
    "a norm's weight computed from another": (lambda: parametrized("weight", nn.LayerNorm(6)), vectors),
    "a pruned weight": (lambda: prune.random_unstructured(nn.Linear(6, 4), "weight", 0.5), vectors),
    "a part without a graph": (HalfFrozen, vectors),
    "checkpointed by the user": (Checkpointed, vectors),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), vectors),
}


def run_split(module: nn.Module, deferral: Deferral, x: Tensor, gradient: Tensor | None = None):
    """F, I and W; the output, the input's gradient, and which parameters had a gradient before W."""
    inputs = x.clone().requires_grad_(x.dtype != torch.int64)
    deferral.store = weights = WeightGradients()
    output = module(inputs)
    output.backward(torch.ones_like(output) if gradient is None else gradient)
    deferral.store = None
    early = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    weights.apply()
    return output, inputs.grad, early


def _in_double(module: nn.Module) -> nn.Module:
    return module if any(parameter.is_complex() for parameter in module.parameters()) else module.double()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_split_equals_whole(name: str):
    torch.manual_seed(0)
    build, make_inputs = CASES[name]
    whole = _in_double(build())
    torch.manual_seed(0)
    split, deferral = _in_double(build()), Deferral()
    split_weight_gradients(split, deferral)
    for _ in range(3):  # gradients accumulate over microbatches
        x = make_inputs()
        inputs = x.clone().requires_grad_(x.dtype != torch.int64)
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


WAITING = [
    "mlp",
    "conv",
    "conv on a lone image",
    "conv with same padding",
    "conv with reflected edges",
    "embedding",
    "a module called twice",
    "a subclass with the forward it inherits",
    "a norm in a shape of its own",
    "a norm with a second input",
    "called by keyword",
    "overwritten outputs",
]


@pytest.mark.parametrize("name", WAITING)
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


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks_gets_its_gradient_where_they_see_it(register: str):
    module, deferral, seen = nn.Linear(6, 4).double(), Deferral(), []
    split_weight_gradients(module, deferral)
    getattr(module.weight, register)(lambda tensor: seen.append(tensor.shape))
    *_, early = run_split(module, deferral, vectors())
    assert early == {"weight", "bias"}
    assert seen == [(4, 6)]


def test_a_weight_computed_from_others_after_the_split():
    torch.manual_seed(0)
    whole, deferral = nn.Linear(6, 4).double(), Deferral()
    split = copy.deepcopy(whole)
    split_weight_gradients(split, deferral)
    for module in (whole, split):
        parametrized("bias", module)
    x = vectors()
    whole(x).sum().backward()
    run_split(split, deferral, x)
    for found, expected in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_weights_given_for_one_call():
    """functional_call's weights are not leaves: their gradient goes on to where they come from."""
    module, deferral, scale = nn.Linear(6, 4).double(), Deferral(), torch.ones((), dtype=torch.float64)
    split_weight_gradients(module, deferral)
    scale.requires_grad_()
    given = {name: parameter * scale for name, parameter in module.named_parameters()}
    deferral.store = WeightGradients()
    torch.func.functional_call(module, given, vectors()).sum().backward()
    deferral.store.apply()
    assert scale.grad is not None


def test_hooks_of_a_split_module_run():
    module, deferral, seen = nn.Linear(6, 4).double(), Deferral(), []
    split_weight_gradients(module, deferral)
    module.register_forward_pre_hook(lambda _, inputs: seen.append("before"))
    module.register_forward_hook(lambda _, inputs, output: seen.append("after"))
    module.register_full_backward_hook(lambda _, grad_input, grad_output: seen.append("backward"))
    *_, early = run_split(module, deferral, vectors())
    assert seen == ["before", "after", "backward"]
    assert early == set()


def test_an_input_changed_after_the_forward_is_noticed():
    module, deferral = nn.Linear(6, 4).double(), Deferral()
    split_weight_gradients(module, deferral)
    deferral.store = WeightGradients()
    inputs = vectors()
    output = module(inputs)
    inputs.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_microbatches_in_flight_keep_apart():
    torch.manual_seed(0)
    module, deferral = CASES["mlp"][0]().double(), Deferral()
    whole = copy.deepcopy(module)
    split_weight_gradients(module, deferral)
    batches, stores, outputs = [vectors() for _ in range(3)], [], []
    for x in batches:
        deferral.store = WeightGradients()
        stores.append(deferral.store)
        outputs.append(module(x))
    deferral.store = None
    for index in (1, 0, 2):
        outputs[index].sum().backward()
    for index in (2, 0, 1):
        stores[index].apply()
        whole(batches[index]).sum().backward()
    for found, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12)


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


def test_i_frees_the_graph():
    """What waits for W are tensors alone: not the graph they come from, nor what it holds."""
    module, deferral = nn.Sequential(nn.Tanh(), nn.Linear(6, 6)).double(), Deferral()
    split_weight_gradients(module, deferral)
    deferral.store = weights = WeightGradients()
    inputs = vectors().requires_grad_()
    alive = weakref.ref(inputs)
    module(inputs).sum().backward()
    del inputs
    assert alive() is None
    weights.apply()


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


# Added at once, in a whole backward


@pytest.fixture
def all_large(monkeypatch):
    """Small Linears count as large."""
    monkeypatch.setattr(split_modules, "LARGE", 1)


class Force(nn.Module):
    """A gradient within the forward, as where forces come from an energy: it is differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.second(torch.tanh(self.first(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def with_gradients(module: nn.Module, at_once: AddedAtOnce | None, batches: list[Tensor]) -> list[Tensor]:
    """What the engine's backward leaves after these microbatches."""
    for x in batches:
        output = module(x.clone().requires_grad_(x.dtype != torch.int64))
        if at_once is not None:
            at_once.taken = True
        output.abs().square().sum().backward()
        if at_once is not None:
            at_once.taken = False
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("name", [*CASES, "a force"])
def test_added_at_once_equals_autograd(name: str):
    build, make_inputs = (Force, vectors) if name == "a force" else CASES[name]
    torch.manual_seed(0)
    whole = _in_double(build())
    torch.manual_seed(0)
    module, at_once = _in_double(build()), AddedAtOnce()
    add_at_once(module, at_once)
    batches = [make_inputs() for _ in range(3)]
    found, expected = with_gradients(module, at_once, batches), with_gradients(whole, None, batches)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("all_large")
def test_a_weight_is_added_to_within_its_product():
    module, at_once = nn.Linear(6, 4).double(), AddedAtOnce()
    add_at_once(module, at_once)
    with_gradients(module, at_once, [vectors()])
    total = module.weight.grad
    products: list[Tensor] = []
    module.weight.register_hook(products.append)  # from now on autograd gives it
    with_gradients(module, at_once, [vectors()])
    assert len(products) == 1
    assert module.weight.grad is total


def test_small_weights_and_autocast_are_left_to_autograd():
    small, large, at_once = nn.Linear(6, 4), nn.Linear(512, 512), AddedAtOnce()
    for module in (small, large):
        add_at_once(module, at_once)
    assert "forward" not in vars(small)
    assert large(torch.ones(1, 512)).grad_fn.name() == "_LinearBackward"
    with torch.autocast("cpu", torch.bfloat16):
        assert large(torch.ones(1, 512)).grad_fn.name() == "AddmmBackward0"
