"""A pipelined step equals a single process's: loss, every gradient, every buffer, in float64."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from models.resnet import resnet
from pipeline.engine.stage import Stage
from pipeline.schedule import library
from pipeline.training.plan import microbatch_sizes
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import ActivationCheckpointSettings
from tests.engine.harness import (
    Outcome,
    assert_equal_outcomes,
    buffers_of,
    pipelined,
    placement,
    plain_loop,
    settings_for,
)
from tests.engine.samples import images, small_gpt, text
from tests.schedule.test_recomputation import least

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
OTHERS = tuple(name for name in library.SCHEDULES if name not in SCHEDULES)
MODES = ("never", "except_last", "always")
RANKS = (1, 2, 3, 4)


@functools.cache
def whole_batch_gpt(batch_size: int, tie: bool = True) -> Outcome:
    return plain_loop(small_gpt(tie=tie), *text(batch_size))


@functools.cache
def microbatch_resnet(depth: int, batch_size: int, microbatches: int) -> Outcome:
    return plain_loop(resnet(depth=depth, classes=10), *images(batch_size), microbatches)


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "mode"), itertools.product(SCHEDULES, RANKS, (1, 3, 4, 6, 8), MODES)
)
def test_gpt_equals_the_whole_batch_in_one_call(schedule, pp, microbatches, mode):
    # 10 samples: with 3, 4, 6 or 8 microbatches the pieces are of unequal size
    settings = settings_for(schedule, pp, microbatches, 10, checkpoint=mode)
    found = pipelined(settings, small_gpt(), *text(10))
    assert_equal_outcomes(found, whole_batch_gpt(10))


def possible(cases):
    """dualpipe_v needs two microbatches a rank and more."""
    return [case for case in cases if case[0] != "dualpipe_v" or case[2] >= 2 * case[1]]


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "mode"),
    possible(itertools.product(OTHERS, RANKS, (3, 8), MODES)),
)
def test_gpt_on_every_other_schedule(schedule, pp, microbatches, mode):
    """Among them those with split backwards, V placements and overlapped pairs."""
    found = pipelined(settings_for(schedule, pp, microbatches, 10, checkpoint=mode), small_gpt(), *text(10))
    assert_equal_outcomes(found, whole_batch_gpt(10))


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_pair_that_hands_on_each_output_when_it_is_there(pp):
    settings = settings_for("dualpipe_v", pp, 8, 10)
    settings.schedule.release = "each"
    assert_equal_outcomes(pipelined(settings, small_gpt(), *text(10)), whole_batch_gpt(10))


@pytest.mark.parametrize(("schedule", "pp", "mode"), itertools.product(OTHERS, (2, 3, 4), ("never", "except_last")))
def test_resnet_on_every_other_schedule(schedule, pp, mode):
    microbatches = 8 if pp == 4 else 6  # dualpipe_v needs two a rank
    found = pipelined(
        settings_for(schedule, pp, microbatches, 8, checkpoint=mode), resnet(depth=18, classes=10), *images(8)
    )
    assert_equal_outcomes(found, microbatch_resnet(18, 8, microbatches))


def least_window(schedule: str, pp: int, microbatches: int) -> ActivationCheckpointSettings:
    """The narrowest window of each rank: whatever can be is recomputed somewhere."""
    written = write_schedule(settings_for(schedule, pp, microbatches, microbatches))
    return ActivationCheckpointSettings("window", keep_microbatches=[int(most) for most in least(written)])


PARTS = {
    "costly": lambda *_: ActivationCheckpointSettings("selective"),
    "every 2nd": lambda *_: ActivationCheckpointSettings("selective", 2),
    "window": least_window,
}
"""Of what is recomputed: a part of the stage, or of the microbatches."""


@functools.cache
def gpt_with_dropout(batch_size: int, microbatches: int) -> Outcome:
    """Microbatch after microbatch through the model on one device, with the dropout of each."""
    model, (inputs, targets) = small_gpt(dropout=0.3), text(batch_size)
    stage = Stage(0, model.layers, model, placement(), last=True)
    for alias, owner in model.tied.items():
        stage.tie(alias, dict(stage.named_parameters())[owner])
    weight, total = model.loss.weight(targets), torch.zeros((), dtype=torch.float64)
    sizes = list(microbatch_sizes(batch_size, microbatches))
    for number, (piece, answer) in enumerate(zip(inputs.split(sizes), targets.split(sizes), strict=True)):
        loss = stage.forward(piece, answer, weight=weight, step=0, microbatch=number)
        loss.backward()
        total = total + loss.detach()
    return Outcome(total, {name: p.grad for name, p in stage.named_parameters()}, buffers_of([stage]))


@pytest.mark.parametrize(("schedule", "pp", "part"), itertools.product(library.SCHEDULES, (2, 4), PARTS))
def test_gpt_with_dropout_where_a_part_is_recomputed(schedule, pp, part):
    checkpoint = PARTS[part](schedule, pp, 8)
    found = pipelined(settings_for(schedule, pp, 8, 10, checkpoint=checkpoint), small_gpt(dropout=0.3), *text(10))
    assert_equal_outcomes(found, gpt_with_dropout(10, 8))


def test_both_a_window_and_a_part():
    checkpoint = replace(least_window("interleaved_1f1b", 2, 8), every=2, keep="costly")
    settings = settings_for("interleaved_1f1b", 2, 8, 10, checkpoint=checkpoint)
    assert_equal_outcomes(pipelined(settings, small_gpt(dropout=0.3), *text(10)), gpt_with_dropout(10, 8))


@functools.cache
def resnet_on_small_images() -> Outcome:
    """Two samples a microbatch: BatchNorm needs more than one value a channel."""
    return plain_loop(resnet(depth=18, classes=10), *images(16, 32), 8)


@pytest.mark.parametrize(
    ("schedule", "pp", "part"),
    [
        (schedule, pp, list(PARTS)[(index + pp // 4) % len(PARTS)])
        for index, schedule in enumerate(library.SCHEDULES)
        for pp in (2, 4)
    ],
)
def test_resnet_where_a_part_is_recomputed(schedule, pp, part):
    checkpoint = PARTS[part](schedule, pp, 8)
    settings = settings_for(schedule, pp, 8, 16, checkpoint=checkpoint)
    found = pipelined(settings, resnet(depth=18, classes=10), *images(16, 32))
    assert_equal_outcomes(found, resnet_on_small_images())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_untied_gpt(schedule):
    found = pipelined(settings_for(schedule, 2, 5, 10), small_gpt(tie=False), *text(10))
    assert_equal_outcomes(found, whole_batch_gpt(10, tie=False))


@pytest.mark.parametrize(("schedule", "pp", "microbatches", "mode"), itertools.product(SCHEDULES, RANKS, (3, 4), MODES))
def test_resnet_equals_the_loop_over_its_microbatches(schedule, pp, microbatches, mode):
    found = pipelined(
        settings_for(schedule, pp, microbatches, 8, checkpoint=mode), resnet(depth=18, classes=10), *images(8)
    )
    assert_equal_outcomes(found, microbatch_resnet(18, 8, microbatches))


@pytest.mark.parametrize(("schedule", "pp", "mode"), [("1f1b", 4, "never"), ("interleaved_1f1b", 2, "always")])
def test_resnet152(schedule, pp, mode):
    found = pipelined(settings_for(schedule, pp, 2, 4, checkpoint=mode), resnet(depth=152, classes=10), *images(4))
    assert_equal_outcomes(found, microbatch_resnet(152, 4, 2))


def test_the_comparison_can_fail():
    """A changed target changes the gradient by more than the tolerance, so the tests above are no tautology."""
    inputs, targets = text(10)
    found = pipelined(settings_for("1f1b", 2, 4, 10), small_gpt(), inputs, targets.roll(1, 0))
    with pytest.raises(AssertionError, match="off by"):
        assert_equal_outcomes(found, whole_batch_gpt(10))


def test_batchnorm_counts_a_batch_once_when_it_is_recomputed():
    """Under torch.utils.checkpoint num_batches_tracked is 2 after one step; here it counts microbatches, not passes."""
    for mode in MODES:
        found = pipelined(settings_for("1f1b", 2, 4, 8, checkpoint=mode), resnet(depth=18, classes=10), *images(8))
        assert found.buffers["bn1.num_batches_tracked"] == 4
        assert found.buffers["layer4.1.bn2.num_batches_tracked"] == 4
