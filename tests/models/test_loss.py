"""Cross entropy as a sum whose parts add up."""

from __future__ import annotations

import math

import pytest
import torch

from models.loss import CrossEntropy


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 7, 11, dtype=torch.float64, generator=draw)
    targets = torch.randint(11, (5, 7), generator=draw)
    targets[0, :3] = -100
    loss = CrossEntropy()
    parts = list(zip(outputs.tensor_split(3), targets.tensor_split(3), strict=True))
    whole = loss(outputs, targets)
    assert whole.shape == ()
    assert sum(loss(*part) for part in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    assert sum(loss.weight(part) for _, part in parts) == loss.weight(targets) == 5 * 7 - 3


def test_value_is_the_negative_log_probability() -> None:
    outputs = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]))
    loss = CrossEntropy()
    assert loss(outputs, torch.tensor([0, 1])).item() == pytest.approx(math.log(2) + math.log(8))
    assert loss.weight(torch.tensor([0, 1])) == 2


def test_targets_all_ignored_give_zero_and_no_weight() -> None:
    targets = torch.full((4,), -100)
    assert CrossEntropy()(torch.randn(4, 3), targets).item() == 0
    assert CrossEntropy().weight(targets) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    outputs = torch.zeros(30_000, 256, dtype=dtype)
    total = CrossEntropy()(outputs, torch.zeros(30_000, dtype=torch.int64))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(30_000 * math.log(256), rel=1e-5)  # above fp16's largest number
