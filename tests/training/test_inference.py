"""Forward passes through the pipeline: all outputs, in order, and never more under way than the program has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.transport import InProcessTransport
from pipeline.training.group import LocalGroup
from pipeline.training.inference import Inference, chunks, under_way
from pipeline.training.plan import for_inference, make_plan
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks
from tests.engine.harness import CPU, placement
from tests.engine.samples import small_gpt, text
from tests.training.harness import FP64, settings_to_train

SIZES = st.integers(1, 40)


@given(samples=st.integers(1, 300), largest=SIZES, microbatches=SIZES)
def test_every_sample_is_in_one_microbatch_and_none_is_too_large(samples, largest, microbatches):
    runs = chunks(samples, largest, microbatches)
    assert sum(map(sum, runs)) == samples
    assert all(1 <= len(sizes) <= microbatches and 1 <= min(sizes) <= max(sizes) <= largest for sizes in runs)
    assert len(runs) == -(-samples // (largest * microbatches))


@given(microbatches=st.integers(1, 200), pp=st.integers(1, 16))
def test_what_is_under_way_depends_on_the_ranks_alone(microbatches, pp):
    found = under_way(microbatches, pp)
    assert 1 <= found <= min(microbatches, 2 * pp)
    assert found >= min(microbatches, pp)


class Counting(InProcessTransport):
    """Knows the most messages that were sent and not yet taken."""

    most = 0

    def send(self, channel, message, tensor):
        super().send(channel, message, tensor)
        self.most = max(self.most, sum(map(len, self._sent.values())))


def inference(schedule, pp, microbatches, sizes, read, transport, model, inputs):
    settings = settings_to_train(schedule, pp, 4, 8, 1, precision=FP64)
    spec = TensorSpec.of(inputs)
    plan = for_inference(
        make_plan(settings, model, spec, CPU), settings, model, spec, CPU, microbatches=microbatches, sizes=sizes
    )
    ranks = [Rank(rank, plan, model, placement(), transport, settings.optimizer) for rank in range(pp)]
    return Inference(Ranks(plan, ranks, model.loss, LocalGroup(pp)), max(sizes), read), ranks


def whole(model, ranks, inputs):
    """The outputs of all layers in a row, with the ranks' own weights."""
    modules = {
        layer.name: module
        for rank in ranks
        for s in rank.stages.values()
        for layer, module in zip(s.layers, s.modules, strict=True)
    }
    value = inputs
    with torch.no_grad():
        for layer in model.layers:
            value = modules[layer.name].eval()(value)
    return value


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("1f1b", 3), ("interleaved_1f1b", 2), ("zbv", 2)])
@pytest.mark.parametrize(("samples", "microbatches"), [(29, 4), (1, 4), (7, 1), (8, 4)])
def test_outputs_come_in_order(schedule, pp, samples, microbatches):
    model, (inputs, _) = small_gpt(dropout=0.2), text(samples)
    sizes = {size for part in chunks(samples, 2, microbatches) for size in part}
    passes, ranks = inference(
        schedule, pp, microbatches, sizes, lambda outputs, _: outputs, InProcessTransport(), model, inputs
    )
    found = list(passes.run(samples, inputs, None))
    assert [len(piece) for piece in found] == [size for part in chunks(samples, 2, microbatches) for size in part]
    assert torch.allclose(torch.cat(found), whole(model, ranks, inputs), rtol=1e-12, atol=1e-14)


def test_targets_go_with_their_outputs():
    model, (inputs, targets) = small_gpt(), text(11)
    passes, ranks = inference(
        "1f1b",
        2,
        4,
        {1, 2},
        lambda outputs, answers: outputs.gather(-1, answers.unsqueeze(-1)),
        InProcessTransport(),
        model,
        inputs,
    )
    expected = whole(model, ranks, inputs).gather(-1, targets.unsqueeze(-1))
    assert torch.allclose(torch.cat(list(passes.run(11, inputs, targets))), expected, rtol=1e-12, atol=1e-14)


def test_memory_is_bounded_by_the_program_whatever_the_number_of_samples():
    model = small_gpt()
    most = []
    for samples in (8, 80):
        inputs, _ = text(samples)
        transport = Counting()
        passes, _ = inference("1f1b", 2, 4, {2}, lambda outputs, _: outputs.sum(), transport, model, inputs)
        assert len(list(passes.run(samples, inputs, None))) == samples // 2
        most.append(transport.most)
    assert most[0] == most[1] <= 4


def test_weights_statistics_and_generators_stay():
    model, (inputs, _) = small_gpt(dropout=0.3), text(6)
    passes, ranks = inference("1f1b", 2, 3, {2}, lambda outputs, _: outputs, InProcessTransport(), model, inputs)
    before = [{name: tensor.clone() for name, tensor in rank.state_dict().items()} for rank in ranks]
    generator = torch.get_rng_state()
    found = [torch.cat(list(passes.run(6, inputs, None))) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for rank in ranks for parameter in rank.parameters.values())
    for rank, state in zip(ranks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in rank.state_dict().items())
