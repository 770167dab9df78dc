"""Shared memory between ranks, here all of one process: every schedule, its buffers counted, and what can go wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.distributed import channels
from pipeline.engine.executor import run
from pipeline.engine.links import open_links
from pipeline.engine.shared_memory import SharedMemoryTransport
from pipeline.engine.transport import PeerError
from pipeline.schedule.actions import ActionType
from pipeline.schedule.buffers import peak_buffers
from pipeline.schedule.library import SCHEDULES
from pipeline.schedule.memory import peak_in_flight
from pipeline.schedule.schedule import Channel, Message, Schedule
from pipeline.training.rank import Rank
from pipeline.training.settings import OptimizerSettings
from pipeline.training.transports import buffers
from tests.engine.harness import (
    assert_equal_outcomes,
    microbatches_of,
    outcome,
    placement,
    plain_loop,
    plan_for,
    settings_for,
)
from tests.engine.samples import small_gpt, text

CHANNEL = Channel(0, 1, "activation")
FIRST, SECOND = Message("activation", 0, 0), Message("activation", 0, 1)
SPEC = TensorSpec((2, 3), torch.float32)


def linked(used: Sequence[Channel], ranks: int):
    """Every rank's ends of the channels; each waits for the others, as processes do."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: open_links(used, rank, store), range(ranks)))


def pair(blocking=False, timeout=5.0, count=2) -> list[SharedMemoryTransport]:
    """Two ranks with one channel between them."""
    return [
        SharedMemoryTransport(*links, size=SPEC.nbytes, count=count, timeout=timeout, blocking=blocking)
        for links in linked([CHANNEL], 2)
    ]


def peaks(program: Schedule, plan, model, microbatches: int) -> tuple[list[int], list[int]]:
    """One step and the next on transports of shared memory: buffers in use at most, and made, of each rank."""
    transports = [
        SharedMemoryTransport(*links, size=size, count=count, timeout=60, blocking=False)
        for rank, links in enumerate(linked(channels([program, plan.evaluation]), program.pp))
        for size, count in [buffers(plan, rank)]
    ]
    ranks = [
        Rank(number, plan, model, placement(), transport, OptimizerSettings())
        for number, transport in enumerate(transports)
    ]
    batch = microbatches_of(plan, model, *text(2 * microbatches))
    expected = plain_loop(model, *text(2 * microbatches), microbatches)
    for _ in range(2):
        results = run([rank.trainer for rank in ranks], [batch] * len(ranks))
        assert_equal_outcomes(outcome(plan, ranks, results), expected)
        for rank in ranks:
            rank.clear_gradients()
    return [transport.pool.peak for transport in transports], [transport.pool.made for transport in transports]


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_buffers_are_as_many_as_are_in_flight_and_prefetched(name, pp):
    """Whatever the number of microbatches, but for gpipe and looped_bfs, which keep all by nature."""
    found = {}
    model = small_gpt()
    for microbatches in (13, 19):  # both 1 more than a multiple of 2, 3 and 6: loops hold more where one is left over
        settings = settings_for(name, pp, microbatches, 2 * microbatches)
        plan = plan_for(settings, model, text(2 * microbatches)[0])
        used, made = peaks(plan.program, plan, model, microbatches)
        most = [held + settings.prefetch for held in peak_in_flight(plan.program)]
        counted = [peak_buffers(plan.program, rank) for rank in range(pp)]
        assert all(one <= other for one, other in zip(counted, most, strict=True))
        assert made == counted, "no more were needed than there were from the start"
        split = any(action.type is ActionType.W for row in plan.program.rows for action in row)
        # W of a transformer block needs the gradient but not the input, of the head neither
        assert all(one <= other for one, other in zip(used, made, strict=True)) if split else used == made
        found[microbatches] = made
    if name not in ("gpipe", "looped_bfs"):
        assert found[13] == found[19]


def test_a_send_waits_for_a_posted_buffer_without_blocking():
    sender, receiver = pair()
    sender.send(CHANNEL, FIRST, torch.ones(2, 3))
    sender.send(CHANNEL, SECOND, 2 * torch.ones(2, 3).t().contiguous().t())
    first = receiver.receive(CHANNEL, FIRST, SPEC)
    assert not first.arrived()
    sender.progress()
    assert first.arrived()
    assert torch.equal(first.wait(), torch.ones(2, 3))
    assert not sender.finish_step()
    second = receiver.receive(CHANNEL, SECOND, SPEC)
    assert sender.finish_step()
    assert torch.equal(second.wait(), 2 * torch.ones(2, 3))
    assert receiver.pool.made == 2


def test_more_buffers_are_made_where_a_model_keeps_its_input():
    sender, receiver = pair(count=1)
    kept = []
    for index in range(3):
        receive = receiver.receive(CHANNEL, FIRST, SPEC)
        sender.send(CHANNEL, FIRST, torch.full((2, 3), float(index)))
        kept.append(receive.wait())
    assert [float(tensor[0, 0]) for tensor in kept] == [0.0, 1.0, 2.0]
    assert receiver.pool.made == 3


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(2, 4), r"32 bytes, float32\[2, 3\] \(24 bytes\) was expected"),
        (torch.ones(2, 3, dtype=torch.int32), r"another message or dtype of that size, float32\[2, 3\]"),
        (torch.ones(3, 2), r"another message or dtype of that size"),
    ],
)
def test_another_shape_or_dtype_than_expected_is_told_at_the_receiver(tensor, says):
    sender, receiver = pair()
    receive = receiver.receive(CHANNEL, FIRST, SPEC)
    sender.send(CHANNEL, FIRST, tensor)
    with pytest.raises(RuntimeError, match=rf"^the activation of stage 0, microbatch 0 from rank 0 is {says}"):
        receive.wait()


def test_a_message_out_of_order_is_told_at_the_receiver():
    sender, receiver = pair()
    receive = receiver.receive(CHANNEL, FIRST, SPEC)
    sender.send(CHANNEL, SECOND, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="another message or dtype"):
        receive.wait()


def test_a_late_message_is_an_error_after_the_timeout():
    _, receiver = pair(blocking=True, timeout=0.05)
    receive = receiver.receive(CHANNEL, FIRST, SPEC)
    assert receive.arrived(), "it may block"
    with pytest.raises(PeerError, match=r"^the activation of .* from rank 0 did not arrive in time: nothing in 0.05 s"):
        receive.wait()


def test_a_message_that_is_not_taken_is_an_error_after_the_timeout():
    sender, _receiver = pair(blocking=True, timeout=0.05)
    sender.send(CHANNEL, FIRST, torch.ones(2, 3))
    with pytest.raises(PeerError, match=r"^the activation of .* was not taken by rank 1 in time"):
        sender.finish_step()


def test_a_lost_sender_is_noticed_at_once():
    ((_, outgoing), (incoming, _)) = linked([CHANNEL], 2)
    receiver = SharedMemoryTransport(incoming, {}, size=24, count=1, timeout=600)
    receive = receiver.receive(CHANNEL, FIRST, SPEC)
    outgoing[CHANNEL].close()
    with pytest.raises(PeerError, match="from rank 0 did not arrive: its sender is gone"):
        receive.wait()
    with pytest.raises(PeerError, match="from rank 0 will not arrive: its sender is gone"):
        receiver.receive(CHANNEL, SECOND, SPEC)


def test_a_lost_receiver_is_noticed_at_once():
    ((_, outgoing), (incoming, _)) = linked([CHANNEL], 2)
    sender = SharedMemoryTransport({}, outgoing, size=0, count=0, timeout=600)
    incoming[CHANNEL].close()
    with pytest.raises(PeerError, match="cannot be sent to rank 1: its receiver is gone"):
        sender.send(CHANNEL, FIRST, torch.ones(2, 3))


def test_a_pipe_that_cannot_be_opened_fails_on_both_ranks_and_leaves_none_open(monkeypatch):
    def refuse(address):
        raise PermissionError(f"no access to {address}")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("pipeline.engine.links.Outgoing", refuse)
    with pytest.raises(OSError, match="no access"):
        linked([CHANNEL], 2)
    assert len(os.listdir("/proc/self/fd")) == before
