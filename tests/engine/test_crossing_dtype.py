"""precision.boundary: what crosses to another rank is rounded there and back, and nothing else is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.engine.stage import Stage
from pipeline.engine.transport import InProcessTransport
from pipeline.training.messages import StepMetrics
from pipeline.training.predicted_bytes import with_predicted_bytes
from pipeline.training.settings import PrecisionSettings
from pipeline.training.transports import buffers
from tests.engine.harness import (
    CPU,
    Outcome,
    assert_equal_outcomes,
    buffers_of,
    build_ranks,
    microbatches_of,
    pipelined,
    placement,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import nested, nests, small_gpt, text
from tests.training.harness import prepare, settings_to_train, text_data
from tests.training.test_job import job_for, record_of

CROSSING = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def settings_with(boundary, schedule, pp, checkpoint="never"):
    precision = PrecisionSettings("fp64", "float64", boundary=boundary)
    return settings_for(schedule, pp, 4, 10, checkpoint=checkpoint, precision=precision)


def rounded_loop(model, inputs, targets, plan, dtype) -> Outcome:
    """The model on one device, with rounding where the plan passes from one rank to another."""
    stage = Stage(0, model.layers, model, placement(), last=True)
    for alias, owner in model.tied.items():
        stage.tie(alias, dict(stage.named_parameters())[owner])
    ranks = plan.schedule.stage_to_rank
    ends = {plan.layers_of(s).stop for s in range(len(ranks) - 1) if ranks[s] != ranks[s + 1]}
    weight, total, sizes = model.loss.weight(targets), torch.zeros((), dtype=torch.float64), list(plan.microbatch_sizes)
    for piece, answer in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        value = piece
        for index, module in enumerate(stage.modules, start=1):
            value = module(value)
            if index in ends:
                value = Rounded.apply(value, dtype)
        loss = model.loss(value, answer) / weight
        loss.backward()
        total = total + loss.detach()
    return Outcome(total, {name: p.grad for name, p in stage.named_parameters()}, buffers_of([stage]))


@pytest.mark.parametrize("boundary", CROSSING)
@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 3), ("zbv", 2), ("interleaved_1f1b", 2), ("dualpipe_v", 2)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_only_what_crosses_is_rounded(boundary, schedule, pp, checkpoint):
    """In the V the turn stays on its rank, and keeps its numbers."""
    settings = settings_with(boundary, schedule, pp, checkpoint)
    found = pipelined(settings, small_gpt(), *text(10))
    plan = plan_for(settings, small_gpt(), text(10)[0])
    expected = rounded_loop(small_gpt(), *text(10), plan, CROSSING[boundary])
    assert_equal_outcomes(found, expected)
    exact = rounded_loop(small_gpt(), *text(10), plan, torch.float64)
    with pytest.raises(AssertionError):
        assert_equal_outcomes(found, exact)


class Spy(InProcessTransport):
    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def send(self, channel, message, tensor):
        self.sent[channel.kind, tensor.dtype] += 1
        super().send(channel, message, tensor)


def test_floating_point_numbers_alone_are_converted():
    settings = settings_with("bfloat16", "1f1b", 4)
    settings.batch_size, batch = 7, nests(7)
    plan = plan_for(settings, nested(), batch[0])
    plain, converted = Spy(), Spy()
    for transport, each in ((plain, plan_for(settings_for("1f1b", 4, 4, 7), nested(), batch[0])), (converted, plan)):
        ranks = build_ranks(each, nested(), transport=transport)
        step(ranks, microbatches_of(each, nested(), *batch))
    rounded = {(k, torch.bfloat16 if d.is_floating_point else d): n for (k, d), n in plain.sent.items()}
    assert converted.sent == rounded
    assert torch.bfloat16 not in {dtype for _, dtype in plain.sent}
    assert {kind for kind, _ in plain.sent} == {"activation", "gradient"}


def test_messages_take_what_they_have_on_their_way():
    """8 tokens of 16 numbers a sample, 3 samples in the largest microbatch."""
    for boundary, size in ((None, 8), ("float32", 4), ("bfloat16", 2)):
        plan = plan_for(settings_with(boundary, "1f1b", 3), small_gpt(), text(10)[0])
        assert buffers(plan, 1)[0] == 3 * 8 * 16 * size


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_is_held_is_what_was_predicted(schedule):
    settings = settings_to_train(schedule, 2, 4, 7, 1, precision=PrecisionSettings(boundary="bfloat16"))
    run = prepare(settings, small_gpt(), text_data(7))
    plan = with_predicted_bytes(run.trainer.ranks.plan, settings, small_gpt(), *text(7), CPU)
    run.trainer.train()
    assert tuple(rank.peak_activation_bytes for rank in run.finished.ranks) == plan.peak_activation_bytes


@pytest.mark.timeout(120)
def test_processes_round_as_one_process_does(tmp_path):
    told = []
    for launch in ("processes", "in_process"):
        precision = PrecisionSettings("fp64", "float64", boundary="bfloat16")
        settings = settings_to_train("interleaved_1f1b", 2, 3, 6, 3, precision=precision, launch=launch)
        told.append([message.loss for message in record_of(job_for(settings), tmp_path).of(StepMetrics)])
    assert told[0] == pytest.approx(told[1], rel=1e-12)


def test_a_step_is_that_of_any_rank_count_where_nothing_crosses():
    found = pipelined(settings_with("bfloat16", "interleaved_1f1b", 1), small_gpt(), *text(10))
    assert_equal_outcomes(found, pipelined(settings_for("1f1b", 1, 4, 10), small_gpt(), *text(10)))
