from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeline.training.gradients import global_norm, scale_gradients, sum_tied_gradients
from pipeline.training.group import LocalGroup


def parameter(gradient: float | None, shape=(2, 2)) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    made.grad = None if gradient is None else torch.full(shape, gradient, dtype=torch.float64)
    return made


def test_the_norm_is_over_all_ranks():
    local = {0: [torch.tensor([3.0, 0.0]), torch.tensor([[12.0]])], 1: [torch.tensor([4.0])]}
    assert global_norm(local, LocalGroup(2)) == pytest.approx(13.0)


def test_a_rank_without_gradients_counts_nothing():
    assert global_norm({0: [], 1: [torch.tensor([5.0])]}, LocalGroup(2)) == 5.0
    assert global_norm({0: []}, LocalGroup(1)) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_entry_anywhere_shows(bad):
    assert not math.isfinite(global_norm({0: [torch.ones(3)], 1: [torch.tensor([1.0, bad])]}, LocalGroup(2)))


def test_scaling_multiplies_all_in_place():
    tensors = [torch.ones(2), torch.full((1,), 4.0)]
    scale_gradients(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [2.0]]
    scale_gradients([], 0.5)


def test_every_copy_gets_the_sum():
    owner, alias, other = parameter(1.0), parameter(10.0), parameter(100.0)
    local = {0: {"a": owner, "x": other}, 1: {"x": parameter(7.0)}, 2: {"b": alias}}
    sum_tied_gradients(local, {"b": "a"}, {"a": (0, 2)}, LocalGroup(3))
    assert owner.grad.unique().tolist() == [11.0]
    assert alias.grad.unique().tolist() == [11.0]
    assert owner.grad is not alias.grad, "each rank scales its own"
    assert other.grad.unique().tolist() == [100.0]
    assert local[1]["x"].grad.unique().tolist() == [7.0]


def test_a_copy_without_a_gradient_gets_the_others():
    owner, alias = parameter(None), parameter(10.0)
    sum_tied_gradients({0: {"a": owner}, 1: {"b": alias}}, {"b": "a"}, {"a": (0, 1)}, LocalGroup(2))
    assert owner.grad.unique().tolist() == [10.0]


def test_a_tied_pair_on_one_rank_is_summed_by_autograd_already():
    both, other = parameter(3.0), parameter(4.0)
    sum_tied_gradients({0: {"a": both, "b": both}, 1: {"x": other}}, {"b": "a"}, {}, LocalGroup(2))
    assert both.grad.unique().tolist() == [3.0]
    assert other.grad.unique().tolist() == [4.0]


def test_two_copies_on_one_rank_and_one_elsewhere():
    both, alone = parameter(3.0), parameter(4.0)
    local = {0: {"a": both, "b": both}, 1: {"c": alone}}
    sum_tied_gradients(local, {"b": "a", "c": "a"}, {"a": (0, 1)}, LocalGroup(2))
    assert both.grad.unique().tolist() == alone.grad.unique().tolist() == [7.0]
