"""CIFAR-10 (Krizhevsky 2009) in its published Python form, read by torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.datasets import CIFAR10

from data.dataset import ALL, Data, require_positive
from data.order import Order
from data.randomness import generator

CLASSES = 10
PADDING = 4  # the usual augmentation: a crop out of 4 pixels' padding, and a flip (He et al. 2015, section 4.2)
MEAN = (0.4914, 0.4822, 0.4465)
STANDARD_DEVIATION = (0.2470, 0.2435, 0.2616)


def cifar10(*, path: str, batch_size: int, seed: int, classes: int = CLASSES) -> Data:
    """Images float32 (batch, 3, 32, 32), normalized; training ones cropped and flipped as drawn from (seed, step).

    `path` holds the unpacked `cifar-10-batches-py`. A missing or damaged file (by its published MD5 sum) is a
    ValueError; nothing is downloaded.
    """
    require_positive(batch_size=batch_size)
    if classes != CLASSES:
        raise ValueError(f"cifar10 has {CLASSES} classes, not {classes}: use classes={CLASSES}")
    # Opening the small part checks the sums of all files, so that damage shows before any rank starts.
    _open(path, train=False)
    return Data.of_images(
        train=CifarImages(path, batch_size, seed, train=True),
        validation=CifarImages(path, batch_size, seed, train=False),
        classes=CLASSES,
    )


@dataclass(frozen=True)
class CifarImages:
    """Batches of one of CIFAR-10's two parts, read on first use: 150 MB for training."""

    path: str
    batch_size: int
    seed: int
    train: bool

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Normalized images, float32 (batch, 3, 32, 32)."""
        images = torch.from_numpy(self._dataset.data[self._order.indices(step)]).permute(0, 3, 1, 2)
        if self.train:
            images = _crop_and_flip(images, generator(self.seed, "crop and flip", step))
        images = images[samples]
        mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STANDARD_DEVIATION))
        return (images.to(torch.float32) / 255).sub_(mean).div_(deviation)

    def targets(self, step: int) -> Tensor:
        """Classes, int64 (batch,)."""
        return torch.from_numpy(np.array(self._dataset.targets, dtype=np.int64)[self._order.indices(step)])

    @property
    def samples(self) -> int:
        """Images in an epoch."""
        return self._order.samples

    @cached_property
    def _dataset(self) -> CIFAR10:
        return _open(self.path, train=self.train)

    @cached_property
    def _order(self) -> Order:
        count = len(self._dataset)
        return Order(count, self.batch_size, self.seed) if self.train else Order.fixed(count, self.batch_size)


def _open(path: str, *, train: bool) -> CIFAR10:
    folder = Path(path) / CIFAR10.base_folder
    if not folder.is_dir():
        raise ValueError(f"cifar10 finds no folder {folder}: use the folder where cifar-10-python.tar.gz was unpacked")
    try:
        return CIFAR10(path, train=train, download=False)
    except RuntimeError as error:  # torchvision's word for a missing file or a wrong MD5 sum
        cure = "unpack cifar-10-python.tar.gz there again"
        raise ValueError(f"cifar10's files in {folder} are incomplete or damaged: {cure}") from error


def _crop_and_flip(images: Tensor, draw: np.random.Generator) -> Tensor:
    """Each image moved by up to PADDING pixels over black, and mirrored half the time, (batch, 3, side, side)."""
    batch, _, side, _ = images.shape
    padded = functional.pad(images, (PADDING,) * 4)
    rows, columns = torch.from_numpy(draw.integers(2 * PADDING + 1, size=(2, batch, 1))) + torch.arange(side)
    flipped = torch.from_numpy(draw.random((batch, 1)) < 0.5)
    columns = torch.where(flipped, columns.flip(1), columns)
    sample = torch.arange(batch)[:, None, None]
    # Three index tensors around the slice put the channels last.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
