from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine.stage import Stage
from tests.engine.harness import build_ranks, microbatches_of, placement, plan_for, settings_for, step
from tests.engine.samples import chain, images, linears, small_gpt, text, vectors

DOUBLE = torch.float64


def whole(model, seed=0):
    return Stage(0, model.layers, model, placement(seed=seed), last=True)


def loss_of(stage, inputs, targets, *, number=0, microbatch=0):
    return stage.forward(inputs, targets, weight=stage.loss.weight(targets), step=number, microbatch=microbatch)


def test_the_last_stage_gives_the_share_of_the_mean_loss():
    model, (inputs, targets) = linears(2), vectors(6)
    stage = whole(model)
    value = stage.modules[1](stage.modules[0](inputs.double()))
    expected = nn.functional.cross_entropy(value, targets)
    shares = [
        stage.forward(piece.double(), answer, weight=6, step=0, microbatch=0)
        for piece, answer in zip(inputs.split([1, 5]), targets.split([1, 5]), strict=True)
    ]
    assert torch.allclose(sum(shares), expected, rtol=1e-14)
    assert shares[0].dim() == 0


def test_a_stage_before_the_last_gives_its_output():
    model = linears(2)
    stage = Stage(0, model.layers[:1], model, placement(), last=False)
    inputs = vectors(3)[0].double()
    assert torch.equal(stage.forward(inputs, None, weight=1, step=0, microbatch=0), stage.modules[0](inputs))


def test_dropout_is_that_of_step_microbatch_and_layer():
    stage, (inputs, targets) = whole(small_gpt(dropout=0.5)), text(2)
    first = loss_of(stage, inputs, targets)
    torch.rand(7)
    assert torch.equal(first, loss_of(stage, inputs, targets)), "the same again, whatever was drawn in between"
    others = [
        loss_of(stage, inputs, targets, number=1),
        loss_of(stage, inputs, targets, microbatch=1),
        loss_of(whole(small_gpt(dropout=0.5), seed=1), inputs, targets),
    ]
    assert all(not torch.equal(first, other) for other in others)


class Mask(nn.Module):
    def forward(self, x):
        return x * nn.functional.dropout(torch.ones_like(x), 0.5, self.training)


def test_layers_that_are_alike_draw_different_masks():
    model = chain([Mask, Mask], stochastic=True)
    stage = Stage(0, model.layers, model, placement(), last=False)
    ones = torch.ones(200, dtype=DOUBLE)
    both = stage.forward(ones, None, weight=1, step=0, microbatch=0)
    assert set(both.unique().tolist()) == {0.0, 4.0}
    assert 20 < (both > 0).sum() < 80, "about a quarter survives two masks; with equal masks it would be half"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_dropout_does_not_depend_on_checkpointing_or_the_pipeline(schedule):
    """Bit for bit: the mask of the forward is the mask of the recomputation, wherever the layer is."""
    model, (inputs, targets) = small_gpt(dropout=0.3, tie=False), text(6)

    def gradients(name, pp, mode):
        plan = plan_for(settings_for(name, pp, 4, 6, checkpoint=mode), model, inputs)
        ranks = build_ranks(plan, model)
        loss = next(
            result.loss
            for result in step(ranks, microbatches_of(plan, model, inputs, targets, 3))
            if result.loss is not None
        )
        return loss, {name: p.grad for rank in ranks for name, p in rank.parameters.items()}

    loss, expected = gradients("gpipe", 1, "never")
    for pp, mode in ((1, "always"), (2, "never"), (2, "except_last"), (3, "always")):
        found_loss, found = gradients(schedule, pp, mode)
        assert torch.equal(found_loss, loss)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_an_evaluation_draws_and_seeds_nothing():
    stage, (inputs, targets) = whole(small_gpt(dropout=0.5)), text(2)
    stage.train(False)
    before = torch.get_rng_state()
    first, second = (loss_of(stage, inputs, targets, number=number) for number in (0, 1))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_recomputation_normalizes_as_training_does_and_leaves_the_statistics():
    model, inputs = resnet(depth=18, classes=10), images(4)[0].double()
    stage = Stage(0, model.layers[:3], model, placement(), last=False)
    first = stage.forward(inputs, None, weight=1, step=0, microbatch=0)
    statistics = {name: tensor.clone() for name, tensor in stage.named_tensors()}
    with stage.recomputing():
        second = stage.forward(inputs, None, weight=1, step=0, microbatch=0)
    assert torch.equal(first, second)
    for name, tensor in stage.named_tensors():
        assert torch.equal(tensor, statistics[name]), name
    stage.forward(inputs, None, weight=1, step=0, microbatch=0)
    assert dict(stage.named_tensors())["bn1.num_batches_tracked"] == 2, "counted again afterwards"


def test_a_failed_recomputation_leaves_the_statistics_tracked():
    model = resnet(depth=18, classes=10)
    stage = Stage(0, model.layers[:1], model, placement(), last=False)
    with pytest.raises(KeyError), stage.recomputing():
        raise KeyError
    assert stage.modules[0].bn1.track_running_stats


def test_a_norm_that_tracks_nothing_stays_so():
    model = chain([partial(nn.BatchNorm1d, 4, track_running_stats=False)])
    stage = Stage(0, model.layers, model, placement(), last=False)
    with stage.recomputing():
        pass
    assert not stage.modules[0].track_running_stats


def test_tied_parameters_of_one_stage_become_one():
    model = chain([partial(nn.Linear, 4, 4)] * 3, tied={"2.weight": "0.weight"})
    stage = whole(model)
    assert torch.equal(stage.modules[2].weight, stage.modules[0].weight)
    stage.tie("2.weight", stage.modules[0].weight)
    assert stage.modules[2].weight is stage.modules[0].weight
    assert stage.modules[1].weight is not stage.modules[0].weight


def test_names_are_the_whole_models():
    model = resnet(depth=18, classes=10)
    stage = Stage(1, model.layers[1:2], model, placement(), last=False)
    assert "layer1.0.conv1.weight" in dict(stage.named_parameters())
    assert "layer1.0.bn1.running_mean" in dict(stage.named_tensors())
    assert stage.state_dict().keys() == dict(stage.named_tensors()).keys()
