"""Characters in matplotlib's fonts, under random affine changes, colors and noise: a learnable set, no download."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from data.dataset import ALL, Data, require_positive
from data.randomness import VALIDATION_SEED, generator

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRAINING_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10", "cmti10"),
)
HELD_OUT_FONTS = ("DejaVuSansMono-Bold", "DejaVuSerif-Italic", "STIXGeneralBolIta", "cmb10", "cmtt10")

SMALLEST_SIZE = 16
GLYPH_SHARE = 0.7  # of the image's side that the larger side of an unchanged glyph takes
ROTATION = math.radians(12)
SCALES = (0.8, 1.15)
SHEAR = 0.15
SHIFT = 0.15  # in half image sides
NOISE = 0.08  # standard deviation, in units of full brightness
DARK, LIGHT = (0.0, 0.4), (0.6, 1.0)
MEAN, STANDARD_DEVIATION = 0.27, 0.24


def glyphs(*, batch_size: int, seed: int, size: int = 64, classes: int = len(CHARACTERS)) -> Data:
    """Images of 0-9 and A-Z, float32 (batch, 3, size, size), drawn without end; validation uses fonts never trained on.

    Each sample is a pure function of (seed, step, position in the batch). `classes` other than 36 is a ValueError.
    """
    require_positive(batch_size=batch_size)
    if size < SMALLEST_SIZE:
        raise ValueError(f"glyphs of {size} pixels are unreadable: use size={SMALLEST_SIZE} or more")
    if classes != len(CHARACTERS):
        raise ValueError(f"glyphs have {len(CHARACTERS)} classes, not {classes}: use classes={len(CHARACTERS)}")
    return Data.of_images(
        train=Glyphs(_font_files(TRAINING_FONTS), batch_size, size, seed, "train"),
        validation=Glyphs(_font_files(HELD_OUT_FONTS), batch_size, size, VALIDATION_SEED, "validation"),
        classes=classes,
    )


@dataclass(frozen=True)
class Glyphs:
    """Batches of glyphs. The masks are drawn once, on first use; a sample bends one of them and colors it."""

    fonts: tuple[Path, ...]
    batch_size: int
    size: int
    seed: int
    split: str

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Normalized images, float32 (batch, 3, size, size)."""
        draw = generator(self.seed, self.split, "look", step)
        fonts = draw.integers(len(self.fonts), size=self.batch_size)
        masks = self.masks[torch.from_numpy(fonts), self.targets(step)].unsqueeze(1)
        grid = functional.affine_grid(_affine(draw, self.batch_size), list(masks.shape), align_corners=False)
        ink = functional.grid_sample(masks, grid, align_corners=False)
        background, color = _colors(draw, self.batch_size)
        images = torch.lerp(background, color, ink)
        noise = draw.standard_normal(images.shape, dtype=np.float32)
        return images.add_(torch.from_numpy(noise), alpha=NOISE).sub_(MEAN).div_(STANDARD_DEVIATION)[samples]

    def targets(self, step: int) -> Tensor:
        """Classes, int64 (batch,): positions in CHARACTERS."""
        draw = generator(self.seed, self.split, "class", step)
        return torch.from_numpy(draw.integers(len(CHARACTERS), size=self.batch_size))

    @property
    def samples(self) -> None:
        """Without end."""
        return None

    @cached_property
    def masks(self) -> Tensor:
        """Ink of every character in every font, float32 in 0..1, (fonts, characters, size, size)."""
        drawn = [[_mask(font, character, self.size) for character in CHARACTERS] for font in self.fonts]
        return torch.from_numpy(np.array(drawn, dtype=np.float32) / 255)


def _font_files(names: tuple[str, ...]) -> tuple[Path, ...]:
    from matplotlib import get_data_path  # only those who draw wait for this import

    folder = Path(get_data_path(), "fonts", "ttf")
    files = tuple(folder / f"{name}.ttf" for name in names)
    for file in files:
        if not file.is_file():
            raise ValueError(f"glyphs finds no font {file}: use `pip install --force-reinstall matplotlib`")
    return files


def _mask(font: Path, character: str, size: int) -> NDArray[np.uint8]:
    """One character, the box around its ink centered and its larger side scaled to GLYPH_SHARE of the image."""
    canvas = Image.new("L", (4 * size, 4 * size))
    face = ImageFont.truetype(str(font), 2 * size)
    ImageDraw.Draw(canvas).text((size, size), character, fill=255, font=face)
    ink = canvas.crop(canvas.getbbox())
    scale = size * GLYPH_SHARE / max(ink.size)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.BOX)
    image = Image.new("L", (size, size))
    image.paste(ink, ((size - ink.width) // 2, (size - ink.height) // 2))
    return np.asarray(image)


def _affine(draw: np.random.Generator, batch_size: int) -> Tensor:
    """Rotation, scale, shear and shift of each sample, as maps from output to mask coordinates, (batch, 2, 3)."""
    angle = draw.uniform(-ROTATION, ROTATION, batch_size)
    scale = draw.uniform(*SCALES, (2, batch_size))
    shear = draw.uniform(-SHEAR, SHEAR, batch_size)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    bend = np.array([[1 / scale[0], shear], [np.zeros(batch_size), 1 / scale[1]]]).transpose(2, 0, 1)
    shift = draw.uniform(-SHIFT, SHIFT, (batch_size, 2, 1))
    return torch.from_numpy(np.concatenate([bend @ rotation, shift], axis=2).astype(np.float32))


def _colors(draw: np.random.Generator, batch_size: int) -> tuple[Tensor, Tensor]:
    """A dark background and a light ink, each (batch, 3, 1, 1) in 0..1."""
    background = draw.uniform(*DARK, (batch_size, 3, 1, 1)).astype(np.float32)
    ink = draw.uniform(*LIGHT, (batch_size, 3, 1, 1)).astype(np.float32)
    return torch.from_numpy(background), torch.from_numpy(ink)
