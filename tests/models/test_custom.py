"""A model of the user's own: its layers, starting weights and ties, and what can't be one."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.custom import custom
from models.loss import CrossEntropy
from models.model import Model
from pipeline.engine.materialize import materialize
from tests.engine.harness import assert_equal_outcomes, pipelined, plain_loop, settings_for
from tests.engine.samples import vectors
from tests.models.own import Scaled, Tagger, bare_sum, perceptron, twice

OWN = "tests.models.own"


def own(name: str, **options: Any) -> Model:
    return custom(target=f"{OWN}:{name}", **options)


def parts(model: Model) -> list[nn.Module]:
    """The layers with memory, as ranks make them."""
    cpu = torch.device("cpu")
    return [materialize(model, layer, device=cpu, dtype=torch.float32, seed=0) for layer in model.layers]


def state(model: Model) -> dict[str, Tensor]:
    pairs = zip(model.layers, parts(model), strict=True)
    return {layer.prefix + name: tensor for layer, module in pairs for name, tensor in module.state_dict().items()}


def test_a_layer_of_a_sequence_begins_at_parameters() -> None:
    model = own("perceptron", arguments={"depth": 1})
    assert [layer.name for layer in model.layers] == ["0", "2", "4", "6"]
    assert [len(list(layer.build().children())) for layer in model.layers] == [2, 2, 2, 0]
    assert (model.name, model.loss, model.stochastic) == ("perceptron", CrossEntropy(), True)


def test_starting_weights_and_outputs_are_those_of_the_function() -> None:
    model = own("perceptron", arguments={"width": 6}, seed=3)
    before = torch.get_rng_state()
    layers = nn.Sequential(*parts(model))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    reference = perceptron(width=6)
    found, expected = state(model), reference.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    images = torch.randn(3, 3, 2, 2)
    assert torch.equal(layers(images), reference(images))


def test_a_module_that_lists_its_layers() -> None:
    model = own("Tagger", seed=5)
    assert [(layer.name, layer.prefix) for layer in model.layers] == [
        ("embedding", "embedding."),
        ("1", "blocks.0."),
        ("2", "blocks.1."),
        ("head", "head."),
    ]
    assert model.tied == {"head.weight": "embedding.weight"}
    torch.manual_seed(5)
    reference = Tagger()
    tokens = torch.arange(11)[None]
    assert torch.equal(nn.Sequential(*parts(model))(tokens), reference(tokens))
    reference.load_state_dict(state(model), strict=True)


def test_by_layer_no_other_layer_gets_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (own("perceptron", initialization="layers", seed=3) for _ in range(2))
    one, cpu = first.layers[1], torch.device("cpu")
    built: list[nn.Module] = []
    monkeypatch.setattr(nn.Linear, "reset_parameters", _noting(built, nn.Linear.reset_parameters))
    materialize(first, first.layers[0], device=cpu, dtype=torch.float32, seed=0)
    assert [module.weight.device.type for module in built] == ["cpu"]
    expected = state(again)
    found = materialize(first, one, device=cpu, dtype=torch.float32, seed=0).state_dict()
    assert all(torch.equal(tensor, expected[one.prefix + name]) for name, tensor in found.items())
    weights = [tensor for name, tensor in expected.items() if tensor.dim() == 2 and tensor.shape == (8, 8)]
    assert not torch.equal(*weights)
    assert expected["1.weight"].abs().max() <= 12**-0.5
    other = state(own("perceptron", initialization="layers", seed=4))
    assert not torch.equal(other["1.weight"], expected["1.weight"])


def _noting(noted: list[nn.Module], reset: Any) -> Any:
    def noting(module: nn.Module) -> None:
        noted.append(module)
        reset(module)

    return noting


def test_by_layer_what_nothing_resets_is_refused() -> None:
    for name, message in (("bad.own", "Own 0? ?.*to start its gain with"), ("Tagger", "Scaled .*to start its scale")):
        model = own(name, initialization="layers")
        with pytest.raises(ValueError, match=rf"{message}.*use model.initialization=whole"):
            parts(model)
    attention = nn.MultiheadAttention(4, 2)  # spells it with an underscore
    assert hasattr(attention, "_reset_parameters")
    assert not hasattr(attention, "reset_parameters")


def test_one_module_in_two_places_is_tied() -> None:
    model = own("twice")
    assert [layer.name for layer in model.layers] == ["0", "2", "3"]
    assert model.tied == {"3.weight": "0.weight", "3.bias": "0.bias"}
    found = state(model)
    assert torch.equal(found["3.weight"], found["0.weight"])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_through_a_pipeline_it_is_what_it_is_in_one_process(schedule: str) -> None:
    model = own("Tagger")
    tokens = torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(1))
    settings = settings_for(schedule, 2, 4, 6)
    assert_equal_outcomes(pipelined(settings, model, tokens, tokens), plain_loop(model, tokens, tokens))


def test_one_module_in_two_places_learns_as_one() -> None:
    model = own("twice")
    vectors, classes = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    found = pipelined(settings_for("1f1b", 3, 3, 6), model, vectors, classes)
    assert_equal_outcomes(found, plain_loop(model, vectors, classes))
    torch.manual_seed(0)
    module = twice().double()
    nn.functional.cross_entropy(module(vectors.double()), classes).backward()
    gradient = module[0].weight.grad
    assert gradient is not None
    torch.testing.assert_close(found.gradients["3.weight"], gradient, rtol=1e-10, atol=1e-12)


def test_in_a_sequence_what_takes_or_gives_is_a_layer_by_itself() -> None:
    model = own("bare_sum")
    assert [(layer.name, layer.takes, layer.gives) for layer in model.layers] == [
        ("0", (), ("skip",)),
        ("1", (), ()),
        ("3", ("skip",), ()),
        ("4", (), ()),
    ]
    vectors, classes = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    found = pipelined(settings_for("1f1b", 4, 3, 6), model, vectors, classes)
    torch.manual_seed(0)
    given, _, linear, _, _ = bare_sum().double()
    value, skip = given(vectors.double())
    nn.functional.cross_entropy((linear(value.tanh()) + skip).tanh(), classes).backward()
    torch.testing.assert_close(found.gradients["0.weight"], given.weight.grad, rtol=1e-10, atol=1e-12)


def test_lists_and_models_are_taken() -> None:
    assert [layer.prefix for layer in own("listed").layers] == ["0.", "1."]
    assert own("whole_model").name == "gpt"
    loss = CrossEntropy(ignore_index=1)
    assert own("whole_model", loss=loss).loss is loss
    assert own("listed", loss=loss).loss is loss


def test_it_survives_pickling() -> None:
    model = own("Tagger")
    parts(model)
    sent = pickle.dumps(model)
    assert len(sent) < 4000
    copied = pickle.loads(sent)
    assert all(torch.equal(tensor, state(copied)[name]) for name, tensor in state(model).items())
    with torch.device("meta"):
        assert isinstance(copied.layers[1].build(), Scaled)


def test_a_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_model.py").write_text("from torch import nn\nbuild = lambda: nn.Sequential(nn.Linear(2, 2))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert len(custom(target="my_own_model:build").layers) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "model.target=nowhere names nothing: use module:name"),
        (":build", "names nothing: use module:name"),
        ("no.such.place:build", r"model.target=no.such.place:build can't be imported \(No module named 'no'\)"),
        (f"{OWN}:nobody", "has no attribute 'nobody'"),
        (f"{OWN}:OWN", "has no attribute 'OWN'"),
        (f"{OWN}:BAD", "is a dict: name a function or a class"),
        (f"{OWN}:instance", "is a Linear: name a function or a class"),
        (f"{OWN}:Keeps", r"can't be called \(missing a required argument: 'layers'\): set its arguments"),
        (f"{OWN}:Bare", "returned Bare, which has no `layers`"),
        (f"{OWN}:one_norm", "has one BatchNorm1d in layers 0 and 2: give each its own"),
        (f"{OWN}:two_names", "has two tensors called one.weight"),
        (f"{OWN}:bad.number", "returned int: return an nn.Sequential"),
        (f"{OWN}:bad.nothing", "a model without layers"),
        (f"{OWN}:bad.lazy", "has a lazy parameter 0.weight"),
        (f"{OWN}:bad.loose", r"0.mask of Loose is a plain tensor: register it, self.register_buffer\('mask'"),
        (f"{OWN}:bad.item", "can't be built on the meta device"),
        (f"{OWN}:bad.left_out", "has a parameter one.weight that is in none of its layers"),
        (f"{OWN}:bad.word", "has str for its layers"),
        (f"{OWN}:bad.count", "has int for its layers"),
        (f"{OWN}:bad.not_modules", "has a layer 1 that is no module"),
        (f"{OWN}:bad.same_name", "has a layer called 'a', a name that is empty or taken"),
        (f"{OWN}:bad.no_name", "has a layer called '', a name that is empty or taken"),
        (f"{OWN}:bad.undying", r"layer 0 of .* can't be copied \(there can be only one\)"),
    ],
)
def test_what_cannot_be_is_refused(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        custom(target=target)
    assert "\n" not in str(caught.value)


def test_an_unknown_initialization_and_an_unknown_argument_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.initialization=zeros is unknown: use whole or layers"):
        own("perceptron", initialization="zeros")
    with pytest.raises(ValueError, match=r"can't be called \(got an unexpected keyword argument 'dept'\)"):
        own("perceptron", arguments={"dept": 1})
    with pytest.raises(ValueError, match=r"the model has no parameter or buffer 'x': use a name such as '1.weight'"):
        own("perceptron").initialize("x", torch.ones(1), torch.Generator())


def test_values_go_past_layers_by_name() -> None:
    model, batch = own("skipping"), vectors(6)
    assert [(layer.takes, layer.gives) for layer in model.layers] == [
        ((), ("kept",)),
        ((), ()),
        ((), ()),
        (("kept",), ()),
    ]
    assert_equal_outcomes(pipelined(settings_for("1f1b", 4, 2, 6), model, *batch), plain_loop(model, *batch, 2))
