"""Images in ImageNet's folder form, train/<class>/ and val/<class>/, found and decoded by torchvision."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
from torchvision.transforms import functional

from data.dataset import ALL, Data, require_positive
from data.order import Order
from data.randomness import generator

MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
# Inception's crops (Szegedy et al. 2014), with torchvision's constants for them; validation takes the center.
AREAS = (0.08, 1.0)
ASPECTS = (3 / 4, 4 / 3)
CENTER_SHARE = 224 / 256

Box = tuple[float, float, float, float]
Draws = NDArray[np.float64]


def image_folder(*, path: str, batch_size: int, seed: int, classes: int, size: int = 224, workers: int = 4) -> Data:
    """Images float32 (batch, 3, size, size), normalized as for ImageNet; training ones cropped and flipped at random.

    `path` holds train/ and val/ with a folder a class. `workers` threads decode. A missing or empty folder, classes
    that differ from `classes` or between the splits, and a file that cannot be decoded are ValueErrors.
    """
    require_positive(batch_size=batch_size, classes=classes, size=size, workers=workers)
    train, validation = Path(path) / "train", Path(path) / "val"
    names = _classes(train)
    if len(names) != classes:
        raise ValueError(f"{train} has {len(names)} classes, not {classes}: use classes={len(names)}")
    if difference := sorted(names ^ _classes(validation)):
        raise ValueError(f"{train} and {validation} differ in class {difference[0]!r}: give both the same folders")
    return Data.of_images(
        train=FolderImages(train, batch_size, seed, size, workers, augmented=True),
        validation=FolderImages(validation, batch_size, seed, size, workers, augmented=False),
        classes=classes,
    )


@dataclass(frozen=True)
class FolderImages:
    """Batches of one split. The list of files is made on first use; only `inputs` opens them."""

    folder: Path
    batch_size: int
    seed: int
    size: int
    workers: int
    augmented: bool

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Normalized images, float32 (batch, 3, size, size); only those that are wanted are opened."""
        files = [self._dataset.samples[index][0] for index in self._order.indices(step)]
        # Drawn before the threads start, so that their order plays no part.
        draws = list(generator(self.seed, "crop and flip", step).random((len(files), 5)))
        with ThreadPoolExecutor(self.workers) as pool:
            images = list(pool.map(self._load, files[samples], draws[samples]))
        return torch.stack(images)

    def targets(self, step: int) -> Tensor:
        """Classes, int64 (batch,): positions in the sorted list of folders. Opens no image."""
        return torch.tensor([self._dataset.targets[index] for index in self._order.indices(step)], dtype=torch.int64)

    @property
    def samples(self) -> int:
        """Images in an epoch."""
        return self._order.samples

    @cached_property
    def _dataset(self) -> ImageFolder:
        return ImageFolder(str(self.folder))

    @cached_property
    def _order(self) -> Order:
        count = len(self._dataset)
        return Order(count, self.batch_size, self.seed) if self.augmented else Order.fixed(count, self.batch_size)

    def _load(self, file: str, draws: Draws) -> Tensor:
        try:
            image: Image.Image = default_loader(file)
        except (OSError, SyntaxError) as error:  # PIL's errors for a file that is cut off or no image
            raise ValueError(f"image_folder cannot decode {file}: remove or replace this file") from error
        box = _random_box(image.size, draws) if self.augmented else _center_box(image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.augmented and draws[4] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels: Tensor = functional.normalize(functional.to_tensor(image), MEAN, STANDARD_DEVIATION)
        return pixels


def _classes(folder: Path) -> set[str]:
    """Names of the class folders, each with an image somewhere in it."""
    if not folder.is_dir():
        raise ValueError(f"image_folder finds no folder {folder}: use a path that holds train/ and val/")
    names = {entry.name for entry in os.scandir(folder) if entry.is_dir()}
    if not names:
        raise ValueError(f"{folder} has no class folders: put images into {folder}/<class>/")
    for name in sorted(names):
        if not any(_images(folder / name)):
            raise ValueError(
                f"{folder / name} has no images: remove it, or put {', '.join(IMG_EXTENSIONS)} files there"
            )
    return names


def _images(folder: Path) -> Iterator[str]:
    for _, _, files in os.walk(folder, followlinks=True):
        yield from (file for file in files if file.lower().endswith(IMG_EXTENSIONS))


def _random_box(size: tuple[int, int], draws: Draws) -> Box:
    """A crop of random area, aspect and place, cut to what the image holds: left, top, right, bottom."""
    width, height = size
    area = width * height * (AREAS[0] + (AREAS[1] - AREAS[0]) * draws[0])
    aspect = ASPECTS[0] * (ASPECTS[1] / ASPECTS[0]) ** draws[1]
    crop_width = min(width, max(1.0, math.sqrt(area * aspect)))
    crop_height = min(height, max(1.0, math.sqrt(area / aspect)))
    left, top = (width - crop_width) * draws[2], (height - crop_height) * draws[3]
    # Rounding may carry the far edge past the image, which PIL refuses.
    return left, top, min(width, left + crop_width), min(height, top + crop_height)


def _center_box(size: tuple[int, int]) -> Box:
    """The middle square, 224/256 of the shorter side: left, top, right, bottom."""
    width, height = size
    side = min(width, height) * CENTER_SHARE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
