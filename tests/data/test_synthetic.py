"""Random batches for speed runs."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from data.synthetic import synthetic_images, synthetic_text

BUILDERS = [
    partial(synthetic_text, batch_size=3, context=5, vocabulary=1000),
    partial(synthetic_images, batch_size=3, classes=1000, size=8),
]


@pytest.mark.parametrize("build", BUILDERS, ids=["text", "images"])
def test_fixed_or_drawn_anew_each_step(build: partial) -> None:
    build = pickle.loads(pickle.dumps(build))
    fixed, drawn, other = build(seed=0), build(seed=0, fixed=False), build(seed=1)
    for take in ("inputs", "targets"):
        first = getattr(fixed.train, take)(0)
        assert torch.equal(first, getattr(fixed.train, take)(1))
        assert not torch.equal(first, getattr(other.train, take)(0))
        assert not torch.equal(first, getattr(fixed.validation, take)(0))
        assert not torch.equal(getattr(drawn.train, take)(0), getattr(drawn.train, take)(1))
        assert torch.equal(getattr(drawn.train, take)(1), getattr(build(seed=0, fixed=False).train, take)(1))


def test_shapes_and_types() -> None:
    text, images = BUILDERS[0](seed=0), BUILDERS[1](seed=0)
    assert text.train.inputs(0).shape == text.train.targets(0).shape == (3, 5)
    assert torch.equal(text.train.inputs(0)[:, 1:], text.train.targets(0)[:, :-1])
    assert text.train.inputs(0).dtype == text.train.targets(0).dtype == torch.int64
    assert images.train.inputs(0).shape == (3, 3, 8, 8)
    assert images.train.inputs(0).dtype == torch.float32
    assert images.train.targets(0).shape == (3,)
    assert text.validation.samples is images.validation.samples is None, "they never end"
    assert (text.kind, text.units_per_sample, text.classes) == ("text", 5, 1000)
    assert (images.kind, images.units_per_sample, images.classes) == ("images", 1, 1000)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive vocabulary, got 0"):
        synthetic_text(batch_size=1, seed=0, context=4, vocabulary=0)
    with pytest.raises(ValueError, match="positive classes, got 0"):
        synthetic_images(batch_size=1, seed=0, classes=0)
