"""The transports between processes: shared memory, and gloo."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict

import pytest
import torch

from pipeline.engine.boundary import TensorSpec, specs_of
from pipeline.engine.buffers import BufferPool
from pipeline.engine.distributed import DistributedTransport, channels
from pipeline.engine.transport import PeerError
from pipeline.schedule.library import interleaved_1f1b, one_f_one_b
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Channel
from pipeline.training.failures import RankFailure
from pipeline.training.launch import launch
from pipeline.training.plan import make_plan
from pipeline.training.precision import autocast, parameter_dtype
from tests.engine import distributed_targets as targets
from tests.engine.distributed_targets import BF16, Case
from tests.engine.harness import (
    CPU,
    Outcome,
    assert_equal_outcomes,
    build_ranks,
    microbatches_of,
    outcome,
    plain_loop,
    settings_for,
    step,
)

pytestmark = pytest.mark.timeout(120)

CASES = {
    case.name: case
    for case in [
        Case("gpt", "1f1b", 4, 8),
        Case("gpt, uneven microbatches", "1f1b", 4, 10, "except_last"),
        Case("gpt, two channels of one kind", "interleaved_1f1b", 5, 10),
        Case("gpt, gpipe with more microbatches than ranks", "gpipe", 8, 8),
        Case("gpt, fewer microbatches than ranks", "1f1b", 1, 2),
        Case("resnet", "gpipe", 3, 6, "always"),
        Case("large messages", "1f1b", 3, 12),
        Case("gpt, split backward", "zb_h1", 4, 10),
        Case("gpt, there and back", "zbv", 5, 10, "always"),
        Case("gpt, half the memory", "v_half", 4, 8),
        Case("gpt, overlapped pairs", "dualpipe_v", 4, 8),
        Case("resnet, split backward in a loop", "interleaved_zb", 3, 6, "except_last"),
        Case("nests, there and back", "zbv", 4, 7, "except_last"),
        Case("lengths of their own", "zbv", 4, 8, "except_last"),
        Case("short batch", "interleaved_1f1b", 4, 8),
        Case("translator", "interleaved_zb", 4, 7, "always"),
        Case("gpt with dropout in bf16", "interleaved_1f1b", 4, 8, "always", BF16),
    ]
}


@pytest.fixture(scope="module", params=["auto", "gloo"])
def sent(request):
    """Of every case the messages of both ranks; one launch runs them all."""
    found = defaultdict(list)
    work = request.param, list(CASES.values())
    launch(targets.steps, work, 2, on_message=lambda message: found[message[0]].append(message[1:]))
    return found


def merged(messages) -> Outcome:
    (loss,) = [loss for loss, _, _ in messages if loss is not None]
    gradients = {name: tensor for _, part, _ in messages for name, tensor in part.items()}
    return Outcome(loss, gradients, {name: tensor for _, _, part in messages for name, tensor in part.items()})


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.precision is not BF16])
def test_processes_equal_a_single_one(sent, name):
    case = CASES[name]
    model, (inputs, answers) = case.model_and_batch()
    expected = plain_loop(model, inputs, answers, case.microbatches if name.startswith("resnet") else 1)
    assert_equal_outcomes(merged(sent[name]), expected)


@pytest.mark.parametrize("name", list(CASES))
def test_processes_equal_the_ranks_of_one_process_bit_for_bit(sent, name):
    case = CASES[name]
    model, (inputs, answers) = case.model_and_batch()
    settings = settings_for(
        case.schedule, 2, case.microbatches, case.batch_size, checkpoint=case.checkpoint, precision=case.precision
    )
    plan = make_plan(settings, model, specs_of(inputs), CPU)
    context = autocast(case.precision, "cpu")
    ranks = build_ranks(plan, model, dtype=parameter_dtype(case.precision), autocast=context)
    expected = outcome(plan, ranks, step(ranks, microbatches_of(plan, model, inputs, answers)))
    found = merged(sent[name])
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(found.gradients[key], tensor) for key, tensor in expected.gradients.items())
    assert all(torch.equal(found.buffers[key], tensor) for key, tensor in expected.buffers.items())


def test_tied_gradients_are_bitwise_equal_on_both_ranks(sent):
    (first, second) = [gradients for _, gradients, _ in sent["gpt"]]
    tensors = {**first, **second}
    assert torch.equal(tensors["head.projection.weight"], tensors["embedding.tokens.weight"])


def test_there_is_a_channel_for_each_direction_and_kind():
    program, wrapped = lower(one_f_one_b(2, 2)), lower(interleaved_1f1b(2, 2))
    one_way = [Channel(0, 1, "activation"), Channel(1, 0, "gradient")]
    assert list(channels([program])) == sorted(one_way)
    # in a loop at pp=2 stage 1 on rank 1 sends to stage 2 on rank 0
    assert list(channels([wrapped])) == sorted([*one_way, Channel(1, 0, "activation"), Channel(0, 1, "gradient")])
    assert set(channels([program], replicas=2)) == {*one_way, Channel(2, 3, "activation"), Channel(3, 2, "gradient")}


def test_collectives_among_processes():
    messages = []
    launch(targets.collectives, None, 3, on_message=messages.append)
    for rank, local, size, floats, objects, gradient, met, added in messages:
        assert met == [True, True, True]
        assert local == (rank,)
        assert size == 3
        assert floats == [0.1, 1.1, 2.1]
        assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert gradient == ([10.0, 10.0] if rank == 1 else [101.0, 101.0])
        assert added == [111.0, 222.0]
    assert len(messages) == 3


def test_a_late_message_is_an_error_that_names_it_and_the_sender():
    messages = []
    launch(targets.late_message, None, 2, on_message=messages.append)
    ((text, seconds),) = messages
    assert text.startswith("a message from rank 0 did not arrive ")
    assert "1000ms" in text
    assert seconds < 20


@pytest.mark.parametrize("choice", ["auto", "gloo"])
def test_a_failing_action_ends_the_job_and_is_the_error_shown(choice):
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launch(targets.break_in_a_step, choice, 2, on_message=lambda message: None)
    assert time.monotonic() - began < 40
    assert caught.value.rank == 1
    assert "rank 1 failed in 1F2 (microbatch 2) of step 1: the third forward breaks" in caught.value.reason
    assert ">F2<" in str(caught.value)
    assert "OverflowError" in caught.value.details


# The outbox, with works that a test can end


class FakeWork:
    """A send that ends as it is told to."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def wait(self, timeout: object = None) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def sends(monkeypatch):
    """Replaces isend and irecv; append the works to come."""
    works = []
    for name in ("isend", "irecv"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, **__: works.pop(0))
    return works


CHANNEL = Channel(0, 1, "activation")


def test_a_lost_send_is_told_at_the_end_of_the_step(sends):
    sends += [FakeWork(), FakeWork("Connection closed by peer\nand more"), FakeWork("Connection closed by peer")]
    transport = DistributedTransport({CHANNEL: None}, CPU, "gloo", 5, BufferPool(0, 0))
    for word in "abc":
        transport.send(CHANNEL, word, torch.ones(1))
    with pytest.raises(PeerError, match=r"^b to rank 1 was not taken: Connection closed by peer$"):
        transport.finish_step()


def test_a_lost_receive_is_told_where_it_is_waited_for(sends):
    sends.append(FakeWork("Connection closed by peer"))
    transport = DistributedTransport({CHANNEL: None}, CPU, "gloo", 5, BufferPool(0, 0))
    receive = transport.receive(CHANNEL, "a", TensorSpec((1,), torch.float32))
    assert receive.arrived()
    with pytest.raises(PeerError, match=r"^a from rank 0 did not arrive .* or its sender is gone: Connection"):
        receive.wait()


def test_what_was_sent_is_let_go(sends):
    sends += [FakeWork(), FakeWork()]
    transport = DistributedTransport({CHANNEL: None}, CPU, "gloo", 5, BufferPool(0, 0))
    tensors = [torch.ones(1), torch.ones(1)]
    references = list(map(weakref.ref, tensors))
    for tensor in tensors:
        transport.send(CHANNEL, "a", tensor)
    del tensor
    tensors.clear()
    deadline = time.monotonic() + 10
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [reference() for reference in references] == [None, None], "also the last one, before the step's end"
    transport.finish_step()


def test_a_step_that_sent_nothing_is_finished_at_once():
    DistributedTransport({}, CPU, "gloo", 5, BufferPool(0, 0)).finish_step()
