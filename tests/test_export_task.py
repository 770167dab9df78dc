"""`task=export`: trained weights as a file that other programs read, and start from again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.gpt import gpt
from models.weights import from_source, with_weights, write_weights
from pipeline.training.checkpoint import find_checkpoint
from pipeline.training.export_task import export
from tests.command import Ran, train
from tests.conf.compose import configured
from tests.engine.samples import small_gpt, text
from tests.engine.test_materialize import weights
from tests.test_resume import saved  # noqa: F401
from tests.training.harness import settings_to_train

BUILD = partial(gpt, layers=2, width=32, heads=2, context=16, vocabulary=256)


def test_trained_weights_are_exported_and_started_from(saved: Ran, tmp_path: Path) -> None:  # noqa: F811
    ran = train(tmp_path, "task=export", f"resume={saved.directory}", "export=out/gpt.safetensors")
    assert (ran.status, ran.err) == (0, "")
    path = tmp_path / "out" / "gpt.safetensors"
    assert ran.out == "28 tensors of gpt: out/gpt.safetensors\n"
    written = load_file(path)
    assert written["transformer.h.1.mlp.c_fc.weight"].shape == (32, 128)
    checkpoint = find_checkpoint(saved.directory)
    expected = dict(checkpoint.read("model", checkpoint.model))
    found = from_source(BUILD(), written)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    started = torch.empty(32, 32)
    with_weights(BUILD, str(path)).initialize("block.1.attention.projection.weight", started, torch.Generator())
    assert torch.equal(started, expected["block.1.attention.projection.weight"].float())


def test_starting_weights_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.pt"
    settings = settings_to_train("1f1b", 2, 2, 4, 1, task="export", export=str(path), seed=3)
    export(settings, small_gpt, write_weights)
    found = from_source(small_gpt(), torch.load(path, weights_only=True))
    expected = weights(small_gpt(), text(4)[0], "1f1b", 1, seed=3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert capsys.readouterr().out.startswith("76 tensors of gpt: ")


def test_what_cannot_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"task=export needs a file: give one, export=weights.safetensors"):
        configured("task=export")
    with pytest.raises(ValueError, match=r"export=a.pt is for task=export, not train: use task=export resume=run"):
        configured("export=a.pt")
    with pytest.raises(ValueError, match=r"export=weights.onnx is of no known kind: use a name that ends in"):
        configured("task=export", "export=weights.onnx").writer()
    settings = settings_to_train("1f1b", 2, 2, 4, 1, task="export", export="a.pt")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="task=export writes from one process and a launcher started 4: use plain"):
        export(settings, small_gpt, write_weights)
