from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from models.gpt import gpt
from models.model import Layer
from models.resnet import resnet
from pipeline.engine.materialize import give_memory, materialize
from pipeline.engine.transport import InProcessTransport
from pipeline.training.rank import Rank
from pipeline.training.settings import OptimizerSettings
from tests.engine.harness import CPU, build_ranks, placement, plan_for, settings_for
from tests.engine.samples import chain, images, small_gpt, text


def weights(model, inputs, schedule, pp, *, dtype=torch.float32, seed=0):
    """Every tensor of all ranks by whole-model name; copies of a tied parameter have names of their own."""
    plan = plan_for(settings_for(schedule, pp, 2, 4), model, inputs, dtype)
    ranks = build_ranks(plan, model, dtype=dtype, seed=seed)
    return {name: tensor.detach() for rank in ranks for name, tensor in rank.state_dict().items()}


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_starting_weights_do_not_depend_on_the_pipeline(kind):
    model, (inputs, _) = (small_gpt(), text(4)) if kind == "gpt" else (resnet(depth=18, classes=10), images(4))
    expected = weights(model, inputs, "1f1b", 1)
    for schedule, pp in (("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2)):
        found = weights(model, inputs, schedule, pp)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_another_seed_gives_other_weights():
    first, second = (weights(small_gpt(), text(4)[0], "1f1b", 1, seed=seed) for seed in (0, 1))
    assert not torch.equal(first["block.0.attention.projection.weight"], second["block.0.attention.projection.weight"])


def test_no_two_layers_start_alike():
    drawn = [
        tensor
        for name, tensor in weights(small_gpt(tie=False), text(4)[0], "1f1b", 2).items()
        if tensor.dim() == 2 and "norm" not in name
    ]
    assert len(drawn) > 20
    for first, second in itertools.combinations(drawn, 2):
        assert not torch.equal(first, second)


def test_a_tied_copy_starts_as_its_owner_does():
    found = weights(small_gpt(), text(4)[0], "1f1b", 2)
    assert torch.equal(found["head.projection.weight"], found["embedding.tokens.weight"])


def test_the_ranks_of_a_resnet_load_into_torchvisions():
    found = weights(resnet(depth=18, classes=10), images(4)[0], "1f1b", 3)
    whole = torchvision.models.resnet18(num_classes=10)
    assert whole.load_state_dict(found, strict=True)


def test_every_buffer_has_a_value():
    found = weights(resnet(depth=18, classes=10), images(4)[0], "1f1b", 2)
    statistics = {name: tensor for name, tensor in found.items() if name.split(".")[-1].startswith(("running", "num"))}
    assert len(statistics) == 3 * 20
    for name, tensor in statistics.items():
        assert torch.equal(tensor, torch.full_like(tensor, 1 if name.endswith("running_var") else 0)), name


def test_values_are_drawn_in_float32_whatever_the_precision():
    single, double = (weights(small_gpt(), text(4)[0], "1f1b", 2, dtype=d) for d in (torch.float32, torch.float64))
    for name, tensor in single.items():
        assert double[name].dtype is torch.float64
        assert torch.equal(double[name], tensor.double())


def test_normalizations_with_averages_keep_float32():
    found = weights(resnet(depth=18, classes=10), images(4)[0], "1f1b", 2, dtype=torch.bfloat16)
    kinds = {tensor.dtype for name, tensor in found.items() if "bn" in name or "downsample.1" in name}
    assert kinds == {torch.float32, torch.int64}
    assert found["conv1.weight"].dtype is torch.bfloat16


def test_a_rank_gives_memory_to_its_own_layers_alone():
    model = small_gpt()
    built: list[tuple[str, nn.Module]] = []

    def spied(layer: Layer) -> Layer:
        def build() -> nn.Module:
            module = layer.build()
            built.append((layer.name, module))
            return module

        return replace(layer, build=build)

    model = replace(model, layers=tuple(map(spied, model.layers)))
    plan = plan_for(settings_for("1f1b", 4, 2, 4), model, text(4)[0])
    made = [parameter for _, module in built for parameter in module.parameters()]
    assert made, "the plan looks at every layer"
    assert all(p.device.type == "meta" or isinstance(p, FakeTensor) for p in made)
    built.clear()
    rank = Rank(1, plan, model, placement(), InProcessTransport(), OptimizerSettings())
    assert [name for name, _ in built] == ["block.1", "block.2"]
    assert sum(p.numel() for p in rank.parameters.values()) == plan.rank_parameters(1)


def test_a_parameter_left_without_a_value_is_refused():
    model = replace(chain([partial(nn.Linear, 2, 2)]), initialize=lambda name, tensor, generator: None)
    with pytest.raises(ValueError, match=r"chain.initialize left 0.weight without a value: fill every parameter"):
        materialize(model, model.layers[0], device=CPU, dtype=torch.float32, seed=0)


def test_a_name_that_the_model_does_not_know_is_refused():
    model = gpt(layers=1, width=4, heads=1, context=4, vocabulary=8)
    stranger = Layer("stranger", partial(nn.Linear, 2, 2), "stranger.")
    with pytest.raises(ValueError, match=r"stranger\.weight"):
        materialize(model, stranger, device=CPU, dtype=torch.float32, seed=0)


class Shared(nn.Module):
    """One parameter and one buffer under two names, one parameter that is frozen, and one that is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.second.register_buffer("count", self.count)


def test_what_submodules_share_stays_shared():
    with torch.device("meta"):
        module = Shared()
    give_memory(module, CPU, torch.float64)
    assert module.first.weight is module.second.weight
    assert module.count is module.second.count
    assert module.first.weight.dtype is torch.float64
    assert module.count.dtype is torch.int64
    assert module.first.weight.requires_grad
    assert not module.first.bias.requires_grad
    assert all(tensor.device == CPU for tensor in (*module.parameters(), *module.buffers()))
