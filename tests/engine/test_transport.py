from __future__ import annotations

import weakref

import pytest
import torch

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.schedule import Channel

CHANNEL = Channel(0, 1, "activation")
SPEC = TensorSpec((2,), torch.float32)


def test_a_message_arrives_whichever_end_is_first():
    transport, tensor = InProcessTransport(), torch.ones(2)
    transport.send(CHANNEL, "a", tensor)
    early = transport.receive(CHANNEL, "a", SPEC)
    late = transport.receive(CHANNEL, "b", SPEC)
    assert early.arrived()
    assert not late.arrived()
    transport.send(CHANNEL, "b", tensor)
    assert late.wait() is tensor
    assert early.wait() is tensor
    transport.finish_step()


def test_channels_are_apart():
    transport = InProcessTransport()
    back = Channel(1, 0, "activation")
    gradient = Channel(0, 1, "gradient")
    receives = [transport.receive(channel, "a", SPEC) for channel in (back, gradient)]
    transport.send(CHANNEL, "a", torch.ones(2))
    assert not any(receive.arrived() for receive in receives)


def test_a_receive_in_another_order_than_the_sends_is_refused():
    transport = InProcessTransport()
    transport.send(CHANNEL, "a", torch.ones(2))
    transport.send(CHANNEL, "b", torch.ones(2))
    with pytest.raises(RuntimeError, match="a was sent where b is received: out of order"):
        transport.receive(CHANNEL, "b", SPEC)


@pytest.mark.parametrize(
    ("tensor", "found"), [(torch.ones(3), r"float32\[3\]"), (torch.ones(2, dtype=torch.float64), r"float64\[2\]")]
)
def test_another_shape_or_dtype_than_expected_is_refused(tensor, found):
    transport = InProcessTransport()
    transport.receive(CHANNEL, "a", SPEC)
    with pytest.raises(RuntimeError, match=rf"a is {found}, float32\[2\] was expected"):
        transport.send(CHANNEL, "a", tensor)


def test_a_message_is_not_kept_once_it_is_taken():
    transport, tensor = InProcessTransport(), torch.ones(2)
    receive = transport.receive(CHANNEL, "a", SPEC)
    transport.send(CHANNEL, "a", tensor)
    reference = weakref.ref(tensor)
    del tensor
    receive.wait()
    assert reference() is None
