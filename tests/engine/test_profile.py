"""What a profile measures: every stage once."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.engine.compilation import Compiler
from pipeline.engine.profile import profile_stages
from pipeline.engine.segments import Recomputed
from tests.engine.harness import placement
from tests.engine.samples import chain, small_gpt, text, vectors
from tests.engine.test_activations import LINEAR, SAMPLES, TENSOR, Total


def test_every_stage_is_timed():
    inputs, targets = text(2)
    profiles = profile_stages(small_gpt(), (3, 3, 2), placement(), inputs, targets, repeats=2)
    assert len(profiles) == 3
    for profile in profiles:
        assert min(profile.forward, profile.backward, profile.backward_input, profile.backward_weight) > 0
        assert profile.recompute > 0
    hidden = 2 * 8 * 16 * 8  # batch, context, width, bytes
    assert [profile.output_bytes for profile in profiles] == [hidden, hidden, 8]


class Counts(nn.Linear):
    """How often it runs."""

    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return super().forward(x)


def test_a_recomputation_is_timed_of_its_part_alone():
    """Two more calls of the first layer than of the second, for each repetition and the one that warms up."""
    calls = []
    for part in (Recomputed(), Recomputed(2)):
        Counts.calls = 0
        model = chain([LINEAR, partial(Counts, 4, 4)], loss=Total())
        profile_stages(model, (2,), placement(), *vectors(SAMPLES), repeats=1, recomputed=part)
        calls.append(Counts.calls)
    assert calls[0] - calls[1] == 2


def test_a_stage_without_gradients_is_profiled_too():
    """Nothing to train and no gradient to hand back: a backward that does nothing."""
    inputs, targets = vectors(SAMPLES)
    model = chain([nn.Identity, LINEAR], loss=Total())
    first, _ = profile_stages(model, (1, 1), placement(), inputs, targets, repeats=1)
    assert first.output_bytes == TENSOR
    assert first.backward_weight >= 0


def test_compiled_stages_are_profiled_as_they_run():
    inputs, targets = vectors(SAMPLES)
    model, where = chain([LINEAR] * 4, loss=Total()), placement(compiler=Compiler("aot_eager"))
    first, _ = profile_stages(model, (2, 2), where, inputs, targets, repeats=1)
    assert first.output_bytes == TENSOR
    assert first.backward_weight > 0
