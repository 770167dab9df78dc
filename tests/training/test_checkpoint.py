"""A checkpoint's folder: complete or not there, and never believed when it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training import checkpoint as disk
from pipeline.training.checkpoint import DamagedCheckpointError, Progress, find_checkpoint

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.half": torch.ones(3, dtype=torch.bfloat16),
    "b.count": torch.tensor(7),
    "b.empty": torch.zeros(0, 4),
}
STATE = {"step/a.weight": torch.tensor(3.0), "exp_avg/a.weight": torch.full((2, 3), 0.25, dtype=torch.float64)}


def written(directory: Path, step: int = 3) -> Path:
    """A checkpoint of two ranks, the second without optimizer state."""
    folder = directory / "checkpoints" / f"step-{step:06}"
    disk.begin(folder)
    parts = [{name: value for name, value in TENSORS.items() if name.startswith(letter)} for letter in "ab"]
    shards = [disk.write_shard(disk.draft_of(folder), 0, 2, parts[0], STATE)]
    shards.append(disk.write_shard(disk.draft_of(folder), 1, 2, parts[1], {}))
    disk.publish(folder, Progress(step, "adamw", 512.0, 5), shards, {"seed": 1, "path": Path("x")})
    return folder


def test_what_was_written_is_read(tmp_path):
    folder = written(tmp_path)
    checkpoint = find_checkpoint(folder)
    assert checkpoint.progress == Progress(3, "adamw", 512.0, 5)
    assert checkpoint.config == {"seed": 1, "path": "x"}
    for section, tensors in (("model", TENSORS), ("optimizer", STATE)):
        read = dict(checkpoint.read(section, tensors))
        assert list(read) == list(tensors)
        for name, value in tensors.items():
            assert read[name].dtype == value.dtype
            assert torch.equal(read[name], value)


def test_the_files_are_plain_safetensors_with_the_models_names(tmp_path):
    folder = written(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
    ]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "whoever may read one may read all"
    assert torch.equal(load_file(folder / "model-00001-of-00002.safetensors")["a.weight"], TENSORS["a.weight"])


def test_tensors_that_share_memory_and_views_are_saved_whole(tmp_path):
    whole = torch.arange(8.0)
    tensors = {"one": whole, "same": whole, "part": whole[2:5], "turned": whole.view(2, 4).t()}
    folder = tmp_path / "step-000001"
    disk.begin(folder)
    shards = [disk.write_shard(disk.draft_of(folder), 0, 1, tensors, {})]
    disk.publish(folder, Progress(1, "sgd", 1.0, 0), shards, {})
    read = dict(find_checkpoint(folder).read("model", tensors))
    assert all(torch.equal(read[name], value) for name, value in tensors.items())


def test_only_the_files_that_are_asked_for_are_opened(tmp_path):
    folder = written(tmp_path)
    checkpoint = find_checkpoint(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert dict(checkpoint.read("model", ["a.weight"])).keys() == {"a.weight"}


@pytest.mark.parametrize("place", ["run", "checkpoints", "one"])
def test_a_run_directory_stands_for_its_last_checkpoint(tmp_path, place):
    written(tmp_path, 9)
    last = written(tmp_path, 100)
    path = {"run": tmp_path, "checkpoints": tmp_path / "checkpoints", "one": last}[place]
    assert find_checkpoint(path).path == last.resolve()


# Interrupted, repeated


def test_an_unfinished_one_is_never_found(tmp_path):
    """Written in part, or all but the manifest; the next attempt starts over."""
    first = written(tmp_path, 3)
    draft = disk.draft_of(first.with_name("step-000006"))
    disk.begin(first.with_name("step-000006"))
    disk.write_shard(draft, 0, 2, TENSORS, STATE)
    first.with_name("step-000007").mkdir()
    first.with_name("step-backup").mkdir()
    (first.with_name("step-backup") / "manifest.json").touch()
    assert find_checkpoint(tmp_path).progress.step == 3
    written(tmp_path, 6)
    assert find_checkpoint(tmp_path).progress.step == 6
    assert not draft.exists()


def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    written(tmp_path, 3)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, 6)
    assert find_checkpoint(tmp_path).progress.step == 3


def test_a_step_that_is_saved_again_replaces_the_older(tmp_path):
    folder = written(tmp_path)
    (folder / "note").touch()
    assert not (written(tmp_path) / "note").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_last_ones_are_kept(tmp_path):
    for step in (2, 10, 100):
        folder = written(tmp_path, step)
    disk.keep_last(folder.parent, 2)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-000010", "step-000100"]


# What can't be


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no directory: use a run directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no complete checkpoint: use a run that had save_every=100"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [b"{", b"\xff", b"[]", b'{"format": 1}'])
def test_a_damaged_manifest(tmp_path, damage):
    folder = written(tmp_path)
    (folder / "manifest.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"manifest.json is damaged .*: use another checkpoint"):
        find_checkpoint(folder)


@pytest.mark.parametrize("part", [{"tensors": 3}, {"tensors": {"model": []}}, {"files": 1}, {"config": 2}])
def test_a_manifest_with_something_else_in_a_place(tmp_path, part):
    folder = written(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | part))
    with pytest.raises(ValueError, match=r"manifest.json is damaged .*: use another checkpoint"):
        find_checkpoint(folder)


def test_another_format(tmp_path):
    folder = written(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(ValueError, match="has format 2, and this version reads format 1"):
        find_checkpoint(folder)


def test_a_file_that_is_missing_or_cut_off(tmp_path):
    folder = written(tmp_path)
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"has {len(data) - 1} bytes of {len(data)}: use another checkpoint"):
        find_checkpoint(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"is missing: use another checkpoint"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    ("at", "message"), [(-1, "a.half isn't what was written|a.weight isn't"), (0, "can't be read")]
)
def test_bytes_that_changed(tmp_path, at, message):
    """In a tensor, found by its checksum; in the header, by the format."""
    folder = written(tmp_path)
    checkpoint = find_checkpoint(folder)
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=message):
        dict(checkpoint.read("model", ["a.weight", "a.half"]))
