"""The memory that messages are received into."""

from __future__ import annotations

import torch

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.buffers import BufferPool

SPEC = TensorSpec((2, 3), torch.float32)


def test_a_buffer_is_used_again_when_nothing_refers_to_it():
    pool = BufferPool(SPEC.nbytes, 2)
    first, slot = pool.take(SPEC)
    view, address = first[1:], first.data_ptr()
    del first
    other, _ = pool.take(SPEC)
    assert other.data_ptr() != address, "the view still lies in it"
    del view
    again, taken = pool.take(SPEC)
    assert (again.data_ptr(), taken) == (address, slot)
    assert (pool.made, pool.peak) == (2, 2)


def test_a_graph_that_saved_a_buffer_keeps_it():
    pool = BufferPool(SPEC.nbytes, 1)
    weight = torch.ones(3, requires_grad=True)
    inputs, _ = pool.take(SPEC)
    inputs.fill_(2.0)
    loss = (inputs * weight).sum()
    del inputs
    pool.take(SPEC)[0].fill_(7.0)
    assert pool.made == 2, "one more was made"
    loss.backward()
    assert weight.grad.tolist() == [4.0] * 3
    del loss
    pool.take(SPEC)
    assert (pool.made, pool.peak) == (2, 2)


def test_buffers_hold_messages_of_any_shape_up_to_their_size():
    pool = BufferPool(4096, 1)
    shapes = [((1024,), torch.float32), ((3, 5), torch.bfloat16), ((), torch.int64), ((2, 0), torch.bool)]
    for spec in (TensorSpec(*shape) for shape in shapes):
        buffer, _ = pool.take(spec)
        assert TensorSpec.of(buffer) == spec
        assert buffer.is_contiguous()
        del buffer
    assert pool.made == 1


def test_a_message_larger_than_any_before_is_given_a_larger_buffer():
    pool = BufferPool(4096, 2)
    small, _ = pool.take(TensorSpec((1024,), torch.float32))
    small.fill_(1.0)
    large, slot = pool.take(TensorSpec((1025,), torch.float32))
    assert (large.numel(), pool.size, pool.made) == (1025, 8192, 3)
    large.fill_(2.0)
    assert small.eq(1.0).all()
    del small, large
    again, taken = pool.take(TensorSpec((2048,), torch.float32))
    assert taken == slot
    other, _ = pool.take(TensorSpec((2048,), torch.float32))
    assert pool.made == 4, "the small ones are not handed out any more"
    other.fill_(3.0)
    assert again[:1025].eq(2.0).all()
