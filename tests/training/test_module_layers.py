"""Modules with values of their own as a model: its layers, its ties, and copies for shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.loss import CrossEntropy
from pipeline.engine.split_modules import split_weight_gradients, whole_again
from pipeline.engine.weight_gradient import Deferral
from pipeline.training.module_layers import let_go, of_modules


def layers_of(modules):
    return of_modules(modules, CrossEntropy()).layers


def test_a_layer_begins_where_there_are_parameters():
    sequence = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    layers = layers_of(sequence)
    assert [layer.name for layer in layers] == ["0", "4", "5"]
    assert [[type(part).__name__ for part in layer.module.children()] for layer in layers] == [
        ["Flatten", "Linear", "ReLU", "Dropout"],
        [],
        [],
    ]
    names = [name for layer in layers for name, _ in layer.tensors()]
    assert set(names) == set(sequence.state_dict())
    assert layers[1].module is sequence[4]


def test_a_module_that_names_values_is_a_layer_of_its_own():
    giving, taking = nn.ReLU(), nn.ReLU()
    giving.gives = taking.takes = ("skip",)
    layers = layers_of(nn.Sequential(nn.Linear(2, 2), giving, nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), taking))
    assert [(layer.name, layer.takes, layer.gives) for layer in layers] == [
        ("0", (), ()),
        ("1", (), ("skip",)),
        ("2", (), ()),
        ("5", ("skip",), ()),
    ]


def test_listed_modules_are_layers_each():
    assert [layer.name for layer in layers_of([nn.Linear(2, 2), nn.ReLU()])] == ["0", "1"]
    assert [layer.prefix for layer in layers_of({"a.b": nn.Linear(2, 2), "c": nn.ReLU()})] == ["a.b.", "c."]


def test_a_sequence_with_a_forward_of_its_own_is_none():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    with pytest.raises(ValueError, match="Residual has a forward of its own"):
        layers_of(Residual(nn.Linear(2, 2)))
    assert len(layers_of([Residual(nn.Linear(2, 2))])) == 1


def test_shared_parameters_are_tied_to_the_first():
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    third.weight = second.weight = first.weight
    model = of_modules([first, second, third, second], CrossEntropy())
    assert model.tied == {
        "1.weight": "0.weight",
        "2.weight": "0.weight",
        "3.weight": "0.weight",
        "3.bias": "1.bias",
    }


class Odd(nn.Module):
    """What modules hold besides parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.mask = torch.ones(2)
        self.computed = self.layer.weight * 2
        self.calls = []


def test_a_copy_has_no_memory_and_no_hooks():
    module, seen = Odd(), []
    module.layer.weight.requires_grad_(False)
    module.register_forward_hook(lambda *given: seen.append(given))
    module.layer.register_full_backward_hook(seen.append)
    (layer,) = layers_of([module])
    copy = layer.build()
    assert {tensor.device.type for tensor in (*copy.parameters(), *copy.buffers())} == {"meta"}
    assert [name for name, _ in copy.named_buffers()] == ["mask", "computed"]
    assert list(copy.state_dict()) == list(module.state_dict())
    assert not copy.layer.weight.requires_grad
    assert copy.layer.bias.requires_grad
    assert not copy._forward_hooks
    assert not copy.layer._backward_hooks
    assert module._forward_hooks
    assert copy.calls is not module.calls


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_copy_makes_its_weights_as_the_module_does():
    """Old-style weight_norm does so in a hook, new-style in a parametrization."""
    old, new = nn.utils.weight_norm(nn.Linear(2, 3)), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    first, second = (layer.build() for layer in layers_of([old, new]))
    for part in (first, second):
        part.to_empty(device="cpu")
    assert second(first(torch.zeros(5, 2))).shape == (5, 4)


def test_what_cannot_be_copied_is_named():
    module = nn.Linear(2, 2)
    module.lock = __import__("threading").Lock()
    (layer,) = layers_of([module])
    with pytest.raises(ValueError, match=r"a Linear can't be copied \(cannot pickle '_thread.lock' object\)"):
        layer.build()


def test_memory_is_given_back_but_for_what_is_shared():
    own, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other.append(own)
    other[0].weight = own.weight
    mine, theirs = layers_of([own, other])
    let_go([theirs], [mine])
    assert {parameter.device.type for parameter in own.parameters()} == {"cpu"}
    assert [p.device.type for p in other.parameters()] == ["meta"] * 4 + ["cpu"] * 2
    assert {buffer.device.type for buffer in other.buffers()} == {"meta"}
    assert all(isinstance(parameter, nn.Parameter) for parameter in other.parameters())


def test_splitting_is_undone():
    plain, patched, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)
    patched.forward = lambda x: x + 1
    norm.forward = own = lambda x: x + 2
    root = nn.ModuleList([plain, patched, norm])
    split_weight_gradients(root, Deferral())
    assert "forward" in vars(plain)
    whole_again(root)
    assert "forward" not in vars(plain)
    assert patched(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert norm.forward is own
