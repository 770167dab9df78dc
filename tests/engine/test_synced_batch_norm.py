"""BatchNorm over replicas, which are threads here, against torch's own BatchNorm on what they have together."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pipeline.engine import batch_norm
from pipeline.engine.reduction import Replicas
from pipeline.engine.synced_batch_norm import Synced, synchronize


class Meeting:
    """Sums what so many threads give, in their order, once all have given."""

    def __init__(self, count: int) -> None:
        self.given = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def of(self, number: int) -> Replicas:
        def add(key, tensor):
            self.given[number] = tensor
            self.barrier.wait()
            total = torch.stack(self.given).sum(0)
            self.barrier.wait()
            return lambda: total

        return Replicas(number, len(self.given), add)


def together(norm, inputs, weights, work):
    """`work(replica, its copy of the norm, its input, its weights)` of all at once."""
    meeting = Meeting(len(inputs))
    norms = [copy.deepcopy(norm) for _ in inputs]
    for number, each in enumerate(norms):
        synchronize([each], meeting.of(number))
    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(work, norms, inputs, weights))
    return norms, results


def train(norm, input, weight):
    input = input.clone().requires_grad_()
    output = norm(input)
    (output * weight).sum().backward()
    return output.detach(), input.grad


def draw(*shapes, offset=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + offset).to(dtype) for shape in shapes]


NORMS = {
    "1d": (nn.BatchNorm1d(3), (5, 3)),
    "1d of lengths": (nn.BatchNorm1d(3), (5, 3, 7)),
    "2d": (nn.BatchNorm2d(3), (4, 3, 5, 2)),
    "3d": (nn.BatchNorm3d(3), (4, 3, 5, 2, 2)),
    "no parameters": (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 2)),
    "a cumulative average": (nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 2)),
    "no average": (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 5, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_it_is_batch_norm_of_what_all_have(name):
    """Three replicas whose microbatches differ in size, two steps."""
    norm, shape = NORMS[name]
    torch.manual_seed(0)
    alone = copy.deepcopy(norm).double()
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    shapes = [(size, *shape[1:]) for size in (2, 5, 1)]
    inputs, weights = draw(*shapes), draw(*shapes, offset=0.5)

    def twice(norm, input, weight):
        train(norm, input, weight)
        return train(norm, input, weight)

    norms, results = together(alone, inputs, weights, twice)
    expected = twice(alone, torch.cat(inputs), torch.cat(weights))
    for found, wanted in zip(zip(*results, strict=True), expected, strict=True):
        assert torch.allclose(torch.cat(found), wanted, rtol=1e-12, atol=1e-12)
    for parameters in zip(*(each.parameters() for each in (alone, *norms)), strict=True):
        assert torch.allclose(sum(p.grad for p in parameters[1:]), parameters[0].grad, rtol=1e-11, atol=1e-11)
    for buffers in zip(*(each.buffers() for each in (alone, *norms)), strict=True):
        assert all(torch.equal(buffer, buffers[1]) for buffer in buffers[1:])
        assert torch.allclose(buffers[1].double(), buffers[0].double(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    norm = nn.BatchNorm2d(3)
    inputs, weights = draw((4, 3, 5, 2), (4, 3, 5, 2), dtype=dtype), draw((4, 3, 5, 2), (4, 3, 5, 2), dtype=dtype)
    _, results = together(norm, inputs, weights, train)
    expected = train(norm, torch.cat(inputs).float(), torch.cat(weights).float())
    for found, wanted in zip(zip(*results, strict=True), expected, strict=True):
        assert {each.dtype for each in found} == {dtype}
        assert torch.allclose(torch.cat(found).float(), wanted, rtol=2e-2, atol=2e-2)


def test_a_large_mean_does_not_cancel():
    inputs = draw((64, 3), (64, 3), offset=1e7)
    _, results = together(nn.BatchNorm1d(3).double(), inputs, draw((64, 3), (64, 3)), train)
    output = torch.cat([output for output, _ in results])
    assert torch.allclose(output.var(0, correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-4)


def test_evaluation_waits_for_nobody():
    norm = nn.BatchNorm1d(3).double()
    norm.running_mean.fill_(3.0)
    synchronize([norm], Replicas(0, 2, lambda key, tensor: pytest.fail("nothing is to be exchanged")))
    norm.eval()
    (input,) = draw((5, 3))
    assert torch.allclose(norm(input), (input - 3.0) / (1 + norm.eps) ** 0.5, rtol=1e-12)


def test_a_recomputation_moves_nothing():
    norm = nn.BatchNorm1d(3).double()
    synchronize([norm], Meeting(1).of(0))
    with batch_norm.statistics_kept([norm]):
        norm(draw((5, 3))[0])
    assert norm.num_batches_tracked == 0
    norm(draw((5, 3))[0])
    assert norm.num_batches_tracked == 1


def test_it_stays_what_it_was_and_is_pickled_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    synchronize([model], Meeting(1).of(0))
    synchronize([model], Meeting(1).of(0))  # a second time changes nothing more
    assert isinstance(model[1], nn.BatchNorm1d)
    assert isinstance(model[1], Synced)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again[1]) is nn.BatchNorm1d
        assert again.state_dict().keys() == model.state_dict().keys()


def test_a_wrong_number_of_dimensions_is_refused_as_by_torch():
    norm = nn.BatchNorm2d(3)
    synchronize([norm], Meeting(1).of(0))
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.zeros(4, 3))
