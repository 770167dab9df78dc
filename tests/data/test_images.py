"""CIFAR-10 and image folders, written small in their real formats."""

from __future__ import annotations

import hashlib
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.datasets.folder import default_loader

from data import image_folder as image_folder_module
from data.cifar import MEAN, STANDARD_DEVIATION, cifar10
from data.image_folder import FolderImages, _center_box, _random_box, image_folder
from data.randomness import generator

BATCH = {"batch_size": 6, "seed": 0}


def normalize(pixels: np.ndarray) -> torch.Tensor:
    """Pixels in 0..255, (..., 3, 32, 32), as CIFAR's batches hold them."""
    scaled = torch.from_numpy(pixels).float() / 255
    return (scaled - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STANDARD_DEVIATION).view(3, 1, 1)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six batches of ten images in CIFAR-10's own form; only the published sums are replaced by these files' own."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    draw = np.random.default_rng(0)

    def write(name: str, content: dict[str, object]) -> str:
        raw = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(raw)
        return hashlib.md5(raw).hexdigest()

    def write_batch(name: str) -> list[str]:
        pixels = draw.integers(256, size=(10, 3072), dtype=np.uint8)
        return [name, write(name, {"data": pixels, "labels": draw.permutation(10).tolist()})]

    monkeypatch.setattr(CIFAR10, "train_list", [write_batch(f"data_batch_{n}") for n in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [write_batch("test_batch")])
    names = {"label_names": list("abcdefghij")}
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": write("batches.meta", names)})
    return tmp_path


def cifar_batch(root: Path, name: str) -> tuple[np.ndarray, list[int]]:
    content = pickle.loads((root / CIFAR10.base_folder / name).read_bytes())
    return content["data"].reshape(-1, 3, 32, 32), content["labels"]


def test_cifar_validation_gives_each_image_with_its_class(cifar: Path) -> None:
    data = cifar10(path=str(cifar), batch_size=10, seed=0)
    pixels, labels = cifar_batch(cifar, "test_batch")
    images, targets = data.validation.inputs(0), data.validation.targets(0)
    assert sorted(targets.tolist()) == list(range(10))
    for image, target in zip(images, targets.tolist(), strict=True):
        torch.testing.assert_close(image, normalize(pixels[labels.index(target)]))
    assert torch.equal(images, data.validation.inputs(1))
    assert (data.train.samples, data.validation.samples) == (50, 10)
    assert (data.kind, data.classes, data.units_per_sample) == ("images", 10, 1)


def test_cifar_training_crops_and_flips(cifar: Path) -> None:
    data = cifar10(path=str(cifar), batch_size=50, seed=0)
    batches = [cifar_batch(cifar, f"data_batch_{n}") for n in range(1, 6)]
    originals = np.concatenate([pixels for pixels, _ in batches])
    labels = [label for _, each in batches for label in each]
    padded = normalize(np.pad(originals, ((0, 0), (0, 0), (4, 4), (4, 4))))
    order = data.train._order.indices(0)
    seen = set()
    for row, (image, target) in enumerate(zip(data.train.inputs(0), data.train.targets(0).tolist(), strict=True)):
        assert target == labels[order[row]]
        found = [
            (top, left, flip)
            for flip in (False, True)
            for top in range(9)
            for left in range(9)
            if torch.allclose(padded[order[row], :, top : top + 32, left : left + 32], image.flip(2) if flip else image)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 30
    assert {flip for *_, flip in seen} == {False, True}


def test_cifar_batches_are_pure_in_seed_and_step(cifar: Path) -> None:
    build = pickle.loads(pickle.dumps(partial(cifar10, path=str(cifar), **BATCH)))
    one, two = build().train, build().train
    state = torch.get_rng_state()
    later = two.inputs(9)
    assert torch.equal(one.inputs(0), two.inputs(0))
    assert torch.equal(one.inputs(9), later)
    assert not torch.equal(one.inputs(0), cifar10(path=str(cifar), batch_size=6, seed=1).train.inputs(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_damaged_or_miscounted_cifar_is_refused(cifar: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar10 finds no folder .*cifar-10-batches-py: use the folder where"):
        cifar10(path=str(cifar / "elsewhere"), **BATCH)
    with pytest.raises(ValueError, match="cifar10 has 10 classes, not 100: use classes=10"):
        cifar10(path=str(cifar), **BATCH, classes=100)
    file = cifar / CIFAR10.base_folder / "data_batch_3"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"files in .* are incomplete or damaged: unpack cifar-10-python.tar.gz"):
        cifar10(path=str(cifar), **BATCH)
    file.unlink()
    with pytest.raises(ValueError, match="are incomplete or damaged"):
        cifar10(path=str(cifar), **BATCH)


def test_small_files_do_not_pass_for_the_published_ones(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", "40351d587109b95175f43aff81a1287e"]])
    with pytest.raises(ValueError, match="are incomplete or damaged"):
        cifar10(path=str(cifar), **BATCH)


COLORS = {"apple": (250, 10, 10), "lime": (10, 250, 10), "plum": (10, 10, 250)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """ImageNet's layout: PNG, JPEG and grayscale, several sizes; the class shows in the color."""
    for split, count in (("train", 4), ("val", 2)):
        for name, color in COLORS.items():
            target = tmp_path / split / name
            target.mkdir(parents=True)
            for index in range(count):
                image = Image.new("RGB", (40 + 10 * index, 60 - 5 * index), color)
                image.save(target / f"{index}.{'png' if index % 2 else 'JPEG'}")
    return tmp_path


def test_folder_images_have_their_class_and_size(folder: Path) -> None:
    data = image_folder(path=str(folder), **BATCH, classes=3, size=32)
    for split in (data.train, data.validation):
        images, targets = split.inputs(0), split.targets(0)
        assert images.shape == (6, 3, 32, 32)
        assert images.dtype == torch.float32
        assert targets.dtype == torch.int64
        assert torch.equal(images.mean(dim=(2, 3)).argmax(1), targets)
    assert sorted(data.validation.targets(0).tolist()) == [0, 0, 1, 1, 2, 2]
    assert (data.train.samples, data.validation.samples) == (12, 6)
    assert (data.kind, data.classes, data.units_per_sample) == ("images", 3, 1)


def test_folder_batches_are_pure_whatever_the_threads(folder: Path) -> None:
    file = folder / "train" / "apple" / "0.JPEG"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(80, 90, 3), dtype=np.uint8)).save(file)
    build = pickle.loads(
        pickle.dumps(partial(image_folder, path=str(folder), batch_size=12, seed=0, classes=3, size=24))
    )
    one, two = build(workers=1).train, build(workers=7).train
    state = torch.get_rng_state()
    later = two.inputs(3)
    assert torch.equal(one.inputs(0), two.inputs(0))
    assert torch.equal(one.inputs(3), later)
    row = list(one._order.indices(0)).index(0), list(one._order.indices(3)).index(0)
    assert not torch.equal(one.inputs(0)[row[0]], later[row[1]])  # the same file under another crop
    assert torch.equal(torch.get_rng_state(), state)


def test_targets_open_no_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder_module, "default_loader", lambda _: pytest.fail("opened"))
    data = image_folder(path=str(folder), **BATCH, classes=3)
    assert data.train.targets(0).shape == (6,)


def test_validation_takes_the_center_and_leaves_pixels_alone() -> None:
    assert _center_box((256, 512)) == (16, 144, 240, 368)
    left, top, right, bottom = _center_box((100, 70))
    assert right - left == bottom - top == pytest.approx(70 * 224 / 256)


def test_validation_equals_torchvisions_transform_at_the_usual_size(folder: Path) -> None:
    pixels = np.random.default_rng(1).integers(256, size=(256, 256, 3), dtype=np.uint8)
    file = folder / "val" / "apple" / "0.png"
    Image.fromarray(pixels).save(file)
    split = image_folder(path=str(folder), **BATCH, classes=3).validation
    assert isinstance(split, FolderImages)
    center = torch.from_numpy(pixels[16:240, 16:240]).permute(2, 0, 1).float() / 255
    expected = (center - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    torch.testing.assert_close(split._load(str(file), np.zeros(5)), expected)


def test_random_crops_stay_inside_and_keep_inceptions_shapes() -> None:
    draw = generator(0, "crops")
    for size in [(500, 375), (10, 1000), (1, 1), (333, 7)]:
        for draws in draw.random((200, 5)):
            left, top, right, bottom = _random_box(size, draws)
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            if size == (500, 375):
                area = (right - left) * (bottom - top) / (500 * 375)
                assert 0.07 < area <= 1.0
                assert 0.74 < (right - left) / (bottom - top) < 1.34


@pytest.mark.parametrize("damage", ["train", "val"])
def test_missing_split_is_refused(folder: Path, damage: str) -> None:
    (folder / damage).rename(folder / "other")
    with pytest.raises(ValueError, match=rf"finds no folder .*{damage}: use a path that holds train/ and val/"):
        image_folder(path=str(folder), **BATCH, classes=3)


def test_wrong_folders_are_refused(folder: Path) -> None:
    build = partial(image_folder, path=str(folder), **BATCH)
    with pytest.raises(ValueError, match=r"train has 3 classes, not 1000: use classes=3"):
        build(classes=1000)
    (folder / "train" / "quince").mkdir()
    with pytest.raises(ValueError, match=r"quince has no images: remove it, or put .jpg, .jpeg"):
        build(classes=4)
    Image.new("L", (9, 9)).save(folder / "train" / "quince" / "0.png")
    with pytest.raises(ValueError, match=r"train and .*val differ in class 'quince': give both the same folders"):
        build(classes=4)
    for name in ("apple", "lime", "plum"):
        (folder / "val" / name).rename(folder / f"old_{name}")
    with pytest.raises(ValueError, match=r"val has no class folders: put images into .*val/<class>/"):
        build(classes=4)


@pytest.mark.parametrize("raw", [b"no image at all", None], ids=["foreign", "cut off"])
def test_broken_image_is_refused_by_name(folder: Path, raw: bytes | None) -> None:
    file = folder / "val" / "lime" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(50, 50, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:2000] if raw is None else raw)
    data = image_folder(path=str(folder), **BATCH, classes=3)
    with pytest.raises(ValueError, match=r"cannot decode .*lime/1.png: remove or replace this file"):
        data.validation.inputs(0)


# A part of a batch, for a replica that takes no more


def test_samples_of_a_batch_are_those_that_the_whole_batch_has(cifar: Path, folder: Path) -> None:
    for data in (
        cifar10(path=str(cifar), **BATCH),
        image_folder(path=str(folder), **BATCH, classes=3, size=32),
    ):
        for split in (data.train, data.validation):
            assert torch.equal(split.inputs(2, slice(1, 3)), split.inputs(2)[1:3])


def test_only_the_images_that_are_wanted_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    load = default_loader
    monkeypatch.setattr("data.image_folder.default_loader", lambda file: (opened.append(file), load(file))[1])
    image_folder(path=str(folder), **BATCH, classes=3, size=32).train.inputs(0, slice(1, 3))
    assert len(opened) == 2
