"""What one microbatch takes, against counts made by hand: float64, a Linear saves its input."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from pipeline.engine.footprint import measure_footprint
from pipeline.engine.segments import Recomputed
from pipeline.schedule.memory import Footprint
from tests.engine.harness import placement
from tests.engine.samples import chain, vectors
from tests.engine.test_activations import SAMPLES, TENSOR, Total
from tests.engine.test_executor import LINEAR


def footprint(builds, counts, dtype=torch.float64):
    return measure_footprint(chain(builds, loss=Total()), counts, placement(dtype), *vectors(SAMPLES))


def test_two_linears_a_stage():
    """F holds the input and what is between; W needs each Linear's input and output gradient, and I gathers them."""
    found = footprint([LINEAR] * 6, (2, 2, 2))
    one = 8  # the last gradient is a single number, expanded
    assert replace(found, recomputed=None) == Footprint(
        activation=(2 * TENSOR,) * 3,
        weight_gradient=(4 * TENSOR, 4 * TENSOR, 3 * TENSOR + one),
        checkpoint=(TENSOR,) * 3,
        boundary=(TENSOR, TENSOR, 8),
        during_recompute=(0,) * 3,
        during_input=(2 * TENSOR, 2 * TENSOR, TENSOR + one),
        kept_output=(0,) * 3,
        input_for_weight=(TENSOR,) * 3,
    )


def test_a_part_that_is_recomputed():
    """Of four Linears every second: between F and R there are its inputs, and those of the Linears that keep theirs."""
    model = chain([LINEAR] * 4, loss=Total())
    found = measure_footprint(model, (4,), placement(), *vectors(SAMPLES), Recomputed(2))
    assert found.recomputed.checkpoint == found.checkpoint == (4 * TENSOR,)
    assert found.recomputed.activation == found.activation == (4 * TENSOR,)
    costly = measure_footprint(model, (4,), placement(), *vectors(SAMPLES), Recomputed(keeps_costly=True))
    assert costly.checkpoint == (5 * TENSOR,), "the input and every product"


def test_an_output_that_autograd_saves():
    found = footprint([LINEAR, nn.ReLU, LINEAR], (2, 1))
    assert found.kept_output == (TENSOR, 0)
    assert found.activation == (2 * TENSOR, TENSOR)


def test_what_no_weight_needs_is_gone_after_the_input_backward():
    found = footprint([LINEAR, nn.Tanh, LINEAR], (1, 2))
    assert found.weight_gradient == (2 * TENSOR, TENSOR + 8)
    assert found.input_for_weight == (TENSOR, 0), "tanh's input is needed by nobody, its output by the Linear"


def test_the_batch_is_no_activation_until_it_is_converted():
    assert footprint([LINEAR] * 2, (1, 1), torch.float32).checkpoint == (0, TENSOR / 2)


def test_a_stage_without_gradients_leaves_nothing():
    found = footprint([nn.Identity, LINEAR], (1, 1))
    assert (found.activation[0], found.weight_gradient[0]) == (TENSOR, 0)


def test_no_memory_is_needed():
    """A terabyte of weights."""
    huge = partial(nn.Linear, 500_000, 500_000)
    inputs, targets = vectors(2, 500_000)
    found = measure_footprint(chain([huge, huge], loss=Total()), (1, 1), placement(torch.float32), inputs, targets)
    assert found.boundary == (2 * 500_000 * 4, 4)
