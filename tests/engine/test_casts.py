"""Autocast keeps one copy of each weight for a step, and checkpointed forwards don't spoil it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.casts import cast, casts_kept_for_a_step
from pipeline.training.precision import autocast
from pipeline.training.settings import ActivationCheckpointSettings, PrecisionSettings
from tests.engine.harness import CPU, microbatches_of, outcome, plan_for, settings_for, step
from tests.engine.samples import chain, linears, small_gpt, text, vectors

BF16 = PrecisionSettings("bf16", "float32", "bfloat16")


class FrozenLinear(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.requires_grad_(False)


def bf16_step(
    model,
    inputs,
    targets,
    schedule: str,
    checkpoint: str | ActivationCheckpointSettings = "never",
    measure: bool = False,
):
    """One step under bf16 autocast of all ranks in this process: the outcome, and each rank's peak activations."""
    from pipeline.engine.stage import Placement
    from pipeline.engine.transport import InProcessTransport
    from pipeline.training.rank import Rank
    from pipeline.training.settings import OptimizerSettings

    settings = settings_for(schedule, 2, 4, len(inputs), checkpoint=checkpoint, precision=BF16)
    plan = plan_for(settings, model, inputs, torch.float32)
    placement = Placement(CPU, torch.float32, autocast(BF16, "cpu"), 0)
    transport = InProcessTransport()
    ranks = [Rank(rank, plan, model, placement, transport, OptimizerSettings()) for rank in range(2)]
    for rank in ranks:
        rank.measure_activations(measure)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    peaks = [rank.measure_activations(False) for rank in ranks]
    return outcome(plan, ranks, results), peaks


def test_copies_of_weights_do_not_multiply_with_microbatches():
    """Four microbatches in flight under gpipe once held four bfloat16 copies of every weight."""
    width = 256
    inputs, targets = vectors(4, width)
    one_copy, saved = width * width * 2, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        bf16_step(linears(4, width), inputs, targets, "gpipe")
    copies = {
        t.untyped_storage()._cdata for t in saved if type(t) is Tensor and t.untyped_storage().nbytes() == one_copy
    }
    assert len(copies) == 3, "the first Linear has no input gradient to compute with its weight"


def test_copies_of_weights_are_no_activations():
    width = 256
    _, peaks = bf16_step(linears(4, width), *vectors(4, width), "gpipe", measure=True)
    assert max(peaks) < width * width * 2


def test_a_frozen_weight_is_copied_by_each_forward_and_counts():
    """autocast keeps no copy of what needs no gradient."""
    width = 256
    frozen = partial(FrozenLinear, width)
    _, (first, _) = bf16_step(
        chain([partial(nn.Linear, width, width), frozen] * 2), *vectors(4, width), "gpipe", measure=True
    )
    assert 4 * width * width * 2 <= first <= 4.5 * width * width * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "checkpoint", ["except_last", "always", "selective", ActivationCheckpointSettings("selective", 2)]
)
def test_checkpointed_forwards_leave_no_copy_without_a_graph(
    schedule: str, checkpoint: str | ActivationCheckpointSettings
):
    """A copy made in a forward without a graph, found again by the recomputation, would give the weight no gradient."""
    model, (inputs, targets) = small_gpt(), text(8)
    expected, _ = bf16_step(model, inputs, targets, schedule)
    found, _ = bf16_step(model, inputs, targets, schedule, checkpoint)
    assert set(found.gradients) == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_a_step_leaves_autocast_as_it_was():
    bf16_step(small_gpt(), *text(8), "1f1b", "always")
    assert torch.is_autocast_cache_enabled()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_a_cast_weight_is_made_once_in_a_step():
    weight = nn.Parameter(torch.ones(2, 2))
    with casts_kept_for_a_step():
        first = cast(weight, torch.bfloat16)
        assert first.dtype == torch.bfloat16
        assert not first.requires_grad
        assert cast(weight, torch.bfloat16) is first
        with torch.no_grad():
            weight.mul_(3)
        assert torch.equal(cast(weight, torch.bfloat16), torch.full((2, 2), 3.0, dtype=torch.bfloat16))


def test_a_step_sees_what_a_fused_optimizer_did():
    """Fused optimizers change weights without moving the version that tells others of it."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    with casts_kept_for_a_step():
        before = cast(weight, torch.bfloat16)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    with casts_kept_for_a_step():
        assert torch.equal(cast(weight, torch.bfloat16), before / 2)
