"""The meter against counts made by hand: float64, a Linear saves its input and its weight."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pipeline.engine.activations import ActivationMeter
from tests.engine.harness import build_ranks, microbatches_of, plan_for, plan_with, settings_for, step
from tests.engine.samples import chain, linears, vectors
from tests.engine.test_executor import LINEAR, written

WIDTH, SAMPLES = 4, 3
TENSOR = SAMPLES * WIDTH * 8
"""Bytes of one microbatch between two layers."""


@dataclass(frozen=True)
class Total:
    """A loss whose backward needs nothing but a scalar divisor."""

    def __call__(self, outputs, targets):
        return outputs.sum()

    def weight(self, targets):
        return len(targets)


def peaks(plan, model, microbatches, steps=1):
    inputs, targets = vectors(SAMPLES * microbatches)
    ranks = build_ranks(plan, model)
    for rank in ranks:
        rank.measure_activations(True)
    for number in range(steps):
        step(ranks, microbatches_of(plan, model, inputs, targets, number))
        for rank in ranks:
            rank.clear_gradients()
    return [rank.measure_activations(False) for rank in ranks]


def planned(model, schedule, pp, microbatches, checkpoint="never"):
    settings = settings_for(schedule, pp, microbatches, SAMPLES * microbatches, checkpoint=checkpoint)
    return plan_for(settings, model, vectors(SAMPLES * microbatches)[0])


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_each_microbatch_in_flight_holds(schedule, microbatches):
    """Three ranks of two Linears: the input and what is between. The output is gone with its message."""
    model = chain([LINEAR] * 6, loss=Total())
    found = peaks(planned(model, schedule, 3, microbatches), model, microbatches)
    for rank in range(3):
        in_flight = microbatches if schedule == "gpipe" else min(3 - rank, microbatches)
        exact = in_flight * TENSOR * 2
        scalars = 8 * in_flight if rank == 2 else 0  # the number that the loss is divided by
        assert exact <= found[rank] <= exact + scalars


def test_checkpointing_keeps_inputs_and_one_recomputed_microbatch():
    model = chain([LINEAR] * 6, loss=Total())
    first, *_ = peaks(planned(model, "gpipe", 2, 5, "always"), model, 5)
    assert first == 5 * TENSOR + 2 * TENSOR
    first, *_ = peaks(planned(model, "gpipe", 2, 5, "except_last"), model, 5)
    # backwards come first in, first out: the last one's activations are held while the first one's are recomputed
    assert first == 4 * TENSOR + 3 * TENSOR + 2 * TENSOR


def test_stages_on_one_rank_share_what_passes_between_them():
    """Two stages of two Linears: four tensors, for the one on the boundary is both an output and an input."""
    model = chain([LINEAR] * 4, loss=Total())
    schedule = written("two stages on one rank", (0, 0), 2, "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    (found,) = peaks(plan_with(schedule, model, vectors(2 * SAMPLES)[0]), model, 2)
    assert 4 * TENSOR <= found <= 4 * TENSOR + 8


def test_a_step_leaves_nothing_behind():
    """Else the second step's peak would stand on the first one's remains."""
    model = linears(4)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        plan = planned(model, schedule, 2, 4, "except_last")
        assert peaks(plan, model, 4, steps=3) == peaks(plan, model, 4)


def test_measuring_changes_no_number():
    model = linears(4)
    plan = planned(model, "1f1b", 2, 4)
    batch = microbatches_of(plan, model, *vectors(SAMPLES * 4))
    plain, measured = build_ranks(plan, model), build_ranks(plan, model)
    for rank in measured:
        rank.measure_activations(True)
    losses = [step(ranks, batch)[-1].loss for ranks in (plain, measured)]
    assert torch.equal(*losses)
    for one, other in zip(plain, measured, strict=True):
        for name, parameter in one.parameters.items():
            assert torch.equal(parameter.grad, other.parameters[name].grad)


def test_without_a_measurement_there_is_no_peak():
    (rank, _) = build_ranks(planned(linears(2), "1f1b", 2, 2), linears(2))
    assert rank.measure_activations(False) is None


def test_a_storage_counts_once_however_many_hold_a_view_of_it():
    meter, tensor = ActivationMeter([]), torch.zeros(10, dtype=torch.float64)
    first = meter.hold(tensor)
    second = meter.hold(tensor[2:4])
    assert meter.peak_bytes == 80
    del first
    third = meter.hold(torch.zeros(5, dtype=torch.float64))
    assert meter.peak_bytes == 120, "the view still holds it"
    del second, third
    last = meter.hold(torch.zeros(15, dtype=torch.float64))
    assert meter.peak_bytes == 120, "all was let go"
    assert last.tensor.numel() == 15


def test_parameters_and_their_views_do_not_count():
    layer = nn.Linear(3, 3, dtype=torch.float64)
    meter = ActivationMeter(layer.parameters())
    held = meter.hold(layer.weight.t())
    assert meter.peak_bytes == 0
    del held
    with meter.watch():
        output = layer(torch.ones(2, 3, dtype=torch.float64)).relu()
    assert meter.peak_bytes == 2 * (2 * 3 * 8), "the Linear's input and what relu keeps"
    output.sum().backward()
    assert layer.weight.grad is not None


def test_only_what_is_saved_while_watching_counts():
    meter = ActivationMeter([])
    torch.ones(3, requires_grad=True).exp()
    assert meter.peak_bytes == 0
