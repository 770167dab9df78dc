"""A part of a batch, for a replica of the pipeline that takes no more: what the whole batch has there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.glyphs import glyphs
from data.synthetic import synthetic_images, synthetic_text
from data.windows import Text, Windows

TEXT = Text("numbers", 500, lambda: np.arange(500))


@pytest.mark.parametrize(
    "split",
    [
        Windows.shuffled(TEXT, 8, 6, 0),
        synthetic_text(batch_size=6, seed=0, context=8, vocabulary=9, fixed=False).train,
        synthetic_images(batch_size=6, seed=0, classes=3, size=8).train,
        synthetic_images(batch_size=6, seed=0, classes=3, size=8, fixed=False).validation,
        glyphs(batch_size=6, seed=0, size=16).train,
    ],
    ids=["windows", "tokens", "images", "new images", "glyphs"],
)
def test_samples_are_those_of_the_whole_batch(split):
    for part in (slice(0, 2), slice(2, 6), slice(None)):
        assert torch.equal(split.inputs(3, part), split.inputs(3)[part])
