"""BatchNorm's running statistics: of each microbatch, or of the whole mini-batch."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine import batch_norm
from pipeline.engine.compilation import Compiler
from pipeline.engine.executor import ActionError, Executor, run
from pipeline.engine.footprint import measure_footprint
from pipeline.engine.stage import Stage
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule import library
from pipeline.training.rank import Rank
from pipeline.training.settings import ActivationCheckpointSettings, OptimizerSettings
from tests.engine.harness import (
    assert_close,
    microbatches_of,
    outcome,
    pipelined,
    placement,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import chain, images, vectors

DEFERRED = replace(placement(), defers_batch_norm=True)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def ranks_of(plan, model, where=DEFERRED):
    transport = InProcessTransport()
    return [Rank(rank, plan, model, where, transport, OptimizerSettings()) for rank in range(plan.schedule.pp)]


def statistics(found):
    return {name: value.clone() for name, value in found.items() if name.rpartition(".")[2] in STATISTICS}


def training(schedule, pp, microbatches, batch, *, checkpoint="never", where=DEFERRED, steps=1, size=32):
    """ResNet-18 in float64: the loss, gradients and buffers after some steps on the same batch."""
    model, (inputs, targets) = resnet(depth=18, classes=10), images(batch, size)
    plan = plan_for(settings_for(schedule, pp, microbatches, batch, checkpoint=checkpoint), model, inputs)
    ranks = ranks_of(plan, model, where)
    for number in range(steps):
        results = step(ranks, microbatches_of(plan, model, inputs, targets, number))
    return outcome(plan, ranks, results)


def moved(norm: nn.Module, pieces, *, steps=1):
    """A deferred copy of `norm` that saw `pieces` in every step."""
    deferred = copy.deepcopy(norm)
    batch_norm.defer(deferred)
    for _ in range(steps):
        batch_norm.begin([deferred])
        for piece in pieces:
            deferred(piece)
        batch_norm.commit([deferred])
    return deferred


def assert_same_statistics(found, expected, tolerance=1e-12):
    for name in STATISTICS:
        assert_close(name, getattr(found, name), getattr(expected, name), tolerance)


SHAPES = {nn.BatchNorm1d: (5, 3), nn.BatchNorm2d: (5, 3, 4, 2), nn.BatchNorm3d: (5, 3, 2, 2, 2)}


@pytest.mark.parametrize(("kind", "momentum", "affine"), itertools.product(SHAPES, (0.1, None, 1.0), (True, False)))
def test_deferred_equals_one_forward_of_the_whole_batch(kind, momentum, affine):
    """Uneven microbatches, in three steps."""
    values = torch.randn(SHAPES[kind], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pieces = values.split([2, 2, 1] if values.dim() > 2 else [2, 3])  # one value a channel is refused
    expected = kind(3, momentum=momentum, affine=affine).double()
    found = moved(expected, pieces, steps=3)
    for _ in range(3):
        expected(values)
    assert_same_statistics(found, expected)
    assert isinstance(found, kind)
    assert set(found.state_dict()) == set(expected.state_dict())
    assert_close("evaluation", found.eval()(values), expected.eval()(values), 1e-12)


def test_the_variance_is_unbiased():
    """torchgpipe's isn't: it divides by the count."""
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    found = moved(nn.BatchNorm1d(1, momentum=1.0).double(), values.split(2))
    assert_close("variance", found.running_var, values.var(0, correction=1), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_mean_does_not_cancel(dtype):
    """torchgpipe's E[x^2] - E[x]^2 loses every digit of a variance of 1e-4 at a mean of 1e4 in float32."""
    values = torch.randn(64, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) + 1e4
    found = moved(nn.BatchNorm1d(3, momentum=1.0, dtype=dtype), values.split(7))
    assert_close("variance", found.running_var, values.double().var((0, 2)), {torch.float32: 1e-5}.get(dtype, 1e-11))


@pytest.mark.parametrize("sizes", [[2, 3], [5], [2, 0, 3]])
def test_fewer_microbatches_or_empty_ones_are_committed_too(sizes):
    """torchgpipe commits when as many microbatches as it was built with have come; with fewer it never does."""
    values = vectors(5)[0].double()
    found, expected = moved(nn.BatchNorm1d(4).double(), values.split(sizes)), nn.BatchNorm1d(4).double()
    expected(values)
    assert_same_statistics(found, expected)


def test_a_step_without_a_value_moves_nothing():
    norm = nn.BatchNorm1d(4, momentum=None)
    assert_same_statistics(moved(norm, []), norm, 0)
    assert moved(norm, []).num_batches_tracked == 0


def test_what_tracks_nothing_is_left_alone():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    batch_norm.defer(norm)
    assert type(norm) is nn.BatchNorm1d


@functools.cache
def deferred_resnet():
    return training("gpipe", 1, 4, 9, steps=2)


CASES = [
    (name, checkpoint)
    for name, checkpoint in zip(
        library.SCHEDULES, itertools.cycle(("never", "always", "except_last", "selective")), strict=False
    )
]


@pytest.mark.parametrize(("schedule", "checkpoint"), [*CASES, ("1f1b", "always"), ("zb_h1", "selective")])
def test_resnet_deferred_whatever_the_schedule_and_recomputation(schedule, checkpoint):
    found = training(schedule, 2, 4, 9, checkpoint=ActivationCheckpointSettings(checkpoint), steps=2)
    expected = deferred_resnet()
    for name, value in statistics(expected.buffers).items():
        assert_close(name, found.buffers[name], value, 1e-10)
    for name, gradient in expected.gradients.items():
        assert_close(name, found.gradients[name], gradient, 1e-10)
    assert found.buffers["layer4.1.bn2.num_batches_tracked"] == 2


def test_the_first_norm_of_a_resnet_is_as_after_the_whole_batch():
    """Later ones see values that were normalized by microbatch, and have the statistics of these."""
    whole = training("gpipe", 1, 1, 9, where=placement())
    found = training("1f1b", 2, 4, 9)
    for name in STATISTICS:
        assert_close(name, found.buffers[f"bn1.{name}"], whole.buffers[f"bn1.{name}"], 1e-12)
    later = "layer1.0.bn2.running_mean"
    assert not torch.allclose(found.buffers[later], whole.buffers[later], rtol=1e-6)


def test_deferring_changes_no_gradient():
    per_microbatch = training("1f1b", 2, 4, 9, where=placement())
    found = training("1f1b", 2, 4, 9)
    assert torch.equal(found.loss, per_microbatch.loss)
    assert all(torch.equal(found.gradients[name], value) for name, value in per_microbatch.gradients.items())
    assert per_microbatch.buffers["bn1.num_batches_tracked"] == 4


class FailsInBackward(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        if output.requires_grad and FailsInBackward.armed:
            output.register_hook(self.fail)
        return output

    armed = True

    def fail(self, _):
        raise ArithmeticError


def test_a_failed_step_commits_nothing_and_leaves_nothing():
    builds = [partial(nn.BatchNorm1d, 4), partial(FailsInBackward, 4, 4), partial(nn.BatchNorm1d, 4)]
    model, (inputs, targets) = chain(builds), vectors(6)
    plan = plan_for(settings_for("1f1b", 3, 2, 6), model, inputs)
    ranks = ranks_of(plan, model)
    batch = microbatches_of(plan, model, inputs, targets)
    before = [statistics(rank.state_dict()) for rank in ranks]
    started = {name: value.clone() for name, value in ranks[0].state_dict().items()}
    FailsInBackward.armed = True
    with pytest.raises(ActionError):
        step(ranks, batch)
    for rank, kept in zip(ranks, before, strict=True):
        assert all(torch.equal(rank.state_dict()[name], value) for name, value in kept.items())
    FailsInBackward.armed = False
    transport = InProcessTransport()  # the other still has the failed step's messages
    run([Executor(r.rank, plan.program, r.stages, plan.boundaries, transport) for r in ranks], [batch] * 3)
    expected = nn.BatchNorm1d(4).double()
    expected.load_state_dict({name.removeprefix("0."): value for name, value in started.items()})
    expected(inputs.double())
    assert_same_statistics(ranks[0].stages[0].modules[0], expected)


def test_evaluations_and_rehearsals_do_not_count():
    model, (inputs, targets) = resnet(depth=18, classes=10), images(8, 32)
    plan = plan_for(settings_for("1f1b", 2, 4, 8), model, inputs)
    ranks, batch = ranks_of(plan, model), microbatches_of(plan, model, inputs, targets)
    before = [rank.state_dict() for rank in ranks]
    before = [{name: value.clone() for name, value in state.items()} for state in before]
    for rank in ranks:
        rank.rehearse(batch, evaluates=True)
    run([rank.evaluator for rank in ranks], [batch] * 2)
    for rank, kept in zip(ranks, before, strict=True):
        assert all(torch.equal(rank.state_dict()[name], value) for name, value in kept.items())


def test_a_compiled_norm_collects_the_same():
    class Block(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU())

    model, (inputs, targets) = chain([Block] * 4), vectors(8)
    plan = plan_for(settings_for("zb_h1", 2, 4, 8, checkpoint="always"), model, inputs)
    found = []
    for compiler in (None, Compiler("aot_eager")):
        ranks = ranks_of(plan, model, replace(DEFERRED, compiler=compiler))
        results = step(ranks, microbatches_of(plan, model, inputs, targets))
        found.append(outcome(plan, ranks, results))
    plain, compiled = (each.buffers for each in found)
    for name, value in statistics(plain).items():
        assert_close(name, compiled[name], value, 1e-12)


def test_deferring_keeps_no_more_for_the_backward():
    model, (inputs, targets) = resnet(depth=18, classes=10), images(2, 32)
    counts = (3, len(model.layers) - 3)
    assert measure_footprint(model, counts, DEFERRED, inputs, targets) == measure_footprint(
        model, counts, placement(), inputs, targets
    )


def test_a_cumulative_average_moves_as_pytorchs_microbatch_after_microbatch():
    model, (inputs, targets) = chain([partial(nn.BatchNorm1d, 4, momentum=None), nn.Identity]), vectors(9)
    plan = plan_for(settings_for("1f1b", 2, 4, 9, checkpoint="always"), model, inputs)
    ranks = ranks_of(plan, model, placement())
    step(ranks, microbatches_of(plan, model, inputs, targets))
    expected = nn.BatchNorm1d(4, momentum=None).double()
    for piece in inputs.double().split(list(plan.microbatch_sizes)):
        expected(piece)
    assert_same_statistics(ranks[0].stages[0].modules[0], expected)
    counts = (1, 1)
    assert measure_footprint(model, counts, placement(), *vectors(3)).activation


class PairsNormalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.view(-1, 2, 2)).reshape(-1, 4)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_instance_norm_counts_a_recomputed_microbatch_once(checkpoint):
    model, (inputs, targets) = chain([PairsNormalized, partial(nn.Linear, 4, 4)]), vectors(8)
    once, again = (
        pipelined(settings_for("1f1b", 2, 4, 8, checkpoint=mode), model, inputs, targets).buffers
        for mode in ("never", checkpoint)
    )
    assert set(once) >= {"0.norm.running_mean", "0.norm.running_var"}
    assert all(torch.equal(again[name], value) for name, value in once.items())


def test_a_deferred_norm_can_be_copied_and_pickled():
    norm = moved(nn.BatchNorm1d(4), vectors(6)[0].split(3))
    for found in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(found) is type(norm)
        assert_same_statistics(found, norm, 0)


def test_a_recomputation_does_not_collect():
    norm, values = nn.BatchNorm1d(4), vectors(6)[0]
    batch_norm.defer(norm)
    norm(values)
    with batch_norm.statistics_kept([norm]), batch_norm.statistics_kept([norm]):
        norm(values)
    assert norm.batch_count == 6


def test_a_stage_defers_only_if_told():
    model = chain([partial(nn.BatchNorm1d, 4)])
    stage = Stage(0, model.layers, model, placement(), last=False)
    assert type(stage.modules[0]) is nn.BatchNorm1d
