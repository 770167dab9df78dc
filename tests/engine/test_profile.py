"""What a profile measures: every layer once."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import count
from typing import ClassVar

import pytest
from torch import nn

from pipeline.engine.compilation import Compiler
from pipeline.engine.passes import Pass
from pipeline.engine.profile import profile_layers
from tests.engine.harness import placement
from tests.engine.samples import chain, small_gpt, text, vectors
from tests.engine.test_activations import LINEAR, SAMPLES, TENSOR, Total


def test_every_layer_is_timed():
    inputs, targets = text(2)
    model = small_gpt()
    profiles = profile_layers(model, placement(), inputs, targets, repeats=2)
    assert [profile.name for profile in profiles] == [layer.name for layer in model.layers]
    for profile in profiles:
        assert min(profile.forward, profile.backward, profile.backward_input, profile.backward_weight) > 0
        assert profile.recompute > 0
    hidden = 2 * 8 * 16 * 8  # batch, context, width, bytes
    assert [profile.output_bytes for profile in profiles] == [*[hidden] * 7, 8]


def test_medians_of_a_clock_that_is_known():
    """Eight readings a round: F and B share one, I and W, R. The n-th reading says n squared; the first round warms up.

    In round r, from 0, F takes 16r+1, B 16r+3, I 16r+7, W 16r+9 and R 16r+13; the median of rounds 1 to 3 is round 2.
    """
    readings = (float(n * n) for n in count())
    (profile,) = profile_layers(
        chain([LINEAR], loss=Total()), placement(), *vectors(SAMPLES), repeats=3, clock=lambda: next(readings)
    )
    found = (profile.forward, profile.backward, profile.backward_input, profile.backward_weight, profile.recompute)
    assert found == (33, 35, 39, 41, 45)


class Counts(nn.Linear):
    """How many of them are alive."""

    alive: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    most = 0

    def forward(self, x):
        Counts.alive.add(self)
        Counts.most = max(Counts.most, len(Counts.alive))
        return super().forward(x)


def test_one_layer_at_a_time_has_memory():
    profile_layers(chain([partial(Counts, 4, 4)] * 3), placement(), *vectors(SAMPLES), repeats=1)
    assert Counts.most == 1


@pytest.mark.parametrize("keeps_costly", [False, True])
def test_a_recomputation_is_timed_of_the_part_that_is_asked_for(keeps_costly, monkeypatch):
    """Once for each repetition and for the round that warms up."""
    seen = []
    monkeypatch.setattr(Pass, "recompute", lambda self, run: seen.extend(self.stage.segments))
    profile_layers(chain([LINEAR]), placement(), *vectors(SAMPLES), repeats=2, keeps_costly=keeps_costly)
    assert [segment.keeps_costly for segment in seen] == [keeps_costly] * 3


def test_a_layer_without_gradients_is_profiled_too():
    """Nothing to train and no gradient to hand back: a backward that does nothing."""
    inputs, targets = vectors(SAMPLES)
    model = chain([nn.Identity, LINEAR], loss=Total())
    first, _ = profile_layers(model, placement(), inputs, targets, repeats=1)
    assert first.output_bytes == TENSOR
    assert first.backward_weight >= 0


def test_compiled_layers_are_profiled_as_they_run():
    inputs, targets = vectors(SAMPLES)
    model, where = chain([LINEAR] * 2, loss=Total()), placement(compiler=Compiler("aot_eager"))
    first, _ = profile_layers(model, where, inputs, targets, repeats=1)
    assert first.output_bytes == TENSOR
    assert first.backward_weight > 0
