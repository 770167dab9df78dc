"""The group within one process; the one between processes is in tests/engine/test_distributed.py's launches."""

from __future__ import annotations

import torch

from pipeline.training.group import LocalGroup


def test_everything_is_here():
    group = LocalGroup(3)
    assert group.local == (0, 1, 2)
    assert group.size == 3
    assert group.gather_floats([0.5, 1.5, 2.5]) == [0.5, 1.5, 2.5]
    assert group.gather(["a", "b", "c"]) == ["a", "b", "c"]
    group.meet()


def test_gradients_are_summed_in_rank_order():
    big = 2.0**53
    gradients = {rank: torch.tensor([value], dtype=torch.float64) for rank, value in enumerate((big, 1.0, -big))}
    LocalGroup(3).sum_gradients((0, 1, 2), gradients)
    assert [gradient.item() for gradient in gradients.values()] == [0.0] * 3, "(2^53 + 1) - 2^53 rounds to 0"


def test_what_is_added_over_replicas_is_the_sum_of_like_ranks():
    """Two replicas of two ranks: 0 and 2 are alike, 1 and 3 are."""
    group = LocalGroup(2, 2)
    assert group.local == (0, 1, 2, 3)
    sums = [group.add(rank, "key", torch.tensor([10.0**rank])) for rank in range(4)]
    assert [wait().item() for wait in reversed(sums)] == [1010.0, 101.0, 1010.0, 101.0]
    again = [group.add(rank, "key", torch.tensor([1.0])) for rank in range(4)]
    assert [wait().item() for wait in again] == [2.0] * 4
