"""Microbatches that differ in size and shape, or are missing, against the plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pipeline.engine.boundary import specs_of
from pipeline.engine.executor import run
from pipeline.engine.nest import Microbatched
from pipeline.schedule.library import SCHEDULES
from pipeline.training.plan import for_batch, make_plan
from tests.engine.harness import (
    CPU,
    assert_close,
    assert_equal_outcomes,
    build_ranks,
    microbatches_of,
    outcome,
    pipelined,
    plain_loop,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import chain, linears, sentences, small_gpt, text, texts, translator, vectors


def settings_of(schedule, batch_size=8, **more):
    """Two ranks and four microbatches."""
    return settings_for(schedule, 2, 4, batch_size, **more)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_length_of_its_own_for_each_microbatch(schedule, checkpoint):
    """Losses and gradients weigh each token alike, in however long a sentence it is."""
    model, batch = small_gpt(), texts([8, 3, 5, 3])
    found = pipelined(settings_of(schedule, checkpoint=checkpoint), model, *batch)
    assert_equal_outcomes(found, plain_loop(model, *batch))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_samples_than_microbatches(schedule, checkpoint, samples):
    """The last batch of a data set: the microbatches that are missing contribute nothing."""
    model, batch = small_gpt(tie=False), text(samples)
    found = pipelined(settings_of(schedule, checkpoint=checkpoint), model, *batch)
    assert_equal_outcomes(found, plain_loop(model, *batch))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe_v"])
def test_any_of_the_microbatches_may_be_empty(schedule):
    model, batch = small_gpt(), texts([0, 5, 0, 8])
    assert_equal_outcomes(pipelined(settings_of(schedule), model, *batch), plain_loop(model, *filled(batch)))


def filled(batch):
    return (Microbatched(piece for piece in part if len(piece)) for part in batch)


def test_a_short_batch_of_several_tensors():
    model, batch = translator(), sentences(3)
    assert_equal_outcomes(pipelined(settings_of("zb_h1"), model, *batch), plain_loop(model, *batch, 3))


def test_a_batch_norm_counts_the_microbatches_that_came():
    model = chain([partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4)])
    batch = [Microbatched(part.split([4, 0, 2, 0])) for part in vectors(6)]
    assert_equal_outcomes(pipelined(settings_of("1f1b"), model, *batch), plain_loop(model, *filled(batch)))


def test_padding_that_is_cut_off_changes_nothing():
    """Sentences padded to the batch's longest, or each microbatch to its own: padding is no target."""
    model, (inputs, targets) = small_gpt(), text(8)
    lengths = torch.tensor([3, 2, 8, 7, 5, 5, 1, 4])
    targets = targets.masked_fill(torch.arange(8) >= lengths[:, None], -100)
    padded = pipelined(settings_of("1f1b"), model, inputs, targets)
    longest = lengths.unflatten(0, (4, 2)).amax(1).tolist()
    cut = [Microbatched(p[:, :n] for p, n in zip(b.split(2), longest, strict=True)) for b in (inputs, targets)]
    assert_equal_outcomes(pipelined(settings_of("1f1b"), model, *cut), padded)


def test_an_evaluation_of_a_short_batch():
    model, (inputs, targets) = small_gpt(), texts([8, 0, 3, 0])
    plan = plan_for(settings_of("interleaved_1f1b"), model, inputs)
    ranks = build_ranks(plan, model)
    results = run([rank.evaluator for rank in ranks], [microbatches_of(plan, model, inputs, targets)] * 2)
    assert_close("loss", results[1].loss, plain_loop(model, *filled((inputs, targets))).loss, 1e-12)


def test_ranks_take_batches_of_one_shape_after_another():
    """Boundaries are planned once a shape, and nothing else changes."""
    model, settings = small_gpt(), settings_of("zbv")
    settings.precision.parameters = "float64"
    plan = plan_for(settings, model, text(8)[0])
    ranks = build_ranks(plan, model)
    for inputs, targets in (text(8), texts([4, 8, 2, 2]), text(2), text(8)):
        planned = for_batch(plan, settings, model, specs_of(inputs), CPU)
        for rank in ranks:
            rank.expect(planned)
            rank.clear_gradients()
        results = step(ranks, microbatches_of(planned, model, inputs, targets))
        assert_equal_outcomes(outcome(planned, ranks, results), plain_loop(model, inputs, targets))


def test_bytes_follow_the_shape():
    plan = plan_for(settings_of("1f1b"), small_gpt(), texts([8, 3, 5, 3])[0])
    sizes = [plan.boundaries[kind][1].tensors[0].nbytes for kind in plan.microbatch_kinds]
    assert sizes == [8 * 2 * length * 16 for length in (8, 3, 5, 3)]
    assert len(plan.boundaries) == 3, "those of one shape share theirs"


def test_another_number_of_microbatches_is_refused():
    with pytest.raises(ValueError, match="cut into 2 microbatches, and the run has 4: use microbatches=2, or cut"):
        plan_for(settings_of("1f1b"), small_gpt(), texts([8, 3])[0])


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a batch of 0 samples is too small: use 1 or more, one at least a replica"):
        plan_for(settings_of("1f1b"), linears(2), vectors(0)[0])


def test_every_replica_needs_a_sample():
    settings = settings_of("1f1b", dp=2)
    inputs = specs_of(vectors(4)[0])
    with pytest.raises(ValueError, match="a batch of 4 samples is too small: use 5 or more, one at least a replica"):
        make_plan(settings, linears(2), inputs, CPU)
