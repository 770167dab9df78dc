"""Drawn characters: pure batches, readable images, fonts held out."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import matplotlib
import pytest
import torch

from data.glyphs import CHARACTERS, HELD_OUT_FONTS, STANDARD_DEVIATION, TRAINING_FONTS, Glyphs, glyphs


def test_batches_are_pure_normalized_and_labelled() -> None:
    build = pickle.loads(pickle.dumps(partial(glyphs, batch_size=128, seed=0, size=32)))
    one, two = build(), build()
    state = torch.get_rng_state()
    later = two.train.inputs(1)
    images, targets = one.train.inputs(0), one.train.targets(0)
    assert images.shape == (128, 3, 32, 32)
    assert images.dtype == torch.float32
    assert images.mean().item() == pytest.approx(0, abs=0.2)
    assert images.std().item() == pytest.approx(1, abs=0.2)
    assert torch.equal(images, two.train.inputs(0))
    assert torch.equal(one.train.inputs(1), later)
    assert not torch.equal(images, later)
    assert targets.dtype == torch.int64
    assert set(torch.cat([one.train.targets(step) for step in range(10)]).tolist()) == set(range(36))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.validation.samples is None, "they never end"
    assert (one.kind, one.classes, one.units_per_sample) == ("images", 36, 1)


def test_default_size_is_64_and_seed_moves_training_alone() -> None:
    zero, one = glyphs(batch_size=2, seed=0), glyphs(batch_size=2, seed=1)
    assert zero.train.inputs(0).shape == (2, 3, 64, 64)
    assert not torch.equal(zero.train.inputs(0), one.train.inputs(0))
    assert torch.equal(zero.validation.inputs(0), one.validation.inputs(0))
    assert torch.equal(zero.validation.targets(0), one.validation.targets(0))


def test_targets_need_no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.glyphs._mask", lambda *_: pytest.fail("drew"))
    assert glyphs(batch_size=4, seed=0).train.targets(0).shape == (4,)


def test_masks_are_centered_distinct_and_inside_the_image() -> None:
    split = glyphs(batch_size=1, seed=0).train
    assert isinstance(split, Glyphs)
    masks = split.masks
    assert masks.shape == (len(TRAINING_FONTS), len(CHARACTERS), 64, 64)
    assert masks.amax(dim=(2, 3)).min() > 0.9
    border = torch.ones(64, 64, dtype=torch.bool)
    border[9:55, 9:55] = False
    assert masks[..., border].max() == 0
    for font in masks.flatten(2):
        assert torch.cdist(font, font).add(torch.eye(36) * 100).min() > 1
    for axis in (2, 3):
        inked = masks.amax(dim=axis).gt(0).double()  # (fonts, characters, places along the other axis)
        first, last = inked.argmax(-1), 63 - inked.flip(-1).argmax(-1)
        assert (first + last - 63).abs().max() <= 1


def test_fonts_are_held_out_and_ship_with_matplotlib() -> None:
    assert not set(TRAINING_FONTS) & set(HELD_OUT_FONTS)
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    assert all((folder / f"{name}.ttf").is_file() for name in TRAINING_FONTS + HELD_OUT_FONTS)


def test_every_glyph_can_be_told_from_its_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.glyphs.NOISE", 0)
    images = glyphs(batch_size=256, seed=3, size=32).train.inputs(0) * STANDARD_DEVIATION
    corner = images[:, :, :1, :1]
    contrast = (images - corner).abs().mean(1).flatten(1)  # (batch, pixels), in units of full brightness
    assert contrast.topk(20).values.mean(1).min() > 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 8}, "glyphs of 8 pixels are unreadable: use size=16 or more"),
        ({"classes": 10}, "glyphs have 36 classes, not 10: use classes=36"),
        ({"batch_size": -1}, "positive batch_size, got -1"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glyphs(**{"batch_size": 2, "seed": 0, **change})


def test_missing_font_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=r"glyphs finds no font .*DejaVuSans.ttf: use `pip install --force-reinstall"):
        glyphs(batch_size=2, seed=0)
