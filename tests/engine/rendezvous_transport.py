"""A transport that behaves like NCCL, for ranks that share a process: what finishes here can't deadlock there.

A communicator is first in, first out at each end: a rank's sends and receives on it stand in one queue. Tags don't
count. Nothing is buffered: the head of one end moves only when it meets the head of the other, a send a receive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine import distributed
from pipeline.engine.boundary import TensorSpec
from pipeline.engine.executor import Executor, Microbatches, StepResult
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Channel, Communicator, Message, Schedule, takes


class Deadlock(RuntimeError):
    """No rank can go on: what each one waits for."""


class WrongMessage(RuntimeError):
    """A receive met another send than it expects."""


@dataclass(eq=False)
class Operation:
    """A send with what it sends, or a posted receive with its buffer, on one rank's end of a communicator."""

    message: Message
    sends: bool
    rank: int
    peer: int
    communicator: Hashable
    tensor: Tensor | None
    held: dict[int, int]
    done: bool = False

    def arrived(self) -> bool:
        return self.done

    def wait(self) -> Tensor:
        assert self.done, "the driver waits for arrived()"
        assert self.tensor is not None, "taken once"
        tensor, self.tensor = self.tensor, None
        self.held[self.rank] -= 1
        return tensor

    def __str__(self) -> str:
        activation = self.message.kind == "activation"
        if self.sends:
            kind = ActionType.SEND_F if activation else ActionType.SEND_B
            return f"{Action(self.message.source_stage, kind, self.message.microbatch)} to rank {self.peer}"
        kind = ActionType.RECV_F if activation else ActionType.RECV_B
        return f"{Action(self.message.destination_stage, kind, self.message.microbatch)} from rank {self.peer}"


class RendezvousTransport:
    """All ranks' ends of all communicators.

    Args:
        communicator: which one each channel uses.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._ends: defaultdict[tuple[Hashable, int], deque[Operation]] = defaultdict(deque)
        self.held: defaultdict[int, int] = defaultdict(int)
        """By rank: messages sent and not received, and receives posted and not consumed."""
        self.peak: defaultdict[int, int] = defaultdict(int)

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        self._issue(channel, message, True, tensor)

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Operation:
        return self._issue(channel, message, False, torch.empty(spec.shape, dtype=spec.dtype))

    def progress(self) -> None:
        """What can move has moved."""

    def finish_step(self) -> bool:
        """Nobody can block here: `run` doesn't end before everything sent has been received."""
        return True

    def unfinished(self, rank: int) -> Iterator[Operation]:
        """What a rank has issued and what has not met its match."""
        for (_, owner), queue in self._ends.items():
            if owner == rank:
                yield from queue

    def obstacle(self, operation: Operation) -> str:
        """What keeps an operation from moving, in words."""
        head = self._ends[operation.communicator, operation.rank][0]
        place = f"{operation} stands first" if head is operation else f"{operation} stands behind {head}"
        others = self._ends[operation.communicator, head.peer]
        return f"{place}, and first at rank {head.peer}'s end is {others[0] if others else 'nothing'}"

    def _issue(self, channel: Channel, message: Hashable, sends: bool, tensor: Tensor) -> Operation:
        assert isinstance(message, Message)
        rank, peer = (channel.source, channel.destination) if sends else (channel.destination, channel.source)
        operation = Operation(message, sends, rank, peer, self._communicator(channel), tensor, self.held)
        self.held[rank] += 1
        self.peak[rank] = max(self.peak[rank], self.held[rank])
        self._ends[operation.communicator, rank].append(operation)
        self._move(operation.communicator, rank)
        return operation

    def _move(self, communicator: Hashable, rank: int) -> None:
        """Let what heads a rank's end meet its match, and then what stood behind the two."""
        unsettled = [rank]
        while unsettled:
            queue = self._ends[communicator, unsettled.pop()]
            if not queue:
                continue
            one, others = queue[0], self._ends[communicator, queue[0].peer]
            if others and others[0].peer == one.rank and others[0].sends != one.sends:
                other = others.popleft()
                queue.popleft()
                self._transfer(*((one, other) if one.sends else (other, one)))
                unsettled += [one.rank, one.peer]

    def _transfer(self, send: Operation, receive: Operation) -> None:
        assert send.tensor is not None
        assert receive.tensor is not None
        if send.message != receive.message:
            raise WrongMessage(f"{send} of rank {send.rank} meets {receive} of rank {receive.rank}")
        found, expected = TensorSpec.of(send.tensor), TensorSpec.of(receive.tensor)
        if found != expected:
            raise WrongMessage(f"{send} brings {found}, {receive} of rank {receive.rank} expects {expected}")
        receive.tensor.copy_(send.tensor)
        send.tensor = None
        send.done = receive.done = True
        self.held[send.rank] -= 1


def run(
    executors: Sequence[Executor], batches: Sequence[Microbatches], transport: RendezvousTransport
) -> list[StepResult]:
    """Run one step of all ranks, each until it waits, in the order given.

    Raises:
        Deadlock: ranks wait forever, or have ended with messages that nobody took.
    """
    programs = {executor.rank: executor.program(batch) for executor, batch in zip(executors, batches, strict=True)}
    waiting: dict[int, Action] = {}
    results: dict[int, StepResult] = {}
    while programs:
        before = sum(executor.completed for executor in executors)
        for rank, program in list(programs.items()):
            try:
                waiting[rank] = next(program)
            except StopIteration as stop:
                results[rank] = stop.value
                waiting.pop(rank, None)
                del programs[rank]
        if before == sum(executor.completed for executor in executors):
            break
    reasons = [_reason(e.rank, waiting.get(e.rank), e.schedule.stages, transport) for e in executors]
    if any(reasons):
        raise Deadlock("\n".join(filter(None, reasons)))
    return [results[executor.rank] for executor in executors]


def _reason(rank: int, action: Action | None, stages: int, transport: RendezvousTransport) -> str | None:
    """Why a rank that stands at `action`, or has ended its row, can't go on; None if it has nothing left to do."""
    unfinished = list(transport.unfinished(rank))
    if action is None:
        return f"rank {rank} has ended its row, but {transport.obstacle(unfinished[0])}" if unfinished else None
    needed = {takes(part, stages) for part in action.compute}
    wanted = next(op for op in unfinished if not op.sends and op.message in needed)
    kind, stage, microbatch = wanted.message
    what = f"the {kind} of stage {stage}, microbatch {microbatch}, from rank {wanted.peer}"
    return f"rank {rank} at {action} waits for {what}: {transport.obstacle(wanted)}"


def engine_communicators(programs: Iterable[Schedule], ranks: int) -> dict[Channel, Hashable]:
    """The communicators that the engine makes for these programs, as `open_channels` asks torch for them.

    All ranks ask in one order, so the number of the call tells which ranks hold ends of the same one.
    """
    used = distributed.channels(programs)
    made: dict[Channel, Hashable] = {}
    for rank in range(ranks):
        for channel, communicator in _opened(used, rank).items():
            if made.setdefault(channel, communicator) != communicator:
                raise AssertionError(f"the two ends of {channel} use {made[channel]} and {communicator}")
    return made


def _opened(used: Iterable[Channel], rank: int) -> dict[Channel, Hashable]:
    calls = count()

    def new_group(members: Sequence[int], backend: str, timeout: float) -> Hashable:
        communicator = next(calls), tuple(members)
        return communicator if rank in members else None

    def silent(tensor: Tensor, peer: int, group: object = None) -> None:
        """What would set up the connection."""

    with (
        patch.object(distributed, "new_group", new_group),
        patch.object(dist, "send", silent),
        patch.object(dist, "recv", silent),
    ):
        return dict(distributed.open_channels(used, rank, "gloo", 1.0))
