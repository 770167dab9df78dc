"""Replicas of a pipeline train as one pipeline does that gets all their microbatches."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd import Function

from pipeline.training.checkpoint import find_checkpoint
from pipeline.training.failures import NonFiniteError
from pipeline.training.group import LocalGroup
from pipeline.training.launch import launch
from pipeline.training.messages import StepMetrics
from pipeline.training.ranks import Ranks
from pipeline.training.saving import Saving
from pipeline.training.settings import OptimizerSettings
from tests.engine.harness import buffers_of, build_ranks, plan_for
from tests.engine.samples import chain, linears, small_gpt, vectors
from tests.training import replica_targets
from tests.training.harness import (
    BF16_TRUE,
    FP16,
    FP64,
    Numbers,
    SmallData,
    prepare,
    relative_error,
    settings_to_train,
    text_data,
    train,
    vector_data,
)

SGD = OptimizerSettings("sgd", learning_rate=0.5, warmup_steps=0, decay="constant", weight_decay=0.0)


def run_of(model, data, schedule, pp, dp, microbatches, batch_size, steps=4, **more):
    settings = settings_to_train(schedule, pp, microbatches, batch_size, steps, precision=FP64, dp=dp, **more)
    return train(settings, model, data)


@functools.cache
def of_gpt(schedule: str, pp: int, dp: int, microbatches: int, checkpoint: str = "never", tie: bool = True):
    """Seven samples, so that microbatches and replicas differ in size; dropout, clipping and AdamW."""
    model = small_gpt(dropout=0.1, tie=tie)
    return run_of(model, text_data(7), schedule, pp, dp, microbatches, 7, checkpoint=checkpoint, validate_every=2)


def states(run):
    """The state dict of each replica."""
    settings = run.trainer.settings
    firsts = range(0, settings.ranks, settings.pp)
    replicas = [run.trainer.ranks.ranks[first : first + settings.pp] for first in firsts]
    return [{name: t for rank in replica for name, t in rank.state_dict().items()} for replica in replicas]


def assert_replicas_are_equal(run):
    for one, other in pairwise(states(run)):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def assert_same_run(found, expected, weights=1e-9):
    assert relative_error(found.losses, expected.losses) < 1e-12
    assert relative_error(*([m.gradient_norm for m in run.of(StepMetrics)] for run in (found, expected))) < 1e-11
    assert found.validations == pytest.approx(expected.validations, rel=1e-12)
    assert_replicas_are_equal(found)
    state, wanted = states(found)[0], states(expected)[0]
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=weights), name


COMBINATIONS = [
    ("1f1b", 1, 2, 2, "never"),
    ("1f1b", 2, 2, 2, "never"),
    ("gpipe", 2, 4, 1, "never"),
    ("gpipe", 3, 2, 2, "except_last"),
    ("interleaved_1f1b", 2, 2, 2, "always"),
    ("zb_h1", 2, 2, 2, "never"),
    ("zbv", 2, 2, 2, "never"),
    ("interleaved_zb", 2, 2, 2, "selective"),
]


@pytest.mark.parametrize(("schedule", "pp", "dp", "microbatches", "checkpoint"), COMBINATIONS)
def test_replicas_do_not_change_the_run(schedule, pp, dp, microbatches, checkpoint):
    """One weight for the whole batch, dropout numbered over all replicas, a tied parameter summed and counted once."""
    found = of_gpt(schedule, pp, dp, microbatches, checkpoint)
    assert_same_run(found, of_gpt("1f1b", 1, 1, dp * microbatches))


def test_untied_embeddings_too():
    assert_same_run(of_gpt("1f1b", 2, 2, 2, tie=False), of_gpt("1f1b", 1, 1, 4, tie=False))


def test_the_run_is_one_in_which_all_of_this_matters():
    run = of_gpt("1f1b", 1, 1, 4)
    assert run.trainer.ranks.plan.microbatch_sizes == (2, 2, 2, 1)
    norms = [message.gradient_norm for message in run.of(StepMetrics)]
    assert min(norms) > run.trainer.settings.gradient_clip, "every step is clipped"
    assert of_gpt("1f1b", 1, 1, 2).losses[0] != pytest.approx(run.losses[0], rel=1e-6), "dropout is on"


def test_every_stage_is_reduced_and_no_validation_reduces():
    plan = of_gpt("zbv", 2, 2, 2).trainer.ranks.plan
    words = [str(action) for row in plan.program.rows for action in row]
    assert sorted(word for word in words if "REDUCE" in word) == [f"{stage}REDUCE_GRAD" for stage in range(4)]
    assert not any("REDUCE" in str(action) for row in plan.evaluation.rows for action in row)


# Parameters that aren't in every microbatch


class UsesSomeWhenAlone(nn.Module):
    """A parameter that microbatches of one sample use; one that none does. Weight decay is for two dimensions."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.empty(1, 4)) for _ in range(3))

    def forward(self, x):
        x = x * self.always
        return x + self.sometimes if self.training and x.shape[0] == 1 else x


def test_a_parameter_that_one_replica_does_not_use():
    """Three samples in two microbatches: the second one, of the second replica, has a single sample."""
    optimizer = OptimizerSettings("adamw", learning_rate=3e-3, warmup_steps=0, weight_decay=0.1)
    model, data = chain([partial(nn.Linear, 4, 4), UsesSomeWhenAlone]), vector_data(3)
    found, expected = (
        run_of(model, data, "1f1b", 2, dp, microbatches, 3, optimizer=optimizer)
        for dp, microbatches in ((2, 1), (1, 2))
    )
    assert_same_run(found, expected)
    start = states(prepare(found.trainer.settings, model, data))[0]
    moved = {name for name, tensor in states(found)[1].items() if not torch.equal(tensor, start[name])}
    assert "1.sometimes" in moved
    assert "1.never" not in moved, "a gradient of zeros would let weight decay move it"


def test_frozen_layers_stay():
    class Frozen(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.requires_grad_(False)

    model = chain([Frozen, Frozen, partial(nn.Linear, 4, 4), Frozen])
    found, expected = (run_of(model, vector_data(8), "1f1b", 2, dp, 8 // dp // 2, 8) for dp in (2, 1))
    assert_same_run(found, expected)


def test_rounded_weights_have_exact_copies_on_every_replica():
    """What is summed over replicas is what was added up in float32."""
    runs = [
        train(settings_to_train("1f1b", 2, 4 // dp, 8, 4, precision=BF16_TRUE, dp=dp), small_gpt(), text_data(8))
        for dp in (2, 1)
    ]
    assert_replicas_are_equal(runs[0])
    assert {tensor.dtype for tensor in states(runs[0])[1].values()} == {torch.float32}
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], rel=1e-6)
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=2e-3)


def test_a_checkpoint_of_replicas_goes_on_as_one_pipeline(tmp_path):
    saving = Saving(tmp_path / "checkpoints", 2, 9, {})
    model, data = small_gpt(dropout=0.1), text_data(8)
    settings = settings_to_train("1f1b", 2, 2, 8, 4, precision=FP64, dp=2)
    whole = train(settings, model, data, saved=saving)
    alone = dataclasses.replace(settings, pp=1, dp=1, microbatches=4)
    rest = train(alone, model, data, resumed=find_checkpoint(tmp_path / "checkpoints" / "step-000002"))
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)
    again = train(settings, model, data, resumed=find_checkpoint(tmp_path / "checkpoints" / "step-000002"))
    assert again.losses == whole.losses[2:]
    assert_replicas_are_equal(again)


# Verdicts over all replicas


class BreaksInThePoorHalf(nn.Linear):
    """Not a number where the batch's last sample is."""

    def forward(self, x):
        return super().forward(x) * torch.where(x.abs().max() > 50, torch.nan, 1.0)


def outlier_data(batch_size, at):
    def make(step):
        inputs, targets = vectors(batch_size)
        if step == 1:
            inputs[at] *= 1000
        return inputs, targets

    return SmallData(Numbers(make), Numbers(make), "vectors", 1)


def test_what_is_not_finite_in_one_replica_skips_the_step_in_all():
    model, data = chain([partial(BreaksInThePoorHalf, 4, 4)] * 2), outlier_data(8, 7)
    found, expected = (
        run_of(model, data, "1f1b", 2, dp, 4 // dp, 8, optimizer=SGD, on_nonfinite="skip") for dp in (2, 1)
    )
    assert [message.skipped for message in found.of(StepMetrics)] == [False, True, False, False]
    assert_replicas_are_equal(found)
    assert states(found)[0]["0.weight"].isfinite().all()
    assert torch.allclose(states(found)[0]["0.weight"], states(expected)[0]["0.weight"], rtol=1e-12)


def test_what_is_not_finite_is_named_with_the_rank_and_the_microbatch_among_all():
    model = chain([partial(nn.Linear, 4, 4), partial(BreaksInThePoorHalf, 4, 4)])
    with pytest.raises(
        NonFiniteError, match=r"at step 2, first the output of layer 1 \(stage 1, rank 3, microbatch 3\)"
    ):
        run_of(model, outlier_data(8, 7), "1f1b", 2, 2, 2, 8, optimizer=SGD)


class Biased(Function):
    """x + bias, whose bias has no finite gradient where the outlier is."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.factor = torch.where(x.abs().max() > 50, torch.nan, 1.0)
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum(0) * ctx.factor


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x):
        return Biased.apply(x, self.weight)


def test_a_gradient_is_named_with_the_replica_that_breaks_it():
    """Summed it is not a number on any."""
    model = chain([Bias, partial(nn.Linear, 4, 4)])
    with pytest.raises(NonFiniteError, match=r"first the gradient of 0\.weight \(layer 0, stage 0, rank 2\)"):
        run_of(model, outlier_data(8, 7), "1f1b", 2, 2, 2, 8, optimizer=SGD)


def test_an_overflow_in_one_replica_shrinks_the_scale_of_all():
    class Overflows(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.where(x.abs().max() > 50, torch.inf, 1.0)

    model, data = chain([partial(Overflows, 4, 4), partial(nn.Linear, 4, 4)]), outlier_data(8, 7)
    run = train(settings_to_train("1f1b", 2, 2, 8, 3, precision=FP16, dp=2, optimizer=SGD), model, data)
    assert [message.skipped for message in run.of(StepMetrics)][1]
    assert run.trainer._scale.value < FP16.loss_scale
    assert_replicas_are_equal(run)


# Buffers


def normed(**more):
    return chain([partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4, **more), partial(nn.Linear, 4, 4)])


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_batch_norms_averages_are_those_of_one_pipeline(batch_norm, momentum):
    """19 samples in four replicas' two microbatches each, three of 3 and five of 2."""
    model = normed(momentum=momentum, eps=0.1)
    found, expected = (
        run_of(model, vector_data(19), "1f1b", pp, dp, 8 // dp, 19, batch_norm=batch_norm, optimizer=SGD)
        for pp, dp in ((3, 4), (1, 1))
    )
    assert_same_run(found, expected)
    tracked = states(found)[3]["1.num_batches_tracked"]
    assert tracked.item() == (4 if batch_norm == "deferred" else 32)


def test_recomputation_does_not_count_twice():
    runs = [run_of(normed(), vector_data(8), "1f1b", 2, dp, 4 // dp, 8, checkpoint="always") for dp in (2, 1)]
    assert_same_run(*runs)


class Moves(nn.Module):
    """A buffer that forwards move, one that they replace, and one that they leave."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.empty(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("still", torch.empty(5))

    def forward(self, x):
        if self.training:
            self.total += x.detach().sum()
            self.seen[0] = True
            self.count = self.count + len(x)
        return x


def test_other_buffers_are_the_first_replicas():
    model, data = chain([partial(nn.Linear, 4, 4), Moves]), vector_data(7)
    found, alone = (
        run_of(model, part, "1f1b", 2, dp, 2, size, steps=1) for part, dp, size in ((data, 2, 7), (data, 1, 7))
    )
    assert_replicas_are_equal(found)
    state = states(found)[1]
    assert state["1.count"].item() == 4, "the first replica's samples"
    assert state["1.seen"].tolist() == [True, False, False]
    assert torch.equal(state["1.still"], states(alone)[0]["1.still"])
    assert state["1.total"].item() != states(alone)[0]["1.total"].item()


# What is reported


def test_every_rank_of_all_replicas_is_reported():
    run = of_gpt("1f1b", 2, 2, 2)
    finished = run.finished
    assert [(report.rank, report.stages) for report in finished.ranks] == [(0, (0,)), (1, (1,)), (2, (0,)), (3, (1,))]
    assert finished.ranks[0].parameters == finished.ranks[2].parameters
    assert len(finished.idle) == len(finished.events) == 4
    assert [{event.rank for event in row} for row in finished.events] == [{0}, {1}, {2}, {3}]
    assert {str(event.action) for event in finished.events[0]} == {str(event.action) for event in finished.events[2]}
    makespan = max(row[-1].end for row in finished.events)
    assert 0 < finished.bubble_measured < 1
    busy = [sum(event.end - event.start for event in row) for row in finished.events]
    assert 0 < max(busy) <= makespan


def test_a_prediction_is_of_all_replicas():
    run = of_gpt("1f1b", 2, 2, 2)
    prediction = run.messages[-2]
    assert len(prediction.events) == len(prediction.idle) == 4
    assert [{event.rank for event in row} for row in prediction.events] == [{0}, {1}, {2}, {3}]


def test_gradients_add_up_over_steps_without_an_optimizer():
    """As with `Pipeline.step`: what an earlier step left is a sum over replicas already."""
    run = prepare(settings_to_train("1f1b", 2, 2, 8, 1, precision=FP64, dp=2), linears(4), vector_data(8))
    ranks, batch = run.trainer.ranks, run.trainer._batch(0)
    ranks.train(batch)
    once = [parameter.grad.clone() for parameter in ranks.parameters()]
    ranks.train(batch)
    assert all(torch.equal(p.grad, 2 * first) for p, first in zip(ranks.parameters(), once, strict=True))


def test_a_replica_loads_its_own_samples_and_the_targets_whose_weight_is_the_whole_batchs():
    """Seven samples in four microbatches: 2 and 2 to the first replica, 2 and 1 to the second."""
    run = prepare(settings_to_train("1f1b", 2, 2, 7, 1, dp=2), small_gpt(), text_data(7))
    everything = run.trainer.ranks.ranks
    loaded = {}
    for rank in everything:
        run.trainer.ranks.ranks = (rank,)
        batch = run.trainer._batch(0)
        (part,) = run.trainer.ranks.parts(batch)
        loaded[rank.rank] = part
        held = [None if piece is None else len(piece) for piece in batch.inputs or ()]
        assert held == {0: [2, 2, None, None], 2: [None, None, 2, 1]}.get(rank.rank, [])
    whole = text_data(7).train
    assert torch.equal(torch.cat(loaded[2].inputs), whole.inputs(0)[4:])
    assert torch.equal(torch.cat(loaded[1].targets), whole.targets(0)[:4])
    assert [loaded[rank].weight for rank in (1, 3)] == [7 * 8] * 2
    assert [loaded[rank].first for rank in range(4)] == [0, 0, 2, 2]


# BatchNorm over replicas, which wait for each other in the middle of an action: in processes alone


@pytest.fixture(scope="module")
def synced():
    """Of every case what the four ranks of two replicas send."""
    found = defaultdict(list)
    launch(replica_targets.synced_steps, None, 4, on_message=lambda message: found[message[0]].append(message[1:]))
    return found


@pytest.mark.parametrize(("schedule", "checkpoint"), replica_targets.CASES)
def test_synced_microbatches_are_normalized_as_their_union(synced, schedule, checkpoint):
    """As one pipeline that gets a microbatch of either replica as one; two steps of eleven samples: 3, 3, 3 and 2."""
    ranks = sorted(synced[schedule, checkpoint])
    model, (inputs, targets) = replica_targets.model(), vectors(11)
    settings = settings_to_train("1f1b", 1, 2, 11, 1, precision=FP64)
    order = [*range(3), *range(6, 9), *range(3, 6), *range(9, 11)]
    plan = dataclasses.replace(plan_for(settings, model, inputs), microbatch_sizes=(6, 5))
    (alone,) = build_ranks(plan, model)
    pair = Ranks(plan, [alone], model.loss, LocalGroup(1))
    for step in range(2):
        expected = pair.train(pair.cut(step, inputs[order], targets[order]))
    loss = sum(loss for _, loss, _, _ in ranks if loss is not None)
    assert loss == pytest.approx(expected[0].loss.item(), rel=1e-12)
    for first, second in zip(ranks[:2], ranks[2:], strict=True):
        for found, other in zip(first[2:], second[2:], strict=True):
            assert all(torch.equal(tensor, other[name]) for name, tensor in found.items())
    gradients, buffers = ({**ranks[0][kind], **ranks[1][kind]} for kind in (2, 3))
    for name, parameter in alone.parameters.items():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13), name
    for name, buffer in buffers_of(list(alone.stages.values())).items():
        assert torch.allclose(buffers[name].double(), buffer.double(), rtol=1e-12), name
    assert buffers["1.num_batches_tracked"] == 4
