"""What is being sent is kept until it is out, and a send that has to wait for its message holds up no other's end."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from pipeline.engine.outbox import Outbox
from pipeline.engine.transport import PeerError


class Work:
    """A send that ends when a test says so."""

    def __init__(self) -> None:
        self.taken = threading.Event()

    def wait(self) -> None:
        assert self.taken.wait(10)

    def is_completed(self) -> bool:
        return self.taken.is_set()


def test_a_send_starts_when_its_message_is_there_and_in_order():
    outbox, there, started = Outbox(blocking_wait=True), threading.Event(), []
    works = [Work(), Work()]
    for work in works:
        work.taken.set()

    def start(index):
        started.append(index)
        return works[index], torch.ones(1)

    outbox.add_when(lambda: there.wait(10), lambda: start(0), "the first")
    outbox.add_when(lambda: None, lambda: start(1), "the second")
    assert started == []
    there.set()
    outbox.drain()
    assert started == [0, 1]


def test_a_send_that_nobody_takes_does_not_hold_up_the_start_of_another():
    """Else ranks that wait for each other's second message would wait forever."""
    outbox, slow, fast = Outbox(blocking_wait=True), Work(), threading.Event()
    outbox.add_when(lambda: None, lambda: (slow, torch.ones(1)), "the first")

    def start():
        fast.set()
        return slow, torch.ones(1)

    outbox.add_when(lambda: None, start, "the second")
    assert fast.wait(10)
    slow.taken.set()
    outbox.drain()


def test_a_send_that_cannot_start_is_told_at_the_end():
    outbox = Outbox(blocking_wait=True)

    def fail():
        raise RuntimeError("[here.cc:1] no such peer\nand more")

    outbox.add_when(lambda: None, fail, "a message to rank 1")
    with pytest.raises(PeerError, match=r"^a message to rank 1 was not sent: no such peer$"):
        outbox.drain()


def test_without_a_blocking_wait_a_message_is_kept_until_it_is_out():
    outbox, work, other = Outbox(blocking_wait=False), Work(), Work()
    payload = torch.ones(1)
    reference = weakref.ref(payload)
    outbox.add((work, payload), "a message")
    del payload
    assert reference() is not None
    work.taken.set()
    outbox.add((other, torch.ones(1)), "another")
    assert reference() is None, "let go with the next send"
    other.taken.set()
    outbox.drain()
