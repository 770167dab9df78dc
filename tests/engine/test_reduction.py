from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.engine.reduction import Reducer
from pipeline.schedule.actions import Action
from pipeline.training.group import LocalGroup

ROW = tuple(map(Action.parse, ["0F0", "1F0", "1B0", "1REDUCE_GRAD", "0B0", "0REDUCE_GRAD"]))


def parameters(*sizes: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


class Replicas:
    """The like ranks of several replicas, whose parameters get the gradients they are told."""

    def __init__(self, stages, row=ROW, dp=2, **more) -> None:
        self.group = LocalGroup(1, dp)
        self.given = []
        self.stages = [stages() for _ in range(dp)]
        self.reducers = [
            Reducer(row, held, lambda key, flat, rank=rank: self._add(rank, key, flat), **more)
            for rank, held in enumerate(self.stages)
        ]

    def _add(self, rank, key, flat):
        self.given.append((rank, key, flat.numel(), flat.dtype))
        return self.group.add(rank, key, flat)

    def fill(self, replica, stage, *values) -> None:
        for parameter, value in zip(self.stages[replica][stage], values, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)

    def reduce(self, *stages) -> None:
        for stage in stages or (1, 0):
            for reducer in self.reducers:
                reducer.start(stage)
        for reducer in self.reducers:
            reducer.finish()

    def gradients(self, replica, stage):
        return [None if p.grad is None else p.grad.unique().tolist() for p in self.stages[replica][stage]]


def test_every_replica_has_the_sum():
    replicas = Replicas(lambda: {0: parameters(2, 3), 1: parameters(1)}, dp=3)
    for replica in range(3):
        replicas.fill(replica, 0, 10.0**replica, replica)
        replicas.fill(replica, 1, -1.0)
    replicas.reduce()
    for replica in range(3):
        assert replicas.gradients(replica, 0) == [[111.0], [3.0]]
        assert replicas.gradients(replica, 1) == [[-3.0]]
        assert [p.grad.shape for p in replicas.stages[replica][0]] == [(2,), (3,)]


def test_replicas_do_not_share_memory():
    replicas = Replicas(lambda: {0: parameters(2), 1: []})
    replicas.fill(0, 0, 1.0)
    replicas.fill(1, 0, 1.0)
    replicas.reduce()
    replicas.stages[0][0][0].grad.zero_()
    assert replicas.gradients(1, 0) == [[2.0]]


def test_what_one_replica_lacks_is_zero_and_what_all_lack_is_none():
    replicas = Replicas(lambda: {0: parameters(2, 2, 2), 1: []})
    replicas.fill(0, 0, None, 1.0, None)
    replicas.fill(1, 0, None, None, 0.0)
    replicas.reduce()
    for replica in range(2):
        assert replicas.gradients(replica, 0) == [None, [1.0], [0.0]]


def test_gradients_are_gone_until_the_sums_are_there():
    replicas = Replicas(lambda: {0: parameters(2), 1: []})
    replicas.fill(0, 0, 1.0)
    replicas.reducers[0].start(0)
    assert replicas.gradients(0, 0) == [None]


def test_a_parameter_of_two_stages_is_summed_once_and_with_the_last():
    """In a V the embedding and the head are on one rank: the embedding's part comes after the head's."""

    def tied():
        (shared,) = parameters(2)
        return {0: [shared], 1: [shared]}

    replicas = Replicas(tied)
    replicas.fill(0, 1, 1.0)
    replicas.fill(1, 1, 2.0)
    for reducer in replicas.reducers:
        reducer.start(1)
    for replica, (shared,) in enumerate(stages[0] for stages in replicas.stages):
        shared.grad += 10.0 * (replica + 1)
    replicas.reduce(0)
    assert replicas.gradients(0, 0) == replicas.gradients(1, 0) == [[33.0]]
    assert len(replicas.given) == 2


def test_buckets_are_of_one_type_and_bounded():
    def stages():
        mixed = [*parameters(4, 4, 4), *parameters(5, dtype=torch.float32), *parameters(100)]
        mixed[1].requires_grad_(False)
        return {0: mixed, 1: []}

    replicas = Replicas(stages, dp=1, bucket_bytes=8 * 8)
    replicas.reduce()
    assert replicas.given == [
        (0, (0, 0), 5 + 1, torch.float32),
        (0, (0, 1), 4 + 4 + 2, torch.float64),
        (0, (0, 2), 100 + 1, torch.float64),
    ]
    assert [parameter.numel() for parameter in replicas.reducers[0].parameters] == [5, 4, 4, 100]


def test_a_frozen_stage_and_one_without_parameters_send_nothing():
    def stages():
        (frozen,) = parameters(3)
        return {0: [frozen.requires_grad_(False)], 1: []}

    replicas = Replicas(stages)
    replicas.reduce()
    assert replicas.given == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_presence_survives_half_precision(dtype):
    replicas = Replicas(lambda: {0: parameters(2, 2, dtype=dtype), 1: []}, dp=7)
    replicas.fill(3, 0, 1.0, None)
    replicas.reduce()
    assert replicas.gradients(6, 0) == [[1.0], None]


def test_a_layout_of_its_own_is_kept_in_shape():
    def stages():
        return {0: [nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))], 1: []}

    replicas = Replicas(stages)
    for held in replicas.stages:
        held[0][0].grad = torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    replicas.reduce()
    assert torch.equal(replicas.stages[1][0][0].grad, 2 * torch.arange(96.0).view(2, 3, 4, 4))


def test_an_abandoned_step_is_forgotten():
    replicas = Replicas(lambda: {0: parameters(2), 1: parameters(2)})
    replicas.fill(0, 1, 5.0)
    replicas.reducers[0].start(1)
    for reducer in replicas.reducers:
        reducer.begin_step()
    for replica in range(2):
        replicas.fill(replica, 0, 1.0)
        replicas.fill(replica, 1, 2.0)
    replicas.reduce()
    assert [replicas.gradients(replica, stage) for replica in (0, 1) for stage in (0, 1)] == [[[2.0]], [[4.0]]] * 2


def test_gradients_are_summed_in_the_dtype_that_they_are_added_up_in():
    """One of 1 and one of 1/1024 on two replicas: in bfloat16 the sum would be 1."""

    def rounded():
        held = parameters(2, dtype=torch.bfloat16)
        held[0].grad_dtype = torch.float32
        return {0: held, 1: parameters(1)}

    replicas = Replicas(rounded)
    for replica, value in enumerate((1.0, 1 / 1024)):
        (parameter,) = replicas.stages[replica][0]
        parameter.grad = torch.full((2,), value)
    replicas.reduce()
    assert replicas.gradients(0, 0) == replicas.gradients(1, 0) == [[1 + 1 / 1024]]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch adds up in the parameter's type")
def test_gradients_are_summed_in_the_type_that_they_are_added_up_in():
    def stages():
        (rounded,) = parameters(2, dtype=torch.bfloat16)
        rounded.grad_dtype = torch.float32
        return {0: [rounded], 1: []}

    replicas = Replicas(stages)
    for replica, value in enumerate((1.0, 2.0**-20)):
        replicas.stages[replica][0][0].grad = torch.full((2,), value)
    replicas.reduce()
    assert replicas.gradients(1, 0) == [[1 + 2.0**-20]]
    assert replicas.stages[1][0][0].grad.dtype is torch.float32


def test_what_is_frozen_or_trained_from_now_on_is_summed_so():
    def stages():
        first, second = parameters(2, 2)
        return {0: [first.requires_grad_(False), second], 1: []}

    replicas = Replicas(stages)
    for step in range(2):
        for reducer, held in zip(replicas.reducers, replicas.stages, strict=True):
            held[0][0].requires_grad_(step == 1)
            held[0][1].requires_grad_(step == 0)
            reducer.begin_step()
        for replica in range(2):
            trained = replicas.stages[replica][0][1 - step]
            trained.grad = torch.full_like(trained, 10.0**replica)
        replicas.reduce()
        assert replicas.stages[0][0][1 - step].grad.tolist() == [11.0, 11.0]
        assert replicas.reducers[0].parameters == [replicas.stages[0][0][1 - step]]
