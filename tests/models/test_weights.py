"""Weights from published state dicts and back: names, layouts, outputs of the source, and files that don't fit."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision import models as torchvision_models

from models.custom import custom
from models.gpt import gpt
from models.model import Layer, Model
from models.resnet import resnet
from models.torchvision_models import torchvision_model
from models.weights import WeightsFile, from_source, to_source, with_weights, write_weights
from pipeline.engine.materialize import materialize
from tests.models.hugging_face_gpt2 import Gpt2WithHead

SIZES = {"vocabulary": 17, "context": 6, "width": 8, "layers": 2}
TOKENS = torch.arange(12).reshape(2, 6) % 17
State = dict[str, Tensor]


def our_gpt(**change: Any) -> Model:
    return gpt(**({**SIZES, "heads": 2} | change))


def source_gpt(tied: bool = True, seed: int = 0) -> Gpt2WithHead:
    torch.manual_seed(seed)
    return Gpt2WithHead(tied, heads=2, **SIZES)


def parts(model: Model) -> list[nn.Module]:
    """The layers with memory, as ranks make them."""
    cpu = torch.device("cpu")
    return [materialize(model, layer, device=cpu, dtype=torch.float32, seed=0).eval() for layer in model.layers]


def state_of(model: Model, modules: list[nn.Module]) -> State:
    pairs = zip(model.layers, modules, strict=True)
    return {layer.prefix + name: tensor for layer, module in pairs for name, tensor in module.state_dict().items()}


def saved(path: Path, state: State) -> str:
    state = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return str(path)


def equal(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def without(state: State, *words: str) -> State:
    return {name: tensor for name, tensor in state.items() if not any(word in name for word in words)}


# GPT-2


@pytest.mark.parametrize("kind", ["with head", "without", "older"])
def test_gpt2s_outputs_are_those_of_the_source(kind: str, tmp_path: Path) -> None:
    source = source_gpt()
    state = source.state_dict() if kind == "older" else without(source.state_dict(), ".attn.bias", "masked_bias")
    if kind == "without":
        state = {name.removeprefix("transformer."): tensor for name, tensor in without(state, "lm_head").items()}
    model = with_weights(our_gpt, saved(tmp_path / "gpt2.safetensors", state))
    layers = nn.Sequential(*parts(model))
    with torch.no_grad():
        torch.testing.assert_close(layers(TOKENS), source(TOKENS), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layers(TOKENS[:, :3]), source(TOKENS[:, :3]), rtol=1e-5, atol=1e-5)


def test_gpt2_goes_there_and_back(tmp_path: Path) -> None:
    source, model = source_gpt(), our_gpt()
    published = without(source.state_dict(), ".attn.bias", "masked_bias", "lm_head")
    ours = from_source(model, published)
    assert ours["block.1.feed_forward.expansion.weight"].shape == (32, 8)
    assert equal(ours, {name: ours[name] for name in state_of(model, parts(model))})
    assert equal(to_source(model, ours), published)
    path = tmp_path / "new" / "back.safetensors"
    write_weights(model, ours, path)
    assert equal(load_file(path), published)
    assert [file.name for file in path.parent.iterdir()] == ["back.safetensors"]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_untied_head_has_its_own_weight_or_the_embeddings(tmp_path: Path) -> None:
    source, untied = source_gpt(tied=False), partial(our_gpt, tie_embeddings=False)
    state = without(source.state_dict(), ".attn.bias", "masked_bias")
    model = with_weights(untied, saved(tmp_path / "a.safetensors", state))
    ours = state_of(model, parts(model))
    with torch.no_grad():
        torch.testing.assert_close(nn.Sequential(*parts(model))(TOKENS), source(TOKENS), rtol=1e-5, atol=1e-5)
    assert equal(to_source(model, ours), state)
    model = with_weights(untied, saved(tmp_path / "b.safetensors", without(state, "lm_head")))
    assert torch.equal(state_of(model, parts(model))["head.projection.weight"], state["transformer.wte.weight"])
    with pytest.raises(ValueError, match=r"lm_head.weight that differs from transformer.wte.weight.*tie_embeddings=f"):
        with_weights(our_gpt, str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 1}, r"is not of gpt, it also has transformer.h.1.attn.c_attn.bias, .* and 9 more: use .*layers=2"),
        ({"layers": 3}, r"lacks block.2.attention_norm.weight, .* and 9 more: use model.layers=2 model.width=8"),
        ({"width": 12}, r"has transformer.wte.weight of 17 x 8 and gpt needs 17 x 12: use .* model.width=8"),
        ({"context": 5}, r"has transformer.wpe.weight of 6 x 8 and gpt needs 5 x 8: .* model.context=6"),
        ({"vocabulary": 16}, r"has transformer.wte.weight of 17 x 8 and gpt needs 16 x 8: .* model.vocabulary=17"),
    ],
)
def test_a_gpt2_of_another_size_is_refused(change: dict[str, int], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "gpt2.safetensors", without(source_gpt().state_dict(), "lm_head"))
    with pytest.raises(ValueError, match=message) as caught:
        with_weights(partial(our_gpt, **change), path)
    assert str(caught.value).startswith(f"model.weights={path} ")


def test_a_transposed_shape_is_told_as_the_file_has_it() -> None:
    state = without(source_gpt().state_dict(), "lm_head")
    state["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(32, 8)
    with pytest.raises(ValueError, match=r"the state dict has transformer.h.0.mlp.c_fc.weight of 32 x 8 .* needs 8 x"):
        from_source(our_gpt(), state)
    with pytest.raises(ValueError, match=r"lacks .*: use a GPT-2's, with Hugging Face's names"):
        from_source(our_gpt(), {})


def test_the_config_beside_the_file_tells_the_heads(tmp_path: Path) -> None:
    path = saved(tmp_path / "gpt2.safetensors", without(source_gpt().state_dict(), "lm_head"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_head": 2, "activation_function": "gelu_new"}))
    with_weights(our_gpt, path)
    with pytest.raises(ValueError, match=r"config.json says n_head=2 and the model has 4: use model.heads=2"):
        with_weights(partial(our_gpt, heads=4), path)
    config.write_text(json.dumps({"n_head": 2, "activation_function": "relu"}))
    with pytest.raises(ValueError, match=r"says activation_function=relu and the model has gelu_new: another"):
        with_weights(our_gpt, path)


# torchvision


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_torchvisions_outputs_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    sizes = {"image_size": 32} if name.startswith("vit") else {}
    torch.manual_seed(5)
    source = getattr(torchvision_models, name)(num_classes=4, **sizes).eval()
    if name == "resnet18":
        build = partial(resnet, depth=18, classes=4)
    else:
        build = partial(torchvision_model, architecture=name, classes=4, image_size=32)
    state = source.state_dict()
    if name.startswith("vit"):  # as the published file still calls them
        state = {
            k.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): v for k, v in state.items()
        }
    model = with_weights(build, saved(tmp_path / "weights.pth", state))
    modules = parts(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(nn.Sequential(*modules)(images), source(images))
    ours = state_of(model, modules)
    write_weights(model, ours, tmp_path / "back.pt")
    written = torch.load(tmp_path / "back.pt", weights_only=True)
    assert equal(written, source.state_dict())
    source.load_state_dict(written, strict=True)


def test_files_of_old_torch_are_read(tmp_path: Path) -> None:
    source = torchvision_models.resnet18(num_classes=4)
    state = without(source.state_dict(), "num_batches_tracked")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    model = with_weights(partial(resnet, depth=18, classes=4), str(tmp_path / "old.pth"))
    found = state_of(model, parts(model))
    assert equal(without(found, "num_batches_tracked"), state)
    assert int(found["bn1.num_batches_tracked"]) == 0


def test_another_number_of_classes_starts_anew(tmp_path: Path) -> None:
    path = saved(tmp_path / "weights.pt", torchvision_models.resnet18(num_classes=7).state_dict())
    build = partial(resnet, depth=18, classes=4)
    with pytest.raises(
        ValueError, match=r"fc.weight of 7 x 512 and resnet18 needs 4 x 512: .* or model.fresh=\[name\]"
    ):
        with_weights(build, path)
    model, without_file = with_weights(build, path, ["fc"]), build()
    for name in ("fc.weight", "fc.bias", "conv1.weight"):
        values = []
        for one in (model, without_file):
            shape = {"fc.weight": (4, 512), "fc.bias": (4,), "conv1.weight": (64, 3, 7, 7)}[name]
            values.append(torch.empty(shape))
            one.initialize(name, values[-1], torch.Generator().manual_seed(1))
        assert torch.equal(*values) == name.startswith("fc")
    with pytest.raises(ValueError, match=r"model.fresh=head is no part of resnet18: use one such as conv1.weight"):
        with_weights(build, path, ["head"])


# any model, and files


def test_a_rank_reads_its_own_layers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "gpt2.safetensors", without(source_gpt().state_dict(), "lm_head"))
    model = pickle.loads(pickle.dumps(with_weights(our_gpt, path)))
    read: list[str] = []
    original = WeightsFile.read
    monkeypatch.setattr(WeightsFile, "read", lambda self, name: read.append(name) or original(self, name))
    _materialize(model, model.layers[1])
    assert len(read) == 12
    assert all(name.startswith("transformer.h.0.") for name in read)


def _materialize(model: Model, layer: Layer) -> nn.Module:
    return materialize(model, layer, device=torch.device("cpu"), dtype=torch.float32, seed=0)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_custom_models_names_are_its_own(suffix: str, tmp_path: Path) -> None:
    build = partial(custom, target="tests.models.own:Tagger", seed=1)
    written = build()
    state = state_of(written, parts(written))
    path = tmp_path / f"weights{suffix}"
    write_weights(written, state, path)
    model = with_weights(partial(custom, target="tests.models.own:Tagger", seed=2), str(path))
    assert equal(state_of(model, parts(model)), state)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.pt", None, r"no.pt can't be read \(.*No such file.*\): give a state dict"),
        ("no.safetensors", None, r"no.safetensors can't be read \(.*No such file"),
        ("bad.safetensors", b"nothing", r"bad.safetensors can't be read \("),
        ("bad.pth", b"nothing", r"bad.pth can't be read \("),
        ("empty.pt", b"", r"empty.pt can't be read \("),
        ("weights.bin", b"", r"weights.bin is of no known kind: use a name that ends in .safetensors, .pt, .pth"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        with_weights(our_gpt, str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("held", [[1, 2], {"epoch": 3}, torch.zeros(2)], ids=["list", "number", "tensor"])
def test_what_is_no_state_dict_is_refused(held: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt holds no tensors by name: give what torch.save"):
        with_weights(our_gpt, str(tmp_path / "weights.pt"))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"weight": nn.Linear(2, 2)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt can't be read \(Weights only load failed"):
        with_weights(our_gpt, str(tmp_path / "weights.pt"))


def test_exports_of_no_known_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export=.*weights.bin is of no known kind"):
        write_weights(our_gpt(), {}, tmp_path / "weights.bin")
